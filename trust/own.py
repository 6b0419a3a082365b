"""The certificate that one side of this machine shows, to everybody it is paired with.

A TLS server shows its certificate before it knows who asks, so a producer has the same one
for all its decoders. Made once, where its private key stays; kept in ``DIR/own``.
"""

from __future__ import annotations

import datetime
import re
import socket
from pathlib import Path
from typing import Final, Literal

import msgspec

from protocol.errors import ConfigError
from protocol.pairing import length_prefixed
from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.record import Der, Role
from trust.places import Kind, Place
from trust.secrets import Kept, Secrets

MAX_FILE_BYTES: Final = 128 * 1024
MAX_NAME: Final = 64
"""Longest name of a machine, in characters."""

_DOMAIN: Final = b"baton own file 1"
_FILE: Final = Kind(
    called="file of this machine's own certificate",
    field="own",
    exposed="own_exposed",
    unreadable="own_unreadable",
    hint="restore it; or remove it, and pair with every machine again",
)


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="baton_own"):
    """A whole file; the private key is its secret, and the rest is bound to it."""

    version: Literal[1]
    role: Role
    certificate: Der
    secrets: Kept


def own_certificate(
    directory: Path, role: Role, secrets: Secrets, now: datetime.datetime
) -> OwnCertificate:
    """The certificate of this side, made if there is none; ``now`` has a time zone.

    Raises ``ConfigError``: ``own_exposed``, ``own_unreadable`` (it is not made anew, since
    others have pinned it), what ``Secrets`` raises, and what ``Place.create`` does.
    """
    place = Place(directory / "own")
    own = _load(place, role, secrets)
    if own is None:
        made = make_certificate(role, now)
        kept = secrets.protect(made.private_key, _bound(role, made.certificate))
        file = _File(1, role, made.certificate, kept)
        raw = msgspec.json.format(msgspec.json.encode(file), indent=2) + b"\n"
        place.create(role, raw)  # another process may have been first: then its own counts
        own = _load(place, role, secrets)
    if own is None:
        raise _unreadable(role, "it was removed")
    return own


def machine_name(otherwise: str) -> str:
    """What the system calls this machine, as others can be told it; ``otherwise`` if nothing."""
    host = socket.gethostname().removesuffix(".local")
    kept = re.sub(r'[^ -~]|["\\]', "", host).strip()[:MAX_NAME].strip()
    return kept or otherwise


def _load(place: Place, role: Role, secrets: Secrets) -> OwnCertificate | None:
    raw = place.read(role, MAX_FILE_BYTES, _FILE)
    if raw is None:
        return None
    try:
        file = msgspec.json.decode(raw, type=_File)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _unreadable(role, "it is not the JSON object that it must be") from error
    if file.role != role:
        raise _unreadable(role, f"it belongs to the {file.role}")
    private_key = secrets.reveal(file.secrets, _bound(role, file.certificate))
    return OwnCertificate(file.certificate, private_key)


def _bound(role: Role, certificate: bytes) -> bytes:
    return length_prefixed(_DOMAIN, role.encode(), certificate)


def _unreadable(role: Role, why: str) -> ConfigError:
    return ConfigError(
        f"The {_FILE.called} ({role}) cannot be used: {why}.",
        reason=_FILE.unreadable,
        field=_FILE.field,
        hint=_FILE.hint,
    )
