"""What all parts of the store share: the files, the books, the index, the locks.

Two locks. ``writing`` is held by whoever changes files or the index, for as long as it takes;
``lock`` guards the books and is never held during input or output. ``writing`` comes first.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mac_decoder.store import names
from mac_decoder.store.events import DeleteReason, Deleting, Event, Listener
from mac_decoder.store.files import Disk
from mac_decoder.store.index import Change, Index
from mac_decoder.store.ledger import Cut, Ledger
from mac_decoder.store.manifest import StoreKeys
from mac_decoder.store.reading import Reader
from mac_decoder.store.recovery import cut_row

INDEX_RESERVE: Final = 2 << 20
"""Bytes under the cap that only the index may use: so a deletion always finds room for its
transaction."""

MOST_TOUCHED: Final = 32
"""Touched cuts that ride along with one commit."""


@dataclass
class Holdings:
    """The shared state of one open store."""

    directory: Path
    disk: Disk
    keys: StoreKeys
    reader: Reader
    index: Index
    ledger: Ledger
    spaces: dict[bytes, str]
    cap_bytes: int
    floor_bytes: int
    listener: Listener
    lock: threading.RLock = field(default_factory=threading.RLock)
    writing: threading.RLock = field(default_factory=threading.RLock)
    counts: Counter[str] = field(default_factory=Counter)
    dirty: set[bytes] = field(default_factory=set)
    """Names of cuts whose recency, role or parent the index does not have yet."""
    index_damaged: bool = False
    """The index that was found was damaged, and no verification has said so yet."""

    def path(self, relative: str) -> Path:
        """A path of the directory."""
        return self.directory / relative

    def tell(self, event: Event) -> None:
        """Pass an event on."""
        self.listener(event)

    def count(self, what: str, by: int = 1) -> None:
        """Count something that happened."""
        with self.lock:
            self.counts[what] += by

    def room(self) -> int:
        """Bytes that data may still take under the cap; negative when over it."""
        with self.lock:
            return self.cap_bytes - INDEX_RESERVE - self.ledger.on_disk

    def remove_file(
        self, relative: str, nbytes: int, reason: DeleteReason, cut: bytes = b""
    ) -> None:
        """Announce, then unlink; a file that is gone already is no error.

        Raises ``OSError``. The books are the caller's.
        """
        self.tell(Deleting(relative, nbytes, reason, cut))
        try:
            self.disk.unlink(self.path(relative))
        except FileNotFoundError:
            return
        self.count("deleted_files")
        self.count("deleted_bytes", nbytes)

    def touch(self, cut: Cut) -> None:
        """Note a use; the index learns of it with the next commit."""
        with self.lock:
            if self.ledger.cuts.get(cut.name) is cut:
                self.ledger.touch(cut)
                cut.used_at = time.time()
                self.dirty.add(cut.name)

    def left_again(self, cut: Cut) -> None:
        """Note that a held cut was published once more, which is a use."""
        with self.lock:
            self.touch(cut)
            cut.left = cut.used

    def commit(self, change: Change) -> None:
        """One transaction, with what was noted since the last. Raises ``sqlite3.Error``.

        The index's size is in the books afterwards, whether it worked or not.
        """
        with self.lock:
            self.dirty &= self.ledger.cuts.keys()
            noted = sorted(self.dirty)[:MOST_TOUCHED]
            self.dirty.difference_update(noted)
            rows = [cut_row(self.ledger.cuts[name]) for name in noted]
        change.cuts += rows
        done = False
        try:
            self.index.commit(change)
            done = True
        finally:
            with self.lock:
                self.ledger.index_nbytes = self.index.nbytes()
                if not done:
                    self.dirty.update(noted)

    def commit_in_steps(self, make: Callable[[int], Change | None]) -> None:
        """Commit what ``make(rows)`` returns until it returns ``None``.

        ``rows`` is the most that the room under the cap allows for. Raises ``sqlite3.Error``.
        """
        while True:
            room = max(self.room() + INDEX_RESERVE, INDEX_RESERVE)
            change = make(max(1, self.index.rows_within(room) - MOST_TOUCHED))
            if change is None:
                return
            self.commit(change)

    def forget_rows(self, cuts: list[bytes], nodes: list[int]) -> None:
        """Take rows out of the index: cuts first, nodes from the ends of their chains.

        Uses both lists up. Raises ``sqlite3.Error``.
        """

        def step(rows: int) -> Change | None:
            change = Change(dropped_cuts=cuts[:rows])
            del cuts[:rows]
            if not change.rows:
                change = Change(dropped_nodes=nodes[:rows])
                del nodes[:rows]
            return change if change.rows else None

        self.commit_in_steps(step)

    def gone(self, path: str) -> None:
        """Take a file out of the books that is not on the disk any more, if it was in them."""
        with self.lock:
            self.ledger.other.pop(path, None)
            digest = names.digest_of_path(path, names.BLOCKS)
            file = self.ledger.blocks.get(digest) if digest else None
            if file:
                self.ledger.set_present(file, False)
                if not file.users:
                    self.ledger.drop_block(file)

    def compact(self) -> None:
        """Give unused pages of the index back; a failure is counted."""
        try:
            self.index.compact()
        except sqlite3.Error:
            self.count("index_failures")
        with self.lock:
            self.ledger.index_nbytes = self.index.nbytes()

    def flush(self) -> None:
        """Tell the index about recency; a failure is counted and tried again later."""
        with self.writing:
            while self.dirty:
                try:
                    self.commit(Change())
                except sqlite3.Error:
                    self.count("index_failures")
                    return
