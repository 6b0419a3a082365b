"""A cut's bytes: what belongs to a cut, what to blocks, and which of them a restore places.

Every tier holds the same two things. A :class:`BlockBody` has the rows of all full layers of
256 tokens; a :class:`CutBody` names its blocks and has the *rest*: full rows past the last
whole block, window rows of sliding layers, states of recurrent layers. Ranges come from the
layout by the functions here, for every tier and both directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from protocol.blocks import BLOCK, as_tokens, chain, cut_digest
from protocol.errors import IntegrityError
from protocol.layout import (
    KEY,
    VALUE,
    FullLayer,
    Layout,
    Region,
    SlidingLayer,
    regions,
    row_bytes,
)
from protocol.messages import History

REST: Final = -1
"""Stands for the cut's own rest where a block's number could stand."""

Place = tuple[int, int]
"""``(index, role)``: an entry of the layout and one of its arrays."""
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class BlockBody:
    """The full layers' rows of one block: per place 256 rows, position-major, flat bytes.

    Places with rows of no bytes are left out, so a layout without full layers has empty
    blocks. The arrays must never be written to again.
    """

    hash: bytes
    data: Mapping[Place, Bytes]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(array.nbytes for array in self.data.values())


@dataclass(frozen=True, eq=False, slots=True)
class CutBody:
    """A cut: its tokens, the names of its whole blocks, its rest and its history.

    ``tokens`` are uint32, one for each position; ``rest`` holds the places of
    :func:`rest_regions` as flat bytes. The arrays must never be written to again.
    """

    layout: Layout
    tokens: NDArray[np.uint32]
    blocks: tuple[bytes, ...]
    rest: Mapping[Place, Bytes]
    history: tuple[History, ...]

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    @property
    def rest_nbytes(self) -> int:
        """Bytes of the rest."""
        return sum(array.nbytes for array in self.rest.values())

    def digest(self, space: bytes) -> bytes:
        """The cut's name in the namespace ``space``."""
        parent = self.blocks[-1] if self.blocks else b""
        tail = self.tokens[len(self.blocks) * BLOCK :]
        return cut_digest(space, parent, tail, self.position)

    def __repr__(self) -> str:
        # Tokens are a prompt: they do not belong into logs.
        return f"CutBody(position={self.position}, rest={self.rest_nbytes} bytes)"


class Piece(NamedTuple):
    """Bytes to copy: from block ``source`` (or ``REST``) to the region of a cache to be built.

    ``start`` is the offset in the source's array of ``(index, role)``, ``offset`` that in the
    region ``(index, role)`` of ``regions(layout, 0, position)``.
    """

    source: int
    index: int
    role: int
    start: int
    offset: int
    nbytes: int


def block_sizes(layout: Layout) -> dict[Place, int]:
    """Bytes of each place of a block: 256 rows of every full layer."""
    sizes: dict[Place, int] = {}
    for index, layer in enumerate(layout.layers):
        if isinstance(layer, FullLayer):
            for role in (KEY, VALUE):
                if width := row_bytes(layer, role):
                    sizes[index, role] = BLOCK * width
    return sizes


def rest_regions(layout: Layout, position: int) -> tuple[Region, ...]:
    """What a cut at ``position`` holds besides its whole blocks; empty places are left out."""
    whole = position // BLOCK * BLOCK
    found = [r for r in regions(layout, 0, position) if not _is_full(layout, r)]
    if whole < position:
        found += [r for r in regions(layout, whole, position) if _is_full(layout, r)]
    return tuple(sorted((r for r in found if r.nbytes), key=lambda r: (r.index, r.role)))


def can_supply(layout: Layout, held: int, position: int) -> bool:
    """Whether a cut at ``held`` has all bytes of a cache at ``position``, tokens being equal.

    States are valid at one position only, and a ring that has wrapped lost its oldest rows;
    rows of full layers, and of a ring that never wrapped, serve every position below.
    """
    if not 0 < position <= held:
        return False
    return position == held or all(_rewinds(layer, held) for layer in layout.layers)


def _rewinds(layer: object, held: int) -> bool:
    if isinstance(layer, SlidingLayer):
        return held <= layer.window
    return isinstance(layer, FullLayer)


