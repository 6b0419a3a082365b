"""Who may talk to this producer: the pairing key, the pinned certificates, making a pairing.

With a pairing file the connection is TLS 1.3 with both certificates pinned. A bare key from
an inherited pipe (``baton demo``) goes without TLS, and therefore on loopback only.
"""

from __future__ import annotations

import datetime
import os
import secrets
import ssl
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from protocol.addresses import is_loopback
from protocol.errors import ConfigError, IntegrityError
from protocol.pairing import KEY_BYTES, Pairing, PinnedCertificates
from protocol.pairing.certificates import make_certificate
from protocol.pairing.record import PairingRecord, encode_record
from trust.pairing_file import load_record
from trust.tls import pinned, server_context


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
        if pinned(certificate, [self.certificates.decoder]) is None:
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
    context = server_context(record.certificate, record.private_key, [record.peer_certificate])
    return Trust(record.pairing, context, record.fingerprints)


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
    now = datetime.datetime.now(datetime.UTC)
    ours, theirs = make_certificate("producer", now), make_certificate("decoder", now)
    producer, decoder = ours.certificate, theirs.certificate
    return (
        PairingRecord(1, "producer", epoch, key, producer, ours.private_key, decoder),
        PairingRecord(1, "decoder", epoch, key, decoder, theirs.private_key, producer),
    )


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
