"""``baton app --install`` and ``--uninstall``: the app among this user's applications."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

from rich.markup import escape
from rich.text import Text

from app import app_bundle, desktop_entry, login_item
from app.service import ask, environment
from app.terminal import err, out


def install() -> None:
    """Put the app among this user's applications, have it open at login, and say where it is.

    Raises ``ConfigError``: what ``app_bundle.install``, ``desktop_entry.put`` and
    ``login_item.install`` raise.
    """
    if sys.platform == "darwin":
        _install_bundle()
    else:
        # First: it refuses systems that have no desktop entries.
        at_login = login_item.install()
        file = desktop_entry.put(login_item.COMMAND, "application")
        desktop_entry.put_icons()
        _tell(file, at_login)
        out.print(
            f"  icons   {desktop_entry.ICON}.png of {len(desktop_entry.SIZES)} sizes, in the theme "
            "hicolor"
        )
        out.print("  remove  baton app --uninstall")
        out.print("  start   baton app, or from the desktop's menu")


def uninstall() -> None:
    """Take away what :func:`install` made; what is not ours stays, and a running app runs on.

    Raises ``ConfigError``: ``app_unwritable``, ``service_manager_missing``.
    """
    at_login = login_item.remove()
    if sys.platform == "darwin":
        gone = app_bundle.uninstall(Path.home())
    else:
        gone = desktop_entry.take_away("application")
        desktop_entry.take_icons_away()
    if gone is None and at_login is None:
        out.print("Baton was not among the applications")
        return
    out.print("Baton is no longer among the applications, and does not open at login")
    err.print("[yellow]note:[/] if it runs, quit it from its menu", soft_wrap=True)


def bundle_command(home: Path) -> app_bundle.Command:
    """What the bundle of this installation runs, and with what of this terminal's environment."""
    named = os.environ.get("XDG_CONFIG_HOME")
    settings = {"XDG_CONFIG_HOME": named} if named else {}
    return app_bundle.Command(
        login_item.COMMAND,
        environment() | settings,
        home / "Library" / "Logs" / "Baton" / "app.log",
    )


def _install_bundle() -> None:
    home = Path.home()
    command = bundle_command(home)
    put = app_bundle.install(command, importlib.metadata.version("baton-llm"), home)
    _tell(put.path, login_item.install())
    out.print(f"  log     {escape(str(command.log))}", soft_wrap=True)
    out.print("  remove  baton app --uninstall")
    remarks = [*put.remarks]
    # While somebody is there to answer what macOS asks then.
    if said := _opened(put.path):
        remarks.append(f"it could not be opened now, and opens at the next login ({said})")
    else:
        remarks.append(
            "macOS asks once whether Baton may use the local network: without it no producer can "
            "be reached (System Settings, Privacy & Security, Local Network)"
        )
    if put.changed:
        remarks.append("if it ran already, quit it from its menu and open it again")
    for remark in remarks:
        err.print(f"[yellow]note:[/] {escape(remark)}", soft_wrap=True)


def _opened(bundle: Path) -> str:
    """What ``open`` says against opening the app; empty if it did."""
    done = ask(["open", "-g", "-a", str(bundle)])
    return "" if not done.status else done.said or f"status {done.status}"


def _tell(app: Path, at_login: Path) -> None:
    out.print("Baton is among the applications, and opens at login")
    out.print(Text(f"  app     {app}"), soft_wrap=True)
    out.print(Text(f"  login   {at_login}"), soft_wrap=True)
