"""The device's thread: what a job is told before it computes, and whose memory it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest

from gb10_producer.backlog import Pool
from gb10_producer.device import Device, Ticket, Work
from gb10_producer.memory import Ledger, floor_bytes, prefill_bytes
from gb10_producer.prefill import Tokens
from gb10_producer.synthetic import Synthetic
from protocol.handoff import Sealed
from tests.gb10_producer import producer
from tests.gb10_producer.peer import MIXED, Peer
from tests.gb10_producer.producer import Gated, wait_until

END = 60


class Recalling(Gated):
    """Says that it holds ``held`` positions; notes what is asked of it and when."""

    def __init__(self, held: int, ledger: Ledger) -> None:
        super().__init__()
        self.held = held
        self.ledger = ledger
        self.reserved_at_recall: list[int] = []

    def recall(self, tokens: Tokens, end: int, extra: Sequence[int] = ()) -> int:
        self.reserved_at_recall.append(self.ledger.reserved)
        return self.held

    def prefill(self, *arguments: object) -> int:
        return super().prefill(*arguments) - self.held  # type: ignore[arg-type]


@contextmanager
def running(source: Synthetic, ledger: Ledger) -> Iterator[Device]:
    device = Device(source, pool=Pool(4 << 20), ledger=ledger, waiting_limit=4)
    device.start()
    try:
        yield device
    finally:
        assert device.stop()


def submit(device: Device, wake: Callable[[], None] = lambda: None) -> Ticket:
    work = Work(b"key", np.arange(END, dtype=np.uint32), 0, END)
    return device.submit("ticket", work, wake)


def test_a_job_knows_what_it_computes_before_the_first_tile() -> None:
    """And not before its memory is reserved: until then some of it may be forgotten."""
    ledger = Ledger(1 << 30)
    source = Recalling(48, ledger)
    woken = threading.Event()
    with running(source, ledger) as device:
        ticket = submit(device, woken.set)
        assert (ticket.started, ticket.computed_tokens) in [(False, 0), (True, END - 48)]
        assert woken.wait(5.0)
        assert source.reached.wait(5.0)
        assert source.tiles == 0
        assert (ticket.started, ticket.computed_tokens) == (True, END - 48)
        needed = prefill_bytes(MIXED, END, source.tile)
        assert source.reserved_at_recall == [0, needed]
        source.gate.set()
        wait_until(lambda: ticket.finished)
        assert ticket.error is None
        device.withdraw(ticket)


def test_what_a_job_reuses_says_nothing_about_the_devices_speed() -> None:
    ledger = Ledger(1 << 30)
    source = Recalling(59, ledger)
    source.gate.set()
    with running(source, ledger) as device:
        queue, finished = device._queue, []
        finish = queue.finish
        queue.finish = lambda job, now, computed: (  # type: ignore[method-assign]
            finished.append(computed) or finish(job, now, computed)
        )
        ticket = submit(device)
        wait_until(lambda: ticket.finished)
        assert finished == [1]


def test_a_job_that_does_not_fit_never_begins() -> None:
    ledger = Ledger(prefill_bytes(MIXED, END, 16))
    assert ledger.take(1)
    source = Recalling(0, ledger)
    with running(source, ledger) as device:
        ticket = submit(device)
        wait_until(lambda: ticket.finished)
        assert ticket.error is not None
        assert ticket.error.reason == "memory_exceeded"
        assert not ticket.started


def test_an_idle_device_gives_memory_back_when_the_machine_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gb10_producer.device._RELIEF_S", 0.01)
    free = [1 << 40]
    ledger = Ledger(1 << 30, lambda: free[0])
    asked: list[int] = []
    ledger.reclaim = lambda nbytes: asked.append(nbytes) or 0
    with running(Synthetic(MIXED, 16), ledger):
        looked = threading.Event()
        ledger._free = lambda: looked.set() or free[0]  # type: ignore[func-returns-value]
        assert looked.wait(5.0)
        assert asked == []
        free[0] = floor_bytes() // 2 - 1000
        wait_until(lambda: asked)
        assert set(asked) == {1000}


def test_room_is_made_until_there_is_none_to_make() -> None:
    ledger = Ledger(100)
    kept = [40, 30]
    for nbytes in kept:
        assert ledger.take(nbytes)
    assert not ledger.take(31)

    def reclaim(lacking: int) -> int:
        asked.append(lacking)
        nbytes = kept.pop() if kept else 0
        ledger.give(nbytes)
        return nbytes

    asked: list[int] = []
    ledger.reclaim = reclaim
    with ledger.reserve(30):
        assert asked == []
    with ledger.reserve(80):
        assert asked == [50, 20]
        assert ledger.reserved == 80
    assert ledger.reserved == 0


@pytest.mark.parametrize("cut", [0, 16, 59])
def test_the_manifest_says_what_is_computed(cut: int) -> None:
    source = Recalling(48, Ledger(1 << 30))
    with producer.running(source) as it, Peer(it.url) as peer:
        peer.handshake().start(range(END), cut)
        begin = peer.begun().begin
        assert (begin.cut, begin.end, begin.computed_tokens) == (cut, END, END - 48)
        source.gate.set()
        peer.until(Sealed)
