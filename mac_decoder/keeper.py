"""The fetched tiers as the engine sees them: looked up, restored from, kept in. No mlx.

One thread keeps, in the order in which it was asked. Others look up, and wait for what was to
be kept before of the same beginning, so that a prompt that comes after an answer finds what
the answer left and a stranger waits for nobody. Others again copy and read what is restored.
Publishing has a thread of its own (``store/publisher``). Nothing here waits for a device, and
the MLX thread waits for none of it.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mac_decoder.reporting import traced
from mac_decoder.reuse.cut import REST, Bytes, Place, clipped, divide, pieces
from mac_decoder.reuse.facts import NOTHING, Holding, Publication, Restore
from mac_decoder.reuse.resident import Pinned, Resident
from mac_decoder.store.events import Deleting, Event, Invalid
from mac_decoder.store.manifest import Role
from mac_decoder.store.publisher import Job, Publisher
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.reading import SCRATCH_BYTES
from mac_decoder.store.store import Store, log_event
from protocol.blocks import BLOCK, as_tokens, chain, cut_digest, namespace
from protocol.errors import BatonError, Cancelled, IntegrityError
from protocol.identity import Identity
from protocol.layout import Layout
from protocol.messages import History

log = logging.getLogger(__name__)

MOST_QUEUED: Final = 1 << 30
"""Bytes of rows that may wait to be kept, beside one cut that is longer."""

_LOOKUPS: Final = 4
_RESTORES: Final = 2

_CHUNK: Final = 4 << 20
"""Bytes copied between two looks at whether the request was withdrawn."""

Into = Callable[[int, int, int, int], memoryview]
"""``(index, role, offset, nbytes)`` to writable memory of the cache to be built."""


@dataclass(frozen=True)
class Looked:
    """What the fetched tiers hold of a prompt. ``durable`` is ``None`` without such a tier."""

    space: bytes
    tokens: NDArray[np.uint32] = field(repr=False)
    names: tuple[bytes, ...] = field(repr=False)
    resident: Holding
    durable: Holding | None

    def cut_name(self, position: int) -> bytes:
        """The name of the prompt's cut at ``position``."""
        whole = position // BLOCK
        parent = self.names[whole - 1] if whole else b""
        return cut_digest(self.space, parent, self.tokens[whole * BLOCK : position], position)


@dataclass(frozen=True)
class Restored:
    """A finished restore: the history of what was placed, and what it cost.

    Times are seconds as the request waited them; ``staging_bytes`` is the memory it took beyond
    the cut. ``pinned`` is a resident cut, still held for whoever goes on from it.
    """

    history: tuple[History, ...]
    nbytes: int
    read_s: float = 0.0
    verify_s: float = 0.0
    place_s: float = 0.0
    staging_bytes: int = 0
    pinned: Pinned | None = None


class Line:
    """One sequence's blocks as they are kept, so that each of its cuts adds only what is new.

    ``blocks`` whole blocks were handed over; ``broken`` that they are not kept, so that the
    next cut has to bring all of them. The rest belongs to the keeper's thread: the cut that the
    sequence was last kept as, pinned while the sequence goes on and only named while it rests.
    """

    def __init__(self, pinned: Pinned | None = None, blocks: int = 0) -> None:
        self.blocks = blocks
        self.broken = False
        self.pinned = pinned
        self.rested: tuple[bytes, object] | None = None

    def release(self) -> None:
        """Let the cut be evicted."""
        if self.pinned is not None:
            self.pinned.release()
            self.pinned = None


