"""What a cut holds, what a block holds, and that together they are a cache, byte for byte."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.reuse.cut import (
    REST,
    BlockBody,
    CutBody,
    block_sizes,
    can_supply,
    check_block,
    check_cut,
    check_history,
    clipped,
    delta_pieces,
    divide,
    extended,
    pieces,
    replayable,
    rest_regions,
    supplies_delta,
)
from protocol.blocks import BLOCK, chain, cut_digest
from protocol.errors import IntegrityError
from protocol.layout import (
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    extra_cuts,
    payload_bytes,
    regions,
)
from protocol.layouts_named import named
from protocol.messages import History
from tests.mac_decoder.reuse.made import (
    BLOCKLESS,
    DECODE,
    FULL,
    LAYOUTS,
    PREFILL,
    RECURRENT,
    SLIDING,
    SPACE,
    causal_rows,
    made_of,
    some_rows,
)
from tests.ordinary import examples
from tests.strategies import layouts

POISON = 0xA5
EDGES = (1, 2, 31, 32, 33, 255, 256, 257, 299, 300, 301, 511, 512, 513, 768, 900)


def expected_at(layout: Layout, rows: dict, held: int, position: int) -> dict:
    """The bytes of a cache at ``position``, taken out of one at ``held`` by hand."""
    found = {}
    for index, layer in enumerate(layout.layers):
        if isinstance(layer, RecurrentLayer):
            found |= {place: rows[place] for place in rows if place[0] == index}
            continue
        for role in (0, 1):
            first = first_held = 0
            if isinstance(layer, SlidingLayer):
                first = max(0, position - layer.window)
                first_held = max(0, held - layer.window)
            array = rows[index, role]
            table = array.reshape(held - first_held, array.nbytes // (held - first_held))
            found[index, role] = table[first - first_held : position - first_held].ravel()
    return found


def assembled(layout: Layout, cut: CutBody, bodies: tuple[BlockBody, ...], position: int) -> dict:
    """The cache that ``pieces`` makes, over poison; every byte must be written exactly once."""
    places = {(r.index, r.role): r.nbytes for r in regions(layout, 0, position)}
    memory = {place: np.full(n, POISON, np.uint8) for place, n in places.items()}
    written = {place: np.zeros(n, np.uint8) for place, n in places.items()}
    for piece in pieces(layout, cut.position, position):
        source = cut.rest if piece.source == REST else bodies[piece.source].data
        place = (piece.index, piece.role)
        target = slice(piece.offset, piece.offset + piece.nbytes)
        memory[place][target] = source[place][piece.start : piece.start + piece.nbytes]
        written[place][target] += 1
    assert all((count == 1).all() for count in written.values())
    return memory


def check_restored(layout: Layout, held: int, position: int) -> None:
    rows = some_rows(layout, held)
    cut, bodies = divide(layout, SPACE, range(held), rows, (History(0, held, PREFILL),))
    memory = assembled(layout, cut, bodies, position)
    expected = expected_at(layout, rows, held, position)
    for place, array in expected.items():
        assert memory[place].tobytes() == array.tobytes(), place


@pytest.mark.parametrize("held", EDGES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_is_saved(layout: Layout, held: int) -> None:
    check_restored(layout, held, held)


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 3 * BLOCK), st.data())
def test_restored_is_saved_at_every_position_that_can_be_supplied(
    layout: Layout, held: int, data: st.DataObject
) -> None:
    position = data.draw(st.integers(1, held))
    if can_supply(layout, held, position):
        check_restored(layout, held, position)
    else:
        with pytest.raises(ValueError):
            list(pieces(layout, held, position))


def composed(layout: Layout, held: int, start: int, end: int, extra: tuple[int, ...] = ()) -> None:
    """A cut at ``held`` and a delta of ``[start, end)`` are the caches at ``end`` and ``extra``,
    byte for byte.

    Their prompts part at ``start``; every byte is written exactly once.
    """
    theirs = list(range(held))
    ours = [*theirs[:start], *range(10_000, 10_000 + end - start)]
    cut, bodies = divide(
        layout, SPACE, theirs, causal_rows(layout, theirs), (History(0, held, PREFILL),)
    )
    expected = causal_rows(layout, ours)
    for region in regions(layout, 0, end, extra[:1]):
        place = (region.index, region.role)
        if extra and isinstance(layout.layers[region.index], SlidingLayer):
            # A window more of the lowest cut, and what follows it.
            width = region.nbytes // (end - region.first)
            behind = expected[place][expected[place].nbytes - (end - extra[0]) * width :]
            lowest = causal_rows(layout, ours[: extra[0]])[place]
            expected[place] = np.concatenate([lowest, behind])
    memory = {place: np.full(array.nbytes, POISON, np.uint8) for place, array in expected.items()}
    written = {place: np.zeros(array.nbytes, np.uint8) for place, array in expected.items()}
    for piece in delta_pieces(layout, held, start, end, extra):
        source = cut.rest if piece.source == REST else bodies[piece.source].data
        place = (piece.index, piece.role)
        target = slice(piece.offset, piece.offset + piece.nbytes)
        memory[place][target] = source[place][piece.start : piece.start + piece.nbytes]
        written[place][target] += 1
    for region in regions(layout, start, end, extra):
        place = (region.index, region.role)
        if place not in expected or region.last != end:
            continue  # a state of an extra cut
        sent = expected[place].nbytes - region.nbytes
        memory[place][sent:] = expected[place][sent:]
        written[place][sent:] += 1
    for place, array in expected.items():
        assert (written[place] == 1).all(), place
        assert memory[place].tobytes() == array.tobytes(), place


@examples(120)
@given(layouts(), st.integers(1, 3 * BLOCK), st.data())
def test_a_cut_and_a_delta_are_the_whole(layout: Layout, held: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(1, held))
    end = data.draw(st.integers(start + 1, 4 * BLOCK))
    if supplies_delta(layout, held, start, end):
        composed(layout, held, start, end)
    else:
        with pytest.raises(ValueError):
            list(delta_pieces(layout, held, start, end))


@examples(120)
@given(layouts(), st.integers(1, 3 * BLOCK), st.data())
def test_a_cut_and_a_delta_are_an_extra_cut_too(
    layout: Layout, held: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(1, held))
    end = data.draw(st.integers(start + 2, 4 * BLOCK))
    extra = extra_cuts(layout, start, end, end, [end - data.draw(st.integers(1, 30))])
    if supplies_delta(layout, held, start, (*extra, end)[0]):
        composed(layout, held, start, end, extra)
    else:
        with pytest.raises(ValueError):
            list(delta_pieces(layout, held, start, end, extra))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("held", "start", "end"),
    [
        (512, 512, 513),
        (512, 512, 900),
        (511, 256, 300),
        (300, 256, 700),
        (301, 256, 301),
        (900, 512, 1024),
        (900, 512, 813),
        (900, 600, 1300),
    ],
)
def test_deltas_around_blocks_and_windows(layout: Layout, held: int, start: int, end: int) -> None:
    if supplies_delta(layout, held, start, end):
        composed(layout, held, start, end)


@pytest.mark.parametrize(
    ("held", "start", "end", "expected"),
    [
        (300, 300, 301, True),
        (300, 0, 301, False),  # nothing is held
        (300, 301, 400, False),
        (300, 300, 300, False),  # nothing is missing
        (600, 512, 600, True),  # rows [300, 512) are in the ring of [300, 600)
        (600, 512, 599, False),  # row 299 has left the ring
        (600, 256, 599, True),  # the whole window is sent
        (600, 300, 599, False),
        (299, 256, 260, True),  # nothing has left the ring yet
    ],
)
def test_what_a_cut_supplies_to_a_delta(held: int, start: int, end: int, expected: bool) -> None:
    """The window is 300."""
    assert supplies_delta(SLIDING, held, start, end) is expected


@pytest.mark.parametrize(
    ("layout", "held", "position", "expected"),
    [
        (FULL, 600, 600, True),
        (FULL, 600, 599, True),
        (FULL, 600, 1, True),
        (FULL, 600, 0, False),
        (FULL, 600, 601, False),
        (SLIDING, 300, 299, True),  # the window is 300: nothing was lost yet
        (SLIDING, 300, 1, True),
        (SLIDING, 301, 300, False),
        (SLIDING, 301, 301, True),
        (SLIDING, 900, 899, False),
        (RECURRENT, 10, 10, True),
        (RECURRENT, 10, 9, False),
        (BLOCKLESS, 10, 9, False),
        (BLOCKLESS, 600, 600, True),
    ],
)
def test_what_a_cut_can_supply(layout: Layout, held: int, position: int, expected: bool) -> None:
    assert can_supply(layout, held, position) is expected


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 4 * BLOCK))
def test_blocks_and_rest_are_the_whole_cut_and_no_more(layout: Layout, position: int) -> None:
    rest = sum(region.nbytes for region in rest_regions(layout, position))
    blocks = position // BLOCK * sum(block_sizes(layout).values())
    assert rest + blocks == payload_bytes(layout, 0, position)


def test_the_shares_of_muse_glimmer() -> None:
    glimmer = named("muse-glimmer")
    assert sum(block_sizes(glimmer).values()) == 13 * 256 * 1024
    rest = rest_regions(glimmer, 65_535)
    assert sum(r.nbytes for r in rest) == 39 * 2048 * 1024 + 13 * 255 * 1024
    assert [(r.index, r.role) for r in rest] == sorted(
        (i, role) for i in range(52) for role in (0, 1)
    )


def test_divide_copies_nothing() -> None:
    rows = some_rows(FULL, 600)
    cut, bodies = divide(FULL, SPACE, range(600), rows, (History(0, 600, PREFILL),))
    for body in bodies:
        assert all(np.shares_memory(array, rows[place]) for place, array in body.data.items())
    assert all(np.shares_memory(array, rows[place]) for place, array in cut.rest.items())
    assert cut.blocks == tuple(body.hash for body in bodies) == tuple(chain(SPACE, range(600)))
    assert cut.digest(SPACE) == cut_digest(SPACE, cut.blocks[1], range(512, 600), 600)
    assert bodies[0].nbytes == sum(block_sizes(FULL).values())


def test_a_cut_shows_no_token() -> None:
    cut, _ = made_of(FULL, [123456789] * 3)
    assert "123456789" not in repr(cut)


def test_malformed_cuts_are_refused() -> None:
    cut, bodies = made_of(SLIDING, range(300))
    check_cut(cut)
    rest = dict(cut.rest)
    place, array = next(iter(rest.items()))
    wrong = {
        "no tokens": replace(cut, tokens=cut.tokens[:0], blocks=(), history=()),
        "narrow tokens": replace(cut, tokens=cut.tokens.astype(np.uint16)),
        "a block missing": replace(cut, blocks=()),
        "a token missing": replace(cut, tokens=cut.tokens[:-1]),
        "a place missing": replace(cut, rest={k: v for k, v in rest.items() if k != place}),
        "a place too many": replace(cut, rest=rest | {(9, 0): array}),
        "short": replace(cut, rest=rest | {place: array[:-1]}),
        "strided": replace(cut, rest=rest | {place: np.repeat(array, 2)[::2]}),
        "not bytes": replace(cut, rest=rest | {place: array.view(np.int8)}),
        "a hole in the history": replace(cut, history=(History(1, 300, PREFILL),)),
        "a short history": replace(cut, history=(History(0, 299, PREFILL),)),
    }
    for what, body in wrong.items():
        with pytest.raises(IntegrityError) as refused:
            check_cut(body)
        assert refused.value.reason == "cut_malformed", what
    check_block(SLIDING, bodies[0])
    for data in ({}, {p: a[1:] for p, a in bodies[0].data.items()}):
        with pytest.raises(IntegrityError):
            check_block(SLIDING, BlockBody(bodies[0].hash, data))


SPANS = (History(0, 100, PREFILL), History(100, 130, DECODE), History(130, 192, PREFILL))


def test_histories_are_clipped_and_extended() -> None:
    check_history(SPANS, 192)
    assert clipped(SPANS, 130) == SPANS[:2]
    assert clipped(SPANS, 120) == (SPANS[0], History(100, 120, DECODE))
    assert clipped(SPANS, 1000) == SPANS
    # On the grid of 64 the joint is where a tile ends anyway.
    joined = extended(SPANS, History(192, 200, PREFILL))
    assert joined == (*SPANS[:2], History(130, 200, PREFILL))
    # Off the grid it is a segment's end that a replay must repeat.
    assert extended(joined, History(200, 256, PREFILL))[-1] == History(200, 256, PREFILL)
    assert extended((), History(0, 5, PREFILL)) == (History(0, 5, PREFILL),)
    for span in (History(191, 200, PREFILL), History(193, 200, PREFILL), History(192, 192, DECODE)):
        with pytest.raises(IntegrityError):
            extended(SPANS, span)
    for broken in (SPANS[1:], (SPANS[0], SPANS[2]), (SPANS[0], SPANS[0])):
        with pytest.raises(IntegrityError):
            check_history(broken, broken[-1].last)


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, False), (63, False), (64, True), (99, False), (100, True), (101, True), (129, True),
     (130, True), (131, False), (191, False), (192, True), (193, False)],
)  # fmt: skip
def test_where_a_history_can_be_replayed_to(position: int, expected: bool) -> None:
    assert replayable(SPANS, position) is expected


def test_full_layers_are_those_of_the_layout() -> None:
    sizes = block_sizes(FULL)
    assert set(sizes) == {(0, 0), (0, 1), (1, 0)}, "a value without bytes has no place"
    assert isinstance(FULL.layers[1], FullLayer)
    assert block_sizes(BLOCKLESS) == {}
