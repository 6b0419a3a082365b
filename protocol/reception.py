"""One handoff as its receiver knows it, apart from the connection that it came over.

A connection may be lost and the handoff go on over another: what was asked for, what arrived
and what was verified is here; credit, deadlines for answers and states belong to a machine.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from protocol import frames, manifest, seal
from protocol.errors import LocalProtocolError
from protocol.frames import Header
from protocol.layout import Layout, Slot
from protocol.manifest import frames_of
from protocol.messages import NO_TRANSFER, Begin, Prefill, Resume, Seal
from protocol.outstanding import Outstanding
from protocol.pairing import Pairing
from protocol.reasons import refusal


class _Pending(NamedTuple):
    """A frame whose header is checked and whose digest is not."""

    sequence: int
    digest: bytes
    nbytes: int


class Reception:
    """From PREFILL to its verified seal. Not thread-safe; made by ``DecoderHandoff.start``.

    Whoever holds one ends it: by a machine that verifies or aborts it, or by :meth:`withdraw`.
    """

    def __init__(
        self,
        prefill: Prefill,
        raw: bytes,
        outstanding: Outstanding,
        *,
        or_full: bool,
        started: float,
        total_at: float,
    ) -> None:
        """``raw`` is the PREFILL as it travels; the generation is open in ``outstanding``."""
        self.prefill = prefill
        self.or_full = or_full
        self.started = started
        self.total_at = total_at
        self.begin: Begin | None = None
        self.seal: Seal | None = None
        self.progresses = 0
        """PROGRESS messages so far."""
        self.done = 0
        """Tokens computed so far, as PROGRESS said."""
        self.received = 0
        """Frames whose header was accepted: the offset that RESUME names."""
        self._raw, self._raw_begin = raw, b""
        self._outstanding = outstanding
        self._slots: Iterator[Slot] = iter(())
        self._pending: deque[_Pending] = deque()
        self._stream = seal.StreamDigest()

    @property
    def generation(self) -> int:
        """The number that this handoff alone has."""
        return self.prefill.generation

    @property
    def end(self) -> int:
        """The handoff's last position: how many tokens were sent."""
        return len(self.prefill.tokens) // 4

    @property
    def pending(self) -> int:
        """Frames whose digest was not reported yet."""
        return len(self._pending)

    @property
    def awaited(self) -> int | None:
        """The frame whose digest must be reported next, if one must."""
        return self._pending[0].sequence if self._pending else None

    def require_open(self, begin: Begin) -> None:
        """Return only if BEGIN answers a request that is open; raises as ``Outstanding.check``."""
        self._outstanding.check(begin.generation, begin.nonce)

    def announce(self, begin: Begin, raw: bytes, layout: Layout, tile: int) -> None:
        """Take the manifest in. Raises what ``manifest.require_manifest`` raises."""
        manifest.require_manifest(begin, self.prefill, layout, tile, or_full=self.or_full)
        self.begin, self._raw_begin = begin, raw
        self._slots = frames_of(layout, self.prefill, begin)

    def accept(self, header: Header, layout: Layout) -> Slot:
        """The slot of the next frame. Raises PeerProtocolError ``frame_...``."""
        slot = next(self._slots, None)
        if slot is None:
            raise refusal("frame_unexpected", "a frame came after the last one")
        frames.require_slot(header, layout, slot, self.generation)
        self._pending.append(_Pending(slot.sequence, header.digest, slot.nbytes))
        self.received += 1
        return slot

    def digested(self, sequence: int, digest: bytes) -> None:
        """Compare the digest computed over a frame with the one it claimed, in frame order.

        Raises IntegrityError ``digest_differs``, LocalProtocolError out of order.
        """
        if sequence != self.awaited:
            raise LocalProtocolError("frame digests must be reported in order, once")
        pending = self._pending.popleft()
        if not hmac.compare_digest(pending.digest, digest):
            text = f"frame {sequence} is not what its digest says"
            raise refusal("digest_differs", text, field="sequence", found=sequence)
        self._stream.add(digest, pending.nbytes)

    def verified(self, pairing: Pairing) -> bool:
        """Whether the seal and all digests are here; then the seal holds and is admitted.

        Raises IntegrityError and PeerProtocolError where it does not hold.
        """
        if self.begin is None or self.seal is None or self._pending:
            return False
        seal.verify_seal(pairing, self._raw, self._raw_begin, self._stream, self.seal)
        # The last check that can refuse: from here on this generation is used up.
        self._outstanding.admit(self.generation, self.prefill.nonce)
        return True

    def forget_last(self, layout: Layout) -> None:
        """The last accepted frame did not arrive whole: it is to be sent again."""
        if not self._pending or self.begin is None:
            raise LocalProtocolError("no frame is on its way")
        self._pending.pop()
        self.received -= 1
        self._slots = islice(frames_of(layout, self.prefill, self.begin), self.received, None)

    def resume(self, credit: int) -> Resume:
        """The RESUME that goes on where this stands; a SEAL without COMMITTED comes again.

        Raises LocalProtocolError while digests are missing.
        """
        if self._pending:
            raise LocalProtocolError("report all digests before resuming")
        self.seal = None
        return Resume(
            generation=self.generation,
            prefill=hashlib.sha256(self._raw).digest(),
            transfer=NO_TRANSFER if self.begin is None else self.begin.transfer,
            next=self.received,
            credit=credit,
        )

    def withdraw(self) -> None:
        """Use the generation up without an install; harmless once it is."""
        self._outstanding.withdraw(self.generation)
