"""A sequence as the engine hands it to the keeper: each cut brings what is not kept already."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

import numpy as np

from mac_decoder.keeper import Keeper, Kept, Line, Restored
from mac_decoder.reuse.cut import Place, block_sizes
from mac_decoder.reuse.facts import Restore
from mac_decoder.store.manifest import Role
from protocol.blocks import BLOCK
from protocol.identity import Identity
from protocol.layout import Layout, payload_bytes
from protocol.messages import History
from tests.mac_decoder.reuse.made import PREFILL
from tests.mac_decoder.store.made import Destination, rows_of

IDENTITY = Identity(*(f"{number:064x}" for number in range(8)))
KEY = bytes(range(32))


class Brought:
    """One sequence. ``flavour``: the same tokens, whose rows were made otherwise.

    ``nbytes`` are those that were handed over, by cut; ``known`` the blocks that were not.
    """

    def __init__(
        self,
        keeper: Keeper,
        layout: Layout,
        tokens: Tokens[int],
        flavour: int = 0,
        line: Line | None = None,
    ) -> None:
        self.keeper = keeper
        self.layout = layout
        self.tokens = list(tokens)
        self.flavour = flavour
        self.line = Line() if line is None else line
        self.known: list[int] = []
        self.nbytes: list[int] = []

    def cut(self, position: int, role: Role = "turn", *, publish: bool = True) -> Kept | None:
        """Hand over a cut, or ``None`` where the keeper does not want it now."""
        ready = self.keeper.ready(self.line, position, role, publish=publish)
        if ready is None:
            return None
        self.line, known = ready
        rows = self.rows(position, known)
        self.line.blocks = position // BLOCK
        tokens = np.array(self.tokens[:position], np.uint32)
        history = (History(0, position, PREFILL),)
        kept = Kept(self.line, self.keeper.space(), tokens, rows, known, history, role, publish)
        assert kept.nbytes == brought_bytes(self.layout, known, position)
        self.known.append(known)
        self.nbytes.append(kept.nbytes)
        self.keeper.keep(kept)
        return kept

    def settled(self, position: int, role: Role = "turn") -> None:
        """Hand over a cut, and wait until all that can be done with it is."""
        self.cut(position, role)
        assert self.keeper.drain(30)

    def rows(self, position: int, known: int = 0) -> dict[Place, np.ndarray]:
        """What a cut brings; arrays of their own, as those of the engine."""
        rows = rows_of(self.layout, self.tokens[:position], self.flavour)
        for place, nbytes in block_sizes(self.layout).items():
            rows[place] = rows[place][known * nbytes :].copy()
        return rows


def brought_bytes(layout: Layout, known: int, position: int) -> int:
    """Bytes of a cut's rows without those of its first ``known`` blocks."""
    return payload_bytes(layout, 0, position) - known * sum(block_sizes(layout).values())


def restored(
    keeper: Keeper, layout: Layout, tokens: Tokens[int], tier: str
) -> tuple[Restored, Destination] | None:
    """The cut of exactly ``tokens`` as a tier gives it; ``None`` where it has none."""
    looked = keeper.look((*tokens, 1)).result(20)
    holding = looked.resident if tier == "resident" else looked.durable
    assert holding is not None
    position = len(tokens)
    for offer in holding.offers:
        if offer.position == offer.shared == position:
            memory = Destination(layout, position)
            name = "resident" if tier == "resident" else "durable"
            action = Restore(name, offer.key, position, position)
            done = keeper.restore(action, memory.into, lambda: False).result(20)
            return None if done is None else (done, memory)
    return None


def serves(keeper: Keeper, sequence: Brought, position: int, tier: str) -> bool:
    """Whether a tier restores the cut; with any byte that is not the sequence's own it fails."""
    found = restored(keeper, sequence.layout, sequence.tokens[:position], tier)
    if found is None:
        return False
    done, memory = found
    if done.pinned is not None:
        done.pinned.release()
    assert memory.holds(rows_of(sequence.layout, sequence.tokens[:position], sequence.flavour))
    return True
