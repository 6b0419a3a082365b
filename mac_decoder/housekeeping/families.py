"""Which held cuts are one conversation: one that no other extends, and those it extends. Pure.

Tiers know different things of a cut. Memory has its tokens, from which follows what it extends;
of a cut on disk the books say which other one on disk it extends, and its tokens are in a file
that is read only for those that are shown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from protocol.blocks import BLOCK, chain, cut_digest


@dataclass(frozen=True)
class Member:
    """A held cut. ``last_block`` names its last whole block, ``parent`` a cut that it extends;
    both may be empty. ``blocks`` are its whole blocks' names, where that is known.

    ``recency`` orders uses: greater is later.
    """

    name: bytes
    space: bytes
    last_block: bytes
    position: int
    recency: tuple[float, int]
    parent: bytes = b""
    tokens: NDArray[np.uint32] | None = field(default=None, repr=False)
    blocks: Sequence[bytes] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Family:
    """A conversation's cuts by name, the deepest first; ``own`` are those that lead to no other
    conversation.
    """

    cuts: tuple[bytes, ...]
    own: frozenset[bytes]


Tokens = Callable[[bytes], NDArray[np.uint32] | None]
"""The tokens of a cut by its name; ``None`` where they cannot be had."""


def families(
    members: Iterable[Member], tokens_of: Tokens, most: int
) -> tuple[tuple[Family, ...], int]:
    """The ``most`` conversations that were used last, the latest first; how many more there are.

    ``tokens_of`` is asked for what is shown and has no tokens. What memory alone holds of a
    conversation that is not shown counts as one of its own.
    """
    tree = _Tree(members)
    shown: list[tuple[bytes, ...]] = []
    waiting = sorted(tree.leaves(), key=lambda name: tree.members[name].recency)
    while waiting and len(shown) < most:
        name = waiting.pop()
        if tree.extended(name):
            continue
        shown.append(tree.line(name, tokens_of))
        # Its tokens may have told that another one's leaf is on the way to it.
        shown = [line for line in shown if not tree.extended(line[0])]
    left = sum(not tree.extended(name) for name in waiting)
    children = tree.children()
    return tuple(Family(line, _own(line, children)) for line in shown), left


def _own(line: Sequence[bytes], children: Counter[bytes]) -> frozenset[bytes]:
    own = [line[0]]
    for name in line[1:]:
        if children[name] > 1:
            break
        own.append(name)
    return frozenset(own)


class _Tree:
    """Cuts, each with the deepest one that it is known to extend."""

    def __init__(self, members: Iterable[Member]) -> None:
        self.members = {member.name: member for member in members}
        self._ends: defaultdict[tuple[bytes, bytes], set[int]] = defaultdict(set)
        for member in self.members.values():
            self._ends[member.space, member.last_block].add(member.position)
        self._parents = {
            member.name: member.parent
            for member in self.members.values()
            if member.parent in self.members
        }
        for member in self.members.values():
            if member.tokens is not None:
                self._place(member, member.tokens)
        self._extended = set(self._parents.values())

    def leaves(self) -> list[bytes]:
        """The cuts of which nobody knows that another one extends them."""
        return [name for name in self.members if name not in self._extended]

    def extended(self, name: bytes) -> bool:
        """Whether another cut is known to extend this one."""
        return name in self._extended

    def children(self) -> Counter[bytes]:
        """How many cuts extend each one next."""
        return Counter(self._parents.values())

    def line(self, name: bytes, tokens_of: Tokens) -> tuple[bytes, ...]:
        """A cut and all that it extends, the deepest first."""
        member = self.members[name]
        tokens = tokens_of(name) if member.tokens is None else None
        if tokens is not None:
            self._place(member, tokens)
        found = [name]
        while (before := self._parents.get(found[-1])) is not None:
            found.append(before)
        self._extended.update(found[1:])
        return tuple(found)

    def _place(self, member: Member, tokens: NDArray[np.uint32]) -> None:
        """Find all held cuts that are beginnings of ``tokens``, those of ``member``."""
        space = member.space
        blocks = chain(space, tokens) if member.blocks is None else member.blocks
        found: list[bytes] = []
        for count in range(len(blocks) + 1):
            end = blocks[count - 1] if count else b""
            for position in sorted(self._ends.get((space, end), ())):
                tail = tokens[count * BLOCK : position]
                if len(tail) != position - count * BLOCK:
                    continue
                name = cut_digest(space, end, tail, position)
                if name in self.members:
                    found.append(name)
        for shorter, longer in pairwise(found):
            self._parents[longer] = shorter
