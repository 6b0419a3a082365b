"""Who may talk to this producer: the pairing key, TLS contexts, and making a pairing.

With a pairing file the connection is TLS 1.3 with both certificates pinned. A bare key from
an inherited pipe (``baton demo``) goes without TLS, and therefore on loopback only.
"""

from __future__ import annotations

import datetime
import hmac
import os
import secrets
import ssl
import stat
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_der_private_key,
)
from cryptography.x509.oid import NameOID

from protocol.addresses import is_loopback
from protocol.errors import ConfigError, IntegrityError
from protocol.pairing import KEY_BYTES, Pairing, PinnedCertificates
from protocol.pairing.record import (
    MAX_RECORD_BYTES,
    PairingRecord,
    Role,
    decode_record,
    encode_record,
    fingerprint,
)

_YEARS = 20
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME: the very certificate is pinned, and boxes lose their clocks."""


@dataclass(frozen=True)
class Trust:
    """A pairing as the server uses it; ``context`` and ``certificates`` only with TLS."""

    pairing: Pairing
    context: ssl.SSLContext | None = None
    certificates: PinnedCertificates | None = None

    def check_peer(self, certificate: bytes | None) -> PinnedCertificates | None:
        """The pinned pair, after comparing the client's leaf certificate (DER) with it.

        Raises ``IntegrityError`` (``proof_differs``).
        """
        if self.certificates is None:
            return None
        found = fingerprint(certificate or b"")
        if not hmac.compare_digest(found, self.certificates.decoder):
            raise IntegrityError(
                "The client's certificate is not the paired one.",
                reason="proof_differs",
                field="certificate",
            )
        return self.certificates


def trust_from_key_pipe(descriptor: int) -> Trust:
    """Trust by the 32 bytes that an inherited pipe holds; closes it.

    Raises ``ConfigError`` (``key_unreadable``).
    """
    try:
        with os.fdopen(descriptor, "rb") as pipe:
            key = pipe.read(KEY_BYTES + 1)
    except OSError as error:
        raise _bad_key("it cannot be read") from error
    if len(key) != KEY_BYTES:
        raise _bad_key(f"it holds {len(key)} bytes or more")
    return Trust(Pairing(key, 0))


def trust_from_file(path: Path) -> Trust:
    """Trust by a pairing file, with TLS.

    Raises ``ConfigError``: ``pairing_missing``, ``pairing_exposed`` (readable by others),
    ``pairing_unreadable``, ``pairing_of_other_side``.
    """
    record = load_record(path, "producer")
    return Trust(record.pairing, server_context(record), record.fingerprints)


def load_record(path: Path, role: Role) -> PairingRecord:
    """The pairing file at ``path``; raises like :func:`trust_from_file`."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(MAX_RECORD_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"The pairing file {path} cannot be opened: {error.strerror}.",
            reason="pairing_missing",
            field="pairing",
            hint="Make one with --make-pairing DIR.",
        ) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"Others can read the pairing file {path}.",
            reason="pairing_exposed",
            field="pairing",
            hint=f"chmod 600 {path}",
        )
    return decode_record(raw, role)


def server_context(record: PairingRecord) -> ssl.SSLContext:
    """TLS 1.3, our certificate, and none but the peer's accepted."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a resumed session would not show its certificate again
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= _NO_CHECK_TIME
    try:
        context.load_verify_locations(cadata=record.peer_certificate)
        _load_own(context, record)
    except (ValueError, TypeError, UnsupportedAlgorithm, ssl.SSLError) as error:
        raise ConfigError(
            "The certificates in the pairing file are not usable.",
            reason="pairing_unreadable",
            field="certificate",
            hint="Make a new pairing and copy its two files again.",
        ) from error
    return context


def _load_own(context: ssl.SSLContext, record: PairingRecord) -> None:
    # The ssl module takes a private key from a file only: there it lies encrypted.
    password = secrets.token_hex(32).encode()
    key = load_der_private_key(record.private_key, None)
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(ssl.DER_cert_to_PEM_cert(record.certificate).encode())
        file.write(
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
        )
        file.flush()
        context.load_cert_chain(file.name, password=password)


def make_pairing(directory: Path, epoch: int) -> tuple[Path, Path]:
    """Write ``producer.pairing`` and ``decoder.pairing`` (0600) and return their paths.

    Both are written, or neither: one of them with the other of an older pairing would look
    right and never connect. Raises ``ConfigError`` (``pairing_exists``,
    ``directory_unusable``): nothing is overwritten.
    """
    records = make_records(epoch)
    paths = [directory / f"{record.role}.pairing" for record in records]
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_all(paths, records)
    except FileExistsError as error:
        raise ConfigError(
            f"There is a pairing in {directory} already.",
            reason="pairing_exists",
            field="make-pairing",
            hint="Use another directory, or delete the old files on both machines.",
        ) from error
    except OSError as error:
        raise ConfigError(
            f"The pairing cannot be written to {directory}: {error.strerror}.",
            reason="directory_unusable",
            field="make-pairing",
        ) from error
    return paths[0], paths[1]


def _write_all(paths: Sequence[Path], records: Sequence[PairingRecord]) -> None:
    """Write new files, each record to its path; those made are removed if one fails."""
    with ExitStack() as undo:
        for path, record in zip(paths, records, strict=True):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            undo.callback(path.unlink, missing_ok=True)
            with os.fdopen(descriptor, "wb") as file:
                file.write(encode_record(record))
                file.flush()
                os.fsync(file.fileno())
        undo.pop_all()


def make_records(epoch: int) -> tuple[PairingRecord, PairingRecord]:
    """A fresh key and two fresh self-signed certificates: the producer's and decoder's record."""
    key = secrets.token_bytes(KEY_BYTES)
    producer, producer_key = _self_signed("baton producer")
    decoder, decoder_key = _self_signed("baton decoder")
    return (
        PairingRecord(1, "producer", epoch, key, producer, producer_key, decoder),
        PairingRecord(1, "decoder", epoch, key, decoder, decoder_key, producer),
    )


def _self_signed(name: str) -> tuple[bytes, bytes]:
    """A P-256 certificate and its private key, both DER."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=365 * _YEARS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.DER), private


def require_trust_for(host: str, trust: Trust) -> None:
    """Raise ``ConfigError`` (``pairing_required``) for a key alone off loopback."""
    if trust.context is None and not is_loopback(host):
        raise ConfigError(
            f"Binding to {host} needs a pairing: without TLS only loopback is allowed.",
            reason="pairing_required",
            field="host",
            found=host,
            expected="127.0.0.1",
            hint="Make a pairing with --make-pairing DIR and start with --pairing FILE.",
        )


def _bad_key(why: str) -> ConfigError:
    return ConfigError(
        f"The key's pipe is unusable: {why}; {KEY_BYTES} bytes are needed.",
        reason="key_unreadable",
        field="key-fd",
    )
