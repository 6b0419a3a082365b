"""The resident tier: cuts and blocks in memory, within one budget of bytes.

Blocks are interned by content: cuts that share a block, whoever made them, hold it once. Equal
names mean equal tokens, not equal bytes (rows that were made otherwise differ in rounding), so
bytes are compared before a block is shared, and a cut always gives back exactly what was put.

Every byte of rows, states and tokens is counted; the index itself is not (about 1.5 kB for
each block). Cuts that were not used for longest go first, pinned ones never.

Any thread may call. One lock guards all state and is never held while bytes are compared or
copied; a second only makes puts wait for each other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import TracebackType

from numpy.typing import ArrayLike

from mac_decoder.reuse.cut import BlockBody, CutBody, check_block, check_cut, mixed
from mac_decoder.reuse.facts import Holding, Publication, offers
from mac_decoder.reuse.held import (
    CutInMemory,
    Put,
    ResidentBlock,
    ResidentCut,
    ResidentStats,
    Weight,
    inherited,
    own_bytes,
)
from mac_decoder.reuse.owned import owned_block, owned_cut, same_bytes
from mac_decoder.reuse.radix import Match, Radix
from protocol.blocks import as_tokens, chain
from protocol.errors import IntegrityError
from protocol.messages import History

BARRED: frozenset[Publication] = frozenset({"refused", "invalid"})
"""What a cut's publication may not end as, if the cut is to serve beside a durable tier."""


