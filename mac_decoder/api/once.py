"""Tokens that log in once: proof that whoever asks is the user whose state directory this is.

Another process of the user leaves a private file here, named by the SHA-256 of a random token;
the browser brings the token. The file is gone before the answer is given, and worth nothing a
minute after it was made, so that neither a history nor a log of the browser's opens anything.
It is for one port alone: whoever listens on another, and is no decoder, gains nothing by being
sent the token.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from protocol.errors import CapacityError, ConfigError
from trust.places import Kind, Place

log = logging.getLogger(__name__)

VALID_S: Final = 60.0
MOST: Final = 16
"""At once; they are short-lived."""

DIRECTORY: Final = "logins"

_SECRET_BYTES: Final = 32
_NAME: Final = re.compile(r"[0-9a-f]{64}")
"""The name of a file of ours: a SHA-256. Whatever else lies there is left alone."""

_MAX_FILE_BYTES: Final = 256
_KIND: Final = Kind(
    called="file of a login",
    field="state-dir",
    exposed="login_exposed",
    unreadable="login_invalid",
    hint="remove it, and run `baton dashboard` again",
)


class _Left(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file's content: when it was made, in seconds since 1970, and for which port."""

    made_at: float
    port: int


class Once:
    """The tokens of one decoder. Any process of the user may leave them; files are read and
    written, so not on an event loop.
    """

    def __init__(self, state: Path, port: int, clock: Callable[[], float] = time.time) -> None:
        """``state`` is the decoder's state directory, ``port`` where it listens."""
        self._place = Place(state / DIRECTORY)
        self._port = port
        self._clock = clock
        self._complained = False

    def leave(self) -> str:
        """A new token, valid for ``VALID_S``; its file is there.

        Raises ``ConfigError`` as ``Place.write`` does, and ``CapacityError``
        (``too_many_logins``).
        """
        if self.sweep() >= MOST:
            raise CapacityError(
                "too many logins wait to be used",
                reason="too_many_logins",
                retry_after_s=VALID_S,
                hint="close what opens them, and try again in a minute",
            )
        token = secrets.token_urlsafe(_SECRET_BYTES)
        self._place.create(_name(token), self._content())
        return token

    def waits(self, token: str) -> bool:
        """Whether nobody has used it yet. Raises ``ConfigError``."""
        return _name(token) in self._place.names()

    def take(self, token: str) -> bool:
        """Whether the token is good. It is not any more afterwards, whoever asks.

        What cannot be read is no token; the log says why.
        """
        name = _name(token)
        try:
            left = self._left(name)
            # Of two who bring it at the same time, one removes it.
            if not self._place.remove(name):
                return False
        except ConfigError as error:
            log.warning("a login was refused (%s): %s", error.reason, error.message)
            return False
        # It is gone already: what is the matter with the others does not matter to it.
        with contextlib.suppress(ConfigError):
            self.sweep()
        return left is not None and left.port == self._port and self._is_fresh(left)

    def forget(self, token: str) -> None:
        """Remove a token that nobody is to use any more. Raises ``ConfigError``."""
        self._place.remove(_name(token))

    def sweep(self) -> int:
        """Remove what has expired, and forged files; how many may still be used.

        What this class would not have made (another name, a directory) is left where it is, and
        told once. Raises ``ConfigError`` where the directory itself is not as it has to be.
        """
        fresh, strange = 0, 0
        for name in self._place.names():
            if name.startswith("."):
                continue  # what a crash left of a write
            if not _NAME.fullmatch(name):
                strange += 1
                continue
            try:
                left = self._left(name)
            except ConfigError:
                left = None
            if left is not None and self._is_fresh(left):
                fresh += 1
            elif not self._removed(name):
                strange += 1
        if strange and not self._complained:
            self._complained = True
            where = self._place.path
            log.warning("%d things in %s are no logins, and are left alone", strange, where)
        return fresh

    def _removed(self, name: str) -> bool:
        """Whether it is gone: a directory stays. Raises ``ConfigError`` (``state_dir_locked``)."""
        try:
            self._place.remove(name)
        except ConfigError as error:
            if error.reason == "state_dir_locked":
                raise
            return False
        return True

    def _content(self) -> bytes:
        return msgspec.json.encode(_Left(self._clock(), self._port))

    def _left(self, name: str) -> _Left | None:
        raw = self._place.read(name, _MAX_FILE_BYTES, _KIND)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=_Left)
        except msgspec.MsgspecError:
            return None

    def _is_fresh(self, left: _Left) -> bool:
        # Not of the future either: the clock may have been set back.
        return 0 <= self._clock() - left.made_at < VALID_S


def _name(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
