"""What clients are shown where the endpoint can be reached from other machines: TLS.

A certificate that was given is used as it is. Where none was, one is made on this machine,
once, and kept with its private key in the state directory: clients trust the file of the
certificate, or pin its fingerprint.
"""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protocol.addresses import can_be_a_host
from protocol.errors import ConfigError
from trust.places import Kind, Place, read_named

log = logging.getLogger(__name__)

LIFE: Final = timedelta(days=3650)
"""How long a certificate of our own is valid. Nobody renews it; whoever pins it knows it."""

_DIRECTORY: Final = "https"
_OWN: Final = "identity.pem"
_SHOWN: Final = "certificate.pem"
_MOST_BYTES: Final = 1 << 18
_COMMON_NAME: Final = "Baton decoder"

_KEY: Final = Kind(
    called="private key",
    field="tls-key",
    exposed="tls_key_exposed",
    unreadable="tls_unusable",
    hint="give the PEM file of an unencrypted private key",
)
_IDENTITY: Final = Kind(
    called="endpoint's private key",
    field="state-dir",
    exposed="tls_key_exposed",
    unreadable="tls_unusable",
    hint="remove it: another one is made, which clients then have to trust instead",
)


class Tls(NamedTuple):
    """How the endpoint proves itself: ``path`` is the certificate's file, ``fingerprint`` its
    SHA-256 in hexadecimal digits.
    """

    context: ssl.SSLContext
    path: Path
    fingerprint: str


def given(certificate: Path, key: Path) -> Tls:
    """The certificate (with its chain, PEM) and the private key that the user has.

    Raises ``ConfigError``: ``tls_unusable``, ``tls_key_exposed``.
    """
    try:
        read_named(key, _MOST_BYTES, _KEY)
        leaf = x509.load_pem_x509_certificate(certificate.read_bytes())
        context = _context(certificate, key)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            "the certificate and the private key cannot be used together",
            reason="tls_unusable",
            field="tls-cert",
            found=type(error).__name__,
            expected="a PEM certificate, and its private key without a password",
        ) from error
    return Tls(context, certificate, _fingerprint(leaf))


def own(state: Path, names: Iterable[str]) -> Tls:
    """This machine's own certificate for ``names`` (host names and addresses), under ``state``.

    It is made the first time, and then stays as it is, since clients pin it; a name that it
    lacks is logged. Raises ``ConfigError``: ``tls_unusable``, ``tls_key_exposed``, and what
    ``trust.places`` does.
    """
    place = Place(state / _DIRECTORY)
    wanted = [_general(name) for name in dict.fromkeys(names) if can_be_a_host(name)]
    raw = place.read(_OWN, _MOST_BYTES, _IDENTITY)
    if raw is None:
        # Another process may be as far: the first one's is everybody's.
        place.create(_OWN, _made(wanted))
        raw = place.read(_OWN, _MOST_BYTES, _IDENTITY)
    path = place.path / _OWN
    try:
        leaf = x509.load_pem_x509_certificate(raw or b"")
        context = _context(path, path)
        known = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound) as error:
        raise ConfigError(
            f"{path} is no private key with its certificate",
            reason=_IDENTITY.unreadable,
            field=_IDENTITY.field,
            hint=_IDENTITY.hint,
        ) from error
    public = leaf.public_bytes(Encoding.PEM)
    if place.read(_SHOWN, _MOST_BYTES, _IDENTITY) != public:
        place.write(_SHOWN, public)
    missing = [name for name in wanted if name not in known]
    if missing:
        log.warning(
            "the certificate does not name %s: clients that check names will not connect; "
            "remove %s to have another one made, which they then have to trust",
            ", ".join(str(name.value) for name in missing),
            path,
        )
    return Tls(context, shown(state), _fingerprint(leaf))


def shown(state: Path) -> Path:
    """Where the certificate lies that :func:`own` made, for clients on this machine to pin."""
    return state / _DIRECTORY / _SHOWN


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or better, for clients that show no certificate. Raises ``OSError``."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Both sides take 1.3 where they can; some HTTP clients that people have cannot.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["http/1.1"])
    # Without this, a key with a password would be asked for on the terminal.
    context.load_cert_chain(certificate, key, password=lambda: "")
    return context


def _made(names: Iterable[x509.GeneralName]) -> bytes:
    """A new private key and its certificate, PEM, one after the other."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    named = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _COMMON_NAME)])
    public = key.public_key()
    usage = x509.KeyUsage(
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
    certificate = (
        x509.CertificateBuilder()
        .subject_name(named)
        .issuer_name(named)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        # Two machines' clocks differ.
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + LIFE)
        # Whoever trusts it as a root trusts nothing that it might have signed.
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private + certificate.public_bytes(Encoding.PEM)


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name.encode("idna").decode("ascii"))


def _fingerprint(leaf: x509.Certificate) -> str:
    return hashlib.sha256(leaf.public_bytes(Encoding.DER)).hexdigest()
