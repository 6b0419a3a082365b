"""What is kept, as conversations: from what each tier says of its cuts to what people see.

No token and no text leaves this file, and no name of a cut: ids are keyed with a secret of the
process.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from mac_decoder.engine.live import LiveCut
from mac_decoder.housekeeping.families import Family, Member, families
from mac_decoder.keeper import Keeper
from mac_decoder.reuse.cut import mixed
from mac_decoder.reuse.facts import Publication
from mac_decoder.reuse.held import CutInMemory
from mac_decoder.store.catalogue import Foreign, HeldCut, Weight
from mac_decoder.store.publisher import Job
from protocol.blocks import BLOCK, chain, cut_digest
from protocol.messages import History

MOST_SHOWN: Final = 50
MOST_SPANS: Final = 32

_MARK: Final = 6
"""Hexadecimal digits of a mark, where no other mark begins alike."""

Held = Literal["live", "resident", "durable"]
State = Publication | Literal["withheld", ""]
"""What became of a cut's way to the disk; ``withheld``: it is there and not served; empty where
there is no durable tier, or nothing is to be published."""


@dataclass(frozen=True)
class ShownCut:
    """A cut of a conversation.

    ``why`` it was taken: ``turn``, ``shared`` or ``step``, empty if nobody knows. ``own``: no
    other conversation needs it. ``file_bytes`` are those of its own file without its blocks.
    Times are readings of the clock; ``used_at`` is ``None`` where it was not used since the
    start.
    """

    position: int
    why: str
    tiers: tuple[Held, ...]
    state: State
    withheld: str
    own: bool
    mixed: bool
    file_bytes: int
    made_at: float | None
    used_at: float | None


@dataclass(frozen=True)
class Span:
    """Positions ``[first, last)``, and who computed them: ``who`` as in ``Recipe``."""

    first: int
    last: int
    who: str
    device: str
    dtype: str
    tile: int


@dataclass(frozen=True)
class Conversation:
    """A conversation as it is kept: its cuts, the deepest first.

    ``id`` is of what is kept of it now, and another one once it goes on; ``mark`` is for people,
    short, and stays as :class:`Marks` says. ``made_at`` and ``used_at`` are of what is its own
    alone: a beginning that others share says nothing of it. ``referenced_bytes`` are those of all
    files that it needs, ``own_bytes`` of those that would go with it, the rest is
    ``shared_bytes`` with others. Memory likewise. ``spans`` are the latest of how the deepest
    cut's rows were made; those of one recipe that meet are one.
    """

    id: str
    mark: str
    position: int
    tiers: tuple[Held, ...]
    cuts: tuple[ShownCut, ...]
    made_at: float | None
    used_at: float | None
    referenced_bytes: int
    own_bytes: int
    memory_bytes: int
    memory_own_bytes: int
    live_bytes: int
    spans: tuple[Span, ...]
    spans_not_shown: int

    @property
    def shared_bytes(self) -> int:
        """Bytes of files that other conversations need too."""
        return max(0, self.referenced_bytes - self.own_bytes)


@dataclass(frozen=True)
class Conversations:
    """The latest conversations, how many more there are, and what other identities hold."""

    shown: tuple[Conversation, ...]
    not_shown: int
    foreign: Foreign


@dataclass(frozen=True)
class Chosen:
    """What goes with a conversation: cuts by name, and live sequences by key. ``line`` has all
    its cuts, also those that others need and that stay.
    """

    cuts: frozenset[bytes]
    live: tuple[LiveCut, ...]
    line: tuple[bytes, ...] = ()


class Marks:
    """The marks of conversations, of which no two that are shown have the same. Any thread.

    A conversation keeps its own while it goes on, as long as a cut of it is kept that was its own
    when it was shown. Where it forks, one branch keeps it, and others get marks of their own.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._lock = threading.Lock()
        self._known: dict[bytes, str] = {}
        """Of cuts: the mark of the conversation whose own each was last."""
        self._deepest: dict[str, bytes] = {}
        """Of marks: the deepest cut of their conversation when it was last shown."""

    def of(self, families: Sequence[Family], held: Collection[bytes]) -> list[str]:
        """One for each of those that are shown. What is held of others keeps theirs."""
        with self._lock:
            self._known = {name: mark for name, mark in self._known.items() if name in held}
            marks = {*self._known.values()}
            self._deepest = {mark: cut for mark, cut in self._deepest.items() if mark in marks}
            found: list[str] = []
            for family in families:
                mark = self._kept(family, held) or self._made(family.cuts[0])
                found.append(mark)
                self._known |= dict.fromkeys(family.own, mark)
                # None of the others is at this cut, so that none of them keeps the mark too.
                self._deepest[mark] = family.cuts[0]
            return found

    def forget(self, gone: Chosen) -> None:
        """What stays for others when a conversation goes does not hand its mark on to them."""
        with self._lock:
            mark = self._known.get(gone.line[0], "")
            for name in gone.line:
                if name not in gone.cuts and self._known.get(name) == mark:
                    del self._known[name]

    def _kept(self, family: Family, held: Collection[bytes]) -> str:
        """The mark that a conversation keeps, if any: it goes on from the deepest cut that was
        shown with the mark, or that is gone and it alone has another one. Whoever parts from it
        before that is somebody else.
        """
        line = {*family.cuts}
        for name in family.cuts:
            mark = self._known.get(name, "")
            deepest = self._deepest.get(mark)
            if deepest in line or (mark and name in family.own and deepest not in held):
                return mark
        return ""

    def _made(self, deepest: bytes) -> str:
        """A new one, as short as it can be."""
        whole = identified(self._secret, deepest)
        marks = (whole[:digits] for digits in range(_MARK, len(whole)))
        return next((mark for mark in marks if mark not in self._deepest), whole)


