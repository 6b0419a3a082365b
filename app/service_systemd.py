"""A side of Baton as a user service of systemd: the unit's text, and what systemctl is told."""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from app.service import (
    COMMANDS,
    LAST_WORDS,
    MODULES,
    STOP_S,
    Installed,
    Outcome,
    Service,
    Side,
    ask,
    ended_at_once,
    manager_missing,
    require,
    require_printable,
    write_file,
)
from protocol.errors import ConfigError

UNITS: Final[Mapping[Side, str]] = {
    "decoder": "baton-decoder.service",
    "producer": "baton-producer.service",
}

_WORD: Final = re.compile(r'"((?:[^"\\]|\\.)*)"')
_LOOK_S: Final = 0.25

# KillMode: the supervisor itself passes the signal on, and a second one would mean "at once".
# OOMPolicy: where the kernel kills the child, the supervisor counts it, and starts another.
_TEXT: Final = """\
# Written by `{command} --install`, which replaces it; `{command} --uninstall` removes it.
[Unit]
Description=Baton's {side}
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart={words}
Environment={environment}
KillMode=mixed
TimeoutStopSec={stop_s}
Restart=on-failure
RestartSec=5
RestartPreventExitStatus={last_words}
OOMPolicy=continue

[Install]
WantedBy=default.target
"""


def unit(service: Service) -> str:
    """The text of the service's unit.

    Raises ``ConfigError`` (``option_not_for_service``).
    """
    require_printable(service)
    first, *rest = service.command
    # The colon keeps systemd from replacing $NAME in what follows.
    words = " ".join(quoted(word) for word in (f":{first}", *rest))
    variables = (f"{name}={value}" for name, value in service.environment.items())
    return _TEXT.format(
        command=COMMANDS[service.side],
        side=service.side,
        words=words,
        environment=" ".join(quoted(variable) for variable in variables),
        stop_s=STOP_S,
        last_words=" ".join(map(str, LAST_WORDS)),
    )


def quoted(word: str) -> str:
    """A printable word as systemd reads it back: quotes, escapes, and ``%`` doubled."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def arguments_in(text: str, side: Side) -> tuple[str, ...] | None:
    """The arguments in a unit that :func:`unit` made; ``None`` in any other."""
    line = next((line for line in text.splitlines() if line.startswith("ExecStart=")), "")
    words = [re.sub(r"\\(.)", r"\1", word).replace("%%", "%") for word in _WORD.findall(line)]
    if len(words) < 3 or words[1:3] != ["-m", MODULES[side]]:
        return None
    return tuple(words[3:])


def install(service: Service, settle_s: float) -> Outcome:
    """Write the unit, have it start with the user's manager, and start it now, again if it runs.

    Raises ``ConfigError``: ``option_not_for_service``, ``service_manager_missing``,
    ``service_failed`` (also if it ends within ``settle_s`` seconds).
    """
    text = unit(service)
    name = UNITS[service.side]
    write_file(_directory() / name, text.encode())
    require(_systemctl("daemon-reload"))
    require(_systemctl("enable", name))
    ask(_systemctl("reset-failed", name))  # an earlier one may have been started too often
    require(_systemctl("restart", name))
    log = _log(service.side)
    if found := _ended(name, settle_s):
        raise ended_at_once(service.side, found, log)
    return Outcome(name, log, f"systemctl --user stop {name}", _remarks())


def uninstall(side: Side) -> str | None:
    """Stop and remove the service; its name, or ``None`` if there was none. Raises like install."""
    name = UNITS[side]
    file = _directory() / name
    if not file.exists():
        return None
    require(_systemctl("disable", "--now", name))
    file.unlink(missing_ok=True)
    require(_systemctl("daemon-reload"))
    ask(_systemctl("reset-failed", name))
    return name


def installed(side: Side) -> Installed | None:
    """The service that is installed. Raises ``ConfigError`` (``service_manager_missing``)."""
    name = UNITS[side]
    file = _directory() / name
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError):
        return None
    runs = _properties(name).get("ActiveState") == "active"
    return Installed(name, file, arguments_in(text, side), runs, _log(side))


def start(side: Side) -> None:
    """Start the installed service. Raises like install."""
    name = UNITS[side]
    ask(_systemctl("reset-failed", name))  # an earlier one may have been started too often
    require(_systemctl("start", name))


def stop(side: Side) -> None:
    """Stop the installed service until the next login. Raises like install."""
    require(_systemctl("stop", UNITS[side]))


def _systemctl(*words: str) -> list[str]:
    return ["systemctl", "--user", *words]


def _directory() -> Path:
    """Where the user's manager, which has an environment of its own, looks for units."""
    done = ask(_systemctl("show", "--property=UnitPath", "--value"), timeout_s=20)
    if done.status:
        raise manager_missing(
            done.said,
            "log in as this user directly, not by su or sudo; on a machine without a screen: "
            f"loginctl enable-linger {getpass.getuser()}",
        )
    for path in map(Path, done.said.split()):
        if path.parts[-2:] == ("systemd", "user") and Path.home() in path.parents:
            return path
    return Path.home() / ".config" / "systemd" / "user"


def _ended(name: str, settle_s: float) -> str:
    """How the service ended within this time; empty if it runs."""
    until = time.monotonic() + settle_s
    while True:
        found = _properties(name)
        state = found.get("ActiveState", "unknown")
        if state not in ("active", "activating") or found.get("SubState") == "auto-restart":
            return f"{state}, exit status {found.get('ExecMainStatus', 'unknown')}"
        if time.monotonic() >= until:
            return ""
        time.sleep(_LOOK_S)


def _properties(name: str) -> dict[str, str]:
    said = require(_systemctl("show", name, "--property=ActiveState,SubState,ExecMainStatus"))
    return dict(line.split("=", 1) for line in said.splitlines() if "=" in line)


def _log(side: Side) -> str:
    return f"journalctl --user --unit {UNITS[side]} --lines 50"


def _remarks() -> tuple[str, ...]:
    """What a machine needs on which nobody is logged in."""
    user = getpass.getuser()
    try:
        lingers = ask(["loginctl", "show-user", user, "--property=Linger", "--value"], timeout_s=20)
    except ConfigError:
        lingers = None
    if lingers is not None and lingers.said == "yes":
        return ()
    return (
        "it runs while you are logged in. To have it start with the machine, and stay when you "
        f"log out: loginctl enable-linger {user}",
    )
