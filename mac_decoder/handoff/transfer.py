"""One handoff from PREFILL to its verified seal: receiving and digesting side by side.

The caller's thread receives, one call of the kernel per frame, straight into the shadow. A
second thread computes the frames' SHA-256; both leave the interpreter lock while they work
and share nothing but two queues. A third touches the shadow's pages while the producer
computes, since the first write to a fresh page costs more than its bytes on the wire.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Final, Protocol

from mac_decoder.handoff.connection import Arrived, Connection
from mac_decoder.handoff.link import Destination
from protocol.errors import Cancelled, CapacityError, TransferError
from protocol.frames import digest
from protocol.handoff import Began, Event, PeerAborted, Progressed, Reception, Sealed, State
from protocol.layout import Layout, Slot, extra_cuts
from protocol.messages import Recipe

_log = logging.getLogger(__name__)

CREDIT: Final = 32
"""Frames under way at one time: 32 MiB at most, all of it in the shadow already. The producer
keeps as much, for a connection that is lost."""

_LAG: Final = 16
"""Frames that may wait for their digest while the next is received.

They lie in the shadow and cost nothing; with few of them the two threads wait for each other
whenever the kernel runs something else for some milliseconds.
"""

_DIGEST_WAIT_S: Final = 30.0

RECONNECT_S: Final = 10.0
"""How long a lost connection is tried again before the handoff is given up."""

IN_VAIN: Final = 6
"""Connections lost one after another without a frame in between, after which it is given up."""

_RETRY_S: Final = 0.2


@dataclass(frozen=True)
class Order:
    """What is asked for: ``tokens`` are those before the boundary token.

    ``generation`` gives a number that was never used; ``layout`` is the model's. ``recipe`` is how
    whoever answers has to compute; ``None``: as it likes.
    """

    tokens: Sequence[int]
    request_id: str
    space: bytes
    generation: Callable[[], int]
    layout: Layout
    cancelled: Callable[[], bool]
    progress: Callable[[int, int], None]
    recipe: Recipe | None = None


class Connections(Protocol):
    """Where connections come from and go to: ``pool.Pool``."""

    def claim(self, stopped: Callable[[], bool]) -> Connection: ...

    def put_back(self, connection: Connection) -> None: ...


@dataclass(frozen=True)
class Measured:
    """Seconds of one handoff.

    ``waited`` is the time until a connection was free, ``queue`` and ``compute`` are the
    producer's own. ``wire`` is what the way here added to
    them, ``verify`` the time from the last byte to the verified seal. ``receiving`` is the
    time in which some frame was arriving, for the link's rate. ``resumed`` counts the
    connections that were lost on the way.
    """

    waited: float
    queue: float
    compute: float
    wire: float
    verify: float
    receiving: float
    resumed: int


class Transfer:
    """Runs one handoff over a connection that is READY, and over others where that is lost."""

    def __init__(self, connections: Connections, shadow: Destination, order: Order) -> None:
        self._connections = connections
        self._shadow = shadow
        self._order = order
        self._digests = Digests()
        self._connection: Connection | None = None
        self._reception: Reception | None = None
        self._placed: tuple[Slot, memoryview] | None = None
        self._pending = 0
        self._lag = _LAG
        self._credit = CREDIT
        self._sealed: Sealed | None = None
        self._resumed = self._in_vain = self._frames_before = 0
        self._last_byte = self._receiving = 0.0

    def run(self) -> tuple[Connection, Sealed, Measured]:
        """Returns once the seal is verified; the connection's machine is VERIFIED.

        The caller puts the connection back. After any error nothing writes to the shadow any
        more, and there is no connection to put back.
        """
        started = time.monotonic()
        try:
            self._connection = self._connections.claim(self._order.cancelled)
            waited = time.monotonic() - started
            self._start(self._connection)
            with self._digests, prefaulting(self._shadow):
                while self._sealed is None:
                    try:
                        self._round()
                    except TransferError as error:
                        if error.reason != "connection_lost" or self._sealed is not None:
                            raise
                        self._go_on(error)
            connection = self._connected
            return connection, self._sealed, self._measure(self._sealed, started, waited)
        except BaseException as error:
            self._give_up(error)
            raise

    @property
    def _connected(self) -> Connection:
        assert self._connection is not None
        return self._connection

    def _start(self, connection: Connection) -> None:
        self._credit = min(CREDIT, connection.machine.ack.limits.max_credit)
        self._lag = min(_LAG, self._credit // 4)
        extra, ack = self._shadow.extra, connection.machine.ack
        ends = self._shadow.cut, self._shadow.end
        possible = extra_cuts(self._order.layout, *ends, ack.recipe.tile, extra)
        another = self._order.recipe not in (None, ack.recipe)
        if another or extra != possible or len(extra) > ack.limits.max_extra_cuts:
            raise TransferError(
                "the producer is another one than before", reason="producer_changed"
            )
        self._reception = connection.start(
            # Taken only now: generations must ascend on each connection.
            generation=self._order.generation(),
            nonce=os.urandom(32),
            request_id=self._order.request_id,
            tokens=self._order.tokens,
            space=self._order.space,
            cut=self._shadow.cut,
            or_full=self._shadow.cut > 0,
            extra_cuts=extra,
            credit=self._credit,
        )

    def _give_up(self, error: BaseException) -> None:
        """What the connection itself refused has closed it; all else is ours to end."""
        if self._reception is not None:
            self._reception.withdraw()
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                if connection.machine.state in _WITHDRAWABLE and not connection.closed:
                    withdrawn = isinstance(error, Cancelled)
                    connection.abort(error if withdrawn else Cancelled("this side failed"))
            finally:
                self._connections.put_back(connection)

    def _round(self) -> None:
        if self._order.cancelled():
            raise Cancelled("the request was withdrawn")
        connection = self._connected
        events, arrived = connection.step(self._place)
        for event in events:
            self._take(event)
        if arrived is not None:
            self._last_byte = time.monotonic()
            self._receiving += arrived.seconds
            self._placed = None
            self._digests.add(arrived)
            self._pending += 1
        sealing = connection.machine.state == State.SEALING
        self._collect(0 if sealing else self._lag)

    def _place(self, slot: Slot) -> memoryview:
        """Where ``slot`` goes; one that came in half before goes where it went then."""
        if self._placed is None or self._placed[0] != slot:
            self._placed = (slot, self._shadow.place(slot))
        return self._placed[1]

    def _collect(self, lag: int) -> None:
        """Report the digests that are there; wait where more than ``lag`` are not."""
        while self._pending:
            done = self._digests.next(wait=self._pending > lag)
            if done is None:
                return
            self._pending -= 1
            for event in self._connected.digested(*done):
                self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Progressed(done, total):
                self._order.progress(done, total)
            case Sealed():
                self._sealed = event
            case PeerAborted():
                self._refused(event)
            case Began(begin):
                self._shadow.begin(begin.cut)
            case _:
                raise TypeError(f"unknown event {type(event).__name__}")

    def _refused(self, event: PeerAborted) -> None:
        """The producer ended the handoff; one that it never got, it can be asked for anew."""
        connection, reception = self._connected, self._reception
        assert reception is not None
        unheard = event.error.reason == "transfer_unknown" and reception.begin is None
        if not unheard:
            self._digests.stop()
        connection.release()
        if not unheard:
            raise event.error
        self._resumed -= 1
        self._start(connection)

    # A lost connection

    def _go_on(self, lost: TransferError) -> None:
        """Resume over another connection, as soon as one is to be had; or raise ``lost``."""
        reception, connection = self._reception, self._connected
        assert reception is not None
        self._connection = None
        self._connections.put_back(connection)
        if reception.pending > self._pending:
            reception.forget_last(self._order.layout)
        while self._pending:
            done = self._digests.next(wait=True)
            assert done is not None
            self._pending -= 1
            reception.digested(*done)
        self._in_vain = self._in_vain + 1 if reception.received == self._frames_before else 0
        self._frames_before = reception.received
        if self._in_vain >= IN_VAIN:
            raise lost
        self._connection = self._reconnected(lost, reception.total_at)
        self._connection.resume(reception, self._credit)
        self._resumed += 1
        _log.info(
            "connection lost: handoff %d goes on at frame %d",
            reception.generation,
            reception.received,
        )

    def _reconnected(self, lost: TransferError, total_at: float) -> Connection:
        until = min(time.monotonic() + RECONNECT_S, total_at)
        while True:
            try:
                return self._connections.claim(self._order.cancelled)
            except (TransferError, CapacityError) as failure:
                if self._order.cancelled():
                    raise Cancelled("the request was withdrawn") from failure
                # Where nobody listens, the process is gone, and with it what it computed.
                hopeless = failure.reason in ("producer_down", "link_closed", "link_broken")
                if hopeless or time.monotonic() >= until:
                    raise lost from failure
            time.sleep(_RETRY_S)

    def _measure(self, sealed: Sealed, started: float, waited: float) -> Measured:
        now = time.monotonic()
        queue, compute = sealed.seal.queue_us / 1e6, sealed.seal.compute_us / 1e6
        last_byte = self._last_byte or now
        wire = max(0.0, last_byte - started - waited - queue - compute)
        return Measured(
            waited, queue, compute, wire, now - last_byte, self._receiving, self._resumed
        )


_WITHDRAWABLE: Final = frozenset(
    {State.RESUMING, State.REQUESTED, State.RECEIVING, State.SEALING, State.VERIFIED}
)


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
