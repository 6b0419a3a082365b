"""Whom the decoder trusts as its producer: the pairing key, and one pinned certificate.

No authority and no name is believed. TLS proves that the peer holds the private key of the
certificate that it shows, and that certificate must be, byte for byte, the paired one. So an
expired certificate or a changed address breaks nothing, and a valid one of somebody else
does.
"""

from __future__ import annotations

import hmac
import os
import ssl
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_der_private_key,
)

from protocol.errors import ConfigError, IntegrityError
from protocol.pairing import Pairing, PinnedCertificates
from protocol.pairing.record import (
    MAX_RECORD_BYTES,
    PairingRecord,
    decode_record,
    fingerprint,
)


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
        found = fingerprint(certificate or b"")
        if not hmac.compare_digest(found, self.certificates.producer):
            raise IntegrityError(
                "the producer shows another certificate than the paired one",
                reason="certificate_differs",
                field="certificate",
                found=found.hex(),
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
    record = _read(path)
    return Trust(record.pairing, record.fingerprints, _context(record))


def _read(path: Path) -> PairingRecord:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the pairing file cannot be opened: {error.strerror}",
            reason="pairing_missing",
            field="pairing",
            found=path,
            hint="make one on the producer: baton produce --make-pairing DIR",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "the pairing file is a secret, and other users may read it",
            reason="pairing_exposed",
            field="pairing",
            found=f"mode {stat.S_IMODE(mode):04o}",
            expected="mode 0600",
            hint=f"chmod 600 {path}",
        )
    return decode_record(raw, "decoder")


def _context(record: PairingRecord) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The pin replaces chains, names and dates; see Trust.verify.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # ssl reads keys from files only, so the key lies there for a moment, encrypted.
    password = os.urandom(32).hex().encode()
    try:
        certificate = x509.load_der_x509_certificate(record.certificate)
        private_key = load_der_private_key(record.private_key, None)
        text = certificate.public_bytes(Encoding.PEM) + private_key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
        )
        with tempfile.TemporaryDirectory(prefix="baton-") as directory:
            name = Path(directory) / "pairing.pem"
            name.write_bytes(text)
            context.load_cert_chain(name, password=password)
    except (ValueError, TypeError, UnsupportedAlgorithm, ssl.SSLError) as error:
        raise ConfigError(
            "the pairing file holds no usable certificate and key",
            reason="pairing_unreadable",
            field="pairing",
            hint="make a new pairing and copy its two files again",
        ) from error
    return context
