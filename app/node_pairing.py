"""What is done with a pairing, and how a producer becomes one: without a terminal.

`baton node` and the dashboard's page of nodes do these things alike. All of them wait for the
network, so not on an event loop.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final, NamedTuple

from app.discovery import browse
from app.node_registry import Registry
from protocol.addresses import can_be_a_host
from protocol.errors import BatonError, ConfigError, TransferError
from protocol.pairing.code import Code
from protocol.pairing.messages import require_name
from trust.acceptance import accept
from trust.control import Control
from trust.peers import Address, Peer

PAIRING_PORT: Final = 7432

_SPENT: Final = ("code_differs", "code_burned", "code_expired")
_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d{1,5}))?")


class Target(NamedTuple):
    """Where a code can be tried."""

    host: str
    port: int


class Kept(NamedTuple):
    """A producer that is kept, and the names of those that had its address, which are not."""

    peer: Peer
    replaced: list[str]


def target_of(
    typed: str, looking: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Target:
    """Where the producer pairs: ``HOST``, ``HOST:PORT``, or the name that it answers with.

    ``looking`` is entered while the local network is asked.

    Raises ``ConfigError`` (``address_invalid``), and ``TransferError``
    (``discovery_unavailable``, ``node_not_found``, ``pairing_closed``).
    """
    host, port = _parted(typed)
    if not _is_name(host) or port is not None:
        return Target(host, port or PAIRING_PORT)
    with looking():
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


def pair(registry: Registry, target: Target, code: Code, name: str, called: str | None) -> Kept:
    """Try the code, and keep the producer, as ``called`` or as it calls itself.

    ``name`` is this machine's. Raises as ``accept`` and ``Peers.add``.
    """
    require_name(name)
    if called is not None:
        require_name(called)
    own, earlier = registry.own(), registry.peers.epoch_with
    try:
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
    return Kept(peer, registry.keep(peer))


def end(registry: Registry, peer: Peer) -> BatonError | None:
    """End a pairing on both machines; why the producer could not be told, if it could not.

    Raises as ``Registry.forget``.
    """
    unheard: BatonError | None = None
    try:
        with Control.open(address_of(peer), peer.record) as control:
            control.unpair()
    except BatonError as error:
        unheard = error
    registry.forget(peer)
    return unheard


def renew(registry: Registry, peer: Peer) -> Peer | None:
    """Agree on a new key with a producer; ``None`` where it was removed meanwhile.

    Raises as ``Control`` and ``Peers.update``.
    """
    registry.peers.require_usable()

    def renewed(known: Peer) -> Peer:
        # Under the registry's lock: of two rotations at once each goes on from the other's key.
        with Control.open(address_of(known), known.record) as control:
            return replace(known, record=control.rotate())

    return registry.peers.update(peer.fingerprint, renewed)


def address_of(peer: Peer) -> Address:
    """Where a peer is. Raises ``TransferError`` (``node_not_found``) where nobody wrote it down."""
    if peer.address is None:
        raise TransferError(
            f"nobody wrote down where {peer.name} is", reason="node_not_found", field="name"
        )
    return peer.address


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
