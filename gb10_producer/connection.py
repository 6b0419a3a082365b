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

from gb10_producer.device import Device, Work
from gb10_producer.outflow import Outflow
from gb10_producer.throttle import Throttle
from gb10_producer.transfers import Transfer, Transfers
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
    Interrupted,
    Late,
    PeerAborted,
    ProducerHandoff,
    Ready,
    Released,
    Requested,
    State,
)
from protocol.identity import Identity
from protocol.layout import Layout
from protocol.messages import Committed as CommittedMessage
from protocol.messages import Limits, Recipe, Resume
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
_LOST = ("connection_lost", "peer_stalled")
"""Ends of a connection after which its decoder may go on over another."""
_EVERYTHING = 1 << 62


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
class _Serving:
    """A transfer on its way over this connection, until its SEAL is out or it is withdrawn."""

    transfer: Transfer
    outflow: Outflow
    busy: bool = False
    """A frame was hashed in this thread; the loop goes on without waiting."""
    passing: deque[tuple[int, int]] = field(default_factory=deque)
    """(byte of the stream, backlog items that are with the kernel once it is written)."""


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
        transfers: Transfers,
        *,
        refusals: Refusals | None = None,
        proven: Callable[[], None] = lambda: None,
        crowded: Callable[[], bool] = lambda: False,
    ) -> None:
        self.peer = peer
        self._offer = offer
        self._device = device
        self._transfers = transfers
        self._refusals = refusals or Refusals()
        self._proven = proven
        self._crowded = crowded
        self._wire = Wire(sock, stall_s=offer.timing.idle_s)
        self._machine: ProducerHandoff | None = None
        self._transfer: Transfer | None = None
        """What this connection serves, from PREFILL or RESUME to COMMITTED."""
        self._serving: _Serving | None = None
        self._wanted: Resume | None = None
        """A RESUME that waits for another connection to let go of its transfer."""
        self._superseded = threading.Event()
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
            if reason in _LOST:
                self._let_go()
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

    def give_up(self) -> None:
        """Another connection goes on with the transfer: this one is dead, and ends. Any thread."""
        self._superseded.set()
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
            if wire.closing or self._superseded.is_set():
                if not wire.left:
                    self._let_go()
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
        if self._serving is not None:
            pause = self._offer.throttle.wait_s(now) or _LOOK_AROUND_S
            deadline = now if self._serving.busy else min(deadline, now + pause)
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
                    self._end_transfer(error.reason)
                    assert self._machine is not None
                    self._machine.release(time.monotonic())
                case Committed(generation=generation):
                    log.info("committed", extra={"peer": self.peer, "generation": generation})
                    self._end_transfer("transfer_committed")
                case Interrupted(resume=resume):
                    self._wanted = resume
                case Late(committed=committed):
                    self._commit_late(committed)
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
        prefill, machine = event.prefill, self._machine
        assert machine is not None
        assert machine.sending is not None
        end = len(event.tokens)
        extra = prefill.extra_cuts
        span = b"".join(at.to_bytes(8, "big") for at in (prefill.cut, end, len(extra), *extra))
        key = hashlib.sha256(span + prefill.space + prefill.tokens).digest()
        work = Work(key, event.tokens, prefill.cut, end, prefill.space, extra)
        sending = machine.sending
        name = sending.name.hex()
        facts = {"peer": self.peer, "request": prefill.request, "generation": prefill.generation}
        try:
            if int(event.tokens.max(initial=0)) >= self._offer.vocabulary:
                raise refusal(
                    "message_malformed", "a token is not in the vocabulary", field="tokens"
                )
            self._transfers.require_new(sending)
            ticket = self._device.submit(name, work, self._wire.wake)
            try:
                transfer = self._transfers.add(sending, ticket, self)
            except BatonError:
                self._device.withdraw(ticket)
                raise
        except BatonError as error:
            log.info("request refused", extra={**facts, **_loggable(error)})
            self._withdraw(error)
            return
        self._serve_transfer(transfer)
        log.info(
            "request accepted",
            extra={**facts, "cut": prefill.cut, "end": end, "joined": ticket.joined},
        )

    def _serve_transfer(self, transfer: Transfer) -> None:
        self._transfer = transfer
        transfer.ticket.reader.wake = self._wire.wake
        outflow = Outflow(self._offer.layout, transfer.ticket.reader, self._wire.wake)
        self._serving = _Serving(transfer, outflow)

    def _resume(self, resume: Resume, machine: ProducerHandoff) -> None:
        """Go on with what another connection has lost, once that knows it too."""
        if machine.state != State.RESUMING:
            self._wanted = None  # it was withdrawn
            return
        facts = {"peer": self.peer, "generation": resume.generation, "frame": resume.next}
        try:
            transfer = self._transfers.claim(resume, self, self._wire.wake)
        except BatonError as error:
            self._wanted = None
            log.info("resume refused", extra={**facts, **_loggable(error)})
            machine.abort(error, time.monotonic())
            return
        if transfer is None:
            return
        self._wanted = None
        machine.resume(transfer.sending, time.monotonic())
        self._serve_transfer(transfer)
        log.info("resumed", extra=facts)

    def _commit_late(self, committed: CommittedMessage) -> None:
        try:
            generation = self._transfers.commit(committed, self._offer.trust.pairing)
        except IntegrityError as error:
            assert self._machine is not None
            self._machine.shut(error)
            raise
        except BatonError as error:
            # It may come twice, and after it was let go: there is nothing left to do.
            log.info("committed again", extra={"peer": self.peer, "reason": error.reason})
        else:
            log.info("committed late", extra={"peer": self.peer, "generation": generation})

    def _advance(self) -> None:
        """Whatever the handoff can do now: begin, take slots, send frames, seal, give up."""
        serving, machine = self._serving, self._machine
        if machine is None:
            return
        if self._wanted is not None:
            self._resume(self._wanted, machine)
            serving = self._serving
        if serving is None:
            return
        ticket = serving.transfer.ticket
        if serving.outflow.fault is not None:
            self._device.fail(serving.outflow.fault)
        if (error := serving.outflow.fault or ticket.error) is not None:
            self._withdraw(error)
            return
        now = time.monotonic()
        if serving.transfer.sending.begin is None:
            if not ticket.started:
                return
            computed = ticket.computed_tokens
            machine.begin(transfer=os.urandom(16), computed_tokens=computed, now=now)
            self._flush()
        machine.progress(ticket.position, now)
        self._send_frames(serving, machine)
        sent = machine.remaining == 0 and serving.outflow.length == 0
        on_a_slow_link = self._offer.throttle.wait_s(now) > 0  # the last frame is on its way
        if sent and ticket.finished and not on_a_slow_link:
            self._seal(serving.transfer, machine)

    def _send_frames(self, serving: _Serving, machine: ProducerHandoff) -> None:
        wire, outflow, throttle = self._wire, serving.outflow, self._offer.throttle
        transfer = serving.transfer
        serving.busy = False
        while serving.passing and serving.passing[0][0] <= wire.written:
            transfer.ticket.reader.sent_to(serving.passing.popleft()[1])
        transfer.acknowledge(machine.acknowledged)
        while outflow.length < _AHEAD and (slot := machine.next_slot()) is not None:
            outflow.add(slot, machine.header_prefix(slot))
        while wire.pending < _QUEUED_BYTES and not throttle.wait_s(time.monotonic()):
            frame = outflow.take()
            if frame is None or frame.digest is None:
                serving.busy = outflow.help()
                return
            now = time.monotonic()
            header = machine.frame(frame.slot, frame.digest, now)
            transfer.marks.append((frame.slot.sequence, frame.passed))
            wire.send_binary(header, frame.payload)
            serving.passing.append((wire.written + wire.pending, frame.ended))
            throttle.sent(frame.payload.nbytes, now)
            if (slot := machine.next_slot()) is not None:
                outflow.add(slot, machine.header_prefix(slot))

    def _seal(self, transfer: Transfer, machine: ProducerHandoff) -> None:
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
                "generation": transfer.sending.generation,
                "queue_ms": round(ticket.queue_s * 1e3, 1),
                "compute_ms": round(ticket.compute_s * 1e3, 1),
            },
        )
        # Its rows are kept until COMMITTED, for a connection that is lost before.
        self._stop_serving()
        ticket.reader.sent_to(_EVERYTHING)

    def _withdraw(self, error: BatonError) -> None:
        """End the handoff from this side; the connection lives on."""
        self._end_transfer(error.reason)
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

    def _end_transfer(self, how: str = "transfer_expired") -> None:
        """What was served is over; ``how`` is told to whoever asks for it again."""
        self._stop_serving()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._transfers.end(transfer, how)

    def _let_go(self) -> None:
        """The connection is lost, and the transfer waits for another."""
        self._stop_serving()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._transfers.let_go(transfer, time.monotonic())

    def _stop_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.outflow.close()

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
