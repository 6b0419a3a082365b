"""A side of Baton as a service of this user: what is run, and how the system's tools are asked.

The two managers are in ``service_systemd`` and ``service_launchd``. Baton's own supervisor
restarts what fails and gives up in time; a manager only starts that supervisor, and starts it
again if it is killed. It never goes against the supervisor's last word.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from protocol.errors import EXIT_CONFIG, EXIT_ENGINE_FAULT, ConfigError

Side = Literal["decoder", "producer"]

MODULES: Final[Mapping[Side, str]] = {"decoder": "app.decoder", "producer": "gb10_producer"}
COMMANDS: Final[Mapping[Side, str]] = {"decoder": "baton serve", "producer": "baton produce"}

LAST_WORDS: Final = (2, EXIT_ENGINE_FAULT, EXIT_CONFIG)
"""Exit statuses that another start does not cure: usage, given up after faults, configuration."""

STOP_S: Final = 60
"""From the signal that asks a service to end to the one that ends it: more than the 45 s that
the decoder's supervisor gives its child, which may be writing caches."""

SETTLE_S: Final = 3.0
"""How long a service is watched after its start: what cannot run at all ends sooner."""

_TOOL_S: Final = 120.0
"""A tool may wait for a service to stop."""

_PASSED_ON: Final = ("XDG_STATE_HOME", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")
"""What decides in a terminal which files and devices are used, and holds no secret."""


@dataclass(frozen=True)
class Service:
    """What a service runs. ``arguments`` are those of the side's module, their paths absolute."""

    side: Side
    arguments: tuple[str, ...]
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """The whole command line."""
        return (self.python, "-m", MODULES[self.side], *self.arguments)


class Installed(NamedTuple):
    """An installed service. ``arguments`` are ``None`` where its file was changed by hand."""

    name: str
    file: Path
    arguments: tuple[str, ...] | None
    runs: bool
    log: str


class Outcome(NamedTuple):
    """What is told after installing: where the log is, how to stop it, and what else to know."""

    name: str
    log: str
    stop: str
    remarks: tuple[str, ...] = ()


class Done(NamedTuple):
    """How a tool ended; ``said`` is what it wrote, errors last."""

    status: int
    said: str


def environment() -> dict[str, str]:
    """The variables of a service that is installed from this process."""
    passed = {name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)}
    # Without it Python would look for Baton's packages in the working directory first.
    return {"PYTHONSAFEPATH": "1", **passed}


def require_printable(service: Service) -> None:
    """Raise ``ConfigError`` (``option_not_for_service``) for text that no file of a service
    manager holds: line feeds, control characters, bytes that are no UTF-8.
    """
    for text in (*service.command, *service.environment.values()):
        if not text.isprintable():
            raise ConfigError(
                "a service's options and paths are printable text",
                reason="option_not_for_service",
                field="install",
                found=ascii(text),
            )


def ask(command: Sequence[str], timeout_s: float = _TOOL_S) -> Done:
    """Run a tool of the service manager.

    Raises ``ConfigError``: ``service_manager_missing`` if there is none, ``service_failed`` if
    it does not answer.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
        )
    except OSError as error:
        raise manager_missing(f"{command[0]}: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise failed(command, f"no answer within {timeout_s:g} s") from error
    return Done(done.returncode, f"{done.stdout}{done.stderr}".strip())


def require(command: Sequence[str]) -> str:
    """What a tool said that succeeded. Raises like :func:`ask`, and ``service_failed``."""
    done = ask(command)
    if done.status:
        raise failed(command, done.said or f"status {done.status}")
    return done.said


def manager_missing(found: str, hint: str | None = None) -> ConfigError:
    """The error of a machine or a login without a service manager."""
    return ConfigError(
        "no service manager of this user can be reached",
        reason="service_manager_missing",
        field="install",
        found=found,
        expected="systemd's user manager on Linux, launchd on macOS",
        hint=hint or "run `baton serve` or `baton produce` without --install",
    )


def failed(command: Sequence[str], said: str, hint: str | None = None) -> ConfigError:
    """The error of a service manager that refused."""
    return ConfigError(
        f"`{' '.join(command)}` failed",
        reason="service_failed",
        field="install",
        found=said,
        hint=hint,
    )


def ended_at_once(side: Side, found: str, log: str) -> ConfigError:
    """The error of a service that was installed and does not run."""
    return ConfigError(
        f"the {side} was installed as a service, but does not run",
        reason="service_failed",
        field="install",
        found=found,
        hint=f"its log says why: {log}\n{COMMANDS[side]} --uninstall removes it",
    )


def write_file(path: Path, content: bytes) -> None:
    """Make or replace a service's file. Raises ``ConfigError`` (``service_failed``)."""
    make_directory(path.parent)
    try:
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(content)
        new.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def make_directory(path: Path) -> None:
    """Make a directory, closed to others, unless it is there. Raises like :func:`write_file`."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path} cannot be written: {error.strerror}", reason="service_failed", field="install"
    )
