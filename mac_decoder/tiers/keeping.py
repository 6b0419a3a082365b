"""Keeping cuts, in the order in which they were handed over, and publishing what is kept.

One thread compares and copies; publishing has a thread of its own (``store/publisher``). A
cut that memory does not take, mostly for want of room, is published all the same, out of the
rows that were handed over, and the next cut of its sequence goes on from the disk.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mac_decoder.reporting import traced
from mac_decoder.reuse.cut import BlockBody, Bytes, CutBody, Place, block_sizes, divide
from mac_decoder.reuse.facts import Publication
from mac_decoder.reuse.line import Line
from mac_decoder.reuse.resident import Pinned, Resident
from mac_decoder.store.events import Deleting, Event, Invalid
from mac_decoder.store.manifest import Role
from mac_decoder.store.publisher import FORGOTTEN, Job, Publisher
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from mac_decoder.tiers.waiting import Waiting
from protocol.errors import BatonError
from protocol.identity import Identity
from protocol.layout import Layout, payload_bytes
from protocol.messages import History

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """A cut to keep: rows from ``known`` whole blocks on, window rows and states.

    ``tokens`` are all that are in the cache. A cut that came from the durable tier is not
    published again.
    """

    line: Line
    space: bytes
    tokens: NDArray[np.uint32] = field(repr=False)
    rows: Mapping[Place, Bytes] = field(repr=False)
    known: int
    history: tuple[History, ...]
    role: Role
    publish: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes of the rows."""
        return sum(array.nbytes for array in self.rows.values())


class Forgotten(NamedTuple):
    """What was let go of: cuts in memory, their bytes, and publications that were given up."""

    cuts: int = 0
    nbytes: int = 0
    publications: int = 0


