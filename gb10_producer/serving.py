"""What one connection serves: at most one transfer at a time, from its PREFILL to its COMMITTED.

The connection's thread alone calls this; the device's and the hashing thread only wake it.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from dataclasses import dataclass, field

from gb10_producer.device import Device, Work
from gb10_producer.outflow import Outflow
from gb10_producer.throttle import Throttle
from gb10_producer.transfers import Server, Transfer, Transfers
from gb10_producer.trust import Owner
from gb10_producer.wire import Wire
from protocol.errors import BatonError, IntegrityError
from protocol.handoff import ProducerHandoff, Requested, State
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
_EVERYTHING = 1 << 62


@dataclass(frozen=True)
class Offer:
    """What this producer is to every decoder. Token ids must be below ``vocabulary``."""

    identity: Identity
    layout: Layout
    recipe: Recipe
    limits: Limits
    vocabulary: int
    throttle: Throttle = field(default_factory=lambda: Throttle(None))


@dataclass(frozen=True)
class Stock:
    """What all connections of a producer that has loaded its model serve from."""

    offer: Offer
    device: Device
    transfers: Transfers


@dataclass
class _Serving:
    """A transfer on its way over this connection, until its SEAL is out or it is withdrawn."""

    transfer: Transfer
    outflow: Outflow
    busy: bool = False
    """A frame was hashed in this thread; the loop goes on without waiting."""
    passing: deque[tuple[int, int]] = field(default_factory=deque)
    """(byte of the stream, backlog items that are with the kernel once it is written)."""


class Service:
    """Serves the transfers of one connection; see :class:`gb10_producer.connection.Connection`.

    ``server`` lets go when another connection of the same decoder goes on.
    """

    def __init__(
        self, stock: Stock, wire: Wire, machine: ProducerHandoff, peer: str, server: Server
    ) -> None:
        self._offer = stock.offer
        self._device = stock.device
        self._transfers = stock.transfers
        self._wire = wire
        self._machine = machine
        self._peer = peer
        self._server = server
        self.owner = Owner(b"", 0)
        """Who has proven what on this connection; set before anything is accepted."""
        self._transfer: Transfer | None = None
        """What this connection serves, from PREFILL or RESUME to COMMITTED."""
        self._serving: _Serving | None = None
        self._wanted: Resume | None = None
        """A RESUME that waits for another connection to let go of its transfer."""

    def due(self, now: float) -> float | None:
        """When :meth:`advance` must be called at the latest, whatever the socket does."""
        if self._serving is None:
            return None
        pause = self._offer.throttle.wait_s(now) or _LOOK_AROUND_S
        return now if self._serving.busy else now + pause

    def accept(self, event: Requested) -> None:
        """Queue what was asked for, or say why not."""
        prefill, sending = event.prefill, self._machine.sending
        assert sending is not None
        end = len(event.tokens)
        extra = prefill.extra_cuts
        span = b"".join(at.to_bytes(8, "big") for at in (prefill.cut, end, len(extra), *extra))
        key = hashlib.sha256(span + prefill.space + prefill.tokens).digest()
        work = Work(key, event.tokens, prefill.cut, end, prefill.space, extra)
        name = sending.name.hex()
        facts = {"peer": self._peer, "request": prefill.request, "generation": prefill.generation}
        try:
            if int(event.tokens.max(initial=0)) >= self._offer.vocabulary:
                raise refusal(
                    "message_malformed", "a token is not in the vocabulary", field="tokens"
                )
            self._transfers.require_new(sending, self.owner)
            ticket = self._device.submit(name, work, self._wire.wake)
            try:
                transfer = self._transfers.add(sending, ticket, self.owner, self._server)
            except BatonError:
                self._device.withdraw(ticket)
                raise
        except BatonError as error:
            log.info("request refused", extra={**facts, **loggable(error)})
            self.withdraw(error)
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

    def interrupted(self, resume: Resume) -> None:
        """A transfer is to go on; :meth:`advance` does it."""
        self._wanted = resume

    def _resume(self, resume: Resume) -> None:
        """Go on with what another connection has lost, once that knows it too."""
        machine = self._machine
        if machine.state != State.RESUMING:
            self._wanted = None  # it was withdrawn
            return
        facts = {"peer": self._peer, "generation": resume.generation, "frame": resume.next}
        try:
            transfer = self._transfers.claim(resume, self.owner, self._server, self._wire.wake)
        except BatonError as error:
            self._wanted = None
            log.info("resume refused", extra={**facts, **loggable(error)})
            machine.abort(error, time.monotonic())
            return
        if transfer is None:
            return
        self._wanted = None
        machine.resume(transfer.sending, time.monotonic())
        self._serve_transfer(transfer)
        log.info("resumed", extra=facts)

    def commit_late(self, committed: CommittedMessage) -> None:
        """A COMMITTED whose connection was lost before it. Raises ``IntegrityError``."""
        try:
            generation = self._transfers.commit(committed, self.owner, self._machine.pairing)
        except IntegrityError as error:
            self._machine.shut(error)
            raise
        except BatonError as error:
            # It may come twice, and after it was let go: there is nothing left to do.
            log.info("committed again", extra={"peer": self._peer, "reason": error.reason})
        else:
            log.info("committed late", extra={"peer": self._peer, "generation": generation})

    def advance(self) -> None:
        """Whatever the handoff can do now: begin, take slots, send frames, seal, give up."""
        machine = self._machine
        if self._wanted is not None:
            self._resume(self._wanted)
        serving = self._serving
        if serving is None:
            return
        ticket = serving.transfer.ticket
        if serving.outflow.fault is not None:
            self._device.fail(serving.outflow.fault)
        if (error := serving.outflow.fault or ticket.error) is not None:
            self.withdraw(error)
            return
        now = time.monotonic()
        if serving.transfer.sending.begin is None:
            if not ticket.started:
                return
            computed = ticket.computed_tokens
            machine.begin(transfer=os.urandom(16), computed_tokens=computed, now=now)
            self.flush()
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
                "peer": self._peer,
                "generation": transfer.sending.generation,
                "queue_ms": round(ticket.queue_s * 1e3, 1),
                "compute_ms": round(ticket.compute_s * 1e3, 1),
            },
        )
        # Its rows are kept until COMMITTED, for a connection that is lost before.
        self._stop_serving()
        ticket.reader.sent_to(_EVERYTHING)

    def withdraw(self, error: BatonError) -> None:
        """End the handoff from this side; the connection lives on."""
        self.end(error.reason)
        machine = self._machine
        if machine.state in (State.REQUESTED, State.STREAMING):
            machine.abort(error, time.monotonic())
            self.flush()

    def end(self, how: str = "transfer_expired") -> None:
        """What was served is over; ``how`` is told to whoever asks for it again."""
        self._stop_serving()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._transfers.end(transfer, how)

    def let_go(self) -> None:
        """The connection is lost, and the transfer waits for another."""
        self._stop_serving()
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            self._transfers.let_go(transfer, time.monotonic())

    def _stop_serving(self) -> None:
        serving, self._serving = self._serving, None
        if serving is not None:
            serving.outflow.close()

    def flush(self) -> None:
        """Queue what the machine wants to say; a wire that is closing says nothing more."""
        for raw in self._machine.outgoing():
            if not self._wire.closing:
                self._wire.send_text(raw)


def loggable(error: BatonError) -> dict[str, str]:
    """An error as a log line shows it."""
    details = error.details()
    return {"error": error.message, **{f"error_{key}": value for key, value in details.items()}}
