"""TLS 1.3 among machines that know each other's leaf certificates, byte for byte.

No authority, name or date is believed. TLS proves that the peer holds the private key of the
certificate that it shows; that this certificate is a pinned one is decided by its
fingerprint, after the handshake and before anything else: :func:`pinned`. A context alone is
not enough. A client's checks nothing, and a server's would let in whoever a paired machine
issued a certificate to, since it must hold the pins as roots.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import ssl
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_der_private_key,
)

from protocol.errors import ConfigError
from protocol.pairing.record import fingerprint

NO_ROOM: Final = "temporary_directory_unusable"
"""No fault of a certificate: trying again may help."""

_NO_CHECK_TIME: Final = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME: the very certificate is pinned, and boxes lose their clocks."""


def server_context(certificate: bytes, private_key: bytes, pins: Iterable[bytes]) -> ssl.SSLContext:
    """TLS 1.3 as a server with its own leaf; clients must show one of ``pins``. All are DER.

    With no pins nobody is let in. Every shown certificate still has to pass :func:`pinned`.
    Raises ``ConfigError``: ``pairing_unreadable`` for what is no certificate or key,
    ``temporary_directory_unusable``.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a resumed session would not show its certificate again
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    # Two pins of one subject name hide each other where a chain to a root is looked for.
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    try:
        for pin in pins:
            x509.load_der_x509_certificate(pin)  # ssl would take several in one piece
            context.load_verify_locations(cadata=pin)
        _load_own(context, certificate, private_key)
    except (ValueError, TypeError, UnsupportedAlgorithm, ssl.SSLError) as error:
        raise _unusable() from error
    return context


def client_context(certificate: bytes, private_key: bytes) -> ssl.SSLContext:
    """TLS 1.3 as a client that shows its own leaf (DER); what it is shown is for :func:`pinned`.

    Raises like :func:`server_context`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The pin replaces chains, names and dates.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        _load_own(context, certificate, private_key)
    except (ValueError, TypeError, UnsupportedAlgorithm, ssl.SSLError) as error:
        raise _unusable() from error
    return context


def pinned(shown: bytes | None, fingerprints: Iterable[bytes]) -> bytes | None:
    """The fingerprint of the shown leaf (DER) if it is one of these, else ``None``."""
    found = fingerprint(shown or b"")
    matches = [hmac.compare_digest(found, expected) for expected in fingerprints]
    return found if any(matches) else None


def is_gone(error: OSError) -> bool:
    """Whether an error of TLS says that the peer went away; else one of the two sides refused."""
    if isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError):
        return True
    # Python itself says so of a socket that was closed before TLS began, with data left in it.
    return not isinstance(error, ssl.SSLError) or error.errno in (errno.ENOTCONN, errno.EINVAL)


def _load_own(context: ssl.SSLContext, certificate: bytes, private_key: bytes) -> None:
    # The ssl module takes a private key from a file only: there it lies encrypted.
    password = secrets.token_hex(32).encode()
    leaf = x509.load_der_x509_certificate(certificate)
    key = load_der_private_key(private_key, None)
    text = leaf.public_bytes(Encoding.PEM) + key.private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
    )
    try:
        with tempfile.TemporaryDirectory(prefix="baton-") as directory:
            path = Path(directory) / "own.pem"
            path.write_bytes(text)
            context.load_cert_chain(path, password=password)
    except ssl.SSLError:
        raise  # an OSError too, and about the certificate
    except OSError as error:
        raise ConfigError(
            f"A private key could not be handed to TLS: {error.strerror}.",
            reason=NO_ROOM,
            field="TMPDIR",
            hint="make room in the directory for temporary files",
        ) from error


def _unusable() -> ConfigError:
    return ConfigError(
        "A certificate or private key of the pairing is not usable.",
        reason="pairing_unreadable",
        field="certificate",
        hint="Make a new pairing of the two machines.",
    )
