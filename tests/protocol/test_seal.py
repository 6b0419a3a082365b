"""The seal: every part that it binds changes it, and nothing passes without the key."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest
from msgspec import structs

from protocol.errors import BatonError, IntegrityError
from protocol.messages import Seal
from protocol.pairing import Pairing, length_prefixed
from protocol.seal import (
    StreamDigest,
    make_committed,
    make_seal,
    require_complete,
    seal_mac,
    verify_committed,
    verify_seal,
)

KEY = Pairing(bytes(range(32)), 3)
PREFILL, BEGIN, TRANSFER = b'{"type":"prefill"}', b'{"type":"begin"}', bytes(range(16))


def stream(*digests: bytes) -> StreamDigest:
    made = StreamDigest()
    for one in digests or (b"a" * 32, b"b" * 32):
        made.add(one, 100)
    return made


def sealed(**changes: Any) -> Seal:
    seal = make_seal(KEY, PREFILL, BEGIN, TRANSFER, stream(), queue_us=5, compute_us=6)
    return structs.replace(seal, **changes)


def test_the_mac_is_what_the_readme_says() -> None:
    figures = b"".join(number.to_bytes(8, "big") for number in (2, 200, 5, 6))
    digest = hashlib.sha256(b"a" * 32 + b"b" * 32).digest()
    message = length_prefixed(
        b"baton seal 1", (3).to_bytes(8, "big"), PREFILL, BEGIN, digest, figures
    )
    assert sealed().mac == hmac.digest(KEY.key, message, "sha256")
    assert sealed().digest == digest


def test_a_good_seal_passes() -> None:
    verify_seal(KEY, PREFILL, BEGIN, stream(), sealed())
    require_complete(sealed(), TRANSFER, 2, 200)


@pytest.mark.parametrize(
    ("changes", "seal", "reason"),
    [
        ({"pairing": Pairing(bytes(32), 3)}, {}, "seal_differs"),
        ({"pairing": Pairing(KEY.key, 4)}, {}, "seal_differs"),
        ({"prefill": PREFILL + b" "}, {}, "seal_differs"),
        ({"begin": BEGIN + b" "}, {}, "seal_differs"),
        ({"prefill": PREFILL + BEGIN, "begin": b""}, {}, "seal_differs"),
        ({"prefill": BEGIN, "begin": PREFILL}, {}, "seal_differs"),
        ({"stream": stream(b"b" * 32, b"a" * 32)}, {}, "stream_digest_differs"),
        ({"stream": stream(b"a" * 32)}, {}, "stream_digest_differs"),
        ({}, {"frames": 3}, "seal_differs"),
        ({}, {"payload_bytes": 201}, "seal_differs"),
        ({}, {"queue_us": 6}, "seal_differs"),
        ({}, {"compute_us": 5}, "seal_differs"),
        ({}, {"digest": bytes(32)}, "stream_digest_differs"),
    ],
)
def test_each_bound_part_is_bound(
    changes: dict[str, Any], seal: dict[str, Any], reason: str
) -> None:
    parts = {"pairing": KEY, "prefill": PREFILL, "begin": BEGIN, "stream": stream(), **changes}
    with pytest.raises(IntegrityError) as caught:
        verify_seal(seal=sealed(**seal), **parts)
    assert caught.value.reason == reason


def test_every_bit_of_the_mac_counts() -> None:
    mac = sealed().mac
    for place in range(32):
        for bit in range(8):
            wrong = bytearray(mac)
            wrong[place] ^= 1 << bit
            with pytest.raises(IntegrityError):
                verify_seal(KEY, PREFILL, BEGIN, stream(), sealed(mac=bytes(wrong)))


@pytest.mark.parametrize(
    ("seal", "reason"),
    [
        ({"transfer": bytes(16)}, "transfer_differs"),
        ({"frames": 1}, "frames_differ"),
        ({"payload_bytes": 199}, "bytes_differ"),
    ],
)
def test_counts_are_those_of_the_manifest(seal: dict[str, Any], reason: str) -> None:
    with pytest.raises(BatonError) as caught:
        require_complete(sealed(**seal), TRANSFER, 2, 200)
    assert caught.value.reason == reason


def test_committed_answers_one_seal() -> None:
    committed = make_committed(KEY, sealed())
    verify_committed(KEY, sealed(), committed)
    other = sealed(mac=seal_mac(KEY, PREFILL, b"other", sealed()))
    for pairing, seal in ((KEY, other), (Pairing(bytes(32), 3), sealed())):
        with pytest.raises(IntegrityError):
            verify_committed(pairing, seal, committed)
    with pytest.raises(BatonError) as caught:
        verify_committed(KEY, sealed(), structs.replace(committed, transfer=bytes(16)))
    assert caught.value.reason == "transfer_differs"
    assert committed.mac != sealed().mac
