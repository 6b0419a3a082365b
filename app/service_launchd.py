"""A side of Baton as a LaunchAgent of macOS: the property list, and what launchctl is told."""

from __future__ import annotations

import os
import plistlib
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from xml.parsers.expat import ExpatError

from app.service import (
    COMMANDS,
    MODULES,
    STOP_S,
    Installed,
    Outcome,
    Service,
    Side,
    ask,
    ended_at_once,
    failed,
    make_directory,
    require,
    require_printable,
    write_file,
)

LABELS: Final[Mapping[Side, str]] = {
    "decoder": "llm.baton.decoder",
    "producer": "llm.baton.producer",
}

LOCAL_NETWORK: Final = (
    "macOS 15 and later may deny the local network to a Python that launchd started, without "
    "asking and without a word: `baton doctor` tells. Allow it in System Settings, Privacy & "
    "Security, Local Network if it is listed there; if not, remove the service and run "
    "`{command}` in Terminal, which has the permission; Baton.app, which `baton app --install` "
    "makes, is asked about and may start a decoder instead"
)

_LOOK_S: Final = 0.25
_EXIT: Final = re.compile(r"^\s*last exit code = (\d+)", re.MULTILINE)
_STATE: Final = re.compile(r"^\s*state = (.+)$", re.MULTILINE)


def property_list(service: Service, home: Path) -> bytes:
    """The agent's property list, as XML.

    Raises ``ConfigError`` (``option_not_for_service``).
    """
    require_printable(service)
    log = str(log_file(service.side, home))
    agent: dict[str, Any] = {
        "Label": LABELS[service.side],
        "ProgramArguments": list(service.command),
        "EnvironmentVariables": dict(service.environment),
        "RunAtLoad": True,
        # launchd knows no exit statuses that must not be retried; this is the one condition
        # under which every exit is the supervisor's last word.
        "KeepAlive": {"Crashed": True},
        # Any other type is given less of the processor and the disk.
        "ProcessType": "Interactive",
        "ExitTimeOut": STOP_S,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(agent, sort_keys=False)


def arguments_in(content: bytes, side: Side) -> tuple[str, ...] | None:
    """The arguments in a list that :func:`property_list` made; ``None`` in any other."""
    try:
        words = plistlib.loads(content)["ProgramArguments"]
    except (plistlib.InvalidFileException, ExpatError, ValueError, LookupError, TypeError):
        return None
    if not isinstance(words, list) or words[1:3] != ["-m", MODULES[side]]:
        return None
    return tuple(map(str, words[3:]))


def log_file(side: Side, home: Path) -> Path:
    """Where the agent's output goes."""
    return home / "Library" / "Logs" / "Baton" / f"{side}.log"


def install(service: Service, settle_s: float, stop_s: float = STOP_S) -> Outcome:
    """Write the agent, have it start at login, and start it now, again if it runs.

    Raises ``ConfigError``: ``option_not_for_service``, ``service_manager_missing``,
    ``service_failed`` (also if it ends within ``settle_s`` seconds).
    """
    home, side = Path.home(), service.side
    content = property_list(service, home)
    log = log_file(side, home)
    make_directory(log.parent)
    _boot_out(side, stop_s)
    file = _file(side, home)
    write_file(file, content)
    _bootstrap(side, file)
    if found := _ended(side, settle_s):
        raise ended_at_once(side, found, str(log))
    return Outcome(
        LABELS[side],
        str(log),
        f"launchctl bootout {_target(side)}",
        (LOCAL_NETWORK.format(command=COMMANDS[side]),),
    )


def uninstall(side: Side, stop_s: float = STOP_S) -> str | None:
    """Stop and remove the agent; its label, or ``None`` if there was none. Raises like install."""
    file = _file(side, Path.home())
    if not file.exists():
        return None
    _boot_out(side, stop_s)
    file.unlink(missing_ok=True)
    return LABELS[side]


def installed(side: Side) -> Installed | None:
    """The agent that is installed. Raises ``ConfigError`` (``service_manager_missing``)."""
    home = Path.home()
    file = _file(side, home)
    try:
        content = file.read_bytes()
    except OSError:
        return None
    runs = state_in(ask(["launchctl", "print", _target(side)]).said) == "running"
    return Installed(
        LABELS[side], file, arguments_in(content, side), runs, str(log_file(side, home))
    )


def start(side: Side) -> None:
    """Start the installed agent. Raises like install."""
    if ask(["launchctl", "print", _target(side)]).status:
        _bootstrap(side, _file(side, Path.home()))  # which starts it
    else:
        require(["launchctl", "kickstart", _target(side)])


def stop(side: Side, stop_s: float = STOP_S) -> None:
    """Stop the installed agent until the next login. Raises like install."""
    _boot_out(side, stop_s)


def state_in(printed: str) -> str:
    """The state in what ``launchctl print`` says; empty if it says none."""
    found = _STATE.search(printed)
    return found[1].strip() if found else ""


def _file(side: Side, home: Path) -> Path:
    return home / "Library" / "LaunchAgents" / f"{LABELS[side]}.plist"


def _domain() -> str:
    return f"gui/{os.getuid()}"


def _target(side: Side) -> str:
    return f"{_domain()}/{LABELS[side]}"


def _bootstrap(side: Side, file: Path) -> None:
    """Have launchd know the agent from now on, and start it."""
    require(["launchctl", "enable", _target(side)])
    command = ["launchctl", "bootstrap", _domain(), str(file)]
    done = ask(command)
    if done.status:
        hint = "log in on the Mac's own screen once: over SSH alone there is no session for it"
        raise failed(command, done.said or f"status {done.status}", hint)


def _boot_out(side: Side, stop_s: float) -> None:
    """Stop the agent if it is loaded, and wait until it is gone: launchctl does not."""
    if ask(["launchctl", "print", _target(side)]).status:
        return
    command = ["launchctl", "bootout", _target(side)]
    done = ask(command)
    until = time.monotonic() + stop_s + 5
    while not ask(["launchctl", "print", _target(side)]).status:
        if time.monotonic() >= until:
            raise failed(command, done.said or "it does not stop")
        time.sleep(_LOOK_S)


def _ended(side: Side, settle_s: float) -> str:
    """How the agent ended within this time; empty if it runs."""
    until = time.monotonic() + settle_s
    while True:
        said = require(["launchctl", "print", _target(side)])
        exited = _EXIT.search(said)
        if exited and state_in(said) != "running":
            return f"exit status {exited[1]}"
        if time.monotonic() >= until:
            return ""
        time.sleep(_LOOK_S)
