"""An authority of the test's own, and what it certifies."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """Certifies whoever asks."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._own = self._signed("authority", self._key.public_key(), ca=True)

    def certified(self, directory: Path, name: str) -> tuple[Path, Path]:
        """The files of a certificate, followed by the authority's, and of its private key."""
        key = ec.generate_private_key(ec.SECP256R1())
        chain = (self._signed(name, key.public_key(), ca=False), self._own)
        certificate, private = directory / f"{name}.pem", directory / f"{name}.key"
        certificate.write_bytes(b"".join(one.public_bytes(Encoding.PEM) for one in chain))
        private.touch(mode=0o600)
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return certificate, private

    def _signed(self, name: str, key: ec.EllipticCurvePublicKey, *, ca: bool) -> x509.Certificate:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(_named(name))
            .issuer_name(_named("authority"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))
            .not_valid_after(now + timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
