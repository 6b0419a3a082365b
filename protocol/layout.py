"""What a cache consists of, counted to the byte: layer kinds, spans, and the frame schedule.

A *row* of a layer is one position's keys or values for all
its heads. Everything here is a pure function of the layout and of positions; both machines
call the same functions, so that neither can disagree about a range.

Wire order of rows: position-major. The bytes of role ``key`` of a layer for positions
``[first, last)`` are a C-ordered array ``(last - first, heads, key_dim)``; a span of
positions is therefore one contiguous range of bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

Dtype = Literal["float32", "bfloat16", "float16"]
ITEMSIZE: Final[dict[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}

MAX_FRAME_PAYLOAD: Final = 1 << 20
"""Largest payload of one data frame in bytes."""

KEY: Final = 0
VALUE: Final = 1
STATE: Final = 2
"""Roles of a frame. Role ``STATE + i`` is the i-th state of a recurrent layer."""


class FullLayer(msgspec.Struct, frozen=True, tag="full", tag_field="kind"):
    """Rows grow with position (RoPE or NoPE attention, or an MLA latent with ``heads=1``).

    ``layer`` is the index of the decoder's cache object; ``member`` its place in a
    composite cache, 0 elsewhere. Dimensions are elements per head and row.
    """

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: Dtype
    member: int = 0

    kind = "full"


class SlidingLayer(msgspec.Struct, frozen=True, tag="sliding", tag_field="kind"):
    """Only the last ``window`` rows are kept."""

    layer: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: Dtype
    window: int
    member: int = 0

    kind = "sliding"


class StateArray(msgspec.Struct, frozen=True):
    """One state of a recurrent layer; ``shape`` is the decoder's, without the batch axis."""

    name: str
    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        size = ITEMSIZE[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


class RecurrentLayer(msgspec.Struct, frozen=True, tag="recurrent", tag_field="kind"):
    """States that are valid at exactly one position."""

    layer: int
    states: tuple[StateArray, ...]
    member: int = 0

    kind = "recurrent"


AttentionLayer = FullLayer | SlidingLayer
LayerLayout = FullLayer | SlidingLayer | RecurrentLayer


class Span(msgspec.Struct, frozen=True):
    """Positions ``[first, last)`` of ``layers[index]``; a recurrent state at p is ``[p, p)``."""

    index: int
    first: int
    last: int


class Slot(msgspec.Struct, frozen=True):
    """One frame of the schedule: which bytes it carries and where they belong.

    ``offset`` is the byte offset within the region ``(index, role)`` of the whole handoff
    (see :func:`regions`); ``nbytes`` the payload length.
    """

    sequence: int
    index: int
    role: int
    first: int
    last: int
    offset: int
    nbytes: int


class Region(msgspec.Struct, frozen=True):
    """All bytes of one role of one layer in a handoff: positions, size, element layout."""

    index: int
    role: int
    first: int
    last: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: Dtype


class Layout(msgspec.Struct, frozen=True):
    """The ordered list of a model's cache entries. ``Span.index`` counts in ``layers``."""

    layers: tuple[LayerLayout, ...]

    def digest(self) -> bytes:
        """SHA-256 of the canonical JSON encoding (field order as declared), 32 bytes."""
        return hashlib.sha256(msgspec.json.encode(self)).digest()


def row_bytes(layer: AttentionLayer, role: int) -> int:
    """Bytes of one row of ``role`` (``KEY`` or ``VALUE``)."""
    width = layer.key_dim if role == KEY else layer.value_dim
    return layer.heads * width * ITEMSIZE[layer.dtype]


def extra_cuts(
    layout: Layout, cut: int, end: int, tile: int, wanted: Iterable[int]
) -> tuple[int, ...]:
    """Those of ``wanted`` at which a handoff over ``[cut, end)`` can bring a cut too, ascending.

    They lie inside, in the last tile, so that they divide nothing but the ragged tail, whose
    rows no other prompt has; and no further from ``end`` than the smallest window, so that the
    rows that both cuts need are one span.
    """
    windows = [layer.window for layer in layout.layers if isinstance(layer, SlidingLayer)]
    lowest = max(cut + 1, (end - 1) // tile * tile, end - min(windows, default=end))
    return tuple(sorted({position for position in wanted if lowest <= position < end}))


def spans(layout: Layout, cut: int, end: int, extra: Sequence[int] = ()) -> tuple[Span, ...]:
    """What a handoff over ``[cut, end)`` ships, by layer, empty spans left out.

    Full layers ship ``[cut, end)``; sliding layers ``[max(cut, end - window), end)``;
    recurrent layers their state at ``end`` (design, section 3). With cuts at ``extra`` too
    (see :func:`extra_cuts`) it is the union: a window more, states at each of them.

    Raises ``ValueError`` unless ``0 <= cut <= end`` and ``extra`` ascends inside.
    """
    stops = (*extra, end)
    if not 0 <= cut <= end or (extra and not cut < extra[0]) or sorted({*stops}) != [*stops]:
        raise ValueError(f"need 0 <= cut < extra < end, got {cut}, {tuple(extra)}, {end}")
    found: list[Span] = []
    if cut == end:
        return ()
    for index, layer in enumerate(layout.layers):
        match layer:
            case FullLayer():
                found.append(Span(index, cut, end))
            case SlidingLayer():
                found.append(Span(index, max(cut, stops[0] - layer.window), end))
            case RecurrentLayer():
                found += [Span(index, stop, stop) for stop in stops]
    return tuple(found)


def regions(layout: Layout, cut: int, end: int, extra: Sequence[int] = ()) -> tuple[Region, ...]:
    """The destination buffers of a handoff over ``[cut, end)``, in the order of ``spans``."""
    found: list[Region] = []
    for span in spans(layout, cut, end, extra):
        layer = layout.layers[span.index]
        if isinstance(layer, RecurrentLayer):
            for number, state in enumerate(layer.states):
                role, at = STATE + number, span.last
                found.append(
                    Region(span.index, role, at, at, state.nbytes, state.shape, state.dtype)
                )
            continue
        rows = span.last - span.first
        for role, width in ((KEY, layer.key_dim), (VALUE, layer.value_dim)):
            nbytes = rows * row_bytes(layer, role)
            shape = (rows, layer.heads, width)
            found.append(
                Region(span.index, role, span.first, span.last, nbytes, shape, layer.dtype)
            )
    return tuple(found)


def payload_bytes(layout: Layout, cut: int, end: int, extra: Sequence[int] = ()) -> int:
    """Bytes of rows and states that a handoff over ``[cut, end)`` carries (headers excluded)."""
    return sum(region.nbytes for region in regions(layout, cut, end, extra))


def tiles(cut: int, end: int, tile: int, extra: Sequence[int] = ()) -> Iterator[tuple[int, int]]:
    """The tile grid over ``[cut, end)``: pieces that end at absolute multiples of ``tile``, and
    at ``extra``.
    """
    first = cut
    while first < end:
        grid = min((first // tile + 1) * tile, end)
        last = min((stop for stop in extra if first < stop < grid), default=grid)
        yield first, last
        first = last


def schedule(
    layout: Layout,
    cut: int,
    end: int,
    tile: int,
    max_payload: int = MAX_FRAME_PAYLOAD,
    extra: Sequence[int] = (),
) -> Iterator[Slot]:
    """Every frame of a handoff over ``[cut, end)`` in the order in which it must arrive.

    Tile by tile (as rows are computed), within a tile layer by layer, keys before values,
    each cut into frames of whole rows of at most ``max_payload`` bytes (a row that is larger
    is refused with ``ValueError``); after a tile that ends at one of ``extra`` or at ``end``
    every recurrent state there, cut by bytes.
    """
    sequence = 0
    shipped = spans(layout, cut, end, extra)
    for tile_first, tile_last in tiles(cut, end, tile, extra):
        for span in shipped:
            layer = layout.layers[span.index]
            if isinstance(layer, RecurrentLayer):
                continue
            first, last = max(tile_first, span.first), min(tile_last, span.last)
            if first >= last:
                continue
            for role in (KEY, VALUE):
                width = row_bytes(layer, role)
                if width == 0:
                    continue
                per_frame = max_payload // width
                if per_frame == 0:
                    raise ValueError(f"one row of {width} bytes exceeds a frame of {max_payload}")
                for start in range(first, last, per_frame):
                    stop = min(start + per_frame, last)
                    offset, nbytes = (start - span.first) * width, (stop - start) * width
                    yield Slot(sequence, span.index, role, start, stop, offset, nbytes)
                    sequence += 1
        for span in shipped:
            layer = layout.layers[span.index]
            if not isinstance(layer, RecurrentLayer) or span.last != tile_last:
                continue
            for number, state in enumerate(layer.states):
                for offset in range(0, state.nbytes, max_payload):
                    nbytes = min(max_payload, state.nbytes - offset)
                    role = STATE + number
                    yield Slot(sequence, span.index, role, tile_last, tile_last, offset, nbytes)
                    sequence += 1
