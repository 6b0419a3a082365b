"""The machines that this one is paired with: one private file for each, in ``DIR/peers``.

A file is named by the SHA-256 of the peer's certificate, and holds a name, where the peer is
reached, when it was paired, and the pairing's record, of which key and private key are kept
as ``trust/secrets.py`` says. Everything else in the file, and the file's name, is bound to
them. A file that cannot be used is told, and never touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from protocol.addresses import can_be_a_host
from protocol.errors import ConfigError
from protocol.messages import Bytes32, Epoch
from protocol.pairing import Pairing, length_prefixed
from protocol.pairing.messages import Name, Port, require_name
from protocol.pairing.record import Der, PairingRecord, Role, fingerprint
from trust.places import Kind, Place
from trust.secrets import Kept, PlainSecrets, Secrets

MAX_FILE_BYTES: Final = 256 * 1024
MIN_PREFIX: Final = 8
"""Digits of a fingerprint that may stand for all of it."""

_DOMAIN: Final = b"baton peer file 1"
_FILE_NAME: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = Kind(
    called="peer's file",
    field="peers",
    exposed="peer_exposed",
    unreadable="peer_unreadable",
    hint="remove it and pair again",
)


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a decoder reaches a producer, for handoffs and for everything else."""

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Port


@dataclass(frozen=True)
class Peer:
    """A paired machine. ``paired_at`` is in seconds since 1970, by the clock as it was then.

    ``earlier``, at a producer: the pairing before a rotation, which the decoder may still hold
    alone, until it has proven the newer. Raises ``ConfigError``: ``name_malformed``,
    ``host_malformed``.
    """

    name: str
    record: PairingRecord
    paired_at: int
    address: Address | None = None
    earlier: Pairing | None = None

    def __post_init__(self) -> None:
        require_name(self.name)
        if self.address is not None and not can_be_a_host(self.address.host):
            raise ConfigError(
                "This cannot be the name or number of a host.",
                reason="host_malformed",
                field="host",
                found=ascii(self.address.host),
            )

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the peer's certificate, 32 bytes: what a peer is known by."""
        return fingerprint(self.record.peer_certificate)


class Fault(NamedTuple):
    """A file that cannot be used, and why."""

    name: str
    error: ConfigError


class Found(NamedTuple):
    """Every peer, by file name, and every file that is none."""

    peers: tuple[Peer, ...]
    faults: tuple[Fault, ...]


class _Public(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="baton_peer"):
    """What a file says openly."""

    version: Literal[1]
    name: Name
    address: Address | None
    paired_at: Annotated[int, msgspec.Meta(ge=0, le=(1 << 53) - 1)]
    role: Role
    epoch: Epoch
    certificate: Der
    peer_certificate: Der


class _File(_Public, frozen=True, forbid_unknown_fields=True, tag="baton_peer"):
    """A whole file."""

    secrets: Kept

    @property
    def public(self) -> _Public:
        fields = msgspec.structs.asdict(self)
        return _Public(**{name: fields[name] for name in _Public.__struct_fields__})


class _Earlier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: Epoch
    key: Bytes32

    def __repr__(self) -> str:
        return "_Earlier()"


