"""What all parts of the store share: the files, the books, the index, the locks.

Two locks. ``writing`` is held by whoever changes files or the index, for as long as it takes;
``lock`` guards the books and is never held during input or output. ``writing`` comes first.
"""

from __future__ import annotations

import errno
import logging
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from mac_decoder.store import names
from mac_decoder.store.events import (
    DeleteReason,
    Deleting,
    Event,
    Listener,
    PassedOver,
    StaysReason,
)
from mac_decoder.store.files import Disk
from mac_decoder.store.index import Change, Index
from mac_decoder.store.ledger import Cut, Ledger, Other
from mac_decoder.store.manifest import StoreKeys
from mac_decoder.store.reading import Reader
from mac_decoder.store.recovery import cut_row

INDEX_RESERVE: Final = 2 << 20
"""Bytes under the cap that only the index may use: so a deletion always finds room for its
transaction."""

MOST_TOUCHED: Final = 32
"""Touched cuts that ride along with one commit."""

_LOG = logging.getLogger(__name__)

_OF_ONE_FILE: Final[Mapping[int | None, StaysReason]] = {
    errno.ENOTEMPTY: "directory_not_empty",
    errno.EEXIST: "directory_not_empty",
    errno.EPERM: "not_permitted",
    errno.EBUSY: "in_use",
}
"""What the system says of one file, and not of the disk."""

_TAKEN: Final = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)
"""What cannot be replaced: a directory by a file, or the other way round."""


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
    stays: set[str] = field(default_factory=set)
    """Files that could not be removed, by their paths. They stay in the books, and are not
    counted on for making room."""
    passed_over: list[PassedOver] = field(default_factory=list)
    """What the deletion in progress left; guarded by ``writing``."""
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
    ) -> bool:
        """Announce, then unlink. Whether the file is gone, which it may have been before.

        What cannot be removed is passed over where the disk does not fail: false for a file, and
        true for a directory in which something is, since that is no file of ours.
        Raises ``OSError`` where the disk fails. The books are the caller's.
        """
        self.tell(Deleting(relative, nbytes, reason, cut))
        try:
            self.disk.unlink(self.path(relative))
        except FileNotFoundError:
            return True
        except OSError as error:
            why = _OF_ONE_FILE.get(error.errno)
            if why is None:
                raise
            return self._pass_over(relative, why)
        self.stays.discard(relative)
        self.count("deleted_files")
        self.count("deleted_bytes", nbytes)
        return True

    def _pass_over(self, relative: str, why: StaysReason) -> bool:
        """Whether no file of that name is left."""
        try:
            nbytes = self.disk.file_size(self.path(relative))
        except FileNotFoundError:
            return True
        self.count("passed_over")
        self.passed_over.append(PassedOver(relative, why))
        _LOG.warning("%s cannot be removed (%s), and is passed over", relative, why)
        if nbytes is not None:
            self.stays.add(relative)
            return False
        self._enter_strangers(relative)
        return True

    def set_aside(self, relative: str) -> None:
        """Move what has this name to the quarantine, whatever it is, so that the name is free.

        A file is kept there. Of the rest nothing is kept but a directory in which something is:
        that is not ours. Raises ``OSError``.
        """
        folder, _, name = relative.partition("/")
        target = f"{names.QUARANTINE}/{folder}-{name}"
        try:
            try:
                self.disk.rename(self.path(relative), self.path(target))
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
                target += f"-{secrets.token_hex(4)}"
                self.disk.rename(self.path(relative), self.path(target))
        except FileNotFoundError:
            return
        self.disk.sync_directory(self.path(names.QUARANTINE))
        self.disk.sync_directory(self.path(folder))
        with self.lock:
            self.ledger.other.pop(target, None)
        self._forget_strangers(relative)
        nbytes = self.disk.file_size(self.path(target))
        if nbytes is not None:
            with self.lock:
                self.ledger.other[target] = Other("quarantined", nbytes)
            return
        try:
            self.disk.unlink(self.path(target))
        except OSError:
            self._enter_strangers(target)

    def _enter_strangers(self, folder: str) -> None:
        """Have what is in a directory that is not ours in the books, as a walk has it."""
        self._forget_strangers(folder)
        found = list(self.disk.walk(self.path(folder)))
        with self.lock:
            for entry in found:
                self.ledger.other[f"{folder}/{entry.path}"] = Other("unknown", entry.nbytes)

    def _forget_strangers(self, folder: str) -> None:
        with self.lock:
            for path in [path for path in self.ledger.other if path.startswith(f"{folder}/")]:
                del self.ledger.other[path]

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
