"""What both machines share: the queue of outgoing messages, deadlines, endings.

Rules that hold for both:

1. A machine does no I/O and reads no clock. Bytes and ``now`` (monotonic seconds) go in;
   events and :meth:`Machine.outgoing` come out. One thread at a time may call it.
2. Whatever is refused raises a typed error, and the machine is CLOSED: the shell flushes
   ``outgoing()``, which then holds one ABORT with generation 0, and closes the connection.
3. A call that the state forbids raises LocalProtocolError and changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import msgspec

from protocol.aborts import from_abort, to_abort
from protocol.deadlines import Timing
from protocol.errors import BatonError, LocalProtocolError, PeerProtocolError
from protocol.events import Event, PeerAborted, Released
from protocol.messages import CONTROL_BYTES, Abort, Aborted, Message, decode, encode
from protocol.reasons import differs, refusal
from protocol.states import State, Transitions


class Machine(ABC):
    """One side of one connection; see the two subclasses for their calls."""

    TRANSITIONS: ClassVar[Transitions]

    def __init__(self, timing: Timing) -> None:
        self._state = State.START
        self._timing = timing
        self._queue: list[bytes] = []
        self._idle_at: float | None = None
        self._total_at: float | None = None
        self._generation = 0

    @property
    def state(self) -> State:
        """Where the machine stands in its transition table."""
        return self._state

    @property
    def text_limit(self) -> int:
        """Longest TEXT message that the current state can accept, in bytes."""
        return CONTROL_BYTES

    def outgoing(self) -> list[bytes]:
        """The TEXT messages to send now, in order; each is returned once."""
        queued, self._queue = self._queue, []
        return queued

    def deadline(self) -> float | None:
        """When :meth:`tick` must be called at the latest, in seconds of the shell's clock."""
        times = [at for at in (self._idle_at, self._total_at) if at is not None]
        return min(times, default=None)

    def receive_text(self, raw: bytes, now: float) -> list[Event]:
        """Take one control message in.

        Raises PeerProtocolError and, by message, IdentityMismatch, IntegrityError,
        ConfigError, CapacityError, TransferError; the machine is then CLOSED.
        """
        if self._state == State.CLOSED:
            raise LocalProtocolError("the connection has ended")
        with self._refusing():
            message = decode(raw, self.text_limit)
            if isinstance(message, Abort):
                return self._on_abort(message, now)
            if isinstance(message, Aborted):
                return self._on_aborted(message, now)
            return self._on_message(message, raw, now)

    def tick(self, now: float) -> list[Event]:
        """Let time pass.

        Raises TransferError ``deadline_exceeded`` or ``peer_silent``; the machine is then
        CLOSED.
        """
        with self._refusing():
            if self._total_at is not None and now >= self._total_at:
                raise refusal("deadline_exceeded", "the handoff's deadline has passed")
            if self._idle_at is not None and now >= self._idle_at:
                text = f"the other side owed an answer in state {self._state}"
                raise refusal("peer_silent", text, field="state", found=self._state)
        return []

    def eof(self, now: float) -> None:
        """The connection has ended. A closed connection never means complete.

        A handoff that was under way is its shell's now: to resume, or to withdraw.

        Raises TransferError ``connection_lost`` unless nothing was under way.
        """
        state = self._state
        quiet = state in (State.START, State.READY, State.CLOSED)
        self._lost()
        self._close()
        self._queue.clear()
        if not quiet:
            text = f"the connection closed in state {state}"
            raise refusal("connection_lost", text, field="state", found=state)

    def abort(self, error: BatonError, now: float) -> None:
        """End the current handoff for ``error``; the machine waits for ABORTED.

        From here on this side sends nothing more of the handoff: no frame may be half
        written when this is called.
        """
        self._go_locally("abort")
        self._withdrawn()
        self._send(to_abort(error, self._generation))
        self._total_at = None
        self._rearm(now)

    def release(self, now: float) -> None:
        """Answer the peer's ABORT, once nothing here uses the handoff's buffers any more."""
        self._go_locally("release")
        self._send(Aborted(generation=self._generation))
        self._rearm(now)

    def shut(self, error: BatonError) -> None:
        """End the connection for ``error``: ABORT with generation 0 is all that is sent."""
        if self._state != State.CLOSED:
            self._close()
            # Whatever was queued belongs to a conversation that is over.
            self._queue.clear()
            self._send(to_abort(error, 0))

    # what the subclasses supply

    @abstractmethod
    def _on_message(self, message: Message, raw: bytes, now: float) -> list[Event]:
        """Take a message that decoded; the state decides what it means."""

    @abstractmethod
    def _patience(self) -> float | None:
        """How long the peer may be silent in this state, in seconds; None: for ever."""

    @abstractmethod
    def _withdrawn(self) -> None:
        """The current handoff will not be completed; forget what it needed."""

    @abstractmethod
    def _lost(self) -> None:
        """The connection is gone; let go of the handoff, which another may go on with."""

    @abstractmethod
    def _crossed(self, generation: int) -> bool:
        """Whether this ABORT met the handoff's regular end on its way; true at most once."""

    @abstractmethod
    def _answered(self, generation: int) -> bool:
        """Whether this ABORTED answers an ABORT that no longer matters; true at most once."""

    # steps

    def _send(self, message: Message) -> bytes:
        """Queue a message of our own; returns its bytes."""
        with self._own():
            raw = encode(message)
        self._queue.append(raw)
        return raw

    @contextmanager
    def _own(self) -> Iterator[None]:
        """Refuse our own values as misuse where a peer would refuse them on arrival."""
        try:
            yield
        except (msgspec.ValidationError, PeerProtocolError, ValueError, OverflowError) as error:
            raise LocalProtocolError(f"out of bounds: {error}") from error

    def _rearm(self, now: float) -> None:
        patience = self._patience()
        self._idle_at = None if patience is None else now + patience

    def _go(self, trigger: str) -> None:
        """Follow the table for something received."""
        target = self.TRANSITIONS.get((self._state, trigger))
        if target is None:
            text = f"{trigger} is not allowed in state {self._state}"
            raise refusal("message_unexpected", text, field=trigger, found=self._state)
        self._state = target

    def _go_locally(self, trigger: str) -> None:
        """Follow the table for one of our own calls."""
        self._state = self._allowed(trigger)

    def _allowed(self, trigger: str) -> State:
        target = self.TRANSITIONS.get((self._state, trigger))
        if target is None:
            raise LocalProtocolError(f"{trigger} is not allowed in state {self._state}")
        return target

    def _require_generation(self, generation: int) -> None:
        if generation != self._generation:
            raise differs("generation_differs", "generation", generation, self._generation)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Close the machine and tell the peer when the step inside refuses."""
        try:
            yield
        except BatonError as error:
            self.shut(error)
            raise

    def _close(self) -> None:
        self._withdrawn()
        self._state = State.CLOSED
        self._idle_at = self._total_at = None

    # endings that both sides share

    def _on_abort(self, abort: Abort, now: float) -> list[Event]:
        error = from_abort(abort)
        if abort.generation == 0:
            self._close()
            self._queue.clear()
            raise error
        if self._crossed(abort.generation):
            self._send(Aborted(generation=abort.generation))
            return []
        self._go("ABORT")
        self._require_generation(abort.generation)
        self._withdrawn()
        self._total_at = None
        self._rearm(now)
        if self._state == State.CROSSED:
            # Each side answers the other's ABORT and waits for the answer to its own.
            self._send(Aborted(generation=abort.generation))
            return []
        return [PeerAborted(abort.generation, error)]

    def _on_aborted(self, aborted: Aborted, now: float) -> list[Event]:
        if self._answered(aborted.generation):
            return []
        self._go("ABORTED")
        self._require_generation(aborted.generation)
        self._rearm(now)
        return [Released(aborted.generation)]
