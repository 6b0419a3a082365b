"""Baton among the applications of a Linux desktop: entries, icons, and the one for a login.

After freedesktop.org's Desktop Entry, Desktop Application Autostart, Icon Theme and Base Directory
specifications. An entry whose first line is not ours belongs to somebody else, and stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from app.app_icon import png
from protocol.errors import ConfigError

FILE_NAME: Final = "baton.desktop"
ICON: Final = "llm.baton.app"
"""A theme's directory is everybody's, and an icon cannot say whose it is: by a name that nobody
else takes, what is replaced and removed is ours."""

SIZES: Final = (48, 64, 128, 256, 512)

_FIRST_LINE: Final = "# Written by `baton app`, which replaces and removes it."
_PLAIN: Final = re.compile(r"[A-Za-z0-9_@%+:,./-]+", re.ASCII)
_HIDES: Final = re.compile(r"^(Hidden=true|X-GNOME-Autostart-enabled=false)\s*$", re.MULTILINE)

Kind = Literal["application", "autostart"]


def entry(command: Sequence[str], kind: Kind) -> str:
    """The text of an entry that runs ``command``, in the menu or at login.

    Raises ``ConfigError`` (``app_path_unusable``).
    """
    words = [_quoted(word, first=not number) for number, word in enumerate(command)]
    keys = {
        "Type": "Application",
        "Version": "1.4",
        "Name": "Baton",
        "GenericName": "Language model server",
        "Comment": "Prefill on an NVIDIA machine, decode here",
        "Exec": " ".join(words),
        "Icon": ICON,
        "Terminal": "false",
        "StartupNotify": "false",
    }
    if kind == "application":
        keys |= {"Categories": "Utility;", "Keywords": "LLM;OpenAI;chat;model;"}
    else:
        keys |= {"X-GNOME-Autostart-enabled": "true"}
    lines = [_FIRST_LINE, "[Desktop Entry]", *(f"{name}={text}" for name, text in keys.items())]
    return "".join(f"{line}\n" for line in lines)


def place(kind: Kind) -> Path:
    """Where an entry of this kind stands for this user."""
    if kind == "autostart":
        return _base("XDG_CONFIG_HOME", ".config") / "autostart" / FILE_NAME
    return _base("XDG_DATA_HOME", ".local/share") / "applications" / FILE_NAME


def stands(kind: Kind) -> bool:
    """Whether an entry of ours is there, and the desktop was not told to pass over it."""
    text = _text(place(kind))
    return text is not None and text.startswith(_FIRST_LINE) and not _HIDES.search(text)


def put(command: Sequence[str], kind: Kind) -> Path:
    """Write the entry, unless it is there as it should be; its place.

    Raises ``ConfigError``: ``app_path_unusable``, ``app_not_ours``, ``app_unwritable``.
    """
    wanted, file = entry(command, kind), place(kind)
    found = _text(file)
    if found != wanted:
        if (found is not None or file.exists()) and not (found or "").startswith(_FIRST_LINE):
            raise ConfigError(
                f"{file} is not Baton's, and stays as it is",
                reason="app_not_ours",
                field="install",
                found=str(file),
                hint="move it away, then install again",
            )
        _write(file, wanted.encode())
    return file


def take_away(kind: Kind) -> Path | None:
    """Remove the entry if it is ours; where it was. Raises ``ConfigError`` (``app_unwritable``)."""
    file = place(kind)
    if not (_text(file) or "").startswith(_FIRST_LINE):
        return None
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(file, error) from error
    return file


def put_icons() -> None:
    """Write the icon in every size. Raises ``ConfigError`` (``app_unwritable``)."""
    for size, file in _icons():
        _write(file, png(size))
    _told_that_icons_changed()


def take_icons_away() -> None:
    """Remove the icons. Raises ``ConfigError`` (``app_unwritable``)."""
    for _, file in _icons():
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(file, error) from error
    _told_that_icons_changed()


def _theme() -> Path:
    return _base("XDG_DATA_HOME", ".local/share") / "icons" / "hicolor"


def _icons() -> list[tuple[int, Path]]:
    return [(size, _theme() / f"{size}x{size}" / "apps" / f"{ICON}.png") for size in SIZES]


def _told_that_icons_changed() -> None:
    # Desktops read a theme again once the time of its directory has changed.
    with contextlib.suppress(OSError):
        os.utime(_theme())


def _base(variable: str, otherwise: str) -> Path:
    """A base directory; what is not absolute does not count, as the specification says."""
    named = Path(os.environ.get(variable, ""))
    return named if named.is_absolute() else Path.home() / otherwise


def _quoted(word: str, *, first: bool) -> str:
    """A word of ``Exec``: quoted where it has to be, then escaped as every text of an entry is."""
    if not word.isprintable() or (first and "=" in word):
        raise ConfigError(
            "what the app runs lies where its name can stand in no desktop entry",
            reason="app_path_unusable",
            field="install",
            found=ascii(word),
            hint="make Baton's environment in another directory",
        )
    if not _PLAIN.fullmatch(word):
        word = '"' + re.sub(r'(["`$\\])', r"\\\1", word) + '"'
    return word.replace("\\", "\\\\").replace("%", "%%")


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=file.parent, prefix=f".{file.name}.", delete=False
        ) as new:
            new.write(content)
        os.chmod(new.name, 0o644)
        os.replace(new.name, file)
    except OSError as error:
        raise _unwritable(file, error) from error


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{file} cannot be written: {error.strerror or type(error).__name__}",
        reason="app_unwritable",
        field="install",
    )
