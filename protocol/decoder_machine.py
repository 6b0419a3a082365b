"""The decoder's side of a connection: asks, receives, verifies; installs nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from protocol import frames, hello, manifest, seal
from protocol.deadlines import Timing
from protocol.errors import LocalProtocolError
from protocol.events import Began, Event, Progressed, Ready, Sealed
from protocol.identity import Identity
from protocol.layout import Layout, Slot
from protocol.machine import Machine
from protocol.messages import (
    NO_SPACE,
    VERSION,
    Begin,
    Credit,
    Hello,
    HelloAck,
    Message,
    Prefill,
    Progress,
    Proof,
    Resumed,
    Seal,
    encode,
    encode_tokens,
)
from protocol.outstanding import Outstanding
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import differs, refusal
from protocol.reception import Reception
from protocol.states import DECODER, State, Transitions

PROGRESS_BURST: Final = 64
PROGRESS_PER_S: Final = 10
"""A handoff may bring 64 PROGRESS messages and ten more per second of its age."""


class DecoderHandoff(Machine):
    """The decoder's machine for one connection, over which handoffs run one by one.

    Order of calls: ``connect``, then for each handoff ``start``, then whatever arrives
    through ``receive_text`` and ``frame_header``, each frame's digest in order through
    ``frame_digest``, and after :class:`Sealed` the install and ``commit``. Where the connection
    is lost before that, the reception that ``start`` returned goes on in another machine by
    ``resume``, and one that was sealed is committed there by ``acknowledge``.
    """

    TRANSITIONS: ClassVar[Transitions] = DECODER

    def __init__(
        self,
        *,
        identity: Identity,
        layout: Layout,
        pairing: Pairing,
        nonce: bytes,
        outstanding: Outstanding,
        certificates: PinnedCertificates | None = None,
        timing: Timing | None = None,
    ) -> None:
        """``nonce``: 32 fresh random bytes. ``outstanding``: the one object of this key.

        Raises ConfigError ``layout_not_carriable``.
        """
        super().__init__(timing or Timing())
        manifest.require_carriable(layout)
        self._identity = identity
        self._layout = layout
        self._layout_digest = layout.digest()
        self._pairing = pairing
        self._nonce = nonce
        self._outstanding = outstanding
        self._certificates = certificates
        self._hello = self._hello_ack = b""
        self._ack: HelloAck | None = None
        self._finished = self._highest = 0
        self._clear()

    def _clear(self) -> None:
        """Forget the handoff; nothing of it, tokens least of all, stays here."""
        self._reception: Reception | None = None
        self._window = self._credit = self._granted = self._owed = 0
        self._resumed_at = 0

    @property
    def ack(self) -> HelloAck:
        """What the producer said of itself. Raises LocalProtocolError before READY."""
        if self._ack is None:
            raise LocalProtocolError("the handshake has not ended")
        return self._ack

    def connect(self, now: float) -> None:
        """Open the handshake: HELLO is queued."""
        self._allowed("connect")
        self._hello = self._send(
            Hello(
                version=VERSION,
                nonce=self._nonce,
                epoch=self._pairing.epoch,
                identity=self._identity,
                layout=self._layout_digest,
            )
        )
        self._go_locally("connect")
        self._rearm(now)

    def start(
        self,
        *,
        generation: int,
        nonce: bytes,
        request_id: str,
        tokens: Sequence[int] | NDArray[np.integer],
        now: float,
        cut: int = 0,
        or_full: bool = False,
        extra_cuts: tuple[int, ...] = (),
        space: bytes = NO_SPACE,
        deadline_s: float | None = None,
        credit: int = 32,
    ) -> Reception:
        """Ask for the cache of ``[cut, len(tokens))``: PREFILL is queued.

        Returns what outlives the connection: where that is lost, the caller resumes or
        withdraws it.

        ``tokens`` are those *before* the boundary token. ``generation`` was reserved for
        this request alone and ascends on a connection; ``nonce`` is 32 fresh random bytes.
        ``or_full``: BEGIN may name 0 instead of ``cut``, so that a full handoff takes the
        delta's place. ``extra_cuts``: as ``layout.extra_cuts`` finds them for this producer's
        tile, within its limit. ``space``: who shares what the producer keeps
        (``messages.space_of``).
        ``deadline_s``: total time allowed, by default :meth:`Timing.total_s`.
        ``credit``: frames under way at one time.

        Raises CapacityError ``prompt_too_long``; LocalProtocolError in the wrong state, for
        values out of bounds, or for a generation that was used.
        """
        self._allowed("start")
        end = len(tokens)
        limits = self.ack.limits
        if end > limits.max_tokens:
            raise differs("prompt_too_long", "tokens", end, f"at most {limits.max_tokens}")
        if not 0 <= cut < end:
            raise LocalProtocolError("need 0 <= cut < len(tokens)")
        if generation <= self._highest:
            raise LocalProtocolError("generations must ascend on a connection")
        allowed_s = self._timing.total_s(end) if deadline_s is None else deadline_s
        with self._own():
            prefill = Prefill(
                request=request_id,
                generation=generation,
                nonce=nonce,
                identity=self._identity.digest(),
                space=space,
                cut=cut,
                extra_cuts=extra_cuts,
                deadline_ms=round(allowed_s * 1000),
                credit=min(credit, limits.max_credit),
                tokens=encode_tokens(tokens),
            )
            raw = encode(prefill)
            manifest.require_request(
                prefill, self._layout, self.ack.recipe.tile, limits.max_extra_cuts
            )
        self._outstanding.open(generation, nonce)
        self._go_locally("start")
        self._queue.append(raw)
        self._highest = generation
        total_at = now + allowed_s
        reception = Reception(
            prefill, raw, self._outstanding, or_full=or_full, started=now, total_at=total_at
        )
        self._take_on(reception, prefill.credit, now)
        return reception

    def resume(self, reception: Reception, now: float, credit: int = 32) -> None:
        """Go on with a handoff whose connection was lost: RESUME is queued.

        All digests of ``reception`` are reported. An answer that refuses arrives as
        :class:`PeerAborted`. Raises LocalProtocolError in the wrong state.
        """
        self._allowed("resume")
        message = reception.resume(min(credit, self.ack.limits.max_credit))
        self._go_locally("resume")
        self._send(message)
        self._take_on(reception, message.credit, now)

    def _take_on(self, reception: Reception, credit: int, now: float) -> None:
        self._clear()
        self._reception = reception
        self._generation = reception.generation
        self._window = self._credit = credit
        self._resumed_at = reception.received
        self._granted = reception.received + credit
        self._total_at = reception.total_at
        self._rearm(now)

    def frame_header(self, raw: bytes, payload_length: int, now: float) -> Slot | None:
        """Check the 80 bytes that open a frame; returns where its payload belongs.

        ``payload_length`` is the BINARY message's length less 80. None: a handoff is being
        aborted, and the payload must be read and dropped. Everything but the digest is
        checked here, before the payload is read.

        Raises PeerProtocolError (``frame_...``, ``length_differs``, ``credit_exceeded``);
        the machine is then CLOSED.
        """
        if self._state == State.CLOSED:
            raise LocalProtocolError("the connection has ended")
        with self._refusing():
            header = frames.parse(raw)
            if (self._state, "FRAME") not in self.TRANSITIONS:
                text = f"a frame is not allowed in state {self._state}"
                raise refusal("frame_unexpected", text, field="state", found=self._state)
            if payload_length != header.length:
                raise differs("length_differs", "payload", payload_length, header.length)
            if self._credit == 0:
                raise differs("credit_exceeded", "frames", self._granted + 1, self._granted)
            self._credit -= 1
            if self._state == State.ABORTING:
                return None
            slot = self._current.accept(header, self._layout)
            self._rearm(now)
            return slot

    def frame_digest(self, sequence: int, digest: bytes, now: float) -> list[Event]:
        """Report the digest computed over a frame's header and payload, in frame order.

        Once a handoff was aborted its late digests are ignored; they must all have been
        reported, or dropped, before the next ``start``. Returns [Sealed] if this was the
        last thing the seal waited for.

        Raises IntegrityError ``digest_differs`` and what the seal's check raises; the
        machine is then CLOSED.
        """
        if self._state not in (State.RECEIVING, State.SEALING):
            return []
        if sequence != self._current.awaited:
            raise LocalProtocolError("frame digests must be reported in order, once")
        with self._refusing():
            self._current.digested(sequence, digest)
            self._owed += 1
            self._grant()
            return self._verify(now)

    def commit(self, now: float) -> None:
        """Say that the sealed cache is installed: COMMITTED is queued, the machine READY."""
        self._allowed("commit")
        sealed = self._current.seal
        assert sealed is not None
        self._send(seal.make_committed(self._pairing, sealed))
        self._go_locally("commit")
        self._finished = self._generation
        self._clear()
        self._rearm(now)

    def acknowledge(self, sealed: Seal) -> None:
        """Say again, or for the first time, that what ``sealed`` ends is installed.

        For a handoff whose connection was lost after its seal: COMMITTED is queued.
        """
        self._allowed("acknowledge")
        self._send(seal.make_committed(self._pairing, sealed))

    # messages

    def _on_message(self, message: Message, raw: bytes, now: float) -> list[Event]:
        match message:
            case HelloAck():
                return self._on_hello_ack(message, raw, now)
            case Proof():
                return self._on_proof(message, now)
            case Progress():
                return self._on_progress(message, now)
            case Begin():
                return self._on_begin(message, raw, now)
            case Seal():
                return self._on_seal(message, now)
            case Resumed():
                return self._on_resumed(message, now)
            case _:
                name = type(message).__name__
                raise refusal("message_unexpected", f"a decoder receives no {name}", field=name)

    def _on_hello_ack(self, message: HelloAck, raw: bytes, now: float) -> list[Event]:
        self._go("HELLO_ACK")
        hello.require_agreement(message, self._identity, self._layout_digest, self._pairing.epoch)
        self._hello_ack = raw
        self._ack = message
        self._send(hello.make_proof(self._pairing, "decoder", self._hello, raw, self._certificates))
        self._rearm(now)
        return []

    def _on_proof(self, message: Proof, now: float) -> list[Event]:
        self._go("PROOF")
        hello.verify_proof(
            message, self._pairing, "producer", self._hello, self._hello_ack, self._certificates
        )
        self._rearm(now)
        return [Ready(self.ack)]

    def _on_progress(self, message: Progress, now: float) -> list[Event]:
        self._go("PROGRESS")
        self._require_generation(message.generation)
        if self._state == State.ABORTING:
            return []
        reception = self._current
        reception.progresses += 1
        allowed = PROGRESS_BURST + PROGRESS_PER_S * (now - reception.started)
        if reception.progresses > allowed:
            raise differs("too_many_messages", "PROGRESS", reception.progresses, int(allowed))
        total = reception.end
        if not reception.done <= message.done <= total:
            expected = f"{reception.done} to {total}"
            raise differs("progress_invalid", "done", message.done, expected)
        reception.done = message.done
        self._rearm(now)
        return [Progressed(message.done, total)]

    def _on_resumed(self, message: Resumed, now: float) -> list[Event]:
        self._go("RESUMED")
        self._require_generation(message.generation)
        if self._state == State.ABORTING:
            return []
        if message.next != self._resumed_at:
            raise differs("offset_differs", "next", message.next, self._resumed_at)
        if self._current.begin is not None:
            self._go_locally("manifest")
        self._rearm(now)
        return []

    def _on_begin(self, message: Begin, raw: bytes, now: float) -> list[Event]:
        self._go("BEGIN")
        if self._state == State.ABORTING:
            return []
        self._current.require_open(message)
        self._require_generation(message.generation)
        self._current.announce(message, raw, self._layout, self.ack.recipe.tile)
        self._rearm(now)
        return [Began(message)]

    def _on_seal(self, message: Seal, now: float) -> list[Event]:
        self._go("SEAL")
        if self._state == State.ABORTING:
            return []
        reception = self._current
        begin = reception.begin
        assert begin is not None
        seal.require_complete(message, begin.transfer, begin.frames, begin.payload_bytes)
        if reception.received < begin.frames:
            raise differs("frames_missing", "frames", reception.received, begin.frames)
        reception.seal = message
        self._rearm(now)
        return self._verify(now)

    # steps

    def _verify(self, now: float) -> list[Event]:
        """Verify the seal once it and all digests are here."""
        reception = self._current
        if not reception.verified(self._pairing):
            return []
        assert reception.begin is not None
        assert reception.seal is not None
        self._go_locally("verified")
        self._total_at = None
        self._rearm(now)
        return [Sealed(reception.begin, reception.seal)]

    @property
    def _current(self) -> Reception:
        """The handoff under way; every state that asks for it has one."""
        assert self._reception is not None
        return self._reception

    def _grant(self) -> None:
        """Give credit back in quarters of what was given first, never beyond the last frame.

        CREDIT also tells the producer which rows it need not keep for a RESUME.
        """
        begin = self._current.begin
        assert begin is not None
        frames_left = begin.frames - self._granted
        if frames_left > 0 and self._owed >= max(1, self._window // 4):
            granted = min(self._owed, frames_left)
            self._send(Credit(generation=self._generation, frames=granted))
            self._credit += granted
            self._granted += granted
            self._owed = 0

    def _patience(self) -> float | None:
        match self._state:
            case State.HELLO_SENT | State.PROOF_SENT:
                return self._timing.handshake_s
            case State.RESUMING | State.REQUESTED | State.RECEIVING:
                return self._timing.idle_s
            case State.ABORTING | State.CROSSED:
                return self._timing.abort_s
            case _:
                return None

    def _withdrawn(self) -> None:
        if self._reception is not None:
            self._reception.withdraw()
            credit = self._credit
            self._clear()
            # What was credited may still arrive, and is counted while it is dropped.
            self._credit = self._granted = credit

    def _lost(self) -> None:
        self._clear()

    def _crossed(self, generation: int) -> bool:
        met = generation != 0 and generation == self._finished
        if met:
            self._finished = 0
        return met

    def _answered(self, generation: int) -> bool:
        return False
