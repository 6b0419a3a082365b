"""The decoder's process of `baton bench handoff`: the real link, shadow and install, no model."""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

_CONNECT_S = 20.0


class Round(NamedTuple):
    """Seconds of one handoff: shadow reserved (and its pages touched, where that was asked
    for), seal verified, caches built; payload bytes.
    """

    reserve_s: float
    verified_s: float
    installed_s: float
    payload_bytes: int


class Numbers:
    """Generations of a key that lives as long as this process."""

    failure = None

    def retry(self) -> None:
        """Nothing here can fail."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    def take(self) -> int:
        """The next one."""
        return next(self._numbers)


def decode(orders: Connection, url: str, layout_name: str, prompt: int, touched: bool) -> None:
    """Child: take the key, or the pairing's file, from the pipe, connect, say so; then one
    handoff per order.

    Answers every order with a :class:`Round`.
    """
    from mac_decoder.handoff.client import ProducerLink
    from mac_decoder.handoff.connection import Producer
    from mac_decoder.handoff.trust import trust_of_file, trust_of_key
    from mac_decoder.kv import bare, install, shadow  # noqa: F401  before anybody looks at memory
    from protocol.layouts_named import named, stand_in_identity

    layout = named(layout_name)
    given = orders.recv()
    trust = trust_of_key(given) if isinstance(given, bytes) else trust_of_file(given)
    link = ProducerLink(Producer(url, trust, stand_in_identity(layout), layout), Numbers())
    with link:
        deadline = time.monotonic() + _CONNECT_S
        while not link.state.ready and time.monotonic() < deadline:
            time.sleep(0.01)
        orders.send(link.state.reason)
        while orders.recv():
            orders.send(_round(link, layout, prompt, touched))


def _round(link, layout, prompt: int, touched: bool) -> Round:
    from mac_decoder.kv.bare import BareModel
    from mac_decoder.kv.install import build
    from mac_decoder.kv.shadow import Shadow

    began = time.perf_counter()
    shadow = Shadow(layout, 0, prompt - 1)
    if touched:
        shadow.prefault()
    reserved = time.perf_counter()
    with link.fetch(range(prompt), shadow, request_id="bench") as handoff:
        verified = time.perf_counter()
        caches = build(BareModel(layout), layout, shadow)
        installed = time.perf_counter()
        handoff.committed()
    payload = handoff.transferred_bytes
    del caches, shadow
    return Round(reserved - began, verified - reserved, installed - reserved, payload)
