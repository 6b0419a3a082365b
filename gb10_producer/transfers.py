"""Handoffs that outlive their connection: which are under way, which wait for a RESUME.

A transfer is *served* by one connection or *kept* for a while after that was lost: unsealed,
so that its job goes on, and sealed, until its COMMITTED comes. What is kept longer than was
said, or stands in others' way, is let go; what became of a transfer is remembered for a while,
so that every RESUME gets a true answer.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from gb10_producer.device import Device, Ticket
from gb10_producer.trust import Owner
from protocol.errors import BatonError
from protocol.handoff import Sending
from protocol.messages import Committed, Resume
from protocol.pairing import Pairing
from protocol.reasons import REASONS, differs, refusal

log = logging.getLogger(__name__)

REMEMBERED: Final = 1024
"""Transfers of which it is remembered how they ended."""


@dataclass(frozen=True)
class Patience:
    """How long and how many transfers wait for their RESUME.

    ``keep_s`` in seconds; ``in_the_way_s`` the same while another request waits for the device,
    or for memory, that one of them holds. ``most``: beyond that the longest lost goes.
    """

    keep_s: float = 30.0
    in_the_way_s: float = 3.0
    most: int = 8


class Server(Protocol):
    """The connection that serves a transfer."""

    def give_up(self) -> None:
        """Let go of the transfer, soon: another connection goes on with it. Any thread."""
        ...


@dataclass(eq=False)
class Transfer:
    """A request that was accepted, until it is installed, withdrawn or let go.

    Touched by the thread of the connection that serves it alone, but for what
    :class:`Transfers` holds of it.
    """

    sending: Sending
    ticket: Ticket
    owner: Owner
    server: Server | None
    arrived: int = 0
    """Frames below this one have arrived: nobody may ask for them again."""
    marks: deque[tuple[int, int]] = field(default_factory=deque)
    """(frame, item of the backlog that has it), of frames that may be asked for again."""
    lost_at: float = 0.0
    wanted: Callable[[], None] | None = None
    """Wakes the connection that waits for this transfer."""

    def acknowledge(self, frame: int) -> None:
        """Frames below ``frame`` have arrived: their rows need not be kept."""
        self.arrived = max(self.arrived, frame)
        item = None
        while self.marks and self.marks[0][0] < frame:
            item = self.marks.popleft()[1]
        if item is not None:
            self.ticket.reader.pass_to(self.marks[0][1] if self.marks else item)

    def rewind(self, frame: int) -> None:
        """Go back to where ``frame`` can be sent again. Raises ``offset_differs``."""
        reader, framed = self.ticket.reader, self.sending.framed
        item = next((item for sequence, item in self.marks if sequence >= frame), None)
        if item is None:
            # all that was sent has arrived
            item = self.marks[-1][1] if self.marks else reader.position
        if not reader.rewind(item, or_later=frame == framed):
            first = reader.first()
            kept = (sequence for sequence, item in self.marks if item >= first)
            raise differs("offset_differs", "next", frame, f"{next(kept, framed)} to {framed}")
        self.arrived = frame
        self.marks.clear()


class Transfers:
    """All transfers of one producer. Methods may be called from any thread."""

    def __init__(self, device: Device, patience: Patience | None = None) -> None:
        self._device = device
        self._patience = patience or Patience()
        self._lock = threading.Lock()
        self._known: dict[bytes, Transfer] = {}
        self._ended: OrderedDict[tuple[Owner, bytes], str] = OrderedDict()
        self.counts: Counter[str] = Counter()
        """Resumed and committed late; refused, by reason; let go. Logged at the end."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._known)

    @property
    def kept(self) -> int:
        """Transfers that wait for a RESUME."""
        with self._lock:
            return sum(transfer.server is None for transfer in self._known.values())

    def require_new(self, sending: Sending, owner: Owner) -> None:
        """Return unless the PREFILL was sent before, or its RESUME was faster than it.

        A RESUME that was told that there is none has its decoder ask anew. Raises
        PeerProtocolError ``generation_used``, TransferError ``transfer_unknown``.
        """
        with self._lock:
            self._require_unknown(sending)
            if (owner, sending.name) in self._ended:
                raise refusal("transfer_unknown", "its decoder has asked anew", field="prefill")

    def add(self, sending: Sending, ticket: Ticket, owner: Owner, server: Server) -> Transfer:
        """A request of ``owner`` was accepted, and ``server`` serves it.

        Raises PeerProtocolError ``generation_used`` for one that was sent twice; the ticket stays
        the caller's.
        """
        transfer = Transfer(sending, ticket, owner, server)
        with self._lock:
            self._require_unknown(sending)
            self._known[sending.name] = transfer
        return transfer

    def _require_unknown(self, sending: Sending) -> None:
        if sending.name in self._known:
            raise refusal("generation_used", "this PREFILL was sent before", field="prefill")

    def let_go(self, transfer: Transfer, now: float) -> None:
        """Its connection was lost: keep it for a while, and no more than some."""
        with self._lock:
            transfer.server, transfer.lost_at = None, now
            kept = [known for known in self._known.values() if known.server is None]
            wanted, transfer.wanted = transfer.wanted, None
        kept.sort(key=lambda each: each.lost_at)
        for oldest in kept[: max(0, len(kept) - self._patience.most)]:
            self._expire(oldest)
        if wanted is not None:
            wanted()

    def end(self, transfer: Transfer, how: str) -> None:
        """It is over: free what it holds, and remember ``how``, a reason, for a late RESUME."""
        with self._lock:
            name, begin, owner = transfer.sending.name, transfer.sending.begin, transfer.owner
            if self._known.get(name) is not transfer:
                return
            del self._known[name]
            self._remember(owner, name, how)
            if begin is not None:
                self._remember(owner, begin.transfer, how)
            wanted, transfer.wanted = transfer.wanted, None
        self._device.withdraw(transfer.ticket)
        if wanted is not None:
            wanted()

    def _expire(self, transfer: Transfer) -> bool:
        """Let go of what nobody serves; false where somebody does by now."""
        with self._lock:
            if transfer.server is not None:
                return False
            transfer.server = _NOBODY
            self.counts["let_go"] += 1
        self.end(transfer, "transfer_expired")
        return True

    def _remember(self, owner: Owner, name: bytes, how: str) -> None:
        self._ended[owner, name] = how if how in REASONS else "transfer_expired"
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def claim(
        self, resume: Resume, owner: Owner, server: Server, wake: Callable[[], None]
    ) -> Transfer | None:
        """The transfer of ``owner`` that ``resume`` names, which ``server`` serves from now on.

        ``None`` while another connection still lets go of it: ``wake`` is called when to ask
        again. Raises TransferError ``transfer_unknown``, ``transfer_expired``,
        ``transfer_committed``, ``offset_differs``, PeerProtocolError ``resume_differs``.
        """
        try:
            return self._claim(resume, owner, server, wake)
        except BatonError as error:
            with self._lock:
                self.counts[error.reason] += 1
            raise

    def _claim(
        self, resume: Resume, owner: Owner, server: Server, wake: Callable[[], None]
    ) -> Transfer | None:
        with self._lock:
            transfer = self._find(resume, owner)
            transfer.sending.require_resumable(resume, transfer.arrived)
            if transfer.server is not None:
                earlier, transfer.wanted = transfer.wanted, wake
                if earlier is not None and earlier != wake:
                    earlier()
                transfer.server.give_up()
                return None
            transfer.rewind(resume.next)
            transfer.server = server
            self.counts["resumed"] += 1
            return transfer

    def _find(self, resume: Resume, owner: Owner) -> Transfer:
        transfer = self._known.get(resume.prefill)
        if transfer is not None and transfer.owner == owner:
            return transfer
        for known in self._known.values():
            begin = known.sending.begin
            if known.owner == owner and begin is not None and begin.transfer == resume.transfer:
                raise refusal("resume_differs", "RESUME names another request", field="prefill")
        how = self._ended.get((owner, resume.prefill), "transfer_unknown")
        self._remember(owner, resume.prefill, how)
        raise refusal(how, "there is nothing to resume", field="prefill")

    def commit(self, committed: Committed, owner: Owner, pairing: Pairing) -> int:
        """A COMMITTED that came by another connection; returns the handoff's generation.

        Raises ``transfer_committed`` for one that was taken before, ``transfer_unknown``,
        ``transfer_expired``, and IntegrityError ``commit_differs``.
        """
        try:
            with self._lock:
                transfer = self._sealed(committed, owner)
            transfer.sending.require_committed(pairing, committed)
        except BatonError as error:
            with self._lock:
                self.counts[error.reason] += 1
            raise
        with self._lock:
            self.counts["committed_late"] += 1
        self.end(transfer, "transfer_committed")
        return transfer.sending.generation

    def _sealed(self, committed: Committed, owner: Owner) -> Transfer:
        for known in self._known.values():
            begin = known.sending.begin
            if known.owner == owner and begin is not None and begin.transfer == committed.transfer:
                return known
        how = self._ended.get((owner, committed.transfer), "transfer_unknown")
        raise refusal(how, "there is nothing to commit", field="transfer")

    def revoke(self, stands: Callable[[Owner], bool]) -> None:
        """Let go of what is kept for those who may not come back for it."""
        with self._lock:
            kept = [known for known in self._known.values() if known.server is None]
        for transfer in kept:
            if not stands(transfer.owner) and self._expire(transfer):
                log.info("transfer revoked", extra={"generation": transfer.sending.generation})

    def sweep(self, now: float) -> None:
        """Let go of what nobody resumed in time, or what is in others' way."""
        with self._lock:
            kept = [known for known in self._known.values() if known.server is None]
        for transfer in kept:
            waited = now - transfer.lost_at
            in_the_way = self._device.waits_for(transfer.ticket)
            failed = transfer.ticket.error is not None
            patience = self._patience
            late = waited >= (patience.in_the_way_s if in_the_way else patience.keep_s)
            if (failed or late) and self._expire(transfer):
                log.info(
                    "transfer let go",
                    extra={
                        "generation": transfer.sending.generation,
                        "waited_s": round(waited, 1),
                        "in_the_way": in_the_way,
                    },
                )

    def close(self) -> None:
        """The producer stops: nothing is kept."""
        with self._lock:
            kept = [known for known in self._known.values() if known.server is None]
            counts = dict(self.counts)
        for transfer in kept:
            self._expire(transfer)
        if counts:
            log.info("transfers in all", extra=counts)


class _Nobody(Server):
    """Serves what is about to be let go."""

    def give_up(self) -> None:
        """It is given up already."""


_NOBODY: Final = _Nobody()
