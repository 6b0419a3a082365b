"""One handoff as its sender knows it, apart from the connection that it goes over.

What was asked for, announced, digested and sealed is here, so that another connection can go
on with it; credit and states belong to a machine.
"""

from __future__ import annotations

import hashlib
import hmac

from protocol import seal
from protocol.errors import LocalProtocolError
from protocol.messages import NO_TRANSFER, Begin, Committed, Prefill, Resume, Seal
from protocol.pairing import Pairing
from protocol.reasons import differs, refusal


class Sending:
    """From PREFILL to COMMITTED. Not thread-safe; made by ``ProducerHandoff`` at PREFILL."""

    def __init__(self, prefill: Prefill, raw: bytes, total_at: float) -> None:
        """``raw`` is the PREFILL as it arrived; ``total_at`` when its deadline ends."""
        self.prefill = prefill
        self.total_at = total_at
        self.begin: Begin | None = None
        self.seal: Seal | None = None
        self.done = 0
        """Tokens computed so far, as told or to be told by PROGRESS."""
        self.raw_begin = b""
        self.name = hashlib.sha256(raw).digest()
        """The digest of the PREFILL, which no other request has: its nonce is in it."""
        self._raw = raw
        self._stream = seal.StreamDigest()

    @property
    def generation(self) -> int:
        """The number that this handoff alone has."""
        return self.prefill.generation

    @property
    def end(self) -> int:
        """The handoff's last position: how many tokens came."""
        return len(self.prefill.tokens) // 4

    @property
    def framed(self) -> int:
        """Frames that were sent at least once."""
        return self._stream.frames

    def announce(self, begin: Begin, raw: bytes) -> None:
        """Note the manifest and its bytes."""
        self.begin, self.raw_begin = begin, raw

    def add(self, sequence: int, digest: bytes, nbytes: int) -> None:
        """Note a frame; one that is sent again was noted before."""
        if sequence == self._stream.frames:
            self._stream.add(digest, nbytes)
        elif sequence > self._stream.frames:
            raise LocalProtocolError("a frame was left out")

    def sealed(self, pairing: Pairing, *, queue_us: int, compute_us: int) -> Seal:
        """The one SEAL of this handoff, made when it is first asked for."""
        if self.begin is None:
            raise LocalProtocolError("nothing was announced")
        if self.seal is None:
            self.seal = seal.make_seal(
                pairing,
                self._raw,
                self.raw_begin,
                self.begin.transfer,
                self._stream,
                queue_us=queue_us,
                compute_us=compute_us,
            )
        return self.seal

    def require_resumable(self, resume: Resume, kept_from: int) -> None:
        """Return only if ``resume`` names this handoff and an offset that it can go on from.

        Frames from ``kept_from`` on can be sent again. Raises PeerProtocolError
        ``resume_differs``, TransferError ``offset_differs`` with the offsets that are possible.
        """
        known = NO_TRANSFER if self.begin is None else self.begin.transfer
        same = (
            resume.generation == self.generation
            and hmac.compare_digest(resume.prefill, self.name)
            and resume.transfer in (NO_TRANSFER, known)
        )
        if not same:
            raise refusal("resume_differs", "RESUME names another request", field="prefill")
        # Without its BEGIN no frame can have been accepted.
        most = 0 if resume.transfer == NO_TRANSFER else self.framed
        if not kept_from <= resume.next <= most:
            possible = f"{kept_from} to {max(most, kept_from)}"
            raise differs("offset_differs", "next", resume.next, possible)

    def require_committed(self, pairing: Pairing, committed: Committed) -> None:
        """Return only if COMMITTED answers this handoff's seal.

        Raises PeerProtocolError ``message_unexpected``, ``transfer_differs``, IntegrityError
        ``commit_differs``.
        """
        if self.seal is None:
            raise refusal("message_unexpected", "COMMITTED came before SEAL", field="COMMITTED")
        seal.verify_committed(pairing, self.seal, committed)
