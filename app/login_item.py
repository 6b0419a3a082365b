"""Whether the app opens at login: an entry of the desktop on Linux, a LaunchAgent on macOS.

The agent runs ``open`` on the bundle, not the bundle's executable: so the app is started by Launch
Services, as from the Finder, and what macOS granted it there holds. What launchd starts itself is
judged apart from the bundle that it lies in. It has nothing to keep alive, since ``open`` returns.
"""

from __future__ import annotations

import plistlib
import sys
from pathlib import Path
from typing import Any, Final

from app import app_bundle, desktop_entry
from app.service import manager_missing, write_file
from protocol.errors import ConfigError

LABEL: Final = "llm.baton.login"

COMMAND: Final = (sys.executable, "-P", "-m", "app.cli", "app")
"""The app, whatever the working directory holds (``-P``)."""


def installed() -> bool:
    """Whether the app opens at login. Raises ``ConfigError`` (``service_manager_missing``)."""
    if _is_macos():
        return agent_file(Path.home()).is_file()
    return desktop_entry.stands("autostart")


def install() -> Path:
    """Have the app open at every login from now on; the file that says so.

    Raises ``ConfigError``: ``bundle_missing`` (on macOS, where the bundle is missing),
    ``app_not_ours``, ``app_path_unusable``, ``app_unwritable``, ``service_failed``,
    ``service_manager_missing``.
    """
    if not _is_macos():
        return desktop_entry.put(COMMAND, "autostart")
    file, bundle = agent_file(Path.home()), app_bundle.path(Path.home())
    # A signed build opens itself, wherever it was put.
    if (running := app_bundle.running()) is not None:
        bundle = running
    elif not app_bundle.ours(bundle):
        raise ConfigError(
            f"there is no {bundle} that could be opened at login",
            reason="bundle_missing",
            field="install",
            found=str(bundle),
            hint="baton app --install",
        )
    write_file(file, plistlib.dumps(agent(bundle), sort_keys=False))
    return file


def remove() -> Path | None:
    """Have the app stay closed at login; the file that is gone, ``None`` if there was none.

    Raises ``ConfigError``: ``app_unwritable``, ``service_manager_missing``.
    """
    if not _is_macos():
        return desktop_entry.take_away("autostart")
    file = agent_file(Path.home())
    try:
        file.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be removed: {error.strerror}", reason="app_unwritable", field="install"
        ) from error
    return file


def agent(bundle: Path) -> dict[str, Any]:
    """The LaunchAgent that opens the bundle, without bringing it to the front."""
    return {
        "Label": LABEL,
        "ProgramArguments": ["/usr/bin/open", "-g", "-a", str(bundle)],
        "RunAtLoad": True,
        # Only where there is a screen: over SSH there is nothing to open it on.
        "LimitLoadToSessionType": "Aqua",
        # Listed under the app's name among the login items, not under `open`.
        "AssociatedBundleIdentifiers": [app_bundle.IDENTIFIER],
    }


def agent_file(home: Path) -> Path:
    """Where the LaunchAgent stands. launchd reads it at the next login; nothing is told now."""
    return home / "Library" / "LaunchAgents" / f"{LABEL}.plist"


def _is_macos() -> bool:
    if sys.platform == "darwin":
        return True
    if sys.platform.startswith("linux"):
        return False
    raise manager_missing(sys.platform, "start it by hand: baton app")
