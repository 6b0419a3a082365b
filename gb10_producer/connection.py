"""One decoder's connection: the protocol machine, its socket, and the handoff under way.

One thread runs :meth:`Connection.run` and alone touches machine and socket; the device's and
the hashing thread only wake it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gb10_producer.device import Device, Ticket, Work
from gb10_producer.outflow import Outflow
from gb10_producer.throttle import Throttle
from gb10_producer.trust import Trust
from gb10_producer.wire import Wire
from protocol.deadlines import Timing
from protocol.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    IdentityMismatch,
    IntegrityError,
    LocalProtocolError,
    TransferError,
)
from protocol.handoff import (
    Committed,
    Credited,
    Event,
    PeerAborted,
    ProducerHandoff,
    Ready,
    Released,
    Requested,
    State,
)
from protocol.identity import Identity
from protocol.layout import Layout
from protocol.messages import Limits, Recipe
from protocol.reasons import refusal

log = logging.getLogger(__name__)

_AHEAD = 16
"""Frames hashed or being hashed ahead of the socket."""
_QUEUED_BYTES = 2 << 20
"""Below this much queued for the socket, the next frame is queued."""
_LOOK_AROUND_S = 0.5
_CLOSE_S = 2.0
_HOSTS = 64
"""Of how many hosts it is remembered why they were refused."""
_GOING_AWAY, _POLICY, _NORMAL = 1001, 1008, 1000


@dataclass(frozen=True)
class Offer:
    """What this producer is to every decoder. Token ids must be below ``vocabulary``."""

    identity: Identity
    layout: Layout
    recipe: Recipe
    limits: Limits
    trust: Trust
    vocabulary: int
    timing: Timing = field(default_factory=lambda: Timing(heartbeat_s=1.0))
    throttle: Throttle = field(default_factory=lambda: Throttle(None))


@dataclass
class _Transfer:
    """A request that was accepted, until its last frame is written or it is withdrawn."""

    generation: int
    end: int
    ticket: Ticket
    outflow: Outflow
    begun: bool = False
    busy: bool = False
    """A frame was hashed in this thread; the loop goes on without waiting."""
    passing: deque[tuple[int, int]] = field(default_factory=deque)
    """(byte of the stream, backlog items that nobody needs once it is written)."""


class Refusals:
    """Which refusals were logged: a decoder that may not connect tries again for ever.

    Every reason is news once for each host, and again after that host has connected. All
    methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._known: dict[str, set[tuple[str, ...]]] = {}
        self._lock = threading.Lock()

    def news(self, host: str, error: BatonError) -> bool:
        """Whether ``host`` was not refused for this reason before; from now on it was."""
        components = error.components if isinstance(error, IdentityMismatch) else ()
        kind = (error.reason, *components)
        with self._lock:
            if host not in self._known and len(self._known) >= _HOSTS:
                del self._known[next(iter(self._known))]
            known = self._known.setdefault(host, set())
            if kind in known:
                return False
            known.add(kind)
            return True

    def connected(self, host: str) -> None:
        """Forget why ``host`` was refused."""
        with self._lock:
            self._known.pop(host, None)