class Keeping:
    """Takes cuts into the resident tier and has them published. Any thread may call."""

    def __init__(
        self, identity: Identity, layout: Layout, resident: Resident, waiting: Waiting
    ) -> None:
        """Without a durable tier until :meth:`attach`."""
        self._identity = identity
        self._layout = layout
        self._block_nbytes = sum(block_sizes(layout).values())
        self._resident = resident
        self._waiting = waiting
        self._publisher: Publisher | None = None
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="baton-keep")
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def attach(self, store: Store) -> None:
        """Publish from now on."""
        self._publisher = Publisher(store, self._told)

    # -- in the caller's thread

    def ready(
        self, line: Line, position: int, role: Role, *, publish: bool = True
    ) -> tuple[Line, int] | None:
        """The line that a cut at ``position`` is to be handed over for, and how many whole blocks
        need not be; ``None``: nothing is wanted of it.

        To be asked before its rows are made. A line that is broken is given up for another one.
        """
        going = line.renewed() if line.broken else line
        if going is not line and role == "step" and not going.blocks:
            # All of it again is worth a turn's end, not a step.
            return None
        whole = payload_bytes(self._layout, 0, position)
        fits = self._resident.fits(whole)
        if not fits and (self._publisher is None or not publish):
            self._count("put_no_room")
            return None
        # What came from the disk is taken into memory whole, where that can have it.
        known = 0 if fits and going.new_to_memory else going.blocks
        # Not what a delta ships: a cut has its whole window, also rows that another one has.
        if not self._waiting.accepts(whole - known * self._block_nbytes):
            self._count("keeper_behind")
            return None
        if going is not line:
            self._count("line_renewed" if known else "line_anew")
            self.let_go(line)
        going.new_to_memory = False
        return going, known

    def keep(self, kept: Kept) -> None:
        """Queue a cut."""
        number = self._waiting.add(kept.space, kept.tokens, kept.nbytes)
        self._submit(self._keep, kept, number)

    def let_go(self, line: Line) -> None:
        """The sequence is not gone on with; its kept cuts may be evicted."""
        self._submit(line.release)

    def rest(self, line: Line) -> None:
        """The sequence may be gone on with later; until then its kept cuts may be evicted."""
        self._submit(line.rest)

    def wake(self, line: Line) -> None:
        """The sequence is gone on with, on what is still there of its kept cuts."""
        self._submit(line.wake, self._resident, line.blocks)

    def counts(self) -> dict[str, int]:
        """How often what happened."""
        with self._lock:
            return dict(self._counts)

    def publishing(self) -> int:
        """Cuts whose publication has not ended."""
        return self._publisher.waiting() if self._publisher is not None else 0

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was to be kept is, and published; whether that was reached."""
        kept = self._waiting.drain(timeout_s)
        return kept and (self._publisher is None or self._publisher.drain(timeout_s))

    def close(self, timeout_s: float | None = None) -> bool:
        """Keep and publish what waits, for so long; whether all was published."""
        self._ordered.shutdown(wait=True)
        return self._publisher is None or self._publisher.close(timeout_s)

    # -- for whoever keeps house

    def forget(self, cuts: Collection[bytes] | None = None) -> Future[Forgotten]:
        """Let go of ``cuts``, by their names, or of all that was handed over before this call:
        in memory, and on the way to the disk. What is handed over later is kept as ever.

        A publication in progress is not waited for: see :meth:`finish_publication`.
        """
        return self._ordered.submit(self._forget, cuts)

    def unpublished(self) -> tuple[Job, ...]:
        """The cuts whose publication has not ended."""
        return self._publisher.unfinished() if self._publisher is not None else ()

    def finish_publication(self, stopped: Callable[[], bool]) -> None:
        """Wait for the publication that is in progress, if any, or to be stopped."""
        if self._publisher is not None:
            self._publisher.finish_current(stopped)

    # -- in the keeping thread

    def _forget(self, cuts: Collection[bytes] | None) -> Forgotten:
        names = [cut.name for cut in self._resident.cuts()] if cuts is None else cuts
        nbytes = self._resident.weigh((), names).own
        # First: so that no outcome is told of a cut that is kept again in the meantime.
        withdrawn = self._publisher.withdraw(cuts) if self._publisher is not None else 0
        return Forgotten(self._resident.forget(cuts), nbytes, withdrawn)

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        self._ordered.submit(work, *arguments).add_done_callback(self._ended)

    def _ended(self, outcome: Future[None]) -> None:
        error = outcome.exception()
        if error is not None:
            log.error("a cut could not be kept: %s", traced(error))
            self._count("keep_failed")

    def _keep(self, kept: Kept, number: int) -> None:
        sent = False
        try:
            sent = self._put(kept, number)
        except BatonError as error:
            # A fault of ours, which costs a later prompt a hit and nobody an answer.
            log.error("a cut was not kept: %s (%s)", error.message, error.reason)
            self._count("keep_failed")
            kept.line.broken = True
        finally:
            self._waiting.kept(number)
            if not sent:
                self._waiting.freed(number)

    def _put(self, kept: Kept, number: int) -> bool:
        """Keep a cut in memory, or else on disk; whether its rows are needed until it is there."""
        line = kept.line
        if not line.follows(kept.known):
            # The blocks before it are not kept, which was not known yet when this was taken.
            self._count("line_broken")
            return False
        cut, blocks = divide(
            self._layout, kept.space, kept.tokens, kept.rows, kept.history, kept.known
        )
        outcome, pinned = self._remembered(kept, cut, blocks)
        self._count(f"put_{outcome}")
        if pinned is not None:
            line.hold(pinned)
            if kept.publish:
                self._publish(kept, pinned.key)
            return False
        if not kept.publish:
            # It came from the disk, and the line goes on from there.
            return False
        if self._publisher is None:
            line.broken = True
            return False
        self._publish_rows(kept, number, cut, blocks, self._publisher)
        return True

    def _remembered(
        self, kept: Kept, cut: CutBody, blocks: tuple[BlockBody, ...]
    ) -> tuple[str, Pinned | None]:
        """What the resident tier did with a cut, which it holds if that is pinned."""
        before = kept.line.pinned
        if kept.known and before is None:
            return "past_memory", None
        known: Publication = "pending" if kept.publish else "published"
        put = self._resident.put(
            kept.space, cut, blocks, publication=known, continues=before, why=kept.role
        )
        held = put.outcome in ("stored", "held")
        return put.outcome, self._resident.pin(put.key) if held else None

    def _publish(self, kept: Kept, key: bytes) -> None:
        """Publish a resident cut, which stays resident until then."""
        pinned = self._resident.pin(key) if self._publisher is not None else None
        if pinned is None or self._publisher is None:
            return
        kept.line.sent(len(pinned.cut.blocks))
        blocks = {body.hash: body for body in pinned.blocks}
        job = Job(
            kept.space,
            self._identity,
            pinned.cut,
            tuple(blocks.values()),
            kept.role,
            kept.line,
            release=pinned.release,
        )
        self._publisher.submit(job)

    def _publish_rows(
        self,
        kept: Kept,
        number: int,
        cut: CutBody,
        blocks: tuple[BlockBody, ...],
        publisher: Publisher,
    ) -> None:
        """Publish a cut that memory does not take; its blocks before may still be there."""
        before = kept.line.leave_memory()

        def release() -> None:
            if before is not None:
                before.release()
            self._waiting.freed(number)

        if before is not None:
            blocks = (*before.blocks[: kept.known], *blocks)
        kept.line.sent(len(cut.blocks))
        job = Job(
            kept.space,
            self._identity,
            cut,
            blocks,
            kept.role,
            kept.line,
            resident=False,
            release=release,
        )
        publisher.submit(job)

    # -- what became of it, in the publisher's thread and others

    def _told(self, job: Job, outcome: Published | Refused) -> None:
        if job.resident:
            self._resident.settle(job.name, _settled(job.name, outcome))
        if job.line is not None:
            job.line.told(len(job.cut.blocks))
        if isinstance(outcome, Refused):
            self._count(outcome.reason)
            if outcome.reason != FORGOTTEN:
                log.warning("a cut is not on disk (%s)", outcome.reason)

    def heard(self, event: Event) -> None:
        """The store says what it does.

        What is damaged on disk is not served from memory either; what had to go for want of
        space still is, and so is a step whose extension is there in its place.
        """
        match event:
            case Invalid(cuts=names):
                for name in names:
                    self._resident.settle(name, "invalid")
            case Deleting(cut=name, reason="superseded") if name:
                self._resident.settle(name, "superseded", was="published")
            case Deleting(cut=name, reason="room" | "prune" | "clear" | "forget") if name:
                self._resident.settle(name, "out_of_space", was="published")
            case _:
                pass

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1


def _settled(name: bytes, outcome: Published | Refused) -> Publication:
    if isinstance(outcome, Published):
        return "superseded" if name in outcome.superseded else "published"
    # The queue, like the disk, had no room, or it was given up: nothing was found to be wrong.
    untried = ("publisher_behind", "store_closed", FORGOTTEN)
    roomless = outcome.out_of_space or outcome.reason in untried
    return "out_of_space" if roomless else "refused"
