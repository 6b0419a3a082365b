"""What the resident tier keeps for each cut and block, and the figures it gives."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from mac_decoder.reuse.cut import BlockBody, CutBody, clipped
from mac_decoder.reuse.facts import Publication
from protocol.blocks import BLOCK
from protocol.errors import LocalProtocolError

Outcome = Literal["stored", "held", "differs", "no_room"]
"""What became of a put.

``stored``; ``held``: the same bytes were there; ``differs``: a cut of these tokens with other
bytes is there and stays; ``no_room``: it does not fit beside what is pinned.
"""


@dataclass(frozen=True)
class Put:
    """The result of a put: the cut's name, what it added to the tier, and what had to go."""

    key: bytes
    outcome: Outcome
    added_bytes: int = 0
    evicted_bytes: int = 0


@dataclass(frozen=True)
class ResidentStats:
    """Figures of the tier. ``referenced_bytes`` counts shared blocks once for every cut.

    ``mixed`` cuts have rows of more than one recipe; ``publications`` counts cuts by state.
    """

    budget_bytes: int
    used_bytes: int
    referenced_bytes: int
    pinned_bytes: int
    cuts: int
    blocks: int
    mixed: int
    evicted_cuts: int
    evicted_bytes: int
    publications: Mapping[str, int]


@dataclass(frozen=True)
class CutInMemory:
    """A cut of the tier as whoever keeps house sees it: ``why`` it was taken, where that is
    known, and the clock's reading when it was made and last used.
    """

    name: bytes
    space: bytes
    body: CutBody = field(repr=False)
    publication: Publication
    why: str
    made_at: float
    used_at: float


class Weight(NamedTuple):
    """Bytes of memory: of all that some cuts need, each block once, and of those that only
    they need.
    """

    referenced: int
    own: int


class ResidentBlock:
    """An interned block; ``refs`` counts the cuts, and the puts under way, that hold it."""

    __slots__ = ("body", "nbytes", "refs")

    def __init__(self, body: BlockBody) -> None:
        self.body = body
        self.nbytes = body.nbytes
        self.refs = 0


class ResidentCut:
    """A held cut. ``gone``: dropped while pinned; it leaves with its last pin.

    ``token`` tells it from a later cut of the same name, whose bytes may differ. ``why`` it was
    taken is for people.
    """

    __slots__ = (
        "blocks",
        "body",
        "gone",
        "key",
        "made_at",
        "nbytes",
        "pins",
        "publication",
        "space",
        "token",
        "used_at",
        "why",
    )

    def __init__(
        self,
        space: bytes,
        key: bytes,
        body: CutBody,
        blocks: tuple[ResidentBlock, ...],
        publication: Publication,
        why: str = "",
    ) -> None:
        self.space = space
        self.key = key
        self.body = body
        self.blocks = blocks
        self.nbytes = own_bytes(body)
        self.publication: Publication = publication
        self.pins = 0
        self.gone = False
        self.token = object()
        self.why = why
        self.made_at = self.used_at = time.time()

    @property
    def seen(self) -> CutInMemory:
        """The cut as it is now."""
        return CutInMemory(
            self.key, self.space, self.body, self.publication, self.why, self.made_at, self.used_at
        )


def own_bytes(cut: CutBody) -> int:
    """What a cut holds besides its blocks."""
    return cut.rest_nbytes + cut.tokens.nbytes


def inherited(
    cut: CutBody, given: Mapping[bytes, BlockBody], origin: ResidentCut | None
) -> dict[bytes, ResidentBlock]:
    """The blocks that are not given, out of the cut that this one was built from."""
    missing = [number for number, name in enumerate(cut.blocks) if name not in given]
    if not missing:
        return {}
    last = missing[-1]
    if origin is None or origin.body.blocks[: last + 1] != cut.blocks[: last + 1]:
        raise LocalProtocolError(
            "a cut comes without bodies for blocks that are not held",
            reason="blocks_missing",
            field=f"block {last}",
        )
    end = (last + 1) * BLOCK
    if clipped(origin.body.history, end) != clipped(cut.history, end):
        raise LocalProtocolError(
            "a cut's rows were not made as those of the cut it continues",
            reason="history_differs",
            field=f"block {last}",
        )
    return {cut.blocks[number]: origin.blocks[number] for number in missing}