@dataclass(frozen=True)
class Kept:
    """A cut to keep: rows from ``line.blocks`` whole blocks on, window rows and states.

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


class Keeper:
    """Resident and durable tier of one model. Any thread may call."""

    def __init__(
        self, identity: Identity, layout: Layout, store_key: bytes, ram_bytes: int = 0
    ) -> None:
        """Without a durable tier until :meth:`attach`."""
        self._identity = identity
        self._layout = layout
        self._store_key = store_key
        self._resident = Resident(ram_bytes)
        self._store: Store | None = None
        self._publisher: Publisher | None = None
        self._ordered = ThreadPoolExecutor(1, thread_name_prefix="baton-keep")
        self._lookups = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="baton-look")
        self._restores = ThreadPoolExecutor(_RESTORES, thread_name_prefix="baton-restore")
        self._lock = threading.Condition()
        self._waiting: dict[int, tuple[bytes, bytes]] = {}
        self._numbers = 0
        self._queued = 0
        self._counts: Counter[str] = Counter()

    def attach(self, store: Store) -> None:
        """Keep on disk from now on; the store is closed with this keeper."""
        self._store = store
        self._publisher = Publisher(store, self._told)

    def resize(self, ram_bytes: int) -> None:
        """Change the budget of the resident tier."""
        self._resident.resize(ram_bytes)

    @property
    def durable(self) -> bool:
        """Whether there is a durable tier."""
        return self._store is not None

    # -- finding and restoring

    def space(self, salt: bytes = b"") -> bytes:
        """The namespace of this model's cuts under ``salt``."""
        return namespace(self._store_key, self._identity.digest(), salt)

    def look(self, tokens: tuple[int, ...], salt: bytes = b"") -> Future[Looked]:
        """What is held of a prompt, after everything of it that was to be kept before."""
        with self._lock:
            before = dict(self._waiting)
        return self._lookups.submit(self._look, tokens, salt, before)

    def _look(
        self, tokens: tuple[int, ...], salt: bytes, before: Mapping[int, tuple[bytes, bytes]]
    ) -> Looked:
        space = self.space(salt)
        prompt = _array(tokens)
        mine = (space, _beginning(prompt))
        related = {number for number, other in before.items() if _related(mine, other)}
        with self._lock:
            self._lock.wait_for(lambda: related.isdisjoint(self._waiting))
        names = tuple(chain(space, prompt))
        store = self._store
        # First: what it finds damaged on the way is then not offered from memory either.
        durable = None if store is None else store.holding(space, prompt, names)
        resident = self._resident.holding(space, prompt, names)
        if store is not None and durable is not None and _outran(resident, durable):
            # Something was published in between: memory knows, this look at the disk does not.
            durable = store.holding(space, prompt, names)
        return Looked(space, prompt, names, resident, durable)

    def restore(
        self, action: Restore, into: Into, cancelled: Callable[[], bool]
    ) -> Future[Restored | None]:
        """Place the bytes of a held cut; ``None`` if it is not held any more.

        The future raises ``IntegrityError`` for a damaged cut, which is then not offered again,
        and ``Cancelled``. The memory is void after an error, and nobody writes to it.
        """
        work = self._from_memory if action.tier == "resident" else self._from_disk
        return self._restores.submit(work, action, into, cancelled)

    def _from_memory(
        self, action: Restore, into: Into, cancelled: Callable[[], bool]
    ) -> Restored | None:
        began = time.perf_counter()
        pinned = self._resident.pin(_name(action), serving=True)
        if pinned is None:
            return None
        nbytes, done = 0, False
        try:
            for piece in pieces(self._layout, action.held, action.position):
                body = pinned.cut.rest if piece.source == REST else pinned.blocks[piece.source].data
                rows = body[piece.index, piece.role][piece.start : piece.start + piece.nbytes]
                target = np.frombuffer(
                    into(piece.index, piece.role, piece.offset, piece.nbytes), np.uint8
                )
                for start in range(0, piece.nbytes, _CHUNK):
                    if cancelled():
                        raise Cancelled("the request was withdrawn")
                    # Releases the interpreter's lock, unlike assigning to a memoryview.
                    np.copyto(target[start : start + _CHUNK], rows[start : start + _CHUNK])
                nbytes += piece.nbytes
            done = True
        finally:
            if not done:
                pinned.release()
        history = clipped(pinned.cut.history, action.position)
        return Restored(history, nbytes, place_s=time.perf_counter() - began, pinned=pinned)

    def _from_disk(
        self, action: Restore, into: Into, cancelled: Callable[[], bool]
    ) -> Restored | None:
        began = time.perf_counter()
        if self._store is None:
            return None
        found = self._store.read(_name(action), into, position=action.position, cancelled=cancelled)
        if found is None:
            return None
        # Threads read and digest side by side: their shares of the time that was waited.
        waited, work = time.perf_counter() - began, found.read_s + found.verify_s
        read_s = waited * found.read_s / work if work else waited
        return Restored(
            clipped(found.manifest.history, action.position),
            found.nbytes,
            read_s=read_s,
            verify_s=waited - read_s,
            staging_bytes=SCRATCH_BYTES,
        )

    # -- keeping

    def accepts(self, nbytes: int) -> bool:
        """Whether so many bytes of rows may be handed over now; false is counted.

        To be asked before they are made: only the MLX thread hands over.
        """
        with self._lock:
            good = not self._queued or self._queued + nbytes <= MOST_QUEUED
            self._counts["keeper_behind"] += not good
            return good

    def keep(self, kept: Kept) -> None:
        """Queue a cut."""
        nbytes = kept.nbytes
        with self._lock:
            self._queued += nbytes
            self._numbers += 1
            number = self._numbers
            self._waiting[number] = (kept.space, _beginning(kept.tokens))
        self._submit(self._keep, kept, nbytes, number)

    def let_go(self, line: Line) -> None:
        """The sequence is not gone on with; its kept cuts may be evicted."""
        self._submit(line.release)

    def rest(self, line: Line) -> None:
        """The sequence may be gone on with later; until then its kept cuts may be evicted."""
        self._submit(_rest, line)

    def wake(self, line: Line) -> None:
        """The sequence is gone on with, on what is still there of its kept cuts."""
        self._submit(self._wake, line)

    def _wake(self, line: Line) -> None:
        rested, line.rested = line.rested, None
        if rested is not None:
            key, token = rested
            line.pinned = self._resident.pin(key, token=token)
        line.broken = line.broken or (line.blocks > 0 and line.pinned is None)

    def _submit(self, work: Callable[..., None], *arguments: object) -> None:
        self._ordered.submit(work, *arguments).add_done_callback(self._ended)

    def _ended(self, outcome: Future[None]) -> None:
        error = outcome.exception()
        if error is not None:
            log.error("a cut could not be kept: %s", traced(error))
            self._count("keep_failed")

    def _keep(self, kept: Kept, nbytes: int, number: int) -> None:
        try:
            self._put(kept)
        except BatonError as error:
            # A fault of ours, which costs a later prompt a hit and nobody an answer.
            log.error("a cut was not kept: %s (%s)", error.message, error.reason)
            self._count("keep_failed")
            kept.line.broken = True
        finally:
            with self._lock:
                self._queued -= nbytes
                del self._waiting[number]
                self._lock.notify_all()

    def _put(self, kept: Kept) -> None:
        line = kept.line
        if kept.known and line.broken:
            # The blocks before it are not kept, which was not known yet when this was taken.
            self._count("line_broken")
            return
        cut, blocks = divide(
            self._layout, kept.space, kept.tokens, kept.rows, kept.history, kept.known
        )
        known: Publication = "pending" if kept.publish else "published"
        put = self._resident.put(kept.space, cut, blocks, publication=known, continues=line.pinned)
        self._count(f"put_{put.outcome}")
        pinned = self._resident.pin(put.key) if put.outcome in ("stored", "held") else None
        if pinned is not None:
            line.release()
            line.pinned = pinned
            if kept.publish:
                self._publish(kept, put.key)
            return
        line.broken = True
        whole = len(blocks) == len(cut.blocks)
        if put.outcome == "no_room" and kept.publish and kept.role == "turn" and whole:
            self._publish_unheld(Job(kept.space, self._identity, cut, blocks, kept.role))

    def _publish(self, kept: Kept, key: bytes) -> None:
        pinned = self._resident.pin(key) if self._publisher is not None else None
        if pinned is None or self._publisher is None:
            return
        blocks = {body.hash: body for body in pinned.blocks}
        job = Job(
            kept.space,
            self._identity,
            pinned.cut,
            tuple(blocks.values()),
            kept.role,
            release=pinned.release,
        )
        self._publisher.submit(job)

    def _publish_unheld(self, job: Job) -> None:
        """Publish what the resident tier has no room for: one at a time, since nothing counts
        the bytes of those that wait.
        """
        if self._publisher is None:
            return
        if self._publisher.waiting():
            self._count("publisher_behind")
            return
        self._publisher.submit(job)

    # -- what became of it

    def _told(self, job: Job, outcome: Published | Refused) -> None:
        self._resident.settle(job.name, _settled(job.name, outcome))
        if isinstance(outcome, Refused):
            self._count(outcome.reason)
            log.warning("a cut is not on disk (%s)", outcome.reason)

    def heard(self, event: Event) -> None:
        """The store's listener.

        What is damaged on disk is not served from memory either; what had to go for want of
        space still is, and so is a step whose extension is there in its place.
        """
        log_event(event)
        match event:
            case Invalid(cuts=names):
                for name in names:
                    self._resident.settle(name, "invalid")
            case Deleting(cut=name, reason="superseded") if name:
                self._resident.settle(name, "superseded", was="published")
            case Deleting(cut=name, reason="room" | "prune" | "clear") if name:
                self._resident.settle(name, "out_of_space", was="published")
            case _:
                pass

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def status(self) -> dict[str, Any]:
        """Figures of both tiers, in plain types."""
        with self._lock:
            counts, queued = dict(self._counts), self._queued
        durable = None
        if self._store is not None and self._publisher is not None:
            durable = asdict(self._store.stats()) | {"publishing": self._publisher.waiting()}
        return {
            "resident": asdict(self._resident.stats()),
            "durable": durable,
            "keeping_bytes": queued,
            "kept": counts,
        }

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was to be kept is, and published; whether that was reached."""
        with self._lock:
            kept = self._lock.wait_for(lambda: not self._waiting, timeout_s)
        return kept and (self._publisher is None or self._publisher.drain(timeout_s))

    def close(self, timeout_s: float | None = None) -> bool:
        """Keep and publish what waits, then let go of everything; whether all was published.

        ``timeout_s`` bounds the publishing; what is being copied or read is finished first.
        """
        self._lookups.shutdown(wait=True, cancel_futures=True)
        self._restores.shutdown(wait=True, cancel_futures=True)
        self._ordered.shutdown(wait=True)
        drained = True
        if self._publisher is not None:
            drained = self._publisher.close(timeout_s)
        if self._store is not None:
            self._store.close()
        return drained


def nothing(tokens: tuple[int, ...]) -> Looked:
    """What is held of a prompt for which nobody was asked."""
    return Looked(b"", _array(tokens), (), NOTHING, None)


def _array(tokens: tuple[int, ...]) -> NDArray[np.uint32]:
    """The tokens for numpy, which by itself takes three times as long for a tuple."""
    return as_tokens(np.array(array("I", tokens)))


def _rest(line: Line) -> None:
    if line.pinned is not None:
        line.rested = (line.pinned.key, line.pinned.token)
        line.release()


def _name(action: Restore) -> bytes:
    if not isinstance(action.key, bytes):
        raise IntegrityError("a fetched cut is named by a digest", reason="cut_malformed")
    return action.key


def _settled(name: bytes, outcome: Published | Refused) -> Publication:
    if isinstance(outcome, Published):
        return "superseded" if name in outcome.superseded else "published"
    # The queue, like the disk, had no room: nothing was found to be wrong.
    roomless = outcome.out_of_space or outcome.reason in ("publisher_behind", "store_closed")
    return "out_of_space" if roomless else "refused"


def _beginning(tokens: NDArray[np.uint32]) -> bytes:
    """The first block's tokens, by which a prompt knows what it may have to wait for."""
    return tokens[:BLOCK].tobytes()


def _related(one: tuple[bytes, bytes], other: tuple[bytes, bytes]) -> bool:
    (space, ours), (another, theirs) = one, other
    return space == another and (ours.startswith(theirs) or theirs.startswith(ours))


def _outran(resident: Holding, durable: Holding) -> bool:
    """Whether memory says of a cut, or of an extension, that it is on disk, and the disk not."""
    return any(
        offer.publication in ("published", "superseded") and offer.shared > durable.shared
        for offer in resident.offers
    )
