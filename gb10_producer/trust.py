"""Who may talk to this producer: whom its registry has, or the one decoder of a file or a key.

With a registry or a pairing file the connection is TLS 1.3 with both certificates pinned. A
bare key from an inherited pipe (``baton demo``) goes without TLS, and therefore on loopback
only.
"""

from __future__ import annotations

import datetime
import logging
import os
import secrets
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from protocol.addresses import is_loopback
from protocol.errors import BatonError, ConfigError, IntegrityError
from protocol.pairing import KEY_BYTES, Pairing, PinnedCertificates
from protocol.pairing.certificates import OwnCertificate, make_certificate, require_certificate
from protocol.pairing.record import PairingRecord, encode_record, fingerprint
from protocol.reasons import refusal
from trust.pairing_file import load_record
from trust.peers import Found, Peer, Peers
from trust.tls import pinned, server_context

log = logging.getLogger(__name__)


class Owner(NamedTuple):
    """To whom something belongs: a decoder's certificate (empty without TLS), and its epoch."""

    fingerprint: bytes
    epoch: int


@dataclass(frozen=True)
class Admitted:
    """A decoder that TLS let in, and that now has to prove one of ``pairings``, newest first."""

    pairings: tuple[Pairing, ...]
    certificates: PinnedCertificates | None = None
    name: str = ""

    def owner(self, proven: Pairing) -> Owner:
        """What belongs to this decoder, once it has proven that pairing."""
        return Owner(b"" if self.certificates is None else self.certificates.decoder, proven.epoch)


