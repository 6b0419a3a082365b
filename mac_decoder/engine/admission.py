"""Padded-bytes arithmetic: what a cache will take, and which sequences may decode together.

Pure functions of the layout and of lengths. Sequences of one decode group are padded to
their longest member, in every layer, so a group of ``n`` takes ``n`` times its longest
member's bytes. What is admitted is counted by that figure, never by useful rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.layout import KEY, VALUE, FullLayer, Layout, RecurrentLayer, SlidingLayer, row_bytes

ROW_STEP = 256
"""Caches grow by this many rows at a time (mlx-lm's ``step``)."""


@dataclass(frozen=True)
class PaddingRule:
    """How much padding a group may carry.

    A group is allowed when its padded bytes are at most ``ratio`` times its useful bytes,
    or exceed them by at most ``slack`` bytes.
    """

    ratio: float = 1.25
    slack: int = 32 << 20


def cache_bytes(layout: Layout, rows: int, tile: int = 0) -> int:
    """Bytes of one sequence's cache with room for ``rows`` positions.

    Rows are rounded up to the step in which caches grow. While a prompt is prefilled in
    tiles of ``tile`` tokens, sliding layers hold up to a tile more than their window, and
    recurrent layers the states of a cut on the way.
    """
    room = -(-rows // ROW_STEP) * ROW_STEP
    total = 0
    for layer in layout.layers:
        match layer:
            case FullLayer():
                total += room * (row_bytes(layer, KEY) + row_bytes(layer, VALUE))
            case SlidingLayer():
                held = min(room, layer.window + tile)
                total += held * (row_bytes(layer, KEY) + row_bytes(layer, VALUE))
            case RecurrentLayer():
                total += (2 if tile else 1) * sum(state.nbytes for state in layer.states)
    return total


def padded_bytes(layout: Layout, lengths: Sequence[int]) -> int:
    """Bytes of a group whose members have ``lengths``: everyone takes what the longest takes."""
    return len(lengths) * cache_bytes(layout, max(lengths)) if lengths else 0


def useful_bytes(layout: Layout, lengths: Sequence[int]) -> int:
    """Bytes that the same sequences would take apart."""
    return sum(cache_bytes(layout, length) for length in lengths)


def may_share(layout: Layout, lengths: Sequence[int], rule: PaddingRule) -> bool:
    """Whether sequences of ``lengths`` may decode in one group under ``rule``."""
    padded, useful = padded_bytes(layout, lengths), useful_bytes(layout, lengths)
    return padded <= rule.ratio * useful or padded - useful <= rule.slack


def choose_group(
    layout: Layout,
    groups: Sequence[Sequence[int]],
    length: int,
    rule: PaddingRule,
    spare: int,
) -> int | None:
    """The index of the group that a sequence of ``length`` should join, ``None`` for its own.

    ``groups`` holds the members' lengths. Among the groups that stay within ``rule``, and
    whose padding needs at most ``spare`` bytes beyond what the members take apart, the one
    that gains least padding; the first of equals.
    """
    best: tuple[int, int] | None = None
    for index, lengths in enumerate(groups):
        if not lengths:
            continue
        joined = [*lengths, length]
        if not may_share(layout, joined, rule):
            continue
        own = cache_bytes(layout, length)
        added = padded_bytes(layout, joined) - padded_bytes(layout, lengths) - own
        if added <= spare and (best is None or added < best[0]):
            best = (added, index)
    return None if best is None else best[1]


def next_prefill(remaining: Sequence[int], turn: int) -> int:
    """Which of the prompts being prefilled gets the next tile.

    ``remaining`` holds the tokens left, oldest request first. The shortest is served first,
    so that a short question does not wait for a book; every fourth ``turn`` goes to the
    oldest, so that the book is read in the end.
    """
    if turn % 4 == 3:
        return 0
    return min(range(len(remaining)), key=lambda index: (remaining[index], index))
