"""The index of held cuts: how much of a prompt is held, and by which cuts. Pure.

A tree of blocks per namespace. A block's node is found by its chained name, which binds the
namespace and every token before it; then the tokens are compared one by one, so that a name
alone never makes a hit. Below the last node the tokens of its branches (the next blocks, and
the ragged ends of cuts) are kept in order: the branch that shares most with a prompt is a
neighbour of the place where the prompt would be inserted.

The caller serialises calls. A key is the caller's own name of a cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.blocks import BLOCK, as_tokens, chain
from protocol.errors import IntegrityError, LocalProtocolError

K = TypeVar("K", bound=Hashable)

_WIDTH: Final = 4 * BLOCK
_tokens_of = attrgetter("tokens")


class HeldCut(NamedTuple, Generic[K]):
    """A cut in the index: its position and its key."""

    position: int
    key: K


@dataclass(frozen=True)
class Match(Generic[K]):
    """What an index holds of a prompt.

    ``shared`` tokens from the start are equal to those of ``witness``, a cut that shares most
    (``None`` where nothing is shared); ``prompt`` is the prompt's length. ``cuts`` are all
    cuts that are prefixes of the prompt, shallowest first. ``nearest[i]`` is the shallowest
    cut at or past block boundary ``i`` that shares the prompt up to there; ``names`` are those
    of the shared whole blocks.
    """

    prompt: int
    shared: int
    names: tuple[bytes, ...]
    cuts: tuple[HeldCut[K], ...]
    nearest: tuple[HeldCut[K], ...]
    witness: HeldCut[K] | None

    @property
    def parts_at(self) -> int | None:
        """The first position at which the prompt and what is held have different tokens.

        ``None`` where they do not differ: the prompt, or a held cut, ends there.
        """
        ended = self.cuts[-1].position if self.cuts else 0
        return None if self.shared in (0, ended, self.prompt) else self.shared

    def covering(self, position: int) -> HeldCut[K] | None:
        """A cut at or past ``position`` that shares the prompt up to there, if one is held.

        The shallowest there is where ``position`` is a block boundary.
        """
        if not 0 < position <= self.shared:
            return None
        boundary = -(-position // BLOCK)
        found = self.nearest[boundary] if boundary < len(self.nearest) else self.witness
        on_path = next((cut for cut in self.cuts if cut.position >= position), None)
        known = [cut for cut in (found, on_path) if cut is not None]
        return min(known, key=lambda cut: cut.position, default=None)


class _Tail(Generic[K]):
    """A cut: the tokens that follow its last whole block, as bytes."""

    __slots__ = ("cut", "tokens")

    def __init__(self, tokens: bytes, cut: HeldCut[K]) -> None:
        self.tokens = tokens
        self.cut = cut


class _Node(Generic[K]):
    """A block, or a namespace's root; ``branches`` are in the order of their tokens' bytes."""

    __slots__ = ("branches", "depth", "name", "nearest", "parent", "tokens")

    def __init__(self, name: bytes, tokens: bytes, parent: _Node[K] | None) -> None:
        self.name = name
        self.tokens = tokens
        self.parent = parent
        self.depth = parent.depth + 1 if parent else 0
        self.branches: list[_Node[K] | _Tail[K]] = []
        self.nearest: HeldCut[K] | None = None

    def place_of(self, tokens: bytes) -> int:
        return bisect_left(self.branches, tokens, key=_tokens_of)

    def at(self, tokens: bytes) -> _Node[K] | _Tail[K] | None:
        place = self.place_of(tokens)
        if place < len(self.branches) and self.branches[place].tokens == tokens:
            return self.branches[place]
        return None


class Radix(Generic[K]):
    """Cuts of any number of namespaces, found by the tokens of a prompt."""

    def __init__(self) -> None:
        self._roots: dict[bytes, _Node[K]] = {}
        self._nodes: dict[bytes, _Node[K]] = {}
        self._where: dict[K, tuple[bytes, _Node[K], _Tail[K]]] = {}

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, key: object) -> bool:
        return key in self._where

    @property
    def blocks(self) -> int:
        """Blocks whose tokens are held, each counted once."""
        return len(self._nodes)

    def insert(
        self, space: bytes, key: K, tokens: ArrayLike, names: Sequence[bytes] | None = None
    ) -> None:
        """Add a cut; ``names`` spares computing its chain again.

        Raises ``LocalProtocolError`` (``cut_exists``) for a key, or for tokens of a namespace,
        that are held already; ``IntegrityError`` (``tokens_differ``) where a name is held for
        other tokens. Either leaves the index as it was.
        """
        held = as_tokens(tokens)
        raw = held.tobytes()
        links = chain(space, held) if names is None else names
        if len(links) != len(held) // BLOCK:
            raise ValueError(f"{len(links)} names for {len(held)} tokens")
        tail = raw[len(links) * _WIDTH :]
        self._require_new(key, links, raw, tail, space)
        node = self._roots.setdefault(space, _Node(space, b"", None))
        for number, name in enumerate(links):
            child = self._nodes.get(name)
            if child is None:
                child = _Node(name, raw[number * _WIDTH : (number + 1) * _WIDTH], node)
                node.branches.insert(node.place_of(child.tokens), child)
                self._nodes[name] = child
            node = child
        cut = HeldCut(len(held), key)
        end = _Tail(tail, cut)
        node.branches.insert(node.place_of(tail), end)
        self._where[key] = (space, node, end)
        above: _Node[K] | None = node
        while above and (above.nearest is None or cut.position < above.nearest.position):
            above.nearest = cut
            above = above.parent

    def remove(self, key: K) -> None:
        """Take a cut out, and every block that no other cut has. Raises ``KeyError``."""
        space, node, tail = self._where.pop(key)
        del node.branches[node.place_of(tail.tokens)]
        while not node.branches and node.parent is not None:
            del self._nodes[node.name]
            parent = node.parent
            del parent.branches[parent.place_of(node.tokens)]
            node = parent
        above: _Node[K] | None = node
        while above and above.nearest is tail.cut:
            above.nearest = _shallowest(above.branches)
            above = above.parent
        root = self._roots[space]
        if not root.branches:
            del self._roots[space]

    def match(
        self, space: bytes, tokens: ArrayLike, names: Sequence[bytes] | None = None
    ) -> Match[K]:
        """What is held of the prompt ``tokens`` in ``space``; a miss has ``shared`` 0."""
        prompt = as_tokens(tokens)
        links = chain(space, prompt) if names is None else names
        node = self._roots.get(space)
        if node is None:
            return Match(len(prompt), 0, (), (), (), None)
        raw = prompt.tobytes()
        cuts: list[HeldCut[K]] = []
        nearest: list[HeldCut[K]] = []
        while True:
            start = node.depth * _WIDTH
            ahead = raw[start : start + _WIDTH]
            if len(node.branches) > 1 or isinstance(node.branches[0], _Tail):
                cuts += _ends_within(node.branches, ahead)
            if node.nearest is not None:
                nearest.append(node.nearest)
            child = self._nodes.get(links[node.depth]) if node.depth < len(links) else None
            if child is None or child.parent is not node or child.tokens != ahead:
                break
            node = child
        more, branch = _shares_most(node, ahead)
        shared = node.depth * BLOCK + more
        witness = nearest[-1] if shared and nearest else None
        if branch is not None:
            witness = branch.cut if isinstance(branch, _Tail) else branch.nearest
        kept = tuple(links[: node.depth])
        return Match(len(prompt), shared, kept, tuple(cuts), tuple(nearest), witness)

    def _require_new(
        self, key: K, links: Sequence[bytes], raw: bytes, tail: bytes, space: bytes
    ) -> None:
        """Check all that can refuse, so that a refused insert changes nothing."""
        if key in self._where:
            raise LocalProtocolError("the cut is in the index", reason="cut_exists")
        for number, name in enumerate(links):
            held = self._nodes.get(name)
            if held is None:
                continue
            if held.tokens != raw[number * _WIDTH : (number + 1) * _WIDTH]:
                raise IntegrityError(
                    "a block's name is held for other tokens",
                    reason="tokens_differ",
                    field=f"block {number}",
                )
        last = self._nodes.get(links[-1]) if links else self._roots.get(space)
        if last is not None and isinstance(last.at(tail), _Tail):
            raise LocalProtocolError("a cut of these tokens is in the index", reason="cut_exists")


def match_of_few(
    cuts: Sequence[tuple[K, NDArray[np.uint32]]],
    tokens: NDArray[np.uint32],
    names: Sequence[bytes],
) -> Match[K]:
    """What a few cuts hold of the prompt ``tokens``, as an index of them alone would say.

    Each cut is compared with the prompt, which for a few is quicker than to index them.
    ``cuts`` are of the prompt's namespace and all different, ``names`` its blocks'.
    """
    order = sorted(cuts, key=lambda cut: len(cut[1]))
    held = [HeldCut(len(text), key) for key, text in order]
    shares = [common_prefix(text, tokens) for _, text in order]
    nearest: list[HeldCut[K]] = []
    for cut, share in zip(held, shares, strict=True):
        nearest += [cut] * (share // BLOCK + 1 - len(nearest))
    shared = max(shares, default=0)
    prefixes = [cut for cut, share in zip(held, shares, strict=True) if share == cut.position]
    witness = held[shares.index(shared)] if shared else None
    kept = tuple(names[: shared // BLOCK])
    return Match(len(tokens), shared, kept, tuple(prefixes), tuple(nearest), witness)


def common_prefix(ours: NDArray[np.uint32], theirs: NDArray[np.uint32]) -> int:
    """How many tokens both start with."""
    count = min(len(ours), len(theirs))
    parted = ours[:count] != theirs[:count]
    return int(parted.argmax()) if parted.any() else count


def _ends_within(branches: Sequence[_Node[K] | _Tail[K]], ahead: bytes) -> list[HeldCut[K]]:
    """The cuts whose tails ``ahead`` starts with, shallowest first."""
    found: list[HeldCut[K]] = []
    # A tail is shorter than a block; looking for less than one passes over the blocks.
    text = ahead[: _WIDTH - 4]
    while True:
        place = bisect_right(branches, text, key=_tokens_of)
        if place == 0:
            break
        candidate = branches[place - 1]
        length = 4 * _common(candidate.tokens, text)
        if length == len(candidate.tokens) and isinstance(candidate, _Tail):
            found.append(candidate.cut)
            if length == 0:
                break
            length -= 4
        text = text[:length]
    found.reverse()
    return found


def _shares_most(node: _Node[K], ahead: bytes) -> tuple[int, _Node[K] | _Tail[K] | None]:
    """How many tokens of ``ahead`` a branch shares, and that branch; none if it is no token."""
    place = node.place_of(ahead)
    most, best = 0, None
    for branch in node.branches[max(place - 1, 0) : place + 1]:
        length = _common(branch.tokens, ahead)
        if length > most:
            most, best = length, branch
    return most, best


def _common(ours: bytes, theirs: bytes) -> int:
    """How many tokens both start with, compared one by one."""
    count = min(len(ours), len(theirs)) // 4
    if ours[: 4 * count] == theirs[: 4 * count]:
        return count
    parted = np.frombuffer(ours, "<u4", count) != np.frombuffer(theirs, "<u4", count)
    return int(parted.argmax())


def _shallowest(branches: Sequence[_Node[K] | _Tail[K]]) -> HeldCut[K] | None:
    held = [b.cut if isinstance(b, _Tail) else b.nearest for b in branches]
    known = (cut for cut in held if cut is not None)
    return min(known, key=lambda cut: cut.position, default=None)
