"""What the durable tier holds, cut by cut and file by file, for whoever keeps house.

Taken in small steps: the books are never held for longer than one conversation takes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mac_decoder.store import index, names
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.ledger import Cut, Tally, Version, Victims, Withheld
from mac_decoder.store.lookup import Lookup
from mac_decoder.store.manifest import Role
from protocol.errors import Cancelled, IntegrityError
from protocol.messages import History

_ATTEMPTS: Final = 3
"""After that what is counted may be of different moments."""


@dataclass(frozen=True)
class HeldCut:
    """A cut on disk. ``last_block`` is the name of its last whole block, ``parent`` the name of
    the deepest cut on disk that it extends; both may be empty.

    ``used`` orders uses across restarts; ``used_at`` is 0 for a use before this start.
    """

    name: bytes
    space: bytes
    last_block: bytes
    parent: bytes
    position: int
    nbytes: int
    role: Role
    mixed: bool
    withheld: Withheld
    used: int
    made_at: float
    used_at: float


class Weight(NamedTuple):
    """Bytes of files: of all that some cuts need, each once, and of those that only they need."""

    referenced: int
    own: int


class Foreign(NamedTuple):
    """What other identities hold; ``nbytes`` would be free without it."""

    identities: int
    cuts: int
    nbytes: int


@dataclass(frozen=True)
class Footprint:
    """Every file below the directory, by a walk: ``blocks``, ``cuts``, ``index``, and the kinds
    of other files (``ledger.Kind``).

    ``on_disk`` is what the books said when the walk had ended; they differ by what was written or
    deleted while it went on.
    """

    kinds: Mapping[str, Tally]
    total: Tally
    on_disk: int
    referenced: int


class Catalogue:
    """Looks at the books and the directory. Any thread may call."""

    def __init__(self, held: Holdings, lookup: Lookup) -> None:
        self._held = held
        self._lookup = lookup
        self._foreign: tuple[frozenset[bytes], Version, Foreign] | None = None

    def cuts(self, spaces: Collection[bytes]) -> list[HeldCut]:
        """The cuts of these namespaces, the least recently used first."""
        with self._held.lock:
            cuts = list(self._held.ledger.cuts.values())
        return [_described(cut) for cut in cuts if cut.space in spaces]

    def content(self, name: bytes) -> tuple[NDArray[np.uint32], tuple[History, ...]] | None:
        """Tokens and history of a held cut, authenticated; ``None`` where there are none.

        A damaged file is set aside, as when a prompt finds it.
        """
        with self._held.lock:
            cut = self._held.ledger.cuts.get(name)
        if cut is None or cut.withheld in ("invalid", "unreadable"):
            return None
        try:
            manifest = self._lookup.manifest(cut, remember=False)
        except IntegrityError:
            return None
        return manifest.tokens, manifest.history

    def weigh(self, cuts: Collection[bytes], own: Collection[bytes]) -> Weight:
        """What these cuts take, and what would be free without those of ``own``."""
        with self._held.lock:
            ledger = self._held.ledger
            held = [ledger.cuts[name] for name in cuts if name in ledger.cuts]
            files = _files(held)
            freed = Victims(ledger)
            for name in own:
                if name in ledger.cuts:
                    freed.add_cut(ledger.cuts[name])
            return Weight(sum(files.values()) + sum(cut.nbytes for cut in held), freed.freed)

    def foreign(self, spaces: Collection[bytes]) -> Foreign:
        """What there is beside these namespaces; counted anew where some of that has changed."""
        wanted = frozenset(spaces)
        for _ in range(_ATTEMPTS):
            before, found = self._version(wanted), self._foreign
            if found is not None and found[:2] == (wanted, before):
                return found[2]
            foreign = self._count_foreign(wanted)
            if self._version(wanted) == before:
                self._foreign = (wanted, before, foreign)
                break
        return foreign

    def _version(self, spaces: frozenset[bytes]) -> Version:
        with self._held.lock:
            return self._held.ledger.version(spaces)

    def _count_foreign(self, spaces: frozenset[bytes]) -> Foreign:
        """Cut by cut, so that others come in between."""
        held, ledger = self._held, self._held.ledger
        with held.lock:
            cuts = list(ledger.cuts.values())
            freed = Victims(ledger)
        others = [cut for cut in cuts if cut.space not in spaces]
        for cut in others:
            with held.lock:
                freed.add_cut(cut)
        with held.lock:
            identities = {held.spaces[space] for space in {cut.space for cut in others}}
        return Foreign(len(identities), len(others), freed.freed)

    def walk(self, cancelled: Callable[[], bool] = lambda: False) -> Footprint:
        """Count every file. Raises ``OSError``, and ``Cancelled``."""
        held = self._held
        kinds: dict[str, Tally] = {}
        for path, nbytes, _modified in held.disk.walk(held.directory):
            if cancelled():
                raise Cancelled("the count was given up")
            kind = self._kind(path)
            files, sofar = kinds.get(kind, Tally())
            kinds[kind] = Tally(files + 1, sofar + nbytes)
        total = Tally(
            sum(tally.files for tally in kinds.values()),
            sum(tally.nbytes for tally in kinds.values()),
        )
        with held.lock:
            return Footprint(kinds, total, held.ledger.on_disk, held.ledger.referenced())

    def _kind(self, path: str) -> str:
        with self._held.lock:
            other = self._held.ledger.other.get(path)
        if other is not None:
            return other.kind
        if path in index.FILES:
            return "index"
        if path in (names.CACHE_TAG, "lock"):
            return "own"
        for folder in (names.BLOCKS, names.CUTS):
            if names.digest_of_path(path, folder) is not None:
                return folder
        # What came since the books were made: a publication's files, and what was set aside.
        return {names.TEMP: "unfinished", names.QUARANTINE: "quarantined"}.get(
            path.rpartition("/")[0], "unknown"
        )


def _described(cut: Cut) -> HeldCut:
    node, parent = cut.node, cut.parent
    return HeldCut(
        cut.name,
        cut.space,
        node.block if node else b"",
        parent.name if parent else b"",
        cut.position,
        cut.nbytes,
        cut.role,
        cut.mixed,
        cut.withheld,
        cut.used,
        cut.made_at,
        cut.used_at,
    )


def _files(cuts: Collection[Cut]) -> dict[bytes, int]:
    """The bytes of the blocks' files of cuts, by digest."""
    seen: set[int] = set()
    files: dict[bytes, int] = {}
    for cut in cuts:
        for node in cut.nodes():
            if node.number in seen:
                break
            seen.add(node.number)
            if node.file and node.file.present:
                files[node.file.digest] = node.file.nbytes
    return files