def pieces(layout: Layout, held: int, position: int) -> Iterator[Piece]:
    """All bytes of a cache at ``position``, out of a cut at ``held``: blocks in order, then rest.

    Raises ``ValueError`` where the cut cannot supply them (see :func:`can_supply`).
    """
    if not can_supply(layout, held, position):
        raise ValueError(f"a cut at {held} does not supply position {position}")
    full = [region for region in regions(layout, 0, position) if _is_full(layout, region)]
    whole = held // BLOCK * BLOCK
    for number in range(-(-min(position, whole) // BLOCK)):
        first = number * BLOCK
        rows = min(position - first, BLOCK)
        for region in full:
            width = region.nbytes // position
            if width:
                yield Piece(number, region.index, region.role, 0, first * width, rows * width)
    for region in regions(layout, 0, position):
        if not region.nbytes:
            continue
        if not _is_full(layout, region):
            # An unwrapped ring starts at row 0 in both; a wrapped one has the same rows.
            yield Piece(REST, region.index, region.role, 0, 0, region.nbytes)
        elif position > whole:
            width = region.nbytes // position
            offset = whole * width
            yield Piece(REST, region.index, region.role, 0, offset, region.nbytes - offset)


def supplies_delta(layout: Layout, held: int, start: int, end: int) -> bool:
    """Whether a cut at ``held`` has what a cache at ``end`` needs below ``start``. With extra
    cuts, ``end`` is the lowest of them, which needs the most.

    Every full row, and the rows ``[max(0, end - window), start)`` of each ring; a state comes
    with what lies above.
    """
    if not 0 < start <= held or start >= end:
        return False
    windows = [layer.window for layer in layout.layers if isinstance(layer, SlidingLayer)]
    return all(start <= end - window or held - window <= max(end - window, 0) for window in windows)


def delta_pieces(
    layout: Layout, held: int, start: int, end: int, extra: Sequence[int] = ()
) -> Iterator[Piece]:
    """All bytes below ``start`` of caches at ``end`` and at ``extra``, out of a cut at ``held``.

    Blocks in order, then the rest; offsets are those in ``regions(layout, 0, end, extra)``.
    Raises ``ValueError`` where the cut cannot supply them (see :func:`supplies_delta`).
    """
    if not supplies_delta(layout, held, start, extra[0] if extra else end):
        raise ValueError(f"a cut at {held} does not supply [0, {start}) of one at {end}")
    found = [region for region in regions(layout, 0, end, extra) if region.nbytes]
    full = [(region, region.nbytes // end) for region in found if _is_full(layout, region)]
    whole = held // BLOCK * BLOCK
    for number in range(-(-min(start, whole) // BLOCK)):
        first = number * BLOCK
        rows = min(start - first, BLOCK)
        for region, width in full:
            yield Piece(number, region.index, region.role, 0, first * width, rows * width)
    if start > whole:
        for region, width in full:
            rows = start - whole
            yield Piece(REST, region.index, region.role, 0, whole * width, rows * width)
    for region in found:
        layer = layout.layers[region.index]
        if isinstance(layer, SlidingLayer) and region.first < start:
            width = region.nbytes // (region.last - region.first)
            oldest = max(held - layer.window, 0)
            at, rows = (region.first - oldest) * width, start - region.first
            yield Piece(REST, region.index, region.role, at, 0, rows * width)


def divide(
    layout: Layout,
    space: bytes,
    tokens: ArrayLike,
    rows: Mapping[Place, Bytes],
    history: tuple[History, ...],
    known: int = 0,
) -> tuple[CutBody, tuple[BlockBody, ...]]:
    """A cut and its blocks from rows and states at ``len(tokens)``, as flat bytes.

    ``rows`` has the places of ``regions(layout, 0, position)``, of full layers without the rows
    of the first ``known`` blocks, whose bodies are then left out. Nothing is copied: the bodies
    are views of ``rows``. Raises as :func:`check_cut` does.
    """
    held = as_tokens(tokens)
    names = chain(space, held)
    sizes = block_sizes(layout)
    bodies = tuple(
        BlockBody(
            name,
            {place: rows[place][number * n : (number + 1) * n] for place, n in sizes.items()},
        )
        for number, name in enumerate(names[known:])
    )
    rest: dict[Place, Bytes] = {}
    for region in rest_regions(layout, len(held)):
        place = (region.index, region.role)
        skipped = (len(names) - known) * sizes.get(place, 0)
        rest[place] = rows[place][skipped:]
    cut = CutBody(layout, held, tuple(names), rest, history)
    check_cut(cut)
    for body in bodies:
        check_block(layout, body)
    return cut, bodies


def check_cut(cut: CutBody) -> None:
    """Raise ``IntegrityError`` (``cut_malformed``) unless every length is the layout's.

    Tokens, blocks, rest and history must all say the same position.
    """
    if cut.tokens.dtype != np.uint32 or cut.tokens.ndim != 1:
        raise _malformed("tokens", cut.tokens.dtype, "uint32")
    if cut.position == 0:
        raise _malformed("position", 0, "at least 1")
    if len(cut.blocks) != cut.position // BLOCK:
        raise _malformed("blocks", len(cut.blocks), cut.position // BLOCK)
    sizes = {(r.index, r.role): r.nbytes for r in rest_regions(cut.layout, cut.position)}
    _check_arrays(cut.rest, sizes)
    check_history(cut.history, cut.position)


def check_block(layout: Layout, block: BlockBody) -> None:
    """Raise ``IntegrityError`` (``cut_malformed``) unless the rows are those of a block."""
    _check_arrays(block.data, block_sizes(layout))


def check_history(history: Sequence[History], position: int) -> None:
    """Raise ``IntegrityError`` (``cut_malformed``) unless it covers ``[0, position)`` once."""
    reached = 0
    for span in history:
        if span.first != reached or span.last <= span.first:
            raise _malformed("history", span.first, reached)
        reached = span.last
    if reached != position:
        raise _malformed("history", reached, position)


def clipped(history: Sequence[History], position: int) -> tuple[History, ...]:
    """The part of a history below ``position``."""
    return tuple(
        History(span.first, min(span.last, position), span.recipe)
        for span in history
        if span.first < position
    )


def mixed(history: Sequence[History]) -> bool:
    """Whether rows were made by more than one recipe."""
    return len({span.recipe for span in history}) > 1


def replayable(history: Sequence[History], position: int) -> bool:
    """Whether a history that ends at ``position`` tells how the rows below it were made.

    True at a segment's end and on the tile grid of the span that ``position`` lies in. Elsewhere
    the rows came from a longer tile than a replay would compute, and would differ in rounding.
    """
    for span in history:
        if span.first < position <= span.last:
            return position == span.last or position % span.recipe.tile == 0
    return False


def extended(history: Sequence[History], span: History) -> tuple[History, ...]:
    """A history with ``span`` at its end.

    Prefilled spans of one recipe are joined where they meet on its tile grid; elsewhere the
    joint is a segment end that a replay must repeat, so it stays visible. Decoded ones never
    are: a sequence enters a batch anew each time. Raises ``IntegrityError``
    (``cut_malformed``) for a span that does not follow.
    """
    kept = tuple(history)
    last = kept[-1] if kept else None
    if span.first != (last.last if last else 0) or span.last <= span.first:
        raise _malformed("history", span.first, last.last if last else 0)
    prefilled = span.recipe.who != "decoder_decode"
    if last and prefilled and last.recipe == span.recipe and span.first % span.recipe.tile == 0:
        return (*kept[:-1], History(last.first, span.last, span.recipe))
    return (*kept, span)


def _check_arrays(arrays: Mapping[Place, Bytes], sizes: Mapping[Place, int]) -> None:
    if arrays.keys() != sizes.keys():
        raise _malformed("places", sorted(arrays), sorted(sizes))
    for (index, role), array in arrays.items():
        form = (array.dtype, array.ndim, array.flags.c_contiguous)
        if form != (np.uint8, 1, True) or array.nbytes != sizes[index, role]:
            raise _malformed(f"layer {index} role {role}", array.nbytes, sizes[index, role])


def _is_full(layout: Layout, region: Region) -> bool:
    return isinstance(layout.layers[region.index], FullLayer)


def _malformed(field: str, found: object, expected: object) -> IntegrityError:
    return IntegrityError(
        "a cut's parts do not have the lengths that its position asks for",
        reason="cut_malformed",
        field=field,
        found=found,
        expected=expected,
    )
