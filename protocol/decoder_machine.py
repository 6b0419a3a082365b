"""The decoder's side of a connection: asks, receives, verifies; installs nothing itself."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol import frames, hello, manifest, seal
from protocol.deadlines import Timing
from protocol.errors import LocalProtocolError
from protocol.events import Began, Event, Progressed, Ready, Sealed
from protocol.identity import Identity
from protocol.layout import Layout, Slot, schedule
from protocol.machine import Machine
from protocol.messages import (
    VERSION,
    Begin,
    Credit,
    Hello,
    HelloAck,
    Message,
    Prefill,
    Progress,
    Proof,
    Seal,
    encode,
    encode_tokens,
)
from protocol.outstanding import Outstanding
from protocol.pairing import Pairing, PinnedCertificates
from protocol.reasons import differs, refusal
from protocol.states import DECODER, State, Transitions

PROGRESS_BURST: Final = 64
PROGRESS_PER_S: Final = 10
"""A handoff may bring 64 PROGRESS messages and ten more per second of its age."""


class _Pending(NamedTuple):
    """A frame whose header is checked and whose digest is not."""

    sequence: int
    digest: bytes
    nbytes: int


class DecoderHandoff(Machine):
    """The decoder's machine for one connection, over which handoffs run one by one.

    Order of calls: ``connect``, then for each handoff ``start``, then whatever arrives
    through ``receive_text`` and ``frame_header``, each frame's digest in order through
    ``frame_digest``, and after :class:`Sealed` the install and ``commit``.
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
        self._finished = 0
        self._clear()

    def _clear(self) -> None:
        """Forget the handoff; nothing of it, tokens least of all, outlives it."""
        self._prefill: Prefill | None = None
        self._begin: Begin | None = None
        self._seal: Seal | None = None
        self._raw_prefill = self._raw_begin = b""
        self._slots: Iterator[Slot] = iter(())
        self._pending: deque[_Pending] = deque()
        self._stream = seal.StreamDigest()
        self._or_full = False
        self._received = 0
        self._credit = self._granted = self._owed = 0
        self._progress = self._done = 0
        self._started = 0.0

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
        deadline_s: float | None = None,
        credit: int = 32,
    ) -> None:
        """Ask for the cache of ``[cut, len(tokens))``: PREFILL is queued.

        ``tokens`` are those *before* the boundary token. ``generation`` was reserved for
        this request alone and ascends on a connection; ``nonce`` is 32 fresh random bytes.
        ``or_full``: BEGIN may name 0 instead of ``cut``, so that a full handoff takes the
        delta's place. ``deadline_s``: total time allowed, by default :meth:`Timing.total_s`.
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
        if generation <= self._generation:
            raise LocalProtocolError("generations must ascend on a connection")
        allowed_s = self._timing.total_s(end) if deadline_s is None else deadline_s
        with self._own():
            prefill = Prefill(
                request=request_id,
                generation=generation,
                nonce=nonce,
                identity=self._identity.digest(),
                cut=cut,
                extra_cuts=extra_cuts,
                deadline_ms=round(allowed_s * 1000),
                credit=min(credit, limits.max_credit),
                tokens=encode_tokens(tokens),
            )
            raw = encode(prefill)
            manifest.require_request(prefill)
        self._outstanding.open(generation, nonce)
        self._go_locally("start")
        self._clear()
        self._queue.append(raw)
        self._generation = generation
        self._prefill, self._raw_prefill, self._or_full = prefill, raw, or_full
        self._credit = self._granted = prefill.credit
        self._started = now
        self._total_at = now + allowed_s
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
            slot = next(self._slots, None)
            if slot is None:
                raise refusal("frame_unexpected", "a frame came after the last one")
            frames.require_slot(header, self._layout, slot, self._generation)
            self._pending.append(_Pending(slot.sequence, header.digest, slot.nbytes))
            self._received += 1
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
        if not self._pending or self._pending[0].sequence != sequence:
            raise LocalProtocolError("frame digests must be reported in order, once")
        with self._refusing():
            pending = self._pending.popleft()
            if not hmac.compare_digest(pending.digest, digest):
                text = f"frame {sequence} is not what its digest says"
                raise refusal("digest_differs", text, field="sequence", found=sequence)
            self._stream.add(digest, pending.nbytes)
            self._owed += 1
            self._grant()
            return self._verify(now)

    def commit(self, now: float) -> None:
        """Say that the sealed cache is installed: COMMITTED is queued, the machine READY."""
        self._allowed("commit")
        assert self._seal is not None
        self._send(seal.make_committed(self._pairing, self._seal))
        self._go_locally("commit")
        self._finished = self._generation
        self._clear()
        self._rearm(now)

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
        assert self._prefill is not None
        self._progress += 1
        allowed = PROGRESS_BURST + PROGRESS_PER_S * (now - self._started)
        if self._progress > allowed:
            raise differs("too_many_messages", "PROGRESS", self._progress, int(allowed))
        total = len(self._prefill.tokens) // 4
        if not self._done <= message.done <= total:
            raise differs("progress_invalid", "done", message.done, f"{self._done} to {total}")
        self._done = message.done
        self._rearm(now)
        return [Progressed(message.done, total)]

    def _on_begin(self, message: Begin, raw: bytes, now: float) -> list[Event]:
        self._go("BEGIN")
        if self._state == State.ABORTING:
            return []
        assert self._prefill is not None
        self._outstanding.check(message.generation, message.nonce)
        self._require_generation(message.generation)
        tile = self.ack.recipe.tile
        manifest.require_manifest(message, self._prefill, self._layout, tile, or_full=self._or_full)
        self._begin, self._raw_begin = message, raw
        self._slots = schedule(self._layout, message.cut, message.end, tile)
        self._rearm(now)
        return [Began(message)]

    def _on_seal(self, message: Seal, now: float) -> list[Event]:
        self._go("SEAL")
        if self._state == State.ABORTING:
            return []
        begin = self._begin
        assert begin is not None
        seal.require_complete(message, begin.transfer, begin.frames, begin.payload_bytes)
        if self._received < begin.frames:
            raise differs("frames_missing", "frames", self._received, begin.frames)
        self._seal = message
        self._rearm(now)
        return self._verify(now)

    # steps

    def _verify(self, now: float) -> list[Event]:
        """Verify the seal once it and all digests are here."""
        begin, message = self._begin, self._seal
        if begin is None or message is None or self._pending:
            return []
        assert self._prefill is not None
        seal.verify_seal(self._pairing, self._raw_prefill, self._raw_begin, self._stream, message)
        # The last check that can refuse: from here on this generation is used up.
        self._outstanding.admit(self._prefill.generation, self._prefill.nonce)
        self._go_locally("verified")
        self._total_at = None
        self._rearm(now)
        return [Sealed(begin, message)]

    def _grant(self) -> None:
        """Give credit back in halves of what was given first, never beyond the last frame."""
        assert self._begin is not None
        assert self._prefill is not None
        frames_left = self._begin.frames - self._granted
        if frames_left > 0 and self._owed >= max(1, self._prefill.credit // 2):
            granted = min(self._owed, frames_left)
            self._send(Credit(generation=self._generation, frames=granted))
            self._credit += granted
            self._granted += granted
            self._owed = 0

    def _patience(self) -> float | None:
        match self._state:
            case State.HELLO_SENT | State.PROOF_SENT:
                return self._timing.handshake_s
            case State.REQUESTED | State.RECEIVING:
                return self._timing.idle_s
            case State.ABORTING | State.CROSSED:
                return self._timing.abort_s
            case _:
                return None

    def _withdrawn(self) -> None:
        if self._prefill is not None:
            self._outstanding.withdraw(self._prefill.generation)
            credit = self._credit
            self._clear()
            # What was credited may still arrive, and is counted while it is dropped.
            self._credit = self._granted = credit

    def _crossed(self, generation: int) -> bool:
        met = generation != 0 and generation == self._finished
        if met:
            self._finished = 0
        return met

    def _answered(self, generation: int) -> bool:
        return False
