"""Reading everything: which files are not, byte for byte, what was written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mac_decoder.reuse.cut import mixed
from mac_decoder.store import index, names
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.ledger import BlockFile, Cut
from mac_decoder.store.quarantine import Quarantine
from protocol.errors import Cancelled, IntegrityError

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


@dataclass(frozen=True)
class Bad:
    """A file that is wrong, and the reason of its ``IntegrityError``."""

    path: str
    reason: str


@dataclass
class Verified:
    """What was read, and what was wrong with it; all is well without ``bad`` files.

    ``mixed`` good cuts have rows of more than one recipe.
    """

    files: int = 0
    nbytes: int = 0
    mixed: int = 0
    bad: list[Bad] = field(default_factory=list)


class Verifier:
    """One pass over all files. Runs beside everything else: what is deleted meanwhile is left."""

    def __init__(
        self,
        held: Holdings,
        quarantine: Quarantine,
        progress: Progress,
        cancelled: Callable[[], bool],
        dry_run: bool,
    ) -> None:
        self._held = held
        self._quarantine = quarantine
        self._progress = progress
        self._cancelled = cancelled
        self._dry_run = dry_run
        self._result = Verified()
        self._total = 0
        self._known: set[str] = set()

    def run(self) -> Verified:
        """Read all. Raises ``Cancelled``."""
        held = self._held
        with held.lock:
            cuts = list(held.ledger.cuts.values())
            blocks = list(held.ledger.blocks.values())
            damaged = [
                Bad(path, "file_malformed" if other.kind == "malformed" else "file_unreadable")
                for path, other in held.ledger.other.items()
                if other.kind in ("malformed", "unreadable")
            ]
            self._total = sum(cut.nbytes for cut in cuts) + sum(file.nbytes for file in blocks)
        self._result.bad += damaged
        self._known = {bad.path for bad in damaged}
        for cut in cuts:
            self._step(names.cut_path(cut.file), cut.nbytes, lambda cut=cut: self._cut(cut))
        for file in blocks:
            path = names.block_path(file.digest)
            self._step(path, file.nbytes, lambda file=file: self._block(file))
        if not self._dry_run:
            for bad in damaged:
                self._quarantine.other(bad.path)
        with held.writing:
            if held.index_damaged or not held.index.intact():
                self._result.bad.append(Bad(index.NAME, "file_malformed"))
            held.index_damaged = False
        return self._result

    def _step(self, path: str, nbytes: int, check: Callable[[], None]) -> None:
        if self._cancelled():
            raise Cancelled("the verification was given up")
        try:
            check()
        except IntegrityError as error:
            # A cut may need what was known to be damaged: that is one wrong file.
            if path not in self._known:
                self._result.bad.append(Bad(path, error.reason))
        self._result.files += 1
        self._result.nbytes += nbytes
        self._progress(self._result.nbytes, self._total)

    def _cut(self, cut: Cut) -> None:
        path = names.cut_path(cut.file)
        with self._held.lock:
            if self._held.ledger.cuts.get(cut.name) is not cut:
                return
            cut.pins += 1
        try:
            manifest = self._held.reader.manifest(path)
            manifest.check_name()
            files = tuple(node.file.digest for node in cut.nodes() if node.file)
            good = self._held.reader.digest(path, self._cancelled) == cut.file
            if not good or manifest.name != cut.name or manifest.files != files[::-1]:
                raise IntegrityError("", reason="digest_differs", field=path)
            self._result.mixed += mixed(manifest.history)
        except IntegrityError as error:
            if not self._kept(lambda: self._held.ledger.cuts.get(cut.name) is cut):
                return
            if not self._dry_run:
                self._quarantine.find(error, cut)
            raise
        finally:
            with self._held.lock:
                cut.pins -= 1

    def _block(self, file: BlockFile) -> None:
        held = self._held
        path = names.block_path(file.digest)
        try:
            held.reader.check_block(path)
            if held.reader.digest(path, self._cancelled) != file.digest:
                raise IntegrityError("", reason="digest_differs", field=path)
        except IntegrityError as error:
            if not self._kept(lambda: held.ledger.blocks.get(file.digest) is file):
                return
            if not self._dry_run:
                self._quarantine.find_block(error, file)
            raise
        file.trusted = file.trusted or not self._dry_run

    def _kept(self, there: Callable[[], bool]) -> bool:
        """Whether a file still is in the books once whoever deletes it now has done so."""
        with self._held.writing, self._held.lock:
            return there()


def nothing(done: int, total: int) -> None:
    """No progress is wanted."""
