"""The certificate of one pairing: made where its private key stays, pinned by the other side.

No authority signs it and no name in it is believed, so that it says as little as it can. Its
dates are for libraries that insist on them: ten years, from a day before, since clocks differ.
"""

from __future__ import annotations

import datetime
import hashlib
from dataclasses import dataclass, field
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.pairing.record import Role
from protocol.reasons import refusal

LIFE: Final = datetime.timedelta(days=3652)
"""Ten years."""
MAX_CERTIFICATE: Final = 16384
"""Longest certificate that is kept, in bytes of DER; the record's bound."""

_USAGE: Final = x509.KeyUsage(
    digital_signature=True,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=False,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class OwnCertificate:
    """A certificate (X.509, DER) and its private key (PKCS #8, DER), which no ``repr`` shows."""

    certificate: bytes = field(repr=False)
    private_key: bytes = field(repr=False)


def make_certificate(role: Role, now: datetime.datetime) -> OwnCertificate:
    """A fresh P-256 key with a self-signed certificate of ten years; ``now`` has a time zone.

    The subject has a part of the public key's hash, so that no two have the same: libraries
    look certificates up by subject.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    mark = hashlib.sha256(public).hexdigest()[:16]
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton {role} {mark}")])
    uses = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_USAGE, critical=True)
        .add_extension(uses, critical=False)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return OwnCertificate(certificate.public_bytes(Encoding.DER), private)


def require_certificate(shown: bytes) -> None:
    """Return only if what the peer showed in TLS (DER) can be pinned and read again.

    Raises PeerProtocolError ``certificate_unusable``.
    """
    if not 0 < len(shown) <= MAX_CERTIFICATE:
        raise refusal(
            "certificate_unusable",
            "the other side's certificate is missing or too long",
            field="certificate",
            found=f"{len(shown)} bytes",
            expected=f"1 to {MAX_CERTIFICATE}",
        )
    try:
        x509.load_der_x509_certificate(shown)
    except (ValueError, x509.InvalidVersion) as error:
        text = "the other side's certificate is not readable"
        raise refusal("certificate_unusable", text, field="certificate") from error
