"""Keyrings of tests: backends by keyring's own extension point, ``KeyringBackend``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import keyring
from keyring.backend import KeyringBackend
from keyring.errors import KeyringLocked


class Memory(KeyringBackend):
    """Keeps items in a dictionary, and counts how often it is asked."""

    priority = 1  # pyright: ignore[reportAssignmentType]

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[tuple[str, str], str] = {}
        self.reads = 0
        self.writes = 0

    def get_password(self, service: str, username: str) -> str | None:
        self.reads += 1
        return self.items.get((service, username))

    def set_password(self, service: str, username: str, password: str) -> None:
        self.writes += 1
        self.items[service, username] = password


class Blocking(Memory):
    """Answers only once somebody has clicked: :attr:`clicked`."""

    def __init__(self) -> None:
        super().__init__()
        self.clicked = threading.Event()

    def get_password(self, service: str, username: str) -> str | None:
        self.reads += 1
        self.clicked.wait()
        return self.items.get((service, username))


class Locked(Memory):
    """Refuses to be read."""

    def get_password(self, service: str, username: str) -> str | None:
        self.reads += 1
        raise KeyringLocked("locked")


class Refusing(Memory):
    """Raises ``error`` at every reading, out of ``cause``."""

    def __init__(self, error: Exception, cause: Exception | None = None) -> None:
        super().__init__()
        self._error, self._cause = error, cause

    def get_password(self, service: str, username: str) -> str | None:
        raise self._error from self._cause


class Forgetful(Memory):
    """Keeps nothing, like ``keyring.backends.null``."""

    def set_password(self, service: str, username: str, password: str) -> None:
        self.writes += 1


@contextmanager
def using(backend: KeyringBackend) -> Iterator[None]:
    """While the block runs, ``backend`` is this process's keyring."""
    before = keyring.get_keyring()
    keyring.set_keyring(backend)
    try:
        yield
    finally:
        keyring.set_keyring(before)
