"""How `baton node add` comes from what was typed to a producer that is kept."""

from __future__ import annotations

import sys
from typing import Final

import typer
from rich.markup import escape

from app import node_pairing
from app.node_pairing import Target
from app.node_registry import Registry
from app.terminal import complain, err, step
from protocol.control.messages import Description
from protocol.errors import ConfigError, RequestError
from protocol.pairing.code import MAX_TYPED, Code, read_code
from trust.control import Control
from trust.peers import Peer

_TRIES: Final = 5


def target_of(typed: str) -> Target:
    """Where the producer pairs. Raises as ``node_pairing.target_of``."""
    return node_pairing.target_of(typed, lambda: step(f"look for {typed} in the local network"))


def ask_for_code(*, from_stdin: bool) -> Code:
    """The code that somebody types; slips are told and cost nothing.

    Raises ``RequestError`` (``code_malformed``), ``ConfigError`` (``no_terminal``).
    """
    if from_stdin:
        return read_code(sys.stdin.readline(MAX_TYPED + 1).strip())
    if sys.stdin is None:
        raise _nobody_to_ask()
    for left in reversed(range(_TRIES)):
        try:
            return read_code(typer.prompt("the six words that the producer shows", err=True))
        except RequestError as error:
            if not left:
                raise
            complain(error)
        except typer.Abort:
            if sys.stdin.isatty():
                raise
            raise _nobody_to_ask() from None
    raise AssertionError("unreachable")


def _nobody_to_ask() -> ConfigError:
    return ConfigError(
        "there is no terminal to ask for the six words at",
        reason="no_terminal",
        field="code",
        hint="give them on standard input: --code-stdin",
    )


def pair(registry: Registry, target: Target, code: Code, name: str, called: str | None) -> Peer:
    """Try the code, and keep the producer, as ``called`` or as it calls itself.

    ``name`` is this machine's. Raises as ``node_pairing.pair``.
    """
    with step(f"pair with {target.host}, port {target.port}"):
        kept = node_pairing.pair(registry, target, code, name, called)
    for gone in kept.replaced:
        err.print(f"{escape(gone)}, which had this address, is forgotten")
    err.print(f"paired with [bold]{escape(kept.peer.name)}[/]")
    return kept.peer


def describe(peer: Peer) -> Description:
    """Say what the producer serves. Raises as ``Control``."""
    assert peer.address is not None
    with Control.open(peer.address, peer.record) as control:
        found = control.describe()
    how = "" if found.recipe is None else f", {found.recipe.device}, {found.recipe.dtype}"
    # One that waits names what it could not load, if anything.
    model = "no model" if found.state == "waiting" else escape(found.model or "no model")
    err.print(f"it serves {model} ({found.state}{how}), baton {escape(found.version)}")
    return found
