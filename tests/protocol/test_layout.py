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
