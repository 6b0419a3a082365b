"""Files that proved wrong: set aside, counted, told; never served again, never looked at twice.

Whoever finds one withholds it at once, in memory. The file is moved by whoever may write next,
since a reader must not wait for a publication.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from mac_decoder.store import names
from mac_decoder.store.events import Invalid
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.ledger import BlockFile, Cut
from protocol.errors import IntegrityError

UNREADABLE = "file_unreadable"
MISSING = "file_missing"
NOT_A_FILE = "not_a_file"


class Quarantine:
    """Withholds and moves files. ``find`` runs in any thread, the rest under ``writing``."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._waiting: dict[str, Callable[[], None]] = {}
        """By path: how to move what was found and is not moved yet."""

    def find(self, error: IntegrityError, cut: Cut) -> None:
        """``cut`` could not be read because of ``error``, whose field is the file's path."""
        path = error.field or names.cut_path(cut.file)
        digest = names.digest_of_path(path, names.BLOCKS)
        with self._held.lock:
            block = self._held.ledger.blocks.get(digest) if digest else None
            if block is not None:
                self.find_block(error, block)
                return
            unreadable = error.reason == UNREADABLE
            # That it lacks a block says nothing of its own file.
            if cut.withheld == "invalid" or (cut.withheld == "unreadable" and unreadable):
                return
            cut.withheld = "unreadable" if unreadable else "invalid"
            own = names.cut_path(cut.file)
            self._count(own, error.reason, (cut.name,))
            self._waiting[own] = lambda: self._set_cut_aside(cut, error.reason)
        self.settle_if_free()

    def find_block(self, error: IntegrityError, file: BlockFile) -> None:
        """``file`` could not be read because of ``error``."""
        # The name of a missing file may be taken: it is needed for when the block is back.
        strange = error.reason == NOT_A_FILE
        path = names.block_path(file.digest)
        with self._held.lock:
            if path in self._waiting or not (file.present or strange):
                return
            if self._withhold_users(file, error.reason):
                self._waiting[path] = lambda: self._set_block_aside(file, error.reason)
        self.settle_if_free()

    def block(self, file: BlockFile, reason: str) -> None:
        """A block found wrong by a writer: set aside now. Raises ``OSError``."""
        with self._held.lock:
            self._withhold_users(file, reason)
        self._set_block_aside(file, reason)

    def other(self, path: str) -> None:
        """A file that was damaged at the start is set aside, if it still is where it was.

        Failures of the disk are counted.
        """
        held = self._held
        with held.writing:
            found = held.ledger.other.get(path)
            if found is None or found.kind != "malformed":
                return
            try:
                held.set_aside(path)
            except OSError:
                held.count("quarantine_failures")
                return
            with held.lock:
                del held.ledger.other[path]

    def settle_if_free(self) -> None:
        """Move what waits, unless somebody writes: then that one does."""
        if self._held.writing.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._held.writing.release()

    def settle(self) -> None:
        """Move what waits. Failures of the disk are counted; the files stay withheld."""
        while True:
            with self._held.lock:
                if not self._waiting:
                    return
                move = self._waiting.pop(next(iter(self._waiting)))
            try:
                move()
            except OSError:
                self._held.count("quarantine_failures")
            except sqlite3.Error:
                self._held.count("index_failures")

    def _withhold_users(self, file: BlockFile, reason: str) -> bool:
        """Withhold all cuts that need ``file``; false where nothing new was found.

        That they are withheld already may be for another block of theirs.
        """
        cuts = self._held.ledger.withhold_users(file)
        if reason == UNREADABLE and file.users and not cuts:
            return False
        if reason == UNREADABLE:
            for cut in cuts:
                cut.withheld = "unreadable"
        path = names.block_path(file.digest)
        self._count(path, reason, tuple(cut.name for cut in cuts))
        return True

    def _count(self, path: str, reason: str, cuts: tuple[bytes, ...]) -> None:
        self._held.count("invalid")
        self._held.count(f"invalid_{reason}")
        self._held.tell(Invalid(path, reason, cuts))

    def _set_block_aside(self, file: BlockFile, reason: str) -> None:
        held = self._held
        if reason == UNREADABLE:
            # The medium may give it back; until the next start nothing relies on it.
            file.trusted = False
            return
        if held.ledger.blocks.get(file.digest) is not file:
            return
        if not file.present and reason != NOT_A_FILE:
            return
        self._move(names.block_path(file.digest), reason)
        with held.lock:
            held.ledger.set_present(file, False)
            if not file.users:
                held.ledger.drop_block(file)

    def _set_cut_aside(self, cut: Cut, reason: str) -> None:
        held = self._held
        if reason == UNREADABLE or held.ledger.cuts.get(cut.name) is not cut:
            return
        self._move(names.cut_path(cut.file), reason)
        with held.lock:
            removed = held.ledger.remove_cut(cut)
            held.dirty.update(child.name for child in cut.children)
            for file in removed.files:
                if not file.present:
                    held.ledger.drop_block(file)
        held.forget_rows([cut.name], [node.number for node in removed.nodes])

    def _move(self, path: str, reason: str) -> None:
        """From its folder to the quarantine. Raises ``OSError``."""
        if reason != MISSING:
            self._held.set_aside(path)
