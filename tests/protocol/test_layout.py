"""Spans, regions, tiles and the schedule: counted to the byte, and the design's own numbers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.layout import (
    KEY,
    STATE,
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    Span,
    StateArray,
    extra_cuts,
    payload_bytes,
    regions,
    row_bytes,
    schedule,
    spans,
    tiles,
)
from protocol.layouts_named import named
from tests.strategies import layouts, ranges

GLIMMER = named("muse-glimmer")


@pytest.mark.parametrize(
    ("prompt", "held", "expected"),
    [
        (65_536, 0, 954_190_848),
        (32_769, 0, 517_996_544),
        (65_536, 32_768, 517_983_232),
        (2_048, 1_024, 54_472_704),
    ],
)
def test_the_numbers_of_the_design(prompt: int, held: int, expected: int) -> None:
    assert payload_bytes(GLIMMER, held, prompt - 1) == expected


def test_spans_by_kind() -> None:
    layout = Layout(
        (
            FullLayer(0, 1, 2, 2, "float32"),
            SlidingLayer(1, 1, 2, 2, "float32", 8),
            RecurrentLayer(2, (StateArray("conv", (2,), "float32"),)),
        )
    )
    assert spans(layout, 5, 20) == (Span(0, 5, 20), Span(1, 12, 20), Span(2, 20, 20))
    assert spans(layout, 15, 20) == (Span(0, 15, 20), Span(1, 15, 20), Span(2, 20, 20))
    assert spans(layout, 20, 20) == ()
    for cut, end in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError):
            spans(layout, cut, end)


def test_a_latent_has_values_of_another_width() -> None:
    layer = FullLayer(0, 1, 512, 64, "bfloat16")
    assert (row_bytes(layer, KEY), row_bytes(layer, 1)) == (1024, 128)


@given(layouts(), ranges(), st.integers(1, 70), st.sampled_from((64, 100, 1 << 20)))
def test_the_schedule_covers_every_region_once(
    layout: Layout, ends: tuple[int, int], tile: int, largest: int
) -> None:
    cut, end = ends
    filled = {(r.index, r.role): 0 for r in regions(layout, cut, end)}
    last_tile = -1
    for number, slot in enumerate(schedule(layout, cut, end, tile, largest)):
        assert slot.sequence == number
        assert 0 < slot.nbytes <= largest
        # Within a region the bytes follow each other without gap or overlap.
        assert slot.offset == filled[slot.index, slot.role]
        filled[slot.index, slot.role] += slot.nbytes
        layer = layout.layers[slot.index]
        if isinstance(layer, RecurrentLayer):
            assert (slot.first, slot.last) == (end, end)
            last_tile = 1 << 40
        else:
            assert slot.nbytes == (slot.last - slot.first) * row_bytes(layer, slot.role)
            assert slot.first // tile == (slot.last - 1) // tile >= last_tile
            last_tile = slot.first // tile
    assert filled == {(r.index, r.role): r.nbytes for r in regions(layout, cut, end)}
    assert sum(filled.values()) == payload_bytes(layout, cut, end)


@st.composite
def handoffs(draw: st.DrawFn) -> tuple[Layout, int, int, int, tuple[int, ...]]:
    """A layout, a range, a tile and extra cuts that are possible with them."""
    layout, (cut, end), tile = draw(layouts()), draw(ranges()), draw(st.integers(1, 70))
    wanted = draw(st.lists(st.integers(0, 70), max_size=6))
    return layout, cut, end, tile, extra_cuts(layout, cut, end, tile, wanted)


@given(handoffs())
def test_extra_cuts_add_what_they_need_and_nothing_else(
    it: tuple[Layout, int, int, int, tuple[int, ...]],
) -> None:
    """A position is shipped where one of the cuts needs it, by the rule for a single cut."""
    layout, cut, end, _, extra = it

    def needed(span: Span) -> set[tuple[int, int]]:
        return {(span.index, at) for at in range(span.first, span.last)} or {
            (span.index, -span.last)
        }

    alone = set().union(*(needed(s) for stop in (*extra, end) for s in spans(layout, cut, stop)))
    assert set().union(*map(needed, spans(layout, cut, end, extra))) == alone


@given(handoffs())
def test_the_schedule_with_extra_cuts_fills_every_region_in_order(
    it: tuple[Layout, int, int, int, tuple[int, ...]],
) -> None:
    layout, cut, end, tile, extra = it
    whole = regions(layout, cut, end, extra)
    filled = {(r.index, r.role, r.last): 0 for r in whole}
    reached = cut
    for slot in schedule(layout, cut, end, tile, extra=extra):
        state = isinstance(layout.layers[slot.index], RecurrentLayer)
        place = slot.index, slot.role, slot.last if state else end
        assert slot.offset == filled[place]
        filled[place] += slot.nbytes
        # Nothing of a later tile comes before the states of a cut, nor rows across one.
        assert slot.last >= reached
        assert not any(slot.first < stop < slot.last for stop in extra)
        reached = slot.last if state else max(reached, slot.first)
    assert filled == {(r.index, r.role, r.last): r.nbytes for r in whole}
    assert sum(filled.values()) == payload_bytes(layout, cut, end, extra)


@given(handoffs())
def test_extra_cuts_leave_whole_tiles_alone(
    it: tuple[Layout, int, int, int, tuple[int, ...]],
) -> None:
    """Rows of whole tiles are the same for every prompt: an extra cut divides none before the
    last, and what lies in the window of one cut lies in that of the next or behind it.
    """
    layout, cut, end, tile, extra = it
    plain, divided = list(tiles(cut, end, tile)), list(tiles(cut, end, tile, extra))
    assert divided[: len(plain) - 1] == plain[:-1]
    assert [last for _, last in divided[len(plain) - 1 :]] == sorted({*extra, end} - {plain[-1][0]})
    for layer in layout.layers:
        assert not isinstance(layer, SlidingLayer) or all(end - x <= layer.window for x in extra)


def test_extra_cuts_of_the_published_model() -> None:
    """Four tokens of a generation prompt: their rows once, and the window's four oldest."""
    end, extra = 65_535, (65_531,)
    assert extra_cuts(GLIMMER, 0, end, 512, [0, 12, *extra, end]) == extra
    more = payload_bytes(GLIMMER, 0, end, extra) - payload_bytes(GLIMMER, 0, end)
    assert more == 39 * 4 * 1024
    for wrong in ((0,), (end,), (5, 5), (7, 6)):
        with pytest.raises(ValueError):
            spans(GLIMMER, 0, end, wrong)


