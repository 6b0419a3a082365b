"""A producer inside the test's process: real device thread, real sockets, any source."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gb10_producer.backlog import Pool
from gb10_producer.control import Desk
from gb10_producer.device import Device
from gb10_producer.memory import Ledger
from gb10_producer.prefill import Emit, Prefiller
from gb10_producer.server import Server, bind, url_of
from gb10_producer.serving import Offer
from gb10_producer.synthetic import Synthetic
from gb10_producer.throttle import Throttle
from gb10_producer.transfers import Patience, Transfers
from gb10_producer.trust import FixedTrust, Trust
from protocol.deadlines import Timing
from protocol.identity import Identity
from protocol.layout import Layout
from protocol.layouts_named import stand_in_identity
from protocol.messages import Limits
from tests.gb10_producer.peer import KEY, MIXED


@dataclass
class Running:
    """A producer that serves on ``url``."""

    url: str
    device: Device
    server: Server
    pool: Pool

    @property
    def transfers(self) -> Transfers:
        """All transfers of it."""
        stock = self.server.stock
        assert stock is not None
        return stock.transfers

    @property
    def jobs(self) -> tuple[int, int]:
        """How many jobs run and wait."""
        with self.pool.changed:
            queue = self.device._queue
            return (0 if queue.running is None else 1), queue.waiting

    @property
    def connections(self) -> tuple[int, int]:
        """How many connections have proven the key, and how many have not yet."""
        with self.server._lock:
            return len(self.server._proven), len(self.server._strangers)


@contextmanager
def running(
    source: Prefiller,
    *,
    trust: Trust | None = None,
    desk: Desk | None = None,
    identity: Identity | None = None,
    waiting: int = 4,
    connections: int = 8,
    pool_bytes: int = 4 << 20,
    memory: int = 1 << 30,
    timing: Timing | None = None,
    mbps: float | None = None,
    vocabulary: int = 1 << 16,
    max_tokens: int = 1 << 14,
    patience: Patience | None = None,
) -> Iterator[Running]:
    """Serve rows of ``source`` until the block ends."""
    pool = Pool(pool_bytes)
    device = Device(source, pool=pool, ledger=Ledger(memory), waiting_limit=waiting)
    trust = trust or FixedTrust(KEY)
    offer = Offer(
        identity=identity or stand_in_identity(source.layout),
        layout=source.layout,
        recipe=source.recipe,
        limits=Limits(max_tokens=max_tokens, max_credit=64, max_extra_cuts=4),
        vocabulary=vocabulary,
        throttle=Throttle(mbps),
    )
    listener = bind("127.0.0.1", 0)
    server = Server(
        listener,
        trust,
        connections=connections,
        desk=desk,
        timing=timing or Timing(heartbeat_s=0.3),
        patience=patience,
    )
    server.offer(offer, device)
    device.start()
    server.start()
    try:
        yield Running(url_of(listener, "wss" if trust.context else "ws"), device, server, pool)
    finally:
        assert server.stop(), "a connection's thread did not end"
        assert device.stop(), "the device's thread did not end"


class Gated(Synthetic):
    """Synthetic rows whose tiles wait at a gate; ``reached`` is set when a tile gets there."""

    def __init__(self, layout: Layout = MIXED, tile: int = 16) -> None:
        super().__init__(layout, tile)
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.tiles = 0
        self.withdrawn = 0

    def prefill(
        self,
        tokens: Sequence[int],
        cut: int,
        end: int,
        emit: Emit,
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
        extra: Sequence[int] = (),
    ) -> int:
        def asked() -> bool:
            self.reached.set()
            while not self.gate.wait(0.01):
                if cancelled():
                    break
            self.tiles += 1
            stop = cancelled()
            self.withdrawn += stop
            return stop

        return super().prefill(tokens, cut, end, emit, asked, progress, extra)


def wait_until(true: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Wait for a condition that another thread brings about."""
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
