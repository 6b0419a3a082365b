"""Changing one setting in the file of settings; comments, order and everything else stay.

The file is replaced whole, with its mode, so that nobody ever reads half of it. What is about to be
written is read again first: it must say what the file said, and the one change.
"""

from __future__ import annotations

import os
import stat
import tempfile
import tomllib
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any, Final

import tomlkit
import tomlkit.exceptions

from app import settings
from app.settings import Table
from protocol.errors import ConfigError

_PRIVATE: Final = 0o600


def put(table: Table, key: str, value: str, path: Path | None = None) -> Path:
    """Have the file that is read where none is named say ``key = "value"`` in a side's table.

    Returns where it is; ``path`` names another. Raises ``ConfigError``: what ``settings`` raises
    about a file that it cannot read, and ``settings_unwritable``.
    """
    file = path or settings.default_path()
    # A link stays one: the file that it means is replaced.
    real = Path(os.path.realpath(file))
    before = settings.content(file)
    made = edited(before.decode() if before else "", table, key, value, str(file)).encode()
    if len(made) > settings.MAX_BYTES:
        why = f"it would have more than {settings.MAX_BYTES} bytes, which nobody reads"
        raise _unwritable(str(file), why, "make it shorter")
    try:
        mode = stat.S_IMODE(real.stat().st_mode) if before is not None else _PRIVATE
        real.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(real, made, mode)
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise _unwritable(str(file), why, _by_hand(table, key)) from error
    return file


def edited(text: str, table: Table, key: str, value: str, name: str = "config.toml") -> str:
    """The text of a file of settings with one setting changed or added.

    ``name`` is what errors call the file. Raises ``ConfigError``: ``settings_unreadable``,
    ``settings_unwritable``.
    """
    if not value.isprintable():
        why = f"{value!a} is no printable text"
        raise _unwritable(name, why, "choose a name of printable characters")
    try:
        found = tomllib.loads(text)
        document = tomlkit.parse(text)
        if table not in document:
            document[table] = tomlkit.table()
        inner = document[table]
        # A table in several places, as dotted keys make one, is none of tomlkit's own tables.
        if not isinstance(inner, MutableMapping):
            raise _unwritable(name, f"{table} is no table", f"make a table of {table}")
        inner[key] = value
        made = tomlkit.dumps(document)
        said = tomllib.loads(made)
    except (ValueError, RecursionError, tomlkit.exceptions.TOMLKitError) as error:
        raise ConfigError(
            f"{name} cannot be read: it is not TOML",
            reason="settings_unreadable",
            field="config",
            hint="mend it, or move it away",
        ) from error
    wanted: dict[str, Any] = {**found, table: {**found.get(table, {}), key: value}}
    if said != wanted:
        why = f"more than {key} would have changed"
        raise _unwritable(name, why, _by_hand(table, key))
    return made


def _replace(file: Path, content: bytes, mode: int) -> None:
    with tempfile.NamedTemporaryFile(dir=file.parent, prefix=".config-", delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.fchmod(new.fileno(), mode)
            os.fsync(new.fileno())
            os.replace(new.name, file)
        except OSError:
            os.unlink(new.name)
            raise


def _by_hand(table: Table, key: str) -> str:
    return f"by hand: {key} below [{table}], or {table}.{key} where the file is written like that"


def _unwritable(name: str, why: str, hint: str) -> ConfigError:
    return ConfigError(
        f"{name} cannot be changed: {why}", reason="settings_unwritable", field="config", hint=hint
    )
