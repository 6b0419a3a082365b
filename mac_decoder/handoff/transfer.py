"""One handoff from PREFILL to its verified seal: receiving and digesting side by side.

The caller's thread receives, one call of the kernel per frame, straight into the shadow. A
second thread computes the frames' SHA-256; both leave the interpreter lock while they work
and share nothing but two queues. A third touches the shadow's pages while the producer
computes, since the first write to a fresh page costs more than its bytes on the wire.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final

from mac_decoder.handoff.connection import Arrived, Connection
from mac_decoder.handoff.link import Destination
from protocol.errors import Cancelled, TransferError
from protocol.frames import digest
from protocol.handoff import Began, Event, PeerAborted, Progressed, Sealed, State

CREDIT: Final = 64
"""Frames under way at one time: 64 MiB at most, all of it in the shadow already."""

_LAG: Final = 16
"""Frames that may wait for their digest while the next is received.

They lie in the shadow and cost nothing; with few of them the two threads wait for each other
whenever the kernel runs something else for some milliseconds.
"""

_DIGEST_WAIT_S: Final = 30.0


@dataclass(frozen=True)
class Order:
    """What is asked for: ``tokens`` are those before the boundary token."""

    tokens: Sequence[int]
    request_id: str
    generation: int
    cancelled: Callable[[], bool]
    progress: Callable[[int, int], None]


@dataclass(frozen=True)
class Measured:
    """Seconds of one handoff.

    ``queue`` and ``compute`` are the producer's own. ``wire`` is what the way here added to
    them, ``verify`` the time from the last byte to the verified seal. ``receiving`` is the
    time in which some frame was arriving, for the link's rate.
    """

    queue: float
    compute: float
    wire: float
    verify: float
    receiving: float


class Transfer:
    """Runs one handoff on a connection that this thread owns and that is READY."""

    def __init__(self, connection: Connection, shadow: Destination, order: Order) -> None:
        self._connection = connection
        self._shadow = shadow
        self._order = order
        self._digests = Digests()
        self._pending = 0
        self._lag = _LAG
        self._sealed: Sealed | None = None
        self._last_byte = self._receiving = 0.0

    def run(self) -> tuple[Sealed, Measured]:
        """Returns once the seal is verified; the connection's machine is VERIFIED.

        After any error nothing writes to the shadow any more. The connection is closed, or
        its machine is READY (the producer's ABORT) or ABORTING (``Cancelled``).
        """
        order, connection = self._order, self._connection
        started = time.monotonic()
        credit = min(CREDIT, connection.machine.ack.limits.max_credit)
        self._lag = min(_LAG, credit // 4)
        connection.start(
            generation=order.generation,
            nonce=os.urandom(32),
            request_id=order.request_id,
            tokens=order.tokens,
            cut=self._shadow.cut,
            or_full=self._shadow.cut > 0,
            credit=credit,
        )
        try:
            with self._digests, prefaulting(self._shadow):
                while self._sealed is None:
                    self._round()
        except BaseException as error:
            # What the connection itself refuses has closed it; all else is ours to end, a
            # thread that could not be started too.
            if connection.machine.state in _WITHDRAWABLE and not connection.closed:
                withdrawn = isinstance(error, Cancelled)
                connection.abort(error if withdrawn else Cancelled("this side failed"))
            raise
        return self._sealed, self._measure(self._sealed, started)

    def _round(self) -> None:
        if self._order.cancelled():
            raise Cancelled("the request was withdrawn")
        events, arrived = self._connection.step(self._shadow.place)
        for event in events:
            self._take(event)
        if arrived is not None:
            self._last_byte = time.monotonic()
            self._receiving += arrived.seconds
            self._digests.add(arrived)
            self._pending += 1
        sealing = self._connection.machine.state == State.SEALING
        self._collect(0 if sealing else self._lag)

    def _collect(self, lag: int) -> None:
        """Report the digests that are there; wait where more than ``lag`` are not."""
        while self._pending:
            done = self._digests.next(wait=self._pending > lag)
            if done is None:
                return
            self._pending -= 1
            for event in self._connection.digested(*done):
                self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Progressed(done, total):
                self._order.progress(done, total)
            case Sealed():
                self._sealed = event
            case PeerAborted():
                self._digests.stop()
                self._connection.release()
                raise event.error
            case Began(begin):
                self._shadow.begin(begin.cut)
            case _:
                raise TypeError(f"unknown event {type(event).__name__}")

    def _measure(self, sealed: Sealed, started: float) -> Measured:
        now = time.monotonic()
        queue, compute = sealed.seal.queue_us / 1e6, sealed.seal.compute_us / 1e6
        last_byte = self._last_byte or now
        wire = max(0.0, last_byte - started - queue - compute)
        return Measured(queue, compute, wire, now - last_byte, self._receiving)


_WITHDRAWABLE: Final = frozenset({State.REQUESTED, State.RECEIVING, State.SEALING, State.VERIFIED})


class Digests:
    """A thread that digests frames in order. As a context manager it is stopped at the end."""

    def __init__(self) -> None:
        self._todo: SimpleQueue[Arrived | None] = SimpleQueue()
        self._done: SimpleQueue[tuple[int, bytes]] = SimpleQueue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="baton-digest", daemon=True)

    def __enter__(self) -> Digests:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def add(self, arrived: Arrived) -> None:
        """Digest this frame after those before it."""
        self._todo.put(arrived)

    def next(self, *, wait: bool) -> tuple[int, bytes] | None:
        """Sequence and digest of the next frame, ``None`` if that is not known yet.

        Raises ``TransferError`` (``digest_stalled``) if waiting for it is hopeless.
        """
        try:
            return self._done.get(wait, _DIGEST_WAIT_S if wait else None)
        except Empty as error:
            if not wait:
                return None
            raise TransferError(
                "the digest of a frame did not come", reason="digest_stalled"
            ) from error

    def stop(self) -> None:
        """Return once the thread reads no frame any more. Idempotent."""
        self._stopped = True
        self._todo.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (arrived := self._todo.get()) is not None:
            if self._stopped:
                return
            found = digest(arrived.prefix, arrived.payload)
            self._done.put((arrived.slot.sequence, found))


@contextlib.contextmanager
def prefaulting(shadow: Destination) -> Iterator[None]:
    """Touch the shadow's pages in a thread for as long as the block runs."""
    done = threading.Event()
    thread = threading.Thread(
        target=shadow.prefault, args=(done.is_set,), name="baton-prefault", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
