"""``--install`` and ``--uninstall`` of `baton serve` and `baton produce`: services of this user."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple

import typer
from rich.markup import escape

from app import service_launchd, service_systemd
from app.service import (
    COMMANDS,
    SETTLE_S,
    Installed,
    Service,
    Side,
    environment,
    manager_missing,
)
from app.service_arguments import decoder_arguments, producer_arguments
from app.terminal import err, out

INSTALL: Final = "--install"
UNINSTALL: Final = "--uninstall"

_HELP: Final = """
as a service of this user (systemd on Linux, launchd on macOS):
  --install             run this command, with the other options given, from now on and at login
  --uninstall           stop and remove that service

settings of this machine:
  --config FILE         options from this file (default: config.toml in the user's directory for
                        settings); what stands on the command line goes before
"""


class Asked(NamedTuple):
    """What a command line wants: a service made or removed, or the side run; other arguments."""

    action: Literal["install", "uninstall", "run"]
    arguments: tuple[str, ...]


def asked(arguments: Sequence[str]) -> Asked:
    """Take the two options out of a side's command line.

    Raises ``typer.BadParameter`` if they contradict each other or the rest.
    """
    rest = tuple(word for word in arguments if word not in (INSTALL, UNINSTALL))
    removes = UNINSTALL in arguments
    if removes and (rest or INSTALL in arguments):
        raise typer.BadParameter(f"{UNINSTALL} stands alone")
    if removes:
        return Asked("uninstall", ())
    return Asked("install" if INSTALL in arguments else "run", rest)


@contextmanager
def told_in_help(arguments: Sequence[str]) -> Iterator[None]:
    """Add the two options to the help that the side's own parser prints."""
    try:
        yield
    except SystemExit as ended:
        if not ended.code and {"-h", "--help"} & set(arguments):
            print(_HELP, end="")
        raise


def install(side: Side, given: Sequence[str]) -> None:
    """Have a service run the side with these options, and say where its log is.

    Raises ``ConfigError`` before anything is changed (what ``service_arguments`` refuses), and
    ``service_manager_missing``, ``service_failed``.
    """
    manager = _manager()
    made = decoder_arguments(given) if side == "decoder" else producer_arguments(given)
    outcome = manager.install(Service(side, made, environment=environment()), SETTLE_S)
    out.print(f"{outcome.name} is installed and runs", soft_wrap=True)
    for title, text in (
        ("log", outcome.log),
        ("stop", outcome.stop),
        ("remove", f"{COMMANDS[side]} {UNINSTALL}"),
    ):
        out.print(f"  {title:<8}{escape(text)}", soft_wrap=True)
    for remark in outcome.remarks:
        err.print(f"[yellow]note:[/] {escape(remark)}", soft_wrap=True)


def uninstall(side: Side) -> None:
    """Stop and remove the service of the side, if there is one.

    Raises ``ConfigError``: ``service_manager_missing``, ``service_failed``.
    """
    name = _manager().uninstall(side)
    out.print(f"{name} is stopped and removed" if name else f"no service of the {side} was there")


def installed(side: Side) -> Installed | None:
    """The service of the side. Raises ``ConfigError`` (``service_manager_missing``)."""
    return _manager().installed(side)


def start(side: Side) -> None:
    """Start the installed service. Raises as :func:`install`."""
    _manager().start(side)


def stop(side: Side) -> None:
    """Stop the installed service, which starts again at the next login. Raises likewise."""
    _manager().stop(side)


def _manager():
    if sys.platform == "darwin":
        return service_launchd
    if sys.platform.startswith("linux"):
        return service_systemd
    raise manager_missing(sys.platform)