@given(ranges(500), st.integers(1, 600))
def test_tiles_end_at_absolute_multiples(ends: tuple[int, int], tile: int) -> None:
    cut, end = ends
    pieces = list(tiles(cut, end, tile))
    assert pieces[0][0] == cut
    assert pieces[-1][1] == end
    assert all(last % tile == 0 for _, last in pieces[:-1])
    assert all(a[1] == b[0] for a, b in pairwise(pieces))


def test_large_states_are_cut_by_bytes() -> None:
    layout = Layout((RecurrentLayer(0, (StateArray("a", (25,), "float32"),)),))
    slots = list(schedule(layout, 0, 4, 4, 64))
    assert [(slot.offset, slot.nbytes, slot.role) for slot in slots] == [
        (0, 64, STATE),
        (64, 36, STATE),
    ]


def test_a_row_that_fits_no_frame_is_refused() -> None:
    layout = Layout((FullLayer(0, 1, 33, 1, "bfloat16"),))
    with pytest.raises(ValueError):
        list(schedule(layout, 0, 1, 1, 64))


def test_the_digest_tells_layouts_apart() -> None:
    one = Layout((FullLayer(0, 1, 2, 2, "float32"),))
    others = (
        Layout((FullLayer(0, 1, 2, 2, "float16"),)),
        Layout((SlidingLayer(0, 1, 2, 2, "float32", 4),)),
        Layout((*one.layers, *one.layers)),
        Layout((FullLayer(0, 2, 2, 2, "float32"),)),
        Layout((FullLayer(0, 1, 2, 2, "float32", member=1),)),
    )
    assert len({one.digest(), *(other.digest() for other in others)}) == 6
