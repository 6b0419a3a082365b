"""How `baton node add` comes from what was typed to a producer that is kept."""

from __future__ import annotations

import re
import socket
import sys
import time
from dataclasses import replace
from typing import Final, NamedTuple

import typer
from rich.markup import escape

from app.discovery import browse
from app.node_registry import Registry
from app.terminal import complain, err, step
from protocol.addresses import can_be_a_host
from protocol.control.messages import Description
from protocol.errors import BatonError, ConfigError, RequestError, TransferError
from protocol.pairing.code import MAX_TYPED, Code, read_code
from protocol.pairing.messages import require_name
from trust.acceptance import accept
from trust.control import Control
from trust.peers import Address, Peer

PAIRING_PORT: Final = 7432

_TRIES: Final = 5
_SPENT: Final = ("code_differs", "code_burned", "code_expired")
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")


class Target(NamedTuple):
    """Where a code can be tried."""

    host: str
    port: int


def target_of(typed: str) -> Target:
    """Where the producer pairs: ``HOST``, ``HOST:PORT``, or the name that it answers with.

    Raises ``ConfigError`` (``address_invalid``), and ``TransferError``
    (``discovery_unavailable``, ``node_not_found``, ``pairing_closed``).
    """
    host, port = _parted(typed)
    if not _is_name(host) or port is not None:
        return Target(host, port or PAIRING_PORT)
    with step(f"look for {typed} in the local network"):
        seen = [one for one in browse(until=typed) if one.name == typed]
    if not seen and _has_address(host):
        return Target(host, PAIRING_PORT)
    if not seen:
        raise TransferError(
            f"no producer called {typed} answers in the local network",
            reason="node_not_found",
            field="name",
            hint="see `baton node discover`, or give an address: baton node add HOST:7432",
        )
    if not seen[0].pair:
        raise TransferError(
            f"{typed} has no code open",
            reason="pairing_closed",
            field="name",
            hint="open one there: baton produce --pair",
        )
    return Target(seen[0].host, seen[0].pair)


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

    ``name`` is this machine's. Raises as ``accept`` and ``Peers.add``.
    """
    require_name(name)
    if called is not None:
        require_name(called)
    own, earlier = registry.own(), registry.peers.epoch_with
    try:
        with step(f"pair with {target.host}, port {target.port}"):
            found = accept(*target, code, own=own, name=name, earlier_epoch=earlier)
    except BatonError as error:
        if error.reason in _SPENT:
            error.hint = "that code is void now: type the next one that the producer shows"
        elif error.reason == "producer_down":
            error.hint = f"{error.hint}; it may have another --pair-port than {target.port}"
        raise
    address = Address(target.host, found.port)
    peer = Peer(called or found.name, found.record, int(time.time()), address)
    peer = replace(peer, name=registry.free_name(peer.name, peer.fingerprint))
    for gone in registry.keep(peer):
        err.print(f"{escape(gone)}, which had this address, is forgotten")
    err.print(f"paired with [bold]{escape(peer.name)}[/]")
    return peer


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


def _is_name(host: str) -> bool:
    """Whether this may be what a producer calls itself, rather than where it is."""
    return host != "localhost" and "." not in host and ":" not in host


def _has_address(host: str) -> bool:
    try:
        return can_be_a_host(host) and bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


def _parted(typed: str) -> tuple[str, int | None]:
    """Host, or name, and port: ``host``, ``host:port``, ``[v6]``, ``[v6]:port``, bare ``v6``."""
    text = typed.strip()
    found = _ADDRESS.fullmatch(text)
    if text.count(":") > 1 and not text.startswith("["):
        host, port = text, None
    elif found is not None:
        host, port = found["v6"] or found["host"], found["port"]
    else:
        raise _no_address(typed)
    number = None if port is None else int(port)
    valid = can_be_a_host(host) or (_is_name(host) and number is None)
    if not valid or (number is not None and not 1 <= number <= 65535):
        raise _no_address(typed)
    return host, number


def _no_address(typed: str) -> ConfigError:
    return ConfigError(
        f"{typed!a} is neither a producer's name nor an address",
        reason="address_invalid",
        field="name",
        expected="a name that `baton node discover` shows, or HOST, or HOST:PORT",
    )
