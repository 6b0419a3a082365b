"""The producer's side of a connection: answers, streams, seals; computes nothing itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import ClassVar, Final

from protocol import frames, hello, manifest, seal
from protocol.deadlines import Timing
from protocol.errors import LocalProtocolError
from protocol.events import Committed, Credited, Event, Interrupted, Late, Ready, Requested
from protocol.identity import Identity
from protocol.layout import Layout, Slot
from protocol.machine import Machine
from protocol.messages import (
    CONTROL_BYTES,
    VERSION,
    Begin,
    Credit,
    Hello,
    HelloAck,
    History,
    Limits,
    Message,
    Prefill,
    Progress,
    Proof,
    Recipe,
    Resume,
    Resumed,
    Seal,
    decode_tokens,
    prefill_limit,
)
from protocol.messages import Committed as CommittedMessage
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import differs, refusal
from protocol.sending import Sending
from protocol.states import PRODUCER, State, Transitions

PROGRESS_EVERY_S: Final = 0.2
"""PROGRESS messages are at least this far apart, but for the last one."""


class ProducerHandoff(Machine):
    """The producer's machine for one connection, over which handoffs run one by one.

    After :class:`Requested`: ``begin``, then for each slot of ``next_slot`` its payload and
    ``frame``, in order, then ``seal``. The answer is :class:`Committed` or an abort. Where the
    connection is lost before that, :attr:`sending` can go on in another machine: its shell takes
    it before ``eof`` and gives it to ``resume`` when :class:`Interrupted` names it.
    """

    TRANSITIONS: ClassVar[Transitions] = PRODUCER

    def __init__(
        self,
        *,
        identity: Identity,
        layout: Layout,
        recipe: Recipe,
        limits: Limits,
        pairing: Pairing,
        nonce: bytes,
        now: float,
        certificates: PinnedCertificates | None = None,
        earlier: Pairing | None = None,
        timing: Timing | None = None,
    ) -> None:
        """A machine for a connection accepted at ``now``; ``nonce``: 32 fresh random bytes.

        ``earlier``: a pairing that this decoder may prove in the place of ``pairing``. Raises
        ConfigError ``layout_not_carriable``.
        """
        super().__init__(timing or Timing())
        manifest.require_carriable(layout)
        self._identity = identity
        self._layout = layout
        self._recipe = recipe
        self._limits = limits
        self._pairing = pairing
        self._earlier = earlier
        self._nonce = nonce
        self._certificates = certificates
        self._hello = self._hello_ack = b""
        self._ack: HelloAck | None = None
        self._moot = self._highest = 0
        self._spoke = now
        self._clear()
        self._rearm(now)

    def _clear(self) -> None:
        """Forget the handoff; nothing of it, tokens least of all, stays here."""
        self._sending: Sending | None = None
        self._seal: Seal | None = None
        self._resume: Resume | None = None
        self._slots: Iterator[Slot] = iter(())
        self._taken: deque[Slot] = deque()
        self._framed = self._acknowledged = 0
        self._credit = 0
        self._progressed = float("-inf")

    @property
    def text_limit(self) -> int:
        """Longest TEXT message that the current state can accept, in bytes."""
        if self._state == State.READY:
            return prefill_limit(self._limits.max_tokens)
        return CONTROL_BYTES

    @property
    def pairing(self) -> Pairing:
        """Whose key the decoder has proven, or has to."""
        return self._pairing

    @property
    def remaining(self) -> int:
        """Frames of the current handoff that were not yet given to :meth:`frame`."""
        begin = self._sending and self._sending.begin
        return begin.frames - self._framed if begin else 0

    @property
    def sending(self) -> Sending | None:
        """The handoff under way, from its PREFILL to its COMMITTED."""
        return self._sending

    @property
    def acknowledged(self) -> int:
        """Frames below this one have arrived and are digested: nobody asks for them again."""
        return self._acknowledged

    def deadline(self) -> float | None:
        """When :meth:`tick` must be called at the latest, heartbeats included."""
        times = [super().deadline()]
        if self._state in (State.REQUESTED, State.STREAMING):
            times.append(self._spoke + self._timing.heartbeat_s)
        return min((at for at in times if at is not None), default=None)

    def tick(self, now: float) -> list[Event]:
        """Let time pass; queues a PROGRESS where nothing was sent for ``heartbeat_s``.

        Raises TransferError ``deadline_exceeded`` or ``peer_silent``.
        """
        events = super().tick(now)
        beating = self._state in (State.REQUESTED, State.STREAMING)
        if beating and now >= self._spoke + self._timing.heartbeat_s:
            self._send_progress(now)
        return events

    def begin(
        self,
        *,
        transfer: bytes,
        computed_tokens: int,
        now: float,
        cut: int | None = None,
        history: tuple[History, ...] | None = None,
    ) -> Begin:
        """Announce the handoff: BEGIN is queued and returned.

        ``transfer``: 16 fresh random bytes. ``cut``: by default the requested one; 0 puts a
        full handoff in the delta's place, which the decoder may refuse. ``history``: by
        default this producer's recipe over all of ``[cut, end)``, in spans that end at the extra
        cuts.

        Raises LocalProtocolError, also where the schedule has more frames than allowed.
        """
        self._allowed("begin")
        sending = self._current
        end, wanted = sending.end, sending.prefill.cut
        first = wanted if cut is None else cut
        if first not in (0, wanted):
            raise LocalProtocolError("a handoff begins at the requested cut, or at 0")
        extra = sending.prefill.extra_cuts
        with self._own():
            begin = manifest.make_begin(
                sending.prefill,
                self._layout,
                self._recipe.tile,
                transfer=transfer,
                cut=first,
                computed_tokens=computed_tokens,
                history=history or self._spans((first, *extra, end)),
            )
            manifest.require_provenance(begin, extra)
        sending.announce(begin, self._send(begin))
        self._go_locally("begin")
        self._slots = manifest.frames_of(self._layout, sending.prefill, begin)
        self._spoke = now
        self._rearm(now)
        return begin

    def resume(self, sending: Sending, now: float) -> None:
        """Go on with ``sending``, which RESUME has named: RESUMED is queued, BEGIN if need be.

        The caller has had ``sending.require_resumable`` check it. The slots from the named
        offset on come from :meth:`next_slot`, those that were sent before included.
        """
        self._allowed("resumed")
        resume = self._resume
        assert resume is not None
        self._clear()
        self._sending = sending
        self._framed = self._acknowledged = resume.next
        self._credit = resume.credit
        self._spoke = now
        self._total_at = sending.total_at
        self._go_locally("resumed")
        self._send(Resumed(generation=sending.generation, next=resume.next))
        begin = sending.begin
        if begin is not None:
            self._go_locally("manifest")
            if resume.transfer != begin.transfer:
                self._queue.append(sending.raw_begin)
            self._slots = islice(
                manifest.frames_of(self._layout, sending.prefill, begin), resume.next, None
            )
        self._rearm(now)

    def progress(self, done: int, now: float) -> None:
        """Say how many of the request's tokens are computed; sent at most five times a second.

        ``done`` never goes back; a smaller one counts as the largest so far.
        """
        self._allowed("progress")
        sending = self._current
        end = sending.end
        if done > end:
            raise LocalProtocolError("more tokens done than the prompt has")
        if done <= sending.done:
            return
        sending.done = done
        if now - self._progressed >= PROGRESS_EVERY_S or done == end:
            self._send_progress(now)

    def next_slot(self) -> Slot | None:
        """The next frame to fill; takes one credit. Several may be taken ahead.

        None: no credit now (``remaining`` counts on) or no frame left.
        """
        self._allowed("frame")
        if self._credit == 0:
            return None
        slot = next(self._slots, None)
        if slot is not None:
            self._credit -= 1
            self._taken.append(slot)
        return slot

    def header_prefix(self, slot: Slot) -> bytes:
        """The 48 bytes over which, with the payload, :func:`frames.digest` is computed."""
        return frames.header_prefix(self._layout, slot, self._generation)

    def frame(self, slot: Slot, digest: bytes, now: float) -> bytes:
        """The 80 header bytes of a taken slot; frames go in the order of ``next_slot``.

        Header and payload travel as one BINARY message, after everything that
        ``outgoing()`` held.
        """
        self._allowed("frame")
        if not self._taken or self._taken[0] != slot:
            raise LocalProtocolError("frames must be sent in the order of next_slot")
        if len(digest) != frames.DIGEST_BYTES:
            raise LocalProtocolError("a frame digest has 32 bytes")
        self._taken.popleft()
        self._current.add(slot.sequence, digest, slot.nbytes)
        self._framed = slot.sequence + 1
        self._spoke = now
        if self._credit == 0 and not self._taken:
            self._rearm(now)
        return self.header_prefix(slot) + digest

    def seal(self, *, queue_us: int, compute_us: int, now: float) -> None:
        """End the handoff after its last frame: SEAL is queued. Times in microseconds."""
        self._allowed("seal")
        if self.remaining:
            raise LocalProtocolError(f"{self.remaining} frames are missing before the seal")
        sealed = self._current.sealed(self._pairing, queue_us=queue_us, compute_us=compute_us)
        self._send(sealed)
        self._seal = sealed
        self._go_locally("seal")
        self._total_at = None
        self._rearm(now)

    # messages

    def _on_message(self, message: Message, raw: bytes, now: float) -> list[Event]:
        match message:
            case Hello():
                return self._on_hello(message, raw, now)
            case Proof():
                return self._on_proof(message, now)
            case Prefill():
                return self._on_prefill(message, raw, now)
            case Resume():
                return self._on_resume(message, now)
            case Credit():
                return self._on_credit(message, now)
            case CommittedMessage():
                return self._on_committed(message, now)
            case _:
                name = type(message).__name__
                raise refusal("message_unexpected", f"a producer receives no {name}", field=name)

    def _on_hello(self, message: Hello, raw: bytes, now: float) -> list[Event]:
        self._go("HELLO")
        layout = self._layout.digest()
        if self._earlier is not None and message.epoch == self._earlier.epoch:
            self._pairing = self._earlier
        hello.require_agreement(message, self._identity, layout, self._pairing.epoch)
        self._hello = raw
        self._ack = HelloAck(
            version=VERSION,
            nonce=self._nonce,
            epoch=self._pairing.epoch,
            identity=self._identity,
            layout=layout,
            recipe=self._recipe,
            limits=self._limits,
        )
        self._hello_ack = self._send(self._ack)
        self._rearm(now)
        return []

    def _on_proof(self, message: Proof, now: float) -> list[Event]:
        self._go("PROOF")
        exchange = (self._hello, self._hello_ack, self._certificates)
        hello.verify_proof(message, self._pairing, "decoder", *exchange)
        self._send(hello.make_proof(self._pairing, "producer", *exchange))
        self._rearm(now)
        assert self._ack is not None
        return [Ready(self._ack)]

    def _on_prefill(self, message: Prefill, raw: bytes, now: float) -> list[Event]:
        self._go("PREFILL")
        if message.identity != self._identity.digest():
            expected = self._identity.digest()
            raise differs("identity_digest_differs", "identity", message.identity, expected)
        tokens = decode_tokens(message.tokens)
        if len(tokens) > self._limits.max_tokens:
            expected = f"at most {self._limits.max_tokens}"
            raise differs("prompt_too_long", "tokens", len(tokens), expected)
        manifest.require_request(
            message, self._layout, self._recipe.tile, self._limits.max_extra_cuts
        )
        if message.credit > self._limits.max_credit:
            expected = f"at most {self._limits.max_credit}"
            raise differs("credit_invalid", "credit", message.credit, expected)
        if message.generation <= self._highest:
            expected = f"above {self._highest}"
            raise differs("generation_used", "generation", message.generation, expected)
        self._clear()
        allowed_s = min(message.deadline_ms / 1000, self._timing.total_s(len(tokens)))
        self._total_at = now + allowed_s
        self._sending = Sending(message, raw, self._total_at)
        self._generation = self._highest = message.generation
        self._credit = message.credit
        self._spoke = now
        self._rearm(now)
        return [Requested(message, tokens)]

    def _on_resume(self, message: Resume, now: float) -> list[Event]:
        self._go("RESUME")
        if message.credit > self._limits.max_credit:
            expected = f"at most {self._limits.max_credit}"
            raise differs("credit_invalid", "credit", message.credit, expected)
        self._clear()
        self._resume = message
        self._generation = message.generation
        self._rearm(now)
        return [Interrupted(message)]

    def _on_credit(self, message: Credit, now: float) -> list[Event]:
        self._go("CREDIT")
        self._require_generation(message.generation)
        if self._state == State.ABORTING:
            return []
        self._acknowledged += message.frames
        if self._acknowledged > self._framed:
            found = self._acknowledged
            raise differs("credit_invalid", "frames", found, f"at most {self._framed} sent")
        self._credit += message.frames
        if self._credit > self._limits.max_credit:
            expected = f"at most {self._limits.max_credit}"
            raise differs("credit_invalid", "credit", self._credit, expected)
        if self._state == State.STREAMING:
            self._idle_at = None
        return [Credited(self._credit)]

    def _on_committed(self, message: CommittedMessage, now: float) -> list[Event]:
        state = self._state
        self._go("COMMITTED")
        if state == State.READY:
            return [Late(message)]
        if self._seal is None:
            raise refusal("message_unexpected", "COMMITTED came before SEAL", field="COMMITTED")
        seal.verify_committed(self._pairing, self._seal, message)
        if state == State.ABORTING:
            # Our ABORT met the decoder's COMMITTED: the handoff is complete, and only the
            # answer to that ABORT is still to come.
            self._moot = self._generation
        self._clear()
        self._rearm(now)
        return [Committed(self._generation)]

    # steps

    def _spans(self, stops: tuple[int, ...]) -> tuple[History, ...]:
        """This producer's recipe from each of ``stops`` to the next."""
        return tuple(History(*ends, self._recipe) for ends in pairwise(stops))

    def _send_progress(self, now: float) -> None:
        done = 0 if self._sending is None else self._sending.done
        self._send(Progress(generation=self._generation, done=done))
        self._progressed = self._spoke = now

    def _patience(self) -> float | None:
        match self._state:
            case State.START | State.HELLO_ACKED:
                return self._timing.handshake_s
            case State.STREAMING if self._credit == 0 and self.remaining:
                return self._timing.idle_s
            case State.RESUMING:
                return self._timing.handshake_s
            case State.SEALED:
                return self._timing.commit_s
            case State.ABORTING | State.CROSSED:
                return self._timing.abort_s
            case _:
                return None

    def _withdrawn(self) -> None:
        sealed = self._seal
        self._clear()
        # A COMMITTED that met our ABORT must still be recognised.
        self._seal = sealed

    def _lost(self) -> None:
        self._clear()

    @property
    def _current(self) -> Sending:
        """The handoff under way; every state that asks for it has one."""
        assert self._sending is not None
        return self._sending

    def _crossed(self, generation: int) -> bool:
        return False

    def _answered(self, generation: int) -> bool:
        met = generation != 0 and generation == self._moot
        if met:
            self._moot = 0
        return met
