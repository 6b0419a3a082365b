"""What a handoff must consist of: computed by the producer, computed again by the decoder.

Both sides call :func:`totals`; BEGIN states its result, and the decoder refuses any other.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from protocol.layout import (
    KEY,
    MAX_FRAME_PAYLOAD,
    VALUE,
    Layout,
    RecurrentLayer,
    Slot,
    extra_cuts,
    payload_bytes,
    row_bytes,
    schedule,
    spans,
)
from protocol.messages import MAX_FRAMES, Begin, History, Prefill, token_digest
from protocol.reasons import differs, refusal

MAX_LAYERS: Final = 1 << 16
MAX_STATES: Final = 254
_SPAN: Final = struct.Struct(">HQQ")


class Totals(NamedTuple):
    """Frames, payload bytes and the spans' digest of a handoff."""

    frames: int
    payload_bytes: int
    spans: bytes


def spans_digest(layout: Layout, cut: int, end: int, extra: Sequence[int] = ()) -> bytes:
    """SHA-256 over a domain tag and each span: index u16, first u64, last u64, big-endian."""
    state = hashlib.sha256(b"baton spans 1")
    for span in spans(layout, cut, end, extra):
        state.update(_SPAN.pack(span.index, span.first, span.last))
    return state.digest()


def frames_at_most(layout: Layout, cut: int, end: int, tile: int, extra: Sequence[int] = ()) -> int:
    """An upper bound of the frame count that costs no walk over the schedule."""
    tiles = (end - cut) // tile + 2 + len(extra)
    bound = 0
    for layer in layout.layers:
        if isinstance(layer, RecurrentLayer):
            each = sum(state.nbytes // MAX_FRAME_PAYLOAD + 1 for state in layer.states)
            bound += each * (len(extra) + 1)
            continue
        for role in (KEY, VALUE):
            per_frame = MAX_FRAME_PAYLOAD // max(1, row_bytes(layer, role))
            bound += tiles + (end - cut) // max(1, per_frame)
    return bound


def totals(layout: Layout, cut: int, end: int, tile: int, extra: Sequence[int] = ()) -> Totals:
    """What a handoff over ``[cut, end)`` in tiles of ``tile`` tokens, with cuts at ``extra`` too,
    consists of.

    Raises PeerProtocolError ``frames_too_many`` before it walks a schedule that may be
    longer than ``MAX_FRAMES``.
    """
    bound = frames_at_most(layout, cut, end, tile, extra)
    if bound > MAX_FRAMES:
        raise differs("frames_too_many", "frames", bound, f"at most {MAX_FRAMES}")
    count = sum(1 for _ in schedule(layout, cut, end, tile, extra=extra))
    nbytes = payload_bytes(layout, cut, end, extra)
    return Totals(count, nbytes, spans_digest(layout, cut, end, extra))


def require_carriable(layout: Layout) -> None:
    """Return only if frames can carry the layout: row size, layer count, state count.

    Raises ConfigError ``layout_not_carriable``.
    """
    fits = len(layout.layers) <= MAX_LAYERS
    for layer in layout.layers:
        if isinstance(layer, RecurrentLayer):
            fits = fits and len(layer.states) <= MAX_STATES
        else:
            largest = max(row_bytes(layer, KEY), row_bytes(layer, VALUE))
            fits = fits and largest <= MAX_FRAME_PAYLOAD
    if not fits:
        raise refusal("layout_not_carriable", "a row, or the number of layers, is too large")


def require_request(prefill: Prefill, layout: Layout, tile: int, most: int) -> None:
    """Return only if the cuts of a request lie inside its tokens.

    ``0 <= cut < end``, and ``extra_cuts`` are at most ``most``, as
    :func:`protocol.layout.extra_cuts` finds them. Raises PeerProtocolError ``cut_invalid``.
    """
    end = len(prefill.tokens) // 4
    if not prefill.cut < end:
        raise differs("cut_invalid", "cut", prefill.cut, f"below {end}")
    possible = extra_cuts(layout, prefill.cut, end, tile, prefill.extra_cuts)
    if len(prefill.extra_cuts) > most:
        raise differs("cut_invalid", "extra_cuts", len(prefill.extra_cuts), f"at most {most}")
    if possible != prefill.extra_cuts:
        found = ", ".join(map(str, prefill.extra_cuts[:4]))
        raise differs("cut_invalid", "extra_cuts", found, "ascending, in the last tile and window")


def make_begin(
    prefill: Prefill,
    layout: Layout,
    tile: int,
    *,
    transfer: bytes,
    cut: int,
    computed_tokens: int,
    history: tuple[History, ...],
) -> Begin:
    """The manifest that answers ``prefill`` from ``cut`` on; raises as :func:`totals`."""
    end = len(prefill.tokens) // 4
    counted = totals(layout, cut, end, tile, prefill.extra_cuts)
    return Begin(
        generation=prefill.generation,
        nonce=prefill.nonce,
        transfer=transfer,
        layout=layout.digest(),
        tokens=token_digest(prefill.tokens),
        spans=counted.spans,
        cut=cut,
        end=end,
        tile=tile,
        frames=counted.frames,
        payload_bytes=counted.payload_bytes,
        computed_tokens=computed_tokens,
        history=history,
    )


def frames_of(layout: Layout, prefill: Prefill, begin: Begin) -> Iterator[Slot]:
    """Every frame of the handoff that ``begin`` announces, in order."""
    return schedule(layout, begin.cut, begin.end, begin.tile, extra=prefill.extra_cuts)


def require_manifest(
    begin: Begin, prefill: Prefill, layout: Layout, tile: int, *, or_full: bool
) -> None:
    """Return only if BEGIN announces exactly what ``prefill`` asked for.

    ``begin.cut`` is the requested one, or 0 where ``or_full``. Raises in this order:
    ``layout_differs``, ``end_differs``, ``cut_not_accepted``, ``tile_differs``,
    ``frames_too_many``, ``frames_differ``, ``bytes_differ``, ``spans_differ``,
    ``tokens_differ``, ``computed_invalid``, ``history_invalid``.
    """
    end = len(prefill.tokens) // 4
    if begin.layout != layout.digest():
        raise differs("layout_differs", "layout", begin.layout, layout.digest())
    if begin.end != end:
        raise differs("end_differs", "end", begin.end, end)
    if begin.cut != prefill.cut and not (or_full and begin.cut == 0):
        expected = f"{prefill.cut} or 0" if or_full else prefill.cut
        raise differs("cut_not_accepted", "cut", begin.cut, expected)
    if begin.tile != tile:
        raise differs("tile_differs", "tile", begin.tile, tile)
    counted = totals(layout, begin.cut, end, tile, prefill.extra_cuts)
    if begin.frames != counted.frames:
        raise differs("frames_differ", "frames", begin.frames, counted.frames)
    if begin.payload_bytes != counted.payload_bytes:
        raise differs("bytes_differ", "payload_bytes", begin.payload_bytes, counted.payload_bytes)
    if begin.spans != counted.spans:
        raise differs("spans_differ", "spans", begin.spans, counted.spans)
    tokens = token_digest(prefill.tokens)
    if begin.tokens != tokens:
        raise refusal("tokens_differ", "the rows were computed from other tokens", field="tokens")
    require_provenance(begin, prefill.extra_cuts)


def require_provenance(begin: Begin, extra_cuts: Sequence[int] = ()) -> None:
    """Return only if the history covers ``[cut, end)`` and the computed tokens fit.

    An extra cut lies where rows end that were computed in one go: at a span's end, or on its
    tile grid. Elsewhere nobody could compute the same again.

    Raises PeerProtocolError ``computed_invalid``, ``history_invalid``.
    """
    if begin.computed_tokens > begin.end:
        raise differs("computed_invalid", "computed_tokens", begin.computed_tokens, begin.end)
    position = begin.cut
    for part in begin.history:
        if part.first != position or part.last <= part.first:
            raise differs("history_invalid", "first", part.first, position)
        for extra in extra_cuts:
            if part.first < extra < part.last and extra % part.recipe.tile:
                raise differs("history_invalid", "extra_cuts", extra, "at the end of a span")
        position = part.last
    if position != begin.end:
        raise differs("history_invalid", "last", position, begin.end)
