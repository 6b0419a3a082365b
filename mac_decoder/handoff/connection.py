"""One connection to the producer: the wire, and the machine that judges what comes over it.

Exactly one thread owns a connection at a time: the thread of a fetch while a handoff runs,
the link's own thread otherwise.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from mac_decoder.handoff.trust import Trust
from mac_decoder.handoff.wire import DataFrame, Wire
from protocol.deadlines import Timing
from protocol.errors import BatonError, TransferError
from protocol.handoff import DecoderHandoff, Event, Ready, Reception, State
from protocol.identity import Identity
from protocol.layout import Layout, Slot
from protocol.messages import Seal
from protocol.outstanding import Outstanding

CONNECT_S = 3.0
"""Time for name, TCP, TLS and WebSocket handshakes together."""

_TICK_S = 0.05
"""How late a deadline may be noticed while frames stream in."""

_CLOSE_GOING_AWAY = 1001
_CLOSE_POLICY = 1008

Place = Callable[[Slot], memoryview]


@dataclass(frozen=True)
class Producer:
    """Where the producer is and how to know it.

    ``outstanding`` is one object per key, which all connections share in their threads.
    """

    url: str
    trust: Trust
    identity: Identity
    layout: Layout
    timing: Timing = field(default_factory=Timing)
    outstanding: Outstanding = field(default_factory=lambda: Outstanding(threading.Lock()))


@dataclass(frozen=True)
class Arrived:
    """A frame whose payload lies in its place; ``seconds`` is how long it took to come in."""

    slot: Slot
    prefix: bytes
    payload: memoryview
    seconds: float


class Connection:
    """An open connection. Every error of its methods has closed it; ``closed`` tells."""

    def __init__(self, wire: Wire, machine: DecoderHandoff) -> None:
        self.wire = wire
        self.machine = machine
        self.closed = False
        self.generation = 0
        self._committed: Seal | None = None
        self._place: Place | None = None
        self._slot: Slot | None = None
        self._began = 0.0
        self._tick_at = 0.0

    @classmethod
    def open(cls, producer: Producer, stopped: Callable[[], bool]) -> Connection:
        """Connect and exchange proofs: the machine is READY.

        Raises ``TransferError``, ``CapacityError``, ``IdentityMismatch``,
        ``IntegrityError``, ``ConfigError``, ``PeerProtocolError``.
        """
        trust = producer.trust
        machine = DecoderHandoff(
            identity=producer.identity,
            layout=producer.layout,
            pairing=trust.pairing,
            nonce=os.urandom(32),
            outstanding=producer.outstanding,
            certificates=trust.certificates,
            timing=producer.timing,
        )
        wire = Wire.open(
            producer.url,
            tls=trust.context,
            verify=trust.verify,
            timeout_s=CONNECT_S,
            stopped=stopped,
        )
        connection = cls(wire, machine)
        with connection._ending():
            machine.connect(time.monotonic())
            connection.flush()
            while True:
                if stopped():
                    raise TransferError("the link is closing", reason="link_closed")
                events, _ = connection.step()
                if any(isinstance(event, Ready) for event in events):
                    return connection

    @property
    def ready(self) -> bool:
        """Whether a handoff may be started."""
        return not self.closed and self.machine.state == State.READY

    def step(self, place: Place | None = None) -> tuple[list[Event], Arrived | None]:
        """Take in what comes next, waiting at most 0.1 s; returns events and a frame.

        ``place`` says where a frame's payload belongs.
        """
        with self._ending():
            self.flush()
            now = time.monotonic()
            events: list[Event] = []
            if now >= self._tick_at:
                events = self.machine.tick(now)
                self._tick_at = now + _TICK_S
            self._place = place
            try:
                came = self.wire.receive(self._admit, self.machine.text_limit)
            finally:
                self._place = None  # it keeps the shadow's memory alive
            arrived = None
            if isinstance(came, bytes):
                events += self.machine.receive_text(came, time.monotonic())
            elif isinstance(came, DataFrame) and came.payload is not None:
                assert self._slot is not None
                seconds = time.monotonic() - self._began
                arrived = Arrived(self._slot, came.header[:48], came.payload, seconds)
            self.flush()
            return events, arrived

    def rest(self) -> None:
        """Let time pass on a connection that nothing arrives on."""
        with self._ending():
            self.machine.tick(time.monotonic())
            self.flush()

    def start(self, **request: object) -> Reception:
        """``DecoderHandoff.start`` at this moment; the next :meth:`step` sends the PREFILL.

        What it refuses by itself (``prompt_too_long``) leaves the connection as it was.
        """
        reception = self.machine.start(now=time.monotonic(), **request)  # type: ignore[arg-type]
        self.generation = reception.generation
        return reception

    def resume(self, reception: Reception, credit: int) -> None:
        """Go on with a handoff that another connection has lost; the next step sends RESUME."""
        self.machine.resume(reception, time.monotonic(), credit)
        self.generation = reception.generation

    def digested(self, sequence: int, digest: bytes) -> list[Event]:
        """Report a frame's digest, in order."""
        with self._ending():
            events = self.machine.frame_digest(sequence, digest, time.monotonic())
            self.flush()
            return events

    def commit(self, sealed: Seal) -> None:
        """Tell the producer that the cut that ``sealed`` ends is installed."""
        self._committed = sealed
        with self._ending():
            self.machine.commit(time.monotonic())
            self.flush()
            # its answer says that COMMITTED has arrived
            self.wire.ping()

    def acknowledge(self, sealed: Seal) -> None:
        """The same for a cut that came over another connection."""
        self._committed = sealed
        with self._ending():
            self.machine.acknowledge(sealed)
            self.flush()
            self.wire.ping()

    @property
    def unheard(self) -> Seal | None:
        """The seal whose COMMITTED may not have arrived."""
        return self._committed if self.wire.ping_pending else None

    def abort(self, error: BatonError) -> None:
        """Withdraw the handoff; no memory of it is written from here on."""
        self.wire.abandon_payload()
        with self._ending():
            self.machine.abort(error, time.monotonic())
            self.flush()

    def release(self) -> None:
        """Answer the producer's ABORT: nothing here uses the handoff's memory any more."""
        self.wire.abandon_payload()
        with self._ending():
            self.machine.release(time.monotonic())
            self.flush()

    def flush(self) -> None:
        """Send what the machine has to say."""
        for raw in self.machine.outgoing():
            self.wire.send_text(raw)

    def close(self, code: int = _CLOSE_GOING_AWAY) -> None:
        """Leave. Idempotent."""
        if not self.closed:
            self.closed = True
            self.wire.abandon_payload()
            with contextlib.suppress(BatonError):
                self.machine.eof(time.monotonic())
            self.wire.close(code)

    def _admit(self, header: bytes, length: int) -> memoryview | None:
        now = time.monotonic()
        slot = self.machine.frame_header(header, length, now)
        if slot is None:
            return None
        if self._place is None:
            raise TransferError("a frame came while nobody waits for one", reason="link_misuse")
        self._slot, self._began = slot, now
        return self._place(slot)

    def _ending(self) -> _Ending:
        return _Ending(self)


class _Ending:
    """Whatever goes wrong inside ends the connection, with the reason told if it still can be.

    A class, since a generator's context costs more than all else that happens to a frame.
    """

    __slots__ = ("_connection",)

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(BatonError):
                self._connection.flush()
            self._connection.close(_CLOSE_POLICY)