class Connection:
    """Serves one socket until it closes; :meth:`run` never raises for what a peer does."""

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        offer: Offer,
        device: Device,
        *,
        refusals: Refusals | None = None,
        proven: Callable[[], None] = lambda: None,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.peer = peer
        self._offer = offer
        self._device = device
        self._refusals = refusals or Refusals()
        self._proven = proven
        self._crowded = crowded
        self._wire = Wire(sock, stall_s=offer.timing.idle_s)
        self._machine: ProducerHandoff | None = None
        self._transfer: _Transfer | None = None
        self._handshake_until = time.monotonic() + offer.timing.handshake_s
        self._ready = False
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve until the peer leaves, breaks the protocol, or :meth:`stop` is called."""
        code, reason = _NORMAL, ""
        try:
            self._open()
            self._serve()
        except BatonError as error:
            code, reason = _POLICY, error.reason
            self._log_end(error)
            self._flush()
        finally:
            self._end_transfer()
            if self._stopping.is_set():
                code = _GOING_AWAY
            self._wire.close(code, reason, _CLOSE_S)

    @property
    def _host(self) -> str:
        return self.peer.rpartition(":")[0]

    def _log_end(self, error: BatonError) -> None:
        """A decoder that is refused is a person's business, everything else is routine."""
        facts = {"peer": self.peer, **_loggable(error)}
        wrong = isinstance(error, IdentityMismatch | IntegrityError | ConfigError)
        if self._ready or not (wrong or error.reason == "version_unsupported"):
            log.info("connection ended", extra=facts)
        elif self._refusals.news(self._host, error):
            log.warning("decoder refused", extra=facts)
        else:
            log.debug("decoder refused again", extra=facts)

    def stop(self) -> None:
        """Abort what runs, tell the peer, and close. Any thread."""
        self._stopping.set()
        self._wire.wake()

    def _open(self) -> None:
        offer = self._offer
        self._wire.open(offer.trust.context, self._handshake_until, self._crowded)
        self._machine = ProducerHandoff(
            identity=offer.identity,
            layout=offer.layout,
            recipe=offer.recipe,
            limits=offer.limits,
            pairing=offer.trust.pairing,
            nonce=os.urandom(32),
            now=time.monotonic(),
            certificates=offer.trust.check_peer(self._wire.peer_certificate()),
            timing=offer.timing,
        )

    def _serve(self) -> None:
        machine, wire = self._machine, self._wire
        assert machine is not None
        while True:
            wire.limit_text(machine.text_limit)
            deadline = self._deadline(machine)
            for raw in wire.poll(max(0.0, deadline - time.monotonic())):
                self._handle(machine.receive_text(raw, time.monotonic()))
                self._flush()
            if wire.closing:
                self._end_transfer()
                machine.eof(time.monotonic())
                return
            self._let_pass(machine, time.monotonic())
            self._advance()
            self._flush()
            if self._stopping.is_set():
                self._leave(machine, self._device.fault or _stopping_error())
                return

    def _deadline(self, machine: ProducerHandoff) -> float:
        """When the loop must look again, whatever the socket does."""
        now = time.monotonic()
        deadline = machine.deadline() or now + 60.0
        if not self._ready:
            deadline = min(deadline, self._handshake_until)
        if self._transfer is not None:
            pause = self._offer.throttle.wait_s(now) or _LOOK_AROUND_S
            deadline = now if self._transfer.busy else min(deadline, now + pause)
        return deadline

    def _let_pass(self, machine: ProducerHandoff, now: float) -> None:
        if not self._ready and now >= self._handshake_until:
            raise TransferError("The handshake took too long.", reason="handshake_timeout")
        due = machine.deadline()
        if due is not None and now >= due:
            self._handle(machine.tick(now))

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Requested():
                    self._accept(event)
                case PeerAborted(error=error):
                    log.info("decoder withdrew", extra={"peer": self.peer, "reason": error.reason})
                    self._end_transfer()
                    assert self._machine is not None
                    self._machine.release(time.monotonic())
                case Committed(generation=generation):
                    log.info("committed", extra={"peer": self.peer, "generation": generation})
                case Ready():
                    self._ready = True
                    self._refusals.connected(self._host)
                    self._proven()
                    log.info("decoder connected", extra={"peer": self.peer})
                case Credited() | Released():
                    pass  # the loop looks at credit and state by itself
                case _:
                    raise LocalProtocolError(f"a producer has no {type(event).__name__}")

    def _accept(self, event: Requested) -> None:
        prefill = event.prefill
        end = len(event.tokens)
        span = prefill.cut.to_bytes(8, "big") + end.to_bytes(8, "big")
        key = hashlib.sha256(span + prefill.tokens).digest()
        work = Work(key, event.tokens, prefill.cut, end)
        name = f"{id(self)}/{prefill.generation}"
        facts = {"peer": self.peer, "request": prefill.request, "generation": prefill.generation}
        try:
            if int(event.tokens.max(initial=0)) >= self._offer.vocabulary:
                raise refusal(
                    "message_malformed", "a token is not in the vocabulary", field="tokens"
                )
            ticket = self._device.submit(name, work, self._wire.wake)
        except BatonError as error:
            log.info("request refused", extra={**facts, **_loggable(error)})
            self._withdraw(error)
            return
        outflow = Outflow(self._offer.layout, ticket.reader, self._wire.wake)
        self._transfer = _Transfer(prefill.generation, end, ticket, outflow)
        log.info(
            "request accepted",
            extra={**facts, "cut": prefill.cut, "end": end, "joined": ticket.joined},
        )

    def _advance(self) -> None:
        """Whatever the handoff can do now: begin, take slots, send frames, seal, give up."""
        transfer, machine = self._transfer, self._machine
        if transfer is None or machine is None:
            return
        if transfer.outflow.fault is not None:
            self._device.fail(transfer.outflow.fault)
        if (error := transfer.outflow.fault or transfer.ticket.error) is not None:
            self._withdraw(error)
            return
        now = time.monotonic()
        if not transfer.begun:
            if not transfer.ticket.started:
                return
            computed = transfer.ticket.computed_tokens
            machine.begin(transfer=os.urandom(16), computed_tokens=computed, now=now)
            self._flush()
            transfer.begun = True
        machine.progress(transfer.ticket.position, now)
        self._send_frames(transfer, machine)
        sent = machine.remaining == 0 and transfer.outflow.length == 0
        on_a_slow_link = self._offer.throttle.wait_s(now) > 0  # the last frame is on its way
        if sent and transfer.ticket.finished and not on_a_slow_link:
            self._seal(transfer, machine)

    def _send_frames(self, transfer: _Transfer, machine: ProducerHandoff) -> None:
        wire, outflow, throttle = self._wire, transfer.outflow, self._offer.throttle
        transfer.busy = False
        while transfer.passing and transfer.passing[0][0] <= wire.written:
            transfer.ticket.reader.pass_to(transfer.passing.popleft()[1])
        while outflow.length < _AHEAD and (slot := machine.next_slot()) is not None:
            outflow.add(slot, machine.header_prefix(slot))
        while wire.pending < _QUEUED_BYTES and not throttle.wait_s(time.monotonic()):
            frame = outflow.take()
            if frame is None or frame.digest is None:
                transfer.busy = outflow.help()
                return
            now = time.monotonic()
            header = machine.frame(frame.slot, frame.digest, now)
            transfer.passing.append((wire.written + wire.pending, frame.passed))
            wire.send_binary(header, frame.payload)
            throttle.sent(frame.payload.nbytes, now)
            if (slot := machine.next_slot()) is not None:
                outflow.add(slot, machine.header_prefix(slot))

    def _seal(self, transfer: _Transfer, machine: ProducerHandoff) -> None:
        ticket = transfer.ticket
        machine.seal(
            queue_us=int(ticket.queue_s * 1e6),
            compute_us=int(ticket.compute_s * 1e6),
            now=time.monotonic(),
        )
        log.info(
            "sealed",
            extra={
                "peer": self.peer,
                "generation": transfer.generation,
                "queue_ms": round(ticket.queue_s * 1e3, 1),
                "compute_ms": round(ticket.compute_s * 1e3, 1),
            },
        )
        self._end_transfer()

    def _withdraw(self, error: BatonError) -> None:
        """End the handoff from this side; the connection lives on."""
        self._end_transfer()
        machine = self._machine
        if machine is not None and machine.state in (State.REQUESTED, State.STREAMING):
            machine.abort(error, time.monotonic())
            self._flush()

    def _leave(self, machine: ProducerHandoff, error: BatonError) -> None:
        """Tell the decoder why it is left, whatever it waits for: an answer, a commit, nothing."""
        self._withdraw(error)
        if machine.state != State.ABORTING:
            machine.shut(error)
            self._flush()

    def _end_transfer(self) -> None:
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.outflow.close()
            self._device.withdraw(transfer.ticket)

    def _flush(self) -> None:
        """Queue what the machine wants to say; a wire that is closing says nothing more."""
        if self._machine is None:
            return
        for raw in self._machine.outgoing():
            if not self._wire.closing:
                self._wire.send_text(raw)


def _stopping_error() -> BatonError:
    return CapacityError("The producer is stopping.", reason="producer_stopping")


def _loggable(error: BatonError) -> dict[str, str]:
    details = error.details()
    return {"error": error.message, **{f"error_{key}": value for key, value in details.items()}}
