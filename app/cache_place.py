"""Where `baton serve` keeps its caches, and how the commands open that: never making one."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import psutil
import typer

from mac_decoder.config import DecoderConfig
from mac_decoder.store.events import Event
from mac_decoder.store.files import RealDisk
from mac_decoder.store.key import KEY_BYTES, load
from mac_decoder.store.limits import NO_CAP
from mac_decoder.store.store import Store
from protocol.errors import ConfigError

CacheDir = Annotated[
    Path | None, typer.Option(help="The --cache-dir of `baton serve`, if it was given one.")
]
StateDir = Annotated[
    Path | None, typer.Option(help="The --state-dir of `baton serve`, if it was given one.")
]

_LONGEST_COMMAND = 80


def no_listener(event: Event) -> None:
    """Nobody asks what the store does."""


class Place:
    """The cache directory and the store key of a decoder with these options."""

    def __init__(self, cache_dir: Path | None, state_dir: Path | None) -> None:
        config = DecoderConfig(
            model="", cache_dir=str(cache_dir or ""), state_dir=str(state_dir or "")
        )
        self.directory = config.cache_path
        self.state = config.state_path
        self._key_path = config.store_key_path

    def is_empty(self) -> bool:
        """Whether there is no directory, or no file in it."""
        try:
            os.listdir(self.directory)
        except FileNotFoundError:
            return True
        except OSError:
            # There is something: opening it says what is wrong.
            return False
        return next(RealDisk().walk(self.directory), None) is None

    @contextmanager
    def look(self, *, needs_key: bool = False) -> Iterator[Store]:
        """The tier as it is; nothing in it changes. Raises as :meth:`keep_house`."""
        key = self._key(needs_key)
        with _naming_the_holder(self.directory):
            store = Store.look(self.directory, key, no_listener)
        with store:
            yield store

    @contextmanager
    def keep_house(self, *, needs_key: bool = True) -> Iterator[Store]:
        """The tier, to quarantine or delete in it; no file goes because of a cap.

        Raises ``ConfigError``: ``store_locked``, ``cache_dir_unusable``, ``store_key_missing``
        if a key is needed, and those of a key that cannot be used.
        """
        key = self._key(needs_key)
        with _naming_the_holder(self.directory):
            store = Store.open(self.directory, key, NO_CAP, 0, listener=no_listener)
        with store:
            yield store

    def _key(self, needed: bool) -> bytes:
        key = load(self._key_path)
        if key is None and needed:
            raise ConfigError(
                f"there is no store key {self._key_path}, so nothing can be authenticated",
                reason="store_key_missing",
                field="state_dir",
                hint="give the --state-dir of `baton serve`; if the key is lost, "
                "`baton cache clear` removes what it authenticated",
            )
        # Without one everything was made under another key, which is what this one says too.
        return key or secrets.token_bytes(KEY_BYTES)


@contextmanager
def _naming_the_holder(directory: Path) -> Iterator[None]:
    """Let the refusal of a directory in use say who uses it, and what to do."""
    try:
        yield
    except ConfigError as error:
        if error.reason != "store_locked":
            raise
        holder = str(error.found or "")
        raise ConfigError(
            f"the cache directory {directory} is in use by process {_described(holder)}",
            reason="store_locked",
            field="cache_dir",
            found=holder or None,
            hint="stop the `baton serve` that started it and try again; "
            "`baton cache stats --url URL` asks a decoder that runs",
        ) from error


def _described(holder: str) -> str:
    """A process by its number and, where the system tells, its command."""
    if not holder.isdecimal():
        return "unknown"
    try:
        command = " ".join(psutil.Process(int(holder)).cmdline())
    except psutil.Error:
        return holder
    shown = "".join(letter if letter.isprintable() else "?" for letter in command)
    if len(shown) > _LONGEST_COMMAND:
        shown = shown[: _LONGEST_COMMAND - 1] + "…"
    return f"{holder} ({shown})" if shown else holder