class _Secret(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: Bytes32
    private_key: Der
    earlier: _Earlier | None

    def __repr__(self) -> str:
        return "_Secret()"


class Peers:
    """The peers of one side, ``role``, of this machine.

    Several processes may use the same directory. Every method raises ``ConfigError``:
    ``directory_exposed``, ``directory_unusable``, and of the keyring, which all files share,
    ``keychain_locked``, ``keychain_unavailable``, ``keychain_unreadable``,
    ``keychain_item_missing``.
    """

    def __init__(self, directory: Path, role: Role, secrets: Secrets | None = None) -> None:
        self._place = Place(directory / "peers")
        self._role: Role = role
        self._secrets = secrets or PlainSecrets()
        self._stamp: object = None

    def all(self) -> Found:
        """Every peer, and every file that is none. From here on :meth:`changed` counts.

        Reasons of faults: ``peer_exposed``, ``peer_unreadable``, ``peer_foreign`` (no name of
        ours, or half written), ``peer_misplaced`` (the file of another peer),
        ``pairing_of_other_side``, and what ``Secrets.reveal`` raises of one file.
        """
        self._stamp = self._place.stamp()
        return self._found()

    def changed(self) -> bool:
        """Whether any process added, replaced or removed a peer since :meth:`all`; cheap."""
        return self._place.stamp() != self._stamp

    def by_fingerprint(self, fingerprint: bytes) -> Peer | None:
        """The peer whose certificate has this SHA-256; ``None`` if there is none.

        Raises ``ConfigError`` also with what is a fault in :meth:`all`.
        """
        return self._read(fingerprint.hex())

    def epoch_with(self, fingerprint: bytes) -> int:
        """The epoch of the pairing with whose certificate has this SHA-256, 0 without one.

        A new pairing's is larger. It is of this pair alone: what one peer says of epochs changes
        nothing for others.
        """
        found = (p.record.epoch for p in self._found().peers if p.fingerprint == fingerprint)
        return next(found, 0)

    def require_usable(self) -> None:
        """Raise now what :meth:`add` would raise later, of the keyring and the directory."""
        self._found()
        self._secrets.protect(b"", b"")
        with self._place.alone():
            pass

    def add(self, peer: Peer) -> None:
        """Keep a peer, durably; one with the same certificate is replaced.

        Raises ``ConfigError`` also with ``trust_not_durable`` and ``state_dir_locked``: the
        file is then the old one, or the new one whole.
        """
        if peer.record.role != self._role:
            raise ValueError(f"this is a record of the {peer.record.role}")
        # Where files cannot be opened for want of the keyring's key, none is sealed under another.
        self._found()
        name = peer.fingerprint.hex()
        self._place.write(name, _encoded(name, peer, self._secrets))

    def update(self, fingerprint: bytes, change: Callable[[Peer], Peer]) -> Peer | None:
        """Keep what ``change`` makes of a peer, durably; ``None`` if there is none.

        Whatever other processes do, a peer that was removed stays removed, and no change is
        lost. Raises like :meth:`add`, and like :meth:`by_fingerprint`.
        """
        name = fingerprint.hex()
        made: list[Peer] = []

        def changed(raw: bytes) -> bytes:
            made.append(change(_decoded(name, raw, self._role, self._secrets)))
            return _encoded(name, made[0], self._secrets)

        done = self._place.rewrite(name, MAX_FILE_BYTES, _FILE, changed)
        return made[0] if done else None

    def named(self, called: str) -> Peer:
        """The peer of that name, or whose certificate's SHA-256 begins so, in hexadecimal.

        Raises ``ConfigError``: ``peer_unknown``, ``peer_ambiguous``.
        """
        every = self._found().peers
        found = [peer for peer in every if peer.name == called]
        if not found and len(called) >= MIN_PREFIX:
            found = [peer for peer in every if peer.fingerprint.hex().startswith(called.lower())]
        if len(found) == 1:
            return found[0]
        if not found:
            raise ConfigError(
                "No machine of that name is paired with this one.",
                reason="peer_unknown",
                field="name",
                found=ascii(called),
                expected=", ".join(sorted({peer.name for peer in every})) or None,
            )
        raise ConfigError(
            f"{len(found)} machines are called {called}.",
            reason="peer_ambiguous",
            field="name",
            expected=", ".join(peer.fingerprint.hex()[:16] for peer in found),
            hint="name the one that is meant by its fingerprint",
        )

    def remove(self, fingerprint: bytes) -> bool:
        """Forget a peer, durably; ``False`` if there is none. Raises like :meth:`add`."""
        return self._place.remove(fingerprint.hex())

    def discard(self, file: str) -> bool:
        """Remove a file that is a fault in :meth:`all`, durably. Raises like :meth:`add`."""
        return self._place.remove(file)

    def _found(self) -> Found:
        peers: list[Peer] = []
        faults: list[Fault] = []
        for name in self._place.names():
            try:
                peer = self._read(name)
            except ConfigError as error:
                if error.reason in _OF_ALL:
                    raise
                faults.append(Fault(name, error))
            else:
                peers += [peer] if peer is not None else []  # removed since
        return Found(tuple(peers), tuple(faults))

    def _read(self, name: str) -> Peer | None:
        if not _FILE_NAME.fullmatch(name):
            raise ConfigError(
                f"{self._place.path / name} is no peer's file, or one that was half written.",
                reason="peer_foreign",
                field="peers",
                hint="remove it if it is not needed",
            )
        raw = self._place.read(name, MAX_FILE_BYTES, _FILE)
        if raw is None:
            return None
        return _decoded(name, raw, self._role, self._secrets)


_OF_ALL: Final = frozenset(
    {
        "directory_exposed",
        "directory_unusable",
        "keychain_locked",
        "keychain_unavailable",
        "keychain_unreadable",
        "keychain_item_missing",
        "state_dir_locked",
        "trust_not_durable",
    }
)
"""Reasons that are no single file's."""


def _bound(name: str, public: _Public) -> bytes:
    return length_prefixed(
        _DOMAIN, name.encode(), public.role.encode(), msgspec.json.encode(public)
    )


def _encoded(name: str, peer: Peer, secrets: Secrets) -> bytes:
    record = peer.record
    public = _Public(
        version=1,
        name=peer.name,
        address=peer.address,
        paired_at=peer.paired_at,
        role=record.role,
        epoch=record.epoch,
        certificate=record.certificate,
        peer_certificate=record.peer_certificate,
    )
    earlier = None if peer.earlier is None else _Earlier(peer.earlier.epoch, peer.earlier.key)
    secret = msgspec.json.encode(_Secret(record.key, record.private_key, earlier))
    kept = secrets.protect(secret, _bound(name, public))
    file = _File(**msgspec.structs.asdict(public), secrets=kept)
    raw = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
    _decoded(name, raw, record.role, secrets)  # nothing is written that could not be read
    return raw


def _decoded(name: str, raw: bytes, role: Role, secrets: Secrets) -> Peer:
    try:
        file = msgspec.json.decode(raw, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(name, "it is not the JSON object that it must be") from error
    if file.role != role:
        raise ConfigError(
            f"The peer's file {name} belongs to the {file.role} of this machine.",
            reason="pairing_of_other_side",
            field="role",
            found=file.role,
            expected=role,
        )
    if fingerprint(file.peer_certificate).hex() != name:
        raise ConfigError(
            f"The peer's file {name} holds another certificate than its name says.",
            reason="peer_misplaced",
            field="peers",
            found=fingerprint(file.peer_certificate).hex(),
            expected=name,
            hint=_FILE.hint,
        )
    revealed = secrets.reveal(file.secrets, _bound(name, file.public))
    try:
        secret = msgspec.json.decode(revealed, type=_Secret)
        record = PairingRecord(
            1,
            file.role,
            file.epoch,
            secret.key,
            file.certificate,
            secret.private_key,
            file.peer_certificate,
        )
        before = secret.earlier
        earlier = None if before is None else Pairing(before.key, before.epoch)
        return Peer(file.name, record, file.paired_at, file.address, earlier)
    except (msgspec.MsgspecError, UnicodeDecodeError, ConfigError) as error:
        raise _unreadable(name, "what it holds is no pairing") from error


def _unreadable(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"The peer's file {name} cannot be used: {why}.",
        reason=_FILE.unreadable,
        field=_FILE.field,
        hint=_FILE.hint,
    )
