"""The key: its size, its silence, and one meaning per list of parts."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.pairing import Pairing, PinnedCertificates, length_prefixed

parts = st.lists(st.binary(max_size=20), max_size=4)


def test_keys_have_32_bytes() -> None:
    for length in (0, 31, 33):
        with pytest.raises(ValueError):
            Pairing(bytes(length), 1)
    for epoch in (-1, 1 << 53):
        with pytest.raises(ValueError):
            Pairing(bytes(32), epoch)


def test_nothing_shows_the_key() -> None:
    pairing = Pairing(b"SECRET--" * 4, 5)
    assert "SECRET" not in f"{pairing!r} {pairing}"
    assert "5" in repr(pairing)


def test_fingerprints_have_32_bytes() -> None:
    with pytest.raises(ValueError):
        PinnedCertificates(bytes(32), bytes(20))


@given(parts, parts)
def test_different_parts_are_different_bytes(one: list[bytes], two: list[bytes]) -> None:
    assert (length_prefixed(*one) == length_prefixed(*two)) == (one == two)


@given(st.binary(min_size=1, max_size=9), parts)
def test_authentication_is_hmac_over_the_prefixed_parts(domain: bytes, rest: list[bytes]) -> None:
    pairing = Pairing(bytes(range(32)), 9)
    message = length_prefixed(domain, (9).to_bytes(8, "big"), *rest)
    expected = hmac.new(pairing.key, message, hashlib.sha256).digest()
    assert pairing.authenticate(domain, *rest) == expected