class Trust(Protocol):
    """Who may talk to this producer. Methods may be called from any thread."""

    @property
    def context(self) -> ssl.SSLContext | None:
        """For the next connection; ``None`` on loopback with a key alone."""
        ...

    def admit(self, certificate: bytes | None) -> Admitted:
        """Whose leaf certificate (DER) this is. Raises ``IntegrityError`` (``proof_differs``)."""
        ...

    def stands(self, owner: Owner) -> bool:
        """Whether that decoder may still use what it has proven."""
        ...

    def proven(self, owner: Owner) -> None:
        """A decoder has proven that epoch: an earlier one of its own is not taken any more."""
        ...

    def watch(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called whenever others are trusted than before, in any thread."""
        ...

    def refresh(self) -> None:
        """Look for what other processes did. Cheap."""
        ...


@dataclass(frozen=True)
class FixedTrust:
    """One pairing for as long as the process runs; ``context``, ``certificates``: with TLS."""

    pairing: Pairing
    context: ssl.SSLContext | None = None
    certificates: PinnedCertificates | None = None

    def admit(self, certificate: bytes | None) -> Admitted:
        """See :class:`Trust`."""
        pins = self.certificates
        if pins is not None and pinned(certificate, [pins.decoder]) is None:
            raise _unpinned()
        return Admitted((self.pairing,), pins)

    def stands(self, owner: Owner) -> bool:
        """Always."""
        return True

    def proven(self, owner: Owner) -> None:
        """There is no earlier epoch."""

    def watch(self, changed: Callable[[], None]) -> None:
        """It is never called."""

    def refresh(self) -> None:
        """There is nothing to see."""


class RegistryTrust:
    """Whom the registry has, as it is at any moment.

    Where it cannot be read nobody is trusted, until it can be again.
    """

    def __init__(self, peers: Peers, own: OwnCertificate) -> None:
        """``peers`` are a producer's. Raises ``ConfigError`` as ``Peers.all`` does."""
        self._peers = peers
        self._own = own
        self._fingerprint = fingerprint(own.certificate)
        self._lock = threading.Lock()
        self._known: dict[bytes, Peer] = {}
        self._told: set[str] = set()
        self._failed = False
        self._changed: Callable[[], None] = lambda: None
        self._context = self._context_of(())
        self._pins: frozenset[bytes] = frozenset()
        """Whom TLS lets in."""
        self._take(peers.all())

    @property
    def context(self) -> ssl.SSLContext:
        """See :class:`Trust`."""
        return self._context

    @property
    def empty(self) -> bool:
        """Whether nobody is trusted."""
        return not self._known

    def admit(self, certificate: bytes | None) -> Admitted:
        """See :class:`Trust`."""
        known = self._known
        shown = pinned(certificate, known)
        if shown is None:
            raise _unpinned()
        peer = known[shown]
        earlier = () if peer.earlier is None else (peer.earlier,)
        return Admitted((peer.record.pairing, *earlier), peer.record.fingerprints, peer.name)

    def stands(self, owner: Owner) -> bool:
        """See :class:`Trust`."""
        peer = self._known.get(owner.fingerprint)
        if peer is None:
            return False
        earlier = peer.earlier is not None and owner.epoch == peer.earlier.epoch
        return earlier or owner.epoch == peer.record.epoch

    def proven(self, owner: Owner) -> None:
        """See :class:`Trust`. Where it cannot be kept, the earlier one goes on being taken."""
        peer = self._known.get(owner.fingerprint)
        if peer is None or peer.earlier is None or owner.epoch != peer.record.epoch:
            return

        def settled(found: Peer) -> Peer:
            return replace(found, earlier=None) if found.record.epoch == owner.epoch else found

        try:
            self._peers.update(owner.fingerprint, settled)
        except ConfigError as error:
            log.warning("a rotation is not finished", extra={"reason": error.reason})
        self.refresh()

    def watch(self, changed: Callable[[], None]) -> None:
        """See :class:`Trust`."""
        self._changed = changed

    def refresh(self) -> None:
        """See :class:`Trust`."""
        with self._lock:
            before = self._known
            self._look()
            changed = self._known != before
        if changed:
            self._changed()

    def _look(self) -> None:
        try:
            if not self._peers.changed() and not self._failed:
                return
            found = self._peers.all()
        except ConfigError as error:
            if not self._failed:
                log.error("nobody is trusted", extra=error.details())
            self._failed, self._known = True, {}
            return
        self._failed = False
        self._take(found)

    def forget(self, owner: Owner) -> None:
        """Forget a decoder, durably. Raises ``ConfigError`` as ``Peers.remove`` does."""
        self._peers.remove(owner.fingerprint)
        self.refresh()

    def rekey(self, owner: Owner, old: Pairing, new: Pairing) -> None:
        """Keep ``new`` for the decoder that has proven ``old``, which it may still use alone.

        Durably. Raises ``TransferError`` (``pairing_revoked``) if ``old`` is not its own any
        more, and ``ConfigError`` as ``Peers.update`` does.
        """

        def rotated(found: Peer) -> Peer:
            if old not in (found.record.pairing, found.earlier):
                raise _revoked()
            record = msgspec.structs.replace(found.record, key=new.key, epoch=new.epoch)
            return replace(found, record=record, earlier=old)

        if self._peers.update(owner.fingerprint, rotated) is None:
            raise _revoked()
        self.refresh()

    def _take(self, found: Found) -> None:
        """What was read counts from now on."""
        usable: dict[bytes, Peer] = {}
        for peer in found.peers:
            try:
                require_certificate(peer.record.peer_certificate)
            except BatonError as error:
                self._tell(peer.fingerprint.hex(), error.reason)
                continue
            if fingerprint(peer.record.certificate) == self._fingerprint:
                usable[peer.fingerprint] = peer
            else:
                self._tell(peer.fingerprint.hex(), "own_certificate_differs")
        for fault in found.faults:
            self._tell(fault.name, fault.error.reason)
        self._known = usable
        if usable.keys() == self._pins:
            return
        try:
            pins = [peer.record.peer_certificate for peer in usable.values()]
            self._context = self._context_of(pins)
            self._pins = frozenset(usable)
        except ConfigError as error:
            # Who is new gets in later; who was removed is shut out after TLS, by what is known.
            self._failed = True
            self._tell("", error.reason)

    def _tell(self, name: str, reason: str) -> None:
        """Once for each file and reason."""
        if name + reason not in self._told:
            self._told.add(name + reason)
            log.warning("a peer is not trusted", extra={"peer": name, "reason": reason})

    def _context_of(self, pins: Iterable[bytes]) -> ssl.SSLContext:
        return server_context(self._own.certificate, self._own.private_key, pins)


def trust_from_key_pipe(descriptor: int) -> FixedTrust:
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
    return FixedTrust(Pairing(key, 0))


def trust_from_file(path: Path) -> FixedTrust:
    """Trust by a pairing file, with TLS.

    Raises ``ConfigError``: ``pairing_missing``, ``pairing_exposed`` (readable by others),
    ``pairing_unreadable``, ``pairing_of_other_side``.
    """
    record = load_record(path, "producer")
    context = server_context(record.certificate, record.private_key, [record.peer_certificate])
    return FixedTrust(record.pairing, context, record.fingerprints)


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


def require_trust_for(host: str, trust: Trust, *, pairing: bool = False) -> None:
    """Raise ``ConfigError`` (``pairing_required``) for a key alone, or nobody, off loopback.

    ``pairing``: a code will be opened, so that there may be somebody soon.
    """
    if is_loopback(host):
        return
    if trust.context is None:
        raise ConfigError(
            f"Binding to {host} needs a pairing: without TLS only loopback is allowed.",
            reason="pairing_required",
            field="host",
            found=host,
            expected="127.0.0.1",
            hint="Start without --key-fd, and with --pair the first time.",
        )
    if isinstance(trust, RegistryTrust) and trust.empty and not pairing:
        raise ConfigError(
            f"Nobody is paired with this producer, so that nobody could use it on {host}.",
            reason="pairing_required",
            field="peers",
            hint="Start with --pair, and type the code that it shows on the Mac.",
        )


def _unpinned() -> IntegrityError:
    return IntegrityError(
        "The client's certificate is not a paired one.",
        reason="proof_differs",
        field="certificate",
    )


def _revoked() -> BatonError:
    return refusal("pairing_revoked", "this decoder is not paired here any more")


def _bad_key(why: str) -> ConfigError:
    return ConfigError(
        f"The key's pipe is unusable: {why}; {KEY_BYTES} bytes are needed.",
        reason="key_unreadable",
        field="key-fd",
    )
