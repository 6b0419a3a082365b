"""Making room: the byte cap, the free-space floor, and what users remove themselves.

A plan says what goes before anything does: what is of no use first (damage, other formats and
keys, orphans), then the least recently used cuts of all identities, with the blocks that
only they need. If the plan cannot free enough, nothing is deleted.

Order of a deletion: event, the cut's file, the blocks' files, directories, index. So no crash
leaves a cut on record whose blocks were deleted before it.

What cannot be removed for a reason of its own (see ``Holdings.remove_file``) stops nothing: it is
passed over, told, and not counted on again for making room.
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from mac_decoder.store import names
from mac_decoder.store.events import DeleteReason, PassedOver
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.ledger import BlockFile, Cut, Kind, Other, Removed, Tally, Victims
from protocol.errors import CapacityError

_T = TypeVar("_T")

_OF_NO_USE: Final[tuple[Kind, ...]] = (
    "unfinished",
    "duplicate",
    "quarantined",
    "malformed",
    "foreign_key",
    "stale_format",
)
"""In the order in which they go. Unreadable files may be readable at the next start."""


_ATTEMPTS: Final = 3

_SLICE_S: Final = 0.05
"""How long a deletion that users ask for keeps others from writing; one cut may take longer."""

_PAUSE_S: Final = 0.002
"""A lock is not fair: whoever waits for it has to be given the time to take it."""

_LOOK_AGAIN_S: Final = 0.02


def _untold(done: int, total: int) -> None:
    """No progress is wanted."""


def _unheard(passed: PassedOver) -> None:
    """Nobody asks what was left."""


@dataclass(frozen=True)
class Pace:
    """How a deletion that users ask for goes on.

    ``progress(done, total)`` is told bytes; ``cancelled`` is asked between two cuts, and what
    was deleted by then stays so. Cuts that are being read are waited for ``patience_s``, and
    left after that. ``passed_over`` is told what could not be removed.
    """

    progress: Callable[[int, int], None] = _untold
    cancelled: Callable[[], bool] = lambda: False
    patience_s: float = 0.0
    passed_over: Callable[[PassedOver], None] = _unheard


AT_ONCE: Final = Pace()


@dataclass(frozen=True)
class Space:
    """How many bytes are missing under the cap and above the floor; 0 where there is room."""

    under_cap: int
    above_floor: int


@dataclass(frozen=True)
class _Left:
    """What of a plan was not tried yet."""

    other: deque[str]
    blocks: deque[BlockFile]
    cuts: deque[Cut]

    def __bool__(self) -> bool:
        return bool(self.other or self.blocks or self.cuts)


class Sweeper:
    """Deletes by plan. Callers hold ``holdings.writing``."""

    def __init__(self, holdings: Holdings) -> None:
        self._held = holdings

    def missing(self, nbytes: int) -> Space:
        """What is missing before ``nbytes`` may be written. Raises ``OSError``."""
        held = self._held
        free = held.disk.free(held.directory)
        return Space(
            max(0, nbytes - held.room()),
            max(0, nbytes + held.floor_bytes - free),
        )

    def make_room(self, nbytes: int, keep: Collection[Cut] = ()) -> None:
        """Delete until ``nbytes`` may be written, sparing ``keep``.

        Raises ``CapacityError`` (``store_over_cap``, ``store_under_floor``), with nothing
        deleted, where that cannot be reached; ``OSError`` or ``sqlite3.Error`` if the disk fails.
        """
        attempts = 0
        while attempts < _ATTEMPTS:
            space = self.missing(nbytes)
            short = max(space.under_cap, space.above_floor)
            if not short:
                return
            plan = self.plan(short, keep)
            if plan.freed < short:
                break
            self.delete(plan, "room")
            # A reader may pin a victim meanwhile: then it is counted again. What was passed over
            # is not, so that comes to an end.
            attempts += not self._held.passed_over
        over = space.under_cap >= space.above_floor
        raise CapacityError(
            "the durable tier has no room for a cut",
            reason="store_over_cap" if over else "store_under_floor",
            field="cache_max" if over else "free space",
            found=nbytes,
            hint="raise --cache-max or free space on the volume",
        )

    def plan(self, nbytes: int, keep: Collection[Cut] = ()) -> Victims:
        """What to delete for ``nbytes``; frees less where there is no more to delete."""
        with self._held.lock:
            plan = Victims(self._held.ledger)
            self._plan_useless(plan, nbytes)
            spared = {id(cut) for cut in keep}
            for cut in self._held.ledger.cuts.values():
                if plan.freed >= nbytes:
                    break
                stays = names.cut_path(cut.file) in self._held.stays
                if not cut.pins and not stays and id(cut) not in spared:
                    plan.add_cut(cut)
        return plan

    def plan_stale(self, foreign: Collection[bytes]) -> Victims:
        """All that is of no use, and the cuts of the namespaces ``foreign``."""
        with self._held.lock:
            plan = Victims(self._held.ledger)
            self._plan_useless(plan, None)
            for cut in self._held.ledger.cuts.values():
                if cut.space in foreign and not cut.pins:
                    plan.add_cut(cut)
        return plan

    def plan_all(self, spaces: Collection[bytes] | None = None) -> Victims:
        """All but the lock, the tag and files that are not ours.

        With ``spaces`` only the cuts of these namespaces, and neither what other versions wrote
        nor what was made under another store key.
        """
        kinds: list[Kind] = [*_OF_NO_USE, "unreadable"]
        if spaces is not None:
            kinds = [kind for kind in kinds if kind not in ("foreign_key", "stale_format")]
        with self._held.lock:
            plan = Victims(self._held.ledger)
            self._plan_useless(plan, None, kinds)
            for cut in self._held.ledger.cuts.values():
                if spaces is None or cut.space in spaces:
                    plan.add_cut(cut)
        return plan

    def plan_cuts(self, cuts: Collection[bytes]) -> Victims:
        """The held ones of these cuts, by their names."""
        with self._held.lock:
            plan = Victims(self._held.ledger)
            for cut in self._held.ledger.cuts.values():
                if cut.name in cuts:
                    plan.add_cut(cut)
        return plan

    def _plan_useless(
        self, plan: Victims, nbytes: int | None, kinds: Iterable[Kind] = _OF_NO_USE
    ) -> None:
        ledger = self._held.ledger
        # Whoever wants everything gone has it tried again.
        stays = self._held.stays if nbytes is not None else ()
        for kind in kinds:
            for path, other in ledger.other.items():
                if nbytes is not None and plan.freed >= nbytes:
                    return
                if other.kind == kind and path not in stays:
                    plan.add_other(path)
        for file in ledger.idle_blocks():
            if nbytes is not None and plan.freed >= nbytes:
                return
            if names.block_path(file.digest) not in stays:
                plan.add_block(file)

    def delete(self, plan: Victims, reason: DeleteReason) -> Tally:
        """Carry out a plan; what was really deleted. Raises ``OSError`` or ``sqlite3.Error``."""
        self._held.passed_over.clear()
        before = self._deleted()
        for path in plan.other:
            self.delete_other(path, reason)
        self._delete_blocks(plan.blocks, reason)
        self.delete_cuts(plan.cuts, reason)
        after = self._deleted()
        return Tally(after.files - before.files, after.nbytes - before.nbytes)

    def delete_in_slices(self, plan: Victims, reason: DeleteReason, pace: Pace) -> Tally:
        """Carry out a plan while others write: the lock is taken for one slice after another.

        What became of the plan's files in between is respected: a block that a new cut needs
        stays, and so does a cut that was published again, or, where the least recently used ones
        go, used. What was really deleted. Raises ``OSError`` or ``sqlite3.Error``. The caller does
        not hold ``holdings.writing``.
        """
        held = self._held
        left = _Left(deque(plan.other), deque(plan.blocks), deque(plan.cuts))
        files = nbytes = 0

        def stays(cut: Cut) -> bool:
            return (cut.used if reason == "prune" else cut.left) >= plan.since

        until = time.monotonic() + pace.patience_s
        while True:
            while left and not pace.cancelled():
                with held.writing:
                    held.passed_over.clear()
                    done = self._delete_slice(left, reason, pace.cancelled, stays)
                    passed_over = tuple(held.passed_over)
                for passed in passed_over:
                    pace.passed_over(passed)
                files, nbytes = files + done.files, nbytes + done.nbytes
                pace.progress(nbytes, max(nbytes, plan.freed))
                time.sleep(_PAUSE_S)
            with held.lock:
                read = [
                    cut
                    for cut in plan.cuts
                    if held.ledger.cuts.get(cut.name) is cut
                    and not stays(cut)
                    and names.cut_path(cut.file) not in held.stays
                ]
            if not read or pace.cancelled() or time.monotonic() >= until:
                return Tally(files, nbytes)
            time.sleep(_LOOK_AGAIN_S)
            left.cuts.extend(read)

    def _delete_slice(
        self,
        left: _Left,
        reason: DeleteReason,
        cancelled: Callable[[], bool],
        stays: Callable[[Cut], bool],
    ) -> Tally:
        ledger = self._held.ledger
        until = time.monotonic() + _SLICE_S

        def due(waiting: deque[_T]) -> Iterator[_T]:
            while waiting and not cancelled():
                yield waiting.popleft()
                if time.monotonic() >= until:
                    return

        before = self._deleted()
        for path in due(left.other):
            if path in ledger.other:
                self.delete_other(path, reason)
        for file in due(left.blocks):
            if ledger.blocks.get(file.digest) is file:
                self._delete_blocks((file,), reason)
        self.delete_cuts(due(left.cuts), reason, stays)
        after = self._deleted()
        return Tally(after.files - before.files, after.nbytes - before.nbytes)

    def _deleted(self) -> Tally:
        counts = self._held.counts
        return Tally(counts["deleted_files"], counts["deleted_bytes"])

    def delete_other(self, path: str, reason: DeleteReason) -> None:
        """Remove a file that is neither a held cut nor a block."""
        ledger = self._held.ledger
        if self._held.remove_file(path, ledger.other[path].nbytes, reason):
            with self._held.lock:
                del ledger.other[path]

    def delete_cuts(
        self,
        cuts: Iterable[Cut],
        reason: DeleteReason,
        stays: Callable[[Cut], bool] = lambda cut: False,
    ) -> None:
        """Remove cuts with the blocks that only they need; pinned ones stay."""
        held = self._held
        gone: list[bytes] = []
        nodes: list[int] = []
        try:
            for cut in cuts:
                with held.lock:
                    if cut.pins or held.ledger.cuts.get(cut.name) is not cut or stays(cut):
                        continue
                    # From here on no reader finds it.
                    before, cut.withheld = cut.withheld, "invalid"
                removed_file = False
                try:
                    path = names.cut_path(cut.file)
                    removed_file = held.remove_file(path, cut.nbytes, reason, cut.name)
                finally:
                    if not removed_file:
                        cut.withheld = before
                if not removed_file:
                    continue
                with held.lock:
                    removed = held.ledger.remove_cut(cut)
                    held.dirty.update(child.name for child in cut.children)
                gone.append(cut.name)
                nodes.extend(node.number for node in removed.nodes)
                self._delete_blocks(removed.files, reason)
        finally:
            if gone:
                held.disk.sync_directory(held.path(names.CUTS))
                held.disk.sync_directory(held.path(names.BLOCKS))
                held.forget_rows(gone, nodes)

    def replaced(self, old: Cut, removed: Removed, cut: Cut) -> None:
        """Finish what a cut's second publication left of the first. Never raises."""
        held = self._held
        try:
            path = names.cut_path(old.file)
            if old.file != cut.file and not held.remove_file(path, old.nbytes, "superseded"):
                with held.lock:
                    held.ledger.other[path] = Other("duplicate", old.nbytes)
            self._delete_blocks(removed.files, "superseded")
            held.forget_rows([], [node.number for node in removed.nodes])
        except (OSError, sqlite3.Error):
            held.count("delete_failures")

    def _delete_blocks(self, files: Iterable[BlockFile], reason: DeleteReason) -> None:
        held = self._held
        for file in files:
            if file.users:
                continue
            path = names.block_path(file.digest)
            if file.present and not held.remove_file(path, file.nbytes, reason):
                # It stays as a block that no cut needs.
                continue
            with held.lock:
                held.ledger.drop_block(file)