class Pinned:
    """A cut that stays in memory until :meth:`release`, with the bodies of its blocks."""

    def __init__(self, tier: Resident, held: ResidentCut) -> None:
        self._tier = tier
        self._held: ResidentCut | None = held
        self.key = held.key
        self.token = held.token
        self.cut = held.body
        self.blocks = tuple(block.body for block in held.blocks)

    def release(self) -> None:
        """Let go of the cut, and of its arrays; a second call does nothing."""
        held, self._held = self._held, None
        if held is not None:
            del self.cut, self.blocks
            self._tier._unpin(held)

    def __enter__(self) -> Pinned:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Resident:
    """Cuts of all identities in memory, found by namespace and tokens."""

    def __init__(self, budget_bytes: int) -> None:
        """An empty tier. A budget of 0 keeps nothing."""
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._putting = threading.Lock()
        self._cuts: OrderedDict[bytes, ResidentCut] = OrderedDict()  # least recently used first
        self._leaving: set[ResidentCut] = set()
        self._blocks: dict[bytes, list[ResidentBlock]] = {}
        self._serving: Radix[bytes] = Radix()
        self._barred: Radix[bytes] = Radix()
        self._used = 0
        self._evicted_cuts = 0
        self._evicted_bytes = 0

    # -- reading

    def match(
        self, space: bytes, tokens: ArrayLike, names: tuple[bytes, ...] | None = None
    ) -> Match[bytes]:
        """What the cuts that may serve hold of a prompt; keys are the cuts' names."""
        prompt = as_tokens(tokens)
        links = chain(space, prompt) if names is None else names
        with self._lock:
            return self._serving.match(space, prompt, links)

    def holding(
        self, space: bytes, tokens: ArrayLike, names: tuple[bytes, ...] | None = None
    ) -> Holding:
        """The same as facts for the ladder, barred cuts included: it gives the reasons."""
        prompt = as_tokens(tokens)
        links = chain(space, prompt) if names is None else names
        with self._lock:
            serving = offers(self._serving.match(space, prompt, links), self._described)
            barred = offers(self._barred.match(space, prompt, links), self._described)
        deeper = max(serving, barred, key=lambda held: held.shared)
        return replace(deeper, offers=serving.offers + barred.offers)

    def pin(
        self, key: bytes, *, serving: bool = False, token: object | None = None
    ) -> Pinned | None:
        """Keep a cut in memory while it is read, and mark it as used; ``None`` if it is gone.

        ``serving``: ``None`` also if it may not serve, which it may have when it was found.
        ``token``: ``None`` also if it is not the very cut that was pinned with it before.
        """
        with self._lock:
            held = self._cuts.get(key)
            if held is None or (serving and held.publication in BARRED):
                return None
            if token is not None and held.token is not token:
                return None
            held.pins += 1
            held.used_at = time.time()
            if held.publication not in BARRED:
                self._cuts.move_to_end(key)
            return Pinned(self, held)

    def fits(self, nbytes: int) -> bool:
        """Whether a cut of so many bytes could be kept here at all."""
        with self._lock:
            return nbytes <= self._budget

    def stats(self) -> ResidentStats:
        """The figures now."""
        with self._lock:
            cuts = list(self._cuts.values())
            return ResidentStats(
                budget_bytes=self._budget,
                used_bytes=self._used,
                referenced_bytes=sum(c.nbytes + sum(b.nbytes for b in c.blocks) for c in cuts),
                pinned_bytes=self._kept_bytes(()),
                cuts=len(cuts),
                blocks=sum(len(variants) for variants in self._blocks.values()),
                mixed=sum(mixed(cut.body.history) for cut in cuts),
                evicted_cuts=self._evicted_cuts,
                evicted_bytes=self._evicted_bytes,
                publications=dict(Counter(cut.publication for cut in cuts)),
            )

    def cuts(self) -> list[CutInMemory]:
        """All cuts, the least recently used first."""
        with self._lock:
            return [held.seen for held in self._cuts.values()]

    def weigh(self, cuts: Collection[bytes], own: Collection[bytes]) -> Weight:
        """What these cuts take, and what would be free without those of ``own``, once nobody
        uses them.
        """
        with self._lock:
            held = [self._cuts[key] for key in cuts if key in self._cuts]
            going = [self._cuts[key] for key in own if key in self._cuts]
            blocks = {id(block): block.nbytes for cut in held for block in cut.blocks}
            users = Counter(id(block) for cut in going for block in cut.blocks)
            freed = {
                id(block): block.nbytes
                for cut in going
                for block in cut.blocks
                if users[id(block)] == block.refs
            }
            return Weight(
                sum(cut.nbytes for cut in held) + sum(blocks.values()),
                sum(cut.nbytes for cut in going) + sum(freed.values()),
            )

    # -- writing

    def forget(self, cuts: Collection[bytes] | None = None) -> int:
        """Let go of ``cuts``, or of all: how many that were. What is pinned goes when released."""
        with self._lock:
            held = list(self._cuts.values())
            going = [cut for cut in held if cuts is None or cut.key in cuts]
            for cut in going:
                self._remove(cut)
            return len(going)

    def put(
        self,
        space: bytes,
        cut: CutBody,
        blocks: Iterable[BlockBody],
        *,
        publication: Publication = "pending",
        continues: Pinned | None = None,
        why: str = "",
    ) -> Put:
        """Keep a cut. ``blocks`` are bodies for its whole blocks, in any order; ``why`` it was
        taken is for people.

        Blocks that are not among them are those of ``continues``, the cut that the sequence
        was built from or last put as. Arrays that own exactly their bytes are taken over and
        must not be written to again; views are copied.

        Raises ``IntegrityError`` (``cut_malformed``, ``chain_differs``) for parts that do not
        fit together, ``LocalProtocolError`` (``blocks_missing``, ``history_differs``) where
        ``continues`` does not have the missing blocks, or has them from another history. The
        tier is then as it was.
        """
        check_cut(cut)
        if tuple(chain(space, cut.tokens)) != cut.blocks:
            raise IntegrityError("a cut names other blocks than its own", reason="chain_differs")
        own = set(cut.blocks)
        given = {body.hash: body for body in blocks if body.hash in own}
        for body in given.values():
            check_block(cut.layout, body)
        key = cut.digest(space)
        with self._putting:
            taken = self._take_shared(cut, given, continues)
            try:
                return self._put(space, key, cut, given, taken, publication, why)
            finally:
                with self._lock:
                    self._let_go(taken.values())

    def settle(
        self, key: bytes, publication: Publication, *, was: Publication | None = None
    ) -> bool:
        """Record what became of a cut's publication; whether the cut is still held.

        With ``was`` only if that is what had become of it: the loss of a published cut must
        not let a refused one serve.
        """
        with self._lock:
            held = self._cuts.get(key)
            if held is None:
                return False
            if was is not None and held.publication != was:
                return True
            index = self._index(held.publication)
            held.publication = publication
            if self._index(publication) is not index:
                index.remove(key)
                self._add_to_index(held)
            if publication in BARRED:
                self._cuts.move_to_end(key, last=False)
            return True

    def resize(self, budget_bytes: int) -> int:
        """Change the budget; the bytes that had to go. What is pinned goes when released."""
        with self._lock:
            self._budget = budget_bytes
            return self._make_room(0)

    # -- within a put

    def _take_shared(
        self, cut: CutBody, given: Mapping[bytes, BlockBody], continues: Pinned | None
    ) -> dict[bytes, ResidentBlock]:
        """Hold the blocks that the tier has with the cut's own bytes, by their names."""
        with self._lock:
            taken = inherited(cut, given, continues._held if continues else None)
            candidates = {name: tuple(self._blocks.get(name, ())) for name in given}
            held = [*taken.values(), *(b for many in candidates.values() for b in many)]
            for block in held:
                block.refs += 1
        for name, many in candidates.items():
            equal = next(
                (block for block in many if same_bytes(block.body.data, given[name].data)), None
            )
            if equal is not None:
                taken[name] = equal
        kept = set(map(id, taken.values()))
        with self._lock:
            self._let_go(block for block in held if id(block) not in kept)
        return taken

    def _put(
        self,
        space: bytes,
        key: bytes,
        cut: CutBody,
        given: Mapping[bytes, BlockBody],
        taken: Mapping[bytes, ResidentBlock],
        publication: Publication,
        why: str,
    ) -> Put:
        with self._lock:
            there = self._cuts.get(key)
        if there is not None and there.publication not in BARRED:
            names = zip(there.blocks, cut.blocks, strict=True)
            same = all(block is taken.get(name) for block, name in names)
            same = same and same_bytes(there.body.rest, cut.rest)
            with self._lock:
                if same and key in self._cuts:
                    self._cuts.move_to_end(key)
                    there.used_at = time.time()
            return Put(key, "held" if same else "differs")
        new = [name for name in dict.fromkeys(cut.blocks) if name not in taken]
        needed = own_bytes(cut) + sum(given[name].nbytes for name in new)
        with self._lock:
            if there is not None and key in self._cuts:
                self._remove(there)
            there = None  # a name that keeps its arrays alive
            if self._kept_bytes(taken.values()) + needed > self._budget:
                return Put(key, "no_room")
            evicted = self._make_room(needed)
            self._used += needed  # reserved before it is allocated
        reserved = needed
        try:
            owned = owned_cut(cut)
            made = {name: ResidentBlock(owned_block(given[name])) for name in new}
            chosen = tuple(taken.get(name) or made[name] for name in cut.blocks)
            held = ResidentCut(space, key, owned, chosen, publication, why)
            with self._lock:
                self._add_to_index(held)
                self._cuts[key] = held
                for block in chosen:
                    block.refs += 1
                for name, block in made.items():
                    self._blocks.setdefault(name, []).append(block)
                reserved = 0
        except MemoryError:
            return Put(key, "no_room", evicted_bytes=evicted)
        finally:
            with self._lock:
                self._used -= reserved
        return Put(key, "stored", needed, evicted)

    # -- under the lock

    def _described(self, key: bytes) -> tuple[tuple[History, ...], Publication]:
        held = self._cuts[key]
        return held.body.history, held.publication

    def _index(self, publication: Publication) -> Radix[bytes]:
        return self._barred if publication in BARRED else self._serving

    def _add_to_index(self, held: ResidentCut) -> None:
        index = self._index(held.publication)
        index.insert(held.space, held.key, held.body.tokens, held.body.blocks)

    def _kept_bytes(self, taken: Iterable[ResidentBlock]) -> int:
        """Bytes that no eviction can free: those of pinned and leaving cuts, and ``taken``."""
        pinned = [cut for cut in self._cuts.values() if cut.pins] + list(self._leaving)
        blocks = {id(b): b.nbytes for b in (*taken, *(b for cut in pinned for b in cut.blocks))}
        return sum(cut.nbytes for cut in pinned) + sum(blocks.values())

    def _make_room(self, needed: int) -> int:
        """Evict until ``needed`` more bytes fit, or only pinned cuts are left."""
        before = self._used
        for held in list(self._cuts.values()):
            if self._used + needed <= self._budget:
                break
            if not held.pins:
                self._remove(held)
                self._evicted_cuts += 1
        self._evicted_bytes += before - self._used
        return before - self._used

    def _remove(self, held: ResidentCut) -> None:
        del self._cuts[held.key]
        self._index(held.publication).remove(held.key)
        if held.pins:
            held.gone = True
            self._leaving.add(held)
        else:
            self._free(held)

    def _free(self, held: ResidentCut) -> None:
        self._used -= held.nbytes
        self._let_go(held.blocks)

    def _let_go(self, blocks: Iterable[ResidentBlock]) -> None:
        for block in blocks:
            block.refs -= 1
            if block.refs:
                continue
            variants = self._blocks[block.body.hash]
            variants.remove(block)
            if not variants:
                del self._blocks[block.body.hash]
            self._used -= block.nbytes

    def _unpin(self, held: ResidentCut) -> None:
        with self._lock:
            held.pins -= 1
            if not held.pins and held.gone:
                self._leaving.discard(held)
                self._free(held)
            if self._used > self._budget:
                self._make_room(0)