def identified(secret: bytes, name: bytes) -> str:
    """The id of the conversation whose deepest cut is ``name``: it tells nothing else."""
    return hashlib.blake2b(name, key=secret, digest_size=16).hexdigest()


def seen(
    keeper: Keeper,
    live: Sequence[LiveCut],
    secret: bytes,
    marks: Marks,
    most: int = MOST_SHOWN,
) -> Conversations:
    """What is kept now."""
    look = _Look(keeper, live)
    found, left = look.families(most)
    shown = tuple(
        look.conversation(family, secret, mark)
        for family, mark in zip(found, marks.of(found, look.held), strict=True)
    )
    return Conversations(shown, left, look.foreign())


def chosen(
    keeper: Keeper, live: Sequence[LiveCut], secret: bytes, wanted: str, most: int = MOST_SHOWN
) -> Chosen | None:
    """What goes with the conversation ``wanted``; ``None`` where :func:`seen` shows none of it."""
    look = _Look(keeper, live)
    for family in look.families(most)[0]:
        if identified(secret, family.cuts[0]) == wanted:
            sequences = tuple(one for name in family.own for one in look.live.get(name, ()))
            return Chosen(family.own, sequences, family.cuts)
    return None


@dataclass
class _Entry:
    """A cut in all tiers."""

    space: bytes
    last_block: bytes
    position: int
    tokens: NDArray[np.uint32] | None = field(default=None, repr=False)
    blocks: Sequence[bytes] | None = field(default=None, repr=False)
    history: tuple[History, ...] = ()
    parent: bytes = b""
    used: int = 0
    used_at: float = 0.0
    made_at: float = 0.0
    why: str = ""


