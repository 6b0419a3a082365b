"""Whom the decoder trusts as its producer: the pairing key, and one pinned certificate.

No authority and no name is believed. TLS proves that the peer holds the private key of the
certificate that it shows, and that certificate must be, byte for byte, the paired one. So an
expired certificate or a changed address breaks nothing, and a valid one of somebody else
does.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import IntegrityError
from protocol.pairing import Pairing, PinnedCertificates
from protocol.pairing.record import PairingRecord, fingerprint
from trust.pairing_file import load_record
from trust.peers import Address
from trust.tls import client_context, pinned


@dataclass(frozen=True)
class Trust:
    """The shared key and, with TLS, the context and the pins of one connection."""

    pairing: Pairing
    certificates: PinnedCertificates | None = None
    context: ssl.SSLContext | None = None

    def verify(self, certificate: bytes | None) -> None:
        """Return only if the peer showed the certificate (DER) that was pinned.

        Raises ``IntegrityError`` (``certificate_differs``).
        """
        if self.certificates is None:
            return
        if pinned(certificate, [self.certificates.producer]) is None:
            raise IntegrityError(
                "the producer shows another certificate than the paired one",
                reason="certificate_differs",
                field="certificate",
                found=fingerprint(certificate or b"").hex(),
                expected=self.certificates.producer.hex(),
                hint="pair the two machines again, or check what sits between them",
            )


def trust_of_key(key: bytes) -> Trust:
    """Trust by an ephemeral key alone, for a producer on this machine."""
    return Trust(Pairing(key, 0))


def trust_of_file(path: Path) -> Trust:
    """Trust by the decoder's pairing file, with TLS.

    Raises ``ConfigError``: ``pairing_missing``, ``pairing_exposed`` (others may read it),
    ``pairing_unreadable``, ``pairing_of_other_side``.
    """
    return trust_of_record(load_record(path, "decoder"))


def trust_of_record(record: PairingRecord) -> Trust:
    """Trust by the decoder's record of a pairing, with TLS.

    Raises ``ConfigError`` (``pairing_unreadable``).
    """
    context = client_context(record.certificate, record.private_key)
    return Trust(record.pairing, record.fingerprints, context)


def url_of(address: Address) -> str:
    """Where a paired producer is reached for handoffs; its link is called that too."""
    host = address.host.strip("[]")
    return f"wss://[{host}]:{address.port}" if ":" in host else f"wss://{host}:{address.port}"
