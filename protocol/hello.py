"""The handshake: who may talk, and about which model.

HELLO, HELLO_ACK, then the decoder's PROOF, then the producer's. Each proof is an HMAC with
the pairing key over its sender's role, both hellos as they went over the wire (and so over
both nonces, both identities, the recipe and the limits), and the fingerprints of both
certificates. The decoder proves first: a stranger who connects learns nothing keyed.
"""

from __future__ import annotations

import hmac
from typing import Final, Literal

from protocol.identity import Identity, require_same
from protocol.messages import Hello, HelloAck, Proof
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import differs, refusal

Role = Literal["decoder", "producer"]
_DOMAINS: Final[dict[Role, bytes]] = {
    "decoder": b"baton proof decoder 1",
    "producer": b"baton proof producer 1",
}


def require_agreement(
    peer: Hello | HelloAck, identity: Identity, layout: bytes, epoch: int
) -> None:
    """Return only if the peer's hello means the same model, layout and key as ours.

    The version was checked when the message was decoded. Raises IdentityMismatch
    (``weights_differ`` ... ``engine_differs``, ``layout_differs``), ConfigError
    ``epoch_differs``, in this order.
    """
    require_same(identity, peer.identity)
    if peer.layout != layout:
        raise differs("layout_differs", "layout", peer.layout, layout)
    if peer.epoch != epoch:
        raise differs("epoch_differs", "epoch", peer.epoch, epoch)


def make_proof(
    pairing: Pairing,
    role: Role,
    hello: bytes,
    hello_ack: bytes,
    certificates: PinnedCertificates | None,
) -> Proof:
    """The proof of ``role`` over the raw HELLO and HELLO_ACK and both fingerprints.

    Without TLS the fingerprints are empty parts.
    """
    decoder = certificates.decoder if certificates else b""
    producer = certificates.producer if certificates else b""
    return Proof(mac=pairing.authenticate(_DOMAINS[role], hello, hello_ack, decoder, producer))


def verify_proof(
    proof: Proof,
    pairing: Pairing,
    role: Role,
    hello: bytes,
    hello_ack: bytes,
    certificates: PinnedCertificates | None,
) -> None:
    """Return only if ``role`` holds the pairing key and sees the same certificates.

    Raises IntegrityError ``proof_differs``.
    """
    expected = make_proof(pairing, role, hello, hello_ack, certificates)
    if not hmac.compare_digest(proof.mac, expected.mac):
        raise refusal(
            "proof_differs",
            f"the {role} did not prove the pairing key",
            field="mac",
            hint="pair the two machines again, or check what sits between them",
        )
