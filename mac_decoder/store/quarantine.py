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
from mac_decoder.store.ledger import BlockFile, Cut, Other
from protocol.errors import IntegrityError

UNREADABLE = "file_unreadable"
MISSING = "file_missing"


class Quarantine:
    """Withholds and moves files. ``find`` runs in any thread, the rest under ``writing``."""

    def __init__(self, held: Holdings) -> None:
        self._held = held
        self._waiting: list[Callable[[], None]] = []

    def find(self, error: IntegrityError, cut: Cut) -> None:
        """``cut`` could not be read because of ``error``, whose field is the file's path."""
        path = error.field or names.cut_path(cut.file)
        digest = names.digest_of_path(path, names.BLOCKS)
        with self._held.lock:
            block = self._held.ledger.blocks.get(digest) if digest else None
            if block is not None:
                self.find_block(error, block)
                return
            if cut.withheld:
                return
            cut.withheld = "unreadable" if error.reason == UNREADABLE else "invalid"
            self._count(names.cut_path(cut.file), error.reason, (cut.name,))
            self._waiting.append(lambda: self._set_cut_aside(cut, error.reason))
        self.settle_if_free()

    def find_block(self, error: IntegrityError, file: BlockFile) -> None:
        """``file`` could not be read because of ``error``."""
        with self._held.lock:
            if not file.present or not self._withhold_users(file, error.reason):
                return
            self._waiting.append(lambda: self._set_block_aside(file, error.reason))
        self.settle_if_free()

    def block(self, file: BlockFile, reason: str) -> None:
        """A block found wrong by a writer: set aside now. Raises ``OSError``."""
        with self._held.lock:
            self._withhold_users(file, reason)
        self._set_block_aside(file, reason)

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
                move = self._waiting.pop(0)
            try:
                move()
            except OSError:
                self._held.count("quarantine_failures")
            except sqlite3.Error:
                self._held.count("index_failures")

    def _withhold_users(self, file: BlockFile, reason: str) -> bool:
        """Withhold all cuts that need ``file``; false where it was done before."""
        cuts = self._held.ledger.withhold_users(file)
        if file.users and not cuts:
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
        if held.ledger.blocks.get(file.digest) is not file or not file.present:
            return
        self._move(names.block_path(file.digest), file.nbytes, reason)
        with held.lock:
            held.ledger.set_present(file, False)
            if not file.users:
                held.ledger.drop_block(file)

    def _set_cut_aside(self, cut: Cut, reason: str) -> None:
        held = self._held
        if reason == UNREADABLE or held.ledger.cuts.get(cut.name) is not cut:
            return
        self._move(names.cut_path(cut.file), cut.nbytes, reason)
        with held.lock:
            removed = held.ledger.remove_cut(cut)
            held.dirty.update(child.name for child in cut.children)
            for file in removed.files:
                if not file.present:
                    held.ledger.drop_block(file)
        held.forget_rows([cut.name], [node.number for node in removed.nodes])

    def _move(self, path: str, nbytes: int, reason: str) -> None:
        """From its folder to the quarantine. Raises ``OSError``."""
        if reason == MISSING:
            return
        held = self._held
        folder, _, name = path.partition("/")
        target = f"{names.QUARANTINE}/{folder}-{name}"
        try:
            held.disk.rename(held.path(path), held.path(target))
        except FileNotFoundError:
            return
        held.disk.sync_directory(held.path(names.QUARANTINE))
        held.disk.sync_directory(held.path(folder))
        with held.lock:
            held.ledger.other[target] = Other("quarantined", nbytes)
