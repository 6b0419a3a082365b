"""The store key: 32 random bytes in a 0600 file, made once, and what is derived from it.

It names namespaces, and authenticates manifests; rows are not encrypted with it. Whoever
loses it loses the use of every cut on disk, and nothing else.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from mac_decoder.store.files import RealDisk
from protocol.errors import ConfigError

KEY_BYTES: Final = 32

_MANIFEST: Final = b"baton manifest key 1"
_NUMBER: Final = b"baton store key number 1"
_NUMBER_BYTES: Final = 16


def load_or_make(path: Path) -> bytes:
    """The key in ``path``; made, with its directory (0700), if there is none.

    Raises ``ConfigError``: ``store_key_exposed`` if others may read the file, and
    ``store_key_unreadable`` if it is no key of this user.
    """
    key = load(path)
    if key is None:
        _make(path)
        key = load(path)
    if key is None:
        raise _unreadable(path, "it was removed")
    return key


def load(path: Path) -> bytes | None:
    """The key in ``path``; ``None`` if there is none. Raises as :func:`load_or_make`."""
    try:
        return _load(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, error.strerror or "it cannot be opened") from error


def manifest_key(store_key: bytes) -> bytes:
    """The key of the manifests' HMAC, 32 bytes."""
    return hmac.new(store_key, _MANIFEST, hashlib.sha256).digest()


def key_number(store_key: bytes) -> str:
    """A public number of the key, 32 hexadecimal digits: tells files of another key apart."""
    return hmac.new(store_key, _NUMBER, hashlib.sha256).digest()[:_NUMBER_BYTES].hex()


def _load(path: Path) -> bytes:
    # Without waiting: it may be a pipe that nobody writes to.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | os.O_NOFOLLOW
    handle = os.open(path, flags)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _unreadable(path, "it is not a file of this user")
        key = os.read(handle, KEY_BYTES + 1)
    finally:
        os.close(handle)
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(
            f"others may read the store key {path}",
            reason="store_key_exposed",
            field=path.name,
            found=oct(stat.S_IMODE(status.st_mode)),
            expected=oct(0o600),
            hint=f"chmod 600 {path}; if others had access, remove it and clear the cache",
        )
    if len(key) != KEY_BYTES:
        raise _unreadable(path, f"it does not have {KEY_BYTES} bytes")
    return key


def _make(path: Path) -> None:
    """Write a new key durably; whoever links it first wins, and nothing is overwritten."""
    disk = RealDisk()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = disk.create(temporary)
    try:
        try:
            disk.write(handle, [memoryview(secrets.token_bytes(KEY_BYTES))])
            disk.sync(handle)
            disk.barrier(handle)
        finally:
            disk.close(handle)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return
    finally:
        disk.unlink(temporary)
    disk.sync_directory(path.parent)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be used as the store key: {why}",
        reason="store_key_unreadable",
        field=path.name,
        hint="restore it, or remove it and clear the cache: what it authenticated is lost",
    )
