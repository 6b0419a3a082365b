"""API keys: made and revoked by ``baton key``, each in a private file, and looked up by a server.

A key is 256 random bits behind a prefix that people and scanners of leaked secrets recognise.
Only its SHA-256 digest is stored. That is enough: a slow, salted hash protects secrets that
can be guessed, and nobody guesses 256 bits. Beside it stands the salt that keeps the caches
made for this key apart from everybody else's (see ``Keeper.space``). It is random too: a key
that is made again under the same name reuses nothing of the one before.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import msgspec

from protocol.errors import ConfigError
from trust.places import Kind, Place

log = logging.getLogger(__name__)

PREFIX: Final = "baton-"
MOST_KEYS: Final = 256

_SECRET_BYTES: Final = 32
_SALT_BYTES: Final = 32
_DIRECTORY: Final = "api-keys"
_SUFFIX: Final = ".json"
_MAX_FILE_BYTES: Final = 4096
_NAME: Final = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,63}")

_LOOK_EVERY_S: Final = 1.0
"""How long a server may not have noticed a key that was made or revoked."""

_KIND: Final = Kind(
    called="file of an API key",
    field="key",
    exposed="api_keys_exposed",
    unreadable="api_keys_invalid",
    hint="remove it, and make the key again with `baton key create`",
)


class StoredKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept of a key: never the key. ``created`` is in seconds since 1970.

    ``shares_caches`` puts it in the namespace of those who give no key, instead of the one
    that ``salt`` makes.
    """

    name: str
    digest: bytes
    salt: bytes
    created: int
    shares_caches: bool = False

    def __repr__(self) -> str:
        return f"StoredKey({self.name!r})"


class KeyFiles:
    """The keys of one decoder, under its state directory; any process of the user may change
    them at any time.

    Every method raises ``ConfigError``: ``directory_exposed``, ``directory_unusable``,
    ``state_dir_locked``, ``trust_not_durable`` (see ``trust.places``), and those said.
    """

    def __init__(self, state: Path) -> None:
        self._place = Place(state / _DIRECTORY)

    def create(self, name: str, *, shares_caches: bool = False) -> str:
        """A new key, which is told this once.

        Raises ``ConfigError`` (``key_name_invalid``, ``key_name_taken``, ``too_many_keys``).
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                "that is no name for a key",
                reason="key_name_invalid",
                field="name",
                expected="up to 64 letters, digits, dots, underscores and hyphens",
            )
        if len(self._place.names()) >= MOST_KEYS:
            raise ConfigError(
                f"there are {MOST_KEYS} keys already",
                reason="too_many_keys",
                hint="revoke those that nobody uses with `baton key revoke NAME`",
            )
        key = PREFIX + secrets.token_urlsafe(_SECRET_BYTES)
        stored = StoredKey(
            name, digest(key), secrets.token_bytes(_SALT_BYTES), int(time.time()), shares_caches
        )
        if not self._place.create(name + _SUFFIX, msgspec.json.encode(stored)):
            raise ConfigError(
                f"there is a key {name} already",
                reason="key_name_taken",
                field="name",
                found=name,
                hint=f"choose another name, or revoke it first: baton key revoke {name}",
            )
        return key

    def revoke(self, name: str) -> None:
        """Remove a key. Raises ``ConfigError`` (``key_unknown``)."""
        if not _NAME.fullmatch(name) or not self._place.remove(name + _SUFFIX):
            raise ConfigError(
                "there is no key of that name",
                reason="key_unknown",
                field="name",
                hint="`baton key list` shows the names",
            )

    def all(self) -> list[StoredKey]:
        """The keys by name. Raises ``ConfigError`` (``api_keys_exposed``, ``api_keys_invalid``)."""
        raws = (self._place.read(name, _MAX_FILE_BYTES, _KIND) for name in self._names())
        return [_stored(raw) for raw in raws if raw is not None]

    def stamp(self) -> object:
        """A value that differs whenever a key was made or revoked; cheap."""
        return self._place.stamp()

    def _names(self) -> list[str]:
        return [name for name in self._place.names() if name.endswith(_SUFFIX)]


class Keys:
    """The keys that a server takes: ``given`` ones, and those ``stored`` at the time.

    What is stored is looked at again at most once a second, when a request comes. Where it
    cannot be read no stored key is valid, and the log says why.
    """

    def __init__(
        self,
        given: Iterable[str] = (),
        stored: KeyFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._given = {digest(key): digest(key) for key in given}
        self._files = stored
        self._clock = clock
        self._stored: dict[bytes, bytes] = {}
        self._stamp: object = None
        self._looked_at: float | None = None
        self._complaint: str | None = None

    def __len__(self) -> int:
        self._look()
        return len(self._given) + len(self._stored)

    def salt_of(self, key: str) -> bytes | None:
        """What keeps the caches of ``key`` apart (empty: nothing does); ``None`` if it is none."""
        return self.salt_by(digest(key))

    def salt_by(self, found: bytes) -> bytes | None:
        """The same of the key with this digest."""
        self._look()
        # How long a look-up takes tells of digests, of which nobody can choose one.
        return self._given.get(found, self._stored.get(found))

    def _look(self) -> None:
        now = self._clock()
        if self._files is None or (
            self._looked_at is not None and now - self._looked_at < _LOOK_EVERY_S
        ):
            return
        self._looked_at = now
        try:
            stamp = self._files.stamp()
            if stamp == self._stamp and self._complaint is None:
                return
            self._stored = {
                key.digest: b"" if key.shares_caches else key.salt for key in self._files.all()
            }
            self._stamp, self._complaint = stamp, None
        except ConfigError as error:
            self._stored = {}
            if error.reason != self._complaint:
                log.warning("no stored API key is valid (%s): %s", error.reason, error.message)
            self._complaint = error.reason


def digest(key: str) -> bytes:
    """SHA-256 of a key, 32 bytes."""
    return hashlib.sha256(key.encode()).digest()


def is_ours(token: str) -> bool:
    """Whether ``token`` looks like a key that :class:`KeyFiles` made."""
    return token.startswith(PREFIX)


def _stored(raw: bytes) -> StoredKey:
    try:
        key = msgspec.json.decode(raw, type=StoredKey)
    except msgspec.MsgspecError as error:
        raise _invalid() from error
    if len(key.digest) != hashlib.sha256().digest_size or len(key.salt) != _SALT_BYTES:
        raise _invalid()
    return key


def _invalid() -> ConfigError:
    return ConfigError(
        "a file of an API key does not have the form of one",
        reason=_KIND.unreadable,
        field=_KIND.field,
        hint=_KIND.hint,
    )
