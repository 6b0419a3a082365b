"""The proofs: bound to role, both hellos and both certificates."""

from __future__ import annotations

import pytest

from protocol.errors import IntegrityError
from protocol.hello import make_proof, verify_proof
from protocol.pairing import Pairing, PinnedCertificates

KEY = Pairing(bytes(range(32)), 1)
CERTIFICATES = PinnedCertificates(b"d" * 32, b"p" * 32)


@pytest.mark.parametrize("certificates", [None, CERTIFICATES])
def test_a_good_proof_passes(certificates: PinnedCertificates | None) -> None:
    for role in ("decoder", "producer"):
        proof = make_proof(KEY, role, b"hello", b"ack", certificates)
        verify_proof(proof, KEY, role, b"hello", b"ack", certificates)


@pytest.mark.parametrize(
    ("key", "role", "hello", "ack", "certificates"),
    [
        (Pairing(bytes(32), 1), "decoder", b"hello", b"ack", CERTIFICATES),
        (Pairing(KEY.key, 2), "decoder", b"hello", b"ack", CERTIFICATES),
        (KEY, "producer", b"hello", b"ack", CERTIFICATES),
        (KEY, "decoder", b"hello2", b"ack", CERTIFICATES),
        (KEY, "decoder", b"hello", b"ack2", CERTIFICATES),
        (KEY, "decoder", b"helloack", b"", CERTIFICATES),
        (KEY, "decoder", b"ack", b"hello", CERTIFICATES),
        (KEY, "decoder", b"hello", b"ack", None),
        (KEY, "decoder", b"hello", b"ack", PinnedCertificates(b"x" * 32, b"p" * 32)),
        (KEY, "decoder", b"hello", b"ack", PinnedCertificates(b"d" * 32, b"x" * 32)),
        (KEY, "decoder", b"hello", b"ack", PinnedCertificates(b"p" * 32, b"d" * 32)),
    ],
)
def test_anything_else_fails(
    key: Pairing, role: str, hello: bytes, ack: bytes, certificates: PinnedCertificates | None
) -> None:
    proof = make_proof(KEY, "decoder", b"hello", b"ack", CERTIFICATES)
    with pytest.raises(IntegrityError) as caught:
        verify_proof(proof, key, role, hello, ack, certificates)  # type: ignore[arg-type]
    assert caught.value.reason == "proof_differs"
