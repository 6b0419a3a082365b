"""`baton app`: the icon in the menu bar. What it shows and does is in ``app.menubar``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Final

import typer

from app import app_install
from app.interrupts import at_once
from protocol.errors import ConfigError

_HINT: Final = "pip install -c constraints.txt '.[app,decoder]'"


def app(
    url: Annotated[
        str | None,
        typer.Option(help="Follow the decoder there, and start none: HOST:PORT or a URL."),
    ] = None,
    attach_only: Annotated[
        bool, typer.Option("--attach-only", help="Start no decoder where none runs.")
    ] = False,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="A file with an API key, if the decoder asks for one.")
    ] = None,
    install: Annotated[
        bool, typer.Option("--install", help="Put Baton among the applications; open it at login.")
    ] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Take it away again.")] = False,
    trace: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Show the decoder in the menu bar; start it where none runs.

    It is found, and started, as the table serve of config.toml says. Quitting ends a decoder
    that the app has started, and no other.
    """
    if install and uninstall:
        raise typer.BadParameter("--install and --uninstall exclude each other")
    if uninstall:
        return app_install.uninstall()
    with at_once():
        require_qt()
        if install:
            return app_install.install()
        # Only here: Qt takes a moment, and other commands do not need it.
        from app.menubar import running
        from app.menubar.place import Given

        given = Given(url, api_keys_file)
        status = running.run(given, attach_only=attach_only or url is not None, trace=trace)
    raise typer.Exit(status)


def require_qt() -> None:
    """Return if Qt is installed. Raises ``ConfigError`` (``app_not_installed``)."""
    if importlib.util.find_spec("PySide6") is None:
        raise ConfigError(
            "the menu bar needs Qt, which is not installed",
            reason="app_not_installed",
            field="PySide6",
            hint=_HINT,
        )