class _Look:
    """One look at all tiers."""

    def __init__(self, keeper: Keeper, live: Sequence[LiveCut]) -> None:
        self._keeper = keeper
        store = keeper.store
        self._catalogue = store.catalogue if store is not None else None
        self._spaces = store.spaces_of(keeper.identity) if store is not None else frozenset()
        self._entries: dict[bytes, _Entry] = {}
        self.live: dict[bytes, list[LiveCut]] = {}
        # What waits first, then memory, then the disk: a cut that moves on meanwhile is seen.
        self._pending = {job.name: job for job in keeper.unpublished()}
        self._resident = {cut.name: cut for cut in keeper.resident.cuts()}
        self._durable: dict[bytes, HeldCut] = {}
        for one in live:
            self._add_live(one)
        for name, job in self._pending.items():
            self._add_pending(name, job)
        for cut in self._resident.values():
            self._add_resident(cut)
        for cut in self._catalogue.cuts(self._spaces) if self._catalogue is not None else ():
            self._add_durable(cut)

    @property
    def held(self) -> Collection[bytes]:
        """All cuts by name, also those of conversations that are not shown."""
        return self._entries.keys()

    def foreign(self) -> Foreign:
        """What other identities hold."""
        return self._catalogue.foreign(self._spaces) if self._catalogue else Foreign(0, 0, 0)

    def families(self, most: int) -> tuple[tuple[Family, ...], int]:
        """The latest conversations, and how many more there are."""
        members = [
            Member(
                name,
                entry.space,
                entry.last_block,
                entry.position,
                (entry.used_at, entry.used),
                entry.parent,
                entry.tokens,
                entry.blocks,
            )
            for name, entry in self._entries.items()
        ]
        return families(members, self._tokens_of, most)

    def conversation(self, family: Family, secret: bytes, mark: str) -> Conversation:
        """A conversation as people see it."""
        cuts = tuple(self._shown(name, name in family.own) for name in family.cuts)
        weight, memory = Weight(0, 0), self._keeper.resident.weigh(family.cuts, family.own)
        if self._catalogue is not None:
            weight = self._catalogue.weigh(family.cuts, family.own)
        leaf = self._entries[family.cuts[0]]
        spans = _spans(leaf.history)
        tiers: tuple[Held, ...] = ("live", "resident", "durable")
        return Conversation(
            identified(secret, family.cuts[0]),
            mark,
            leaf.position,
            tuple(tier for tier in tiers if any(tier in cut.tiers for cut in cuts)),
            cuts,
            min((cut.made_at for cut in cuts if cut.own and cut.made_at), default=None),
            max((cut.used_at for cut in cuts if cut.own and cut.used_at), default=None),
            weight.referenced,
            weight.own,
            memory.referenced,
            memory.own,
            sum(one.nbytes for name in family.cuts for one in self.live.get(name, ())),
            spans[-MOST_SPANS:],
            max(0, len(spans) - MOST_SPANS),
        )

    def _shown(self, name: bytes, own: bool) -> ShownCut:
        entry, durable = self._entries[name], self._durable.get(name)
        tiers: list[Held] = []
        if name in self.live:
            tiers.append("live")
        if name in self._resident:
            tiers.append("resident")
        if durable is not None:
            tiers.append("durable")
        return ShownCut(
            entry.position,
            entry.why,
            tuple(tiers),
            self._state(name),
            durable.withheld if durable is not None else "",
            own,
            durable.mixed if durable is not None else mixed(entry.history),
            durable.nbytes if durable is not None else 0,
            entry.made_at or None,
            entry.used_at or None,
        )

    def _state(self, name: bytes) -> State:
        durable, resident = self._durable.get(name), self._resident.get(name)
        if durable is not None:
            return "withheld" if durable.withheld else "published"
        if name in self._pending:
            return "pending"
        if resident is None or self._catalogue is None:
            return ""
        return resident.publication

    def _tokens_of(self, name: bytes) -> NDArray[np.uint32] | None:
        found = self._catalogue.content(name) if self._catalogue is not None else None
        if found is None:
            return None
        tokens, self._entries[name].history = found
        return tokens

    def _add_live(self, one: LiveCut) -> None:
        blocks = chain(one.space, one.tokens)
        whole = len(blocks)
        last = blocks[-1] if blocks else b""
        name = cut_digest(one.space, last, one.tokens[whole * BLOCK :], len(one.tokens))
        self.live.setdefault(name, []).append(one)
        entry = self._entry(name, one.space, last, len(one.tokens))
        entry.tokens, entry.blocks, entry.history = one.tokens, blocks, one.history
        entry.why = "turn"
        _note_times(entry, one.ended_at, one.ended_at)

    def _add_pending(self, name: bytes, job: Job) -> None:
        cut = job.cut
        last = cut.blocks[-1] if cut.blocks else b""
        entry = self._entry(name, job.space, last, cut.position)
        entry.tokens, entry.blocks, entry.history = cut.tokens, cut.blocks, cut.history
        entry.why = job.role

    def _add_resident(self, cut: CutInMemory) -> None:
        body = cut.body
        last = body.blocks[-1] if body.blocks else b""
        entry = self._entry(cut.name, cut.space, last, body.position)
        entry.tokens, entry.blocks, entry.history = body.tokens, body.blocks, body.history
        entry.why = cut.why or entry.why
        _note_times(entry, cut.made_at, cut.used_at)

    def _add_durable(self, cut: HeldCut) -> None:
        self._durable[cut.name] = cut
        entry = self._entry(cut.name, cut.space, cut.last_block, cut.position)
        entry.parent, entry.used, entry.why = cut.parent, cut.used, cut.role
        _note_times(entry, cut.made_at, cut.used_at)

    def _entry(self, name: bytes, space: bytes, last_block: bytes, position: int) -> _Entry:
        return self._entries.setdefault(name, _Entry(space, last_block, position))


def _note_times(entry: _Entry, made_at: float, used_at: float) -> None:
    """The earliest that is known of its making, and the latest of its use."""
    entry.made_at = min(made_at, entry.made_at or made_at)
    entry.used_at = max(used_at, entry.used_at)


def _spans(history: Sequence[History]) -> tuple[Span, ...]:
    joined: list[History] = []
    for span in history:
        first = span.first
        if joined and joined[-1].recipe == span.recipe:
            first = joined.pop().first
        joined.append(History(first, span.last, span.recipe))
    return tuple(
        Span(one.first, one.last, made.who, made.device, made.dtype, made.tile)
        for one in joined
        for made in (one.recipe,)
    )
