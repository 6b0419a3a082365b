"""What the control channel's MACs bind, and the key that a rotation makes."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

import msgspec

from protocol.control.messages import NO_MAC, Sealed, encode
from protocol.pairing import Pairing, PinnedCertificates, length_prefixed
from protocol.pairing.record import Role
from protocol.reasons import refusal

TRANSCRIPT_DOMAIN: Final = b"baton control 1"
ROTATION_DOMAIN: Final = b"baton rotation 1"
_DOMAINS: Final[dict[Role, bytes]] = {
    "decoder": b"baton control decoder 1",
    "producer": b"baton control producer 1",
}


class Seals:
    """The MACs of one connection, in both directions; each counts its own messages from 0.

    A MAC is over its sender's role, both opening messages as they travelled, both
    certificates as TLS showed them, the message's number and the message itself. So none of
    another connection, of the other side, or of another place in this one is ever good.
    """

    def __init__(
        self, pairing: Pairing, hello: bytes, answer: bytes, certificates: PinnedCertificates
    ) -> None:
        parts = (hello, answer, certificates.decoder, certificates.producer)
        self._pairing = pairing
        self._transcript = hashlib.sha256(length_prefixed(TRANSCRIPT_DOMAIN, *parts)).digest()
        self._counts: dict[Role, int] = {"decoder": 0, "producer": 0}

    def seal(self, role: Role, message: Sealed) -> Sealed:
        """The next message of ``role`` with its MAC."""
        return msgspec.structs.replace(message, mac=self._mac(role, message))

    def verify(self, role: Role, message: Sealed) -> None:
        """Return only if it is the next message of ``role``, which holds the key.

        Raises IntegrityError ``proof_differs``.
        """
        if not hmac.compare_digest(message.mac, self._mac(role, message)):
            raise refusal(
                "proof_differs",
                f"the {role} did not prove the pairing key",
                field="mac",
                hint="pair the two machines again, or check what sits between them",
            )

    def _mac(self, role: Role, message: Sealed) -> bytes:
        number = self._counts[role].to_bytes(8, "big")
        self._counts[role] += 1
        raw = encode(msgspec.structs.replace(message, mac=NO_MAC))
        return self._pairing.authenticate(_DOMAINS[role], self._transcript, number, raw)


def rotated(
    old: Pairing,
    nonces: tuple[bytes, bytes],
    shares: tuple[bytes, bytes],
    certificates: PinnedCertificates,
) -> Pairing:
    """The pairing that follows ``old``: HKDF-SHA256 of its key, one epoch later.

    ``nonces`` of the connection's openings and ``shares`` are the decoder's, then the
    producer's.
    """
    epoch = old.epoch + 1
    parts = (*shares, certificates.decoder, certificates.producer, epoch.to_bytes(8, "big"))
    info = length_prefixed(ROTATION_DOMAIN, *parts)
    # RFC 5869; the one block that 32 bytes need.
    extracted = hmac.digest(b"".join(nonces), old.key, "sha256")
    return Pairing(hmac.digest(extracted, info + b"\x01", "sha256"), epoch)
