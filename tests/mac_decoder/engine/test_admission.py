"""Padded bytes and grouping: properties over arbitrary layouts."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from mac_decoder.engine.admission import (
    ROW_STEP,
    PaddingRule,
    cache_bytes,
    choose_group,
    may_share,
    next_prefill,
    padded_bytes,
    useful_bytes,
)
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray
from tests.strategies import layouts

LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=8)
FULL = Layout((FullLayer(0, 2, 16, 16, "float32"),))
ROW = 2 * (16 + 16) * 4


def test_rows_are_rounded_up_to_the_step_in_which_caches_grow() -> None:
    assert cache_bytes(FULL, 1) == ROW_STEP * ROW
    assert cache_bytes(FULL, ROW_STEP) == ROW_STEP * ROW
    assert cache_bytes(FULL, ROW_STEP + 1) == 2 * ROW_STEP * ROW


def test_a_window_bounds_its_layer_and_a_tile_widens_it() -> None:
    layout = Layout((SlidingLayer(0, 2, 16, 16, "float32", window=512),))
    assert cache_bytes(layout, 100_000) == 512 * ROW
    assert cache_bytes(layout, 100_000, tile=64) == (512 + 64) * ROW
    assert cache_bytes(layout, 256, tile=64) == 256 * ROW


def test_states_do_not_grow() -> None:
    layout = Layout((RecurrentLayer(0, (StateArray("conv", (3, 8), "float32"),)),))
    assert cache_bytes(layout, 1) == cache_bytes(layout, 1 << 20) == 3 * 8 * 4


def test_a_long_sequence_beside_three_short_ones_takes_four_times_its_cache() -> None:
    lengths = [20_000, 20, 20, 20]
    assert padded_bytes(FULL, lengths) == 4 * cache_bytes(FULL, 20_000)
    assert not may_share(FULL, lengths, PaddingRule(ratio=1.25, slack=0))


@given(layouts(), LENGTHS)
def test_padding_never_takes_less_than_the_sequences_apart(layout: Layout, lengths: list[int]):
    padded = padded_bytes(layout, lengths)
    assert padded >= useful_bytes(layout, lengths)
    assert padded == len(lengths) * max(cache_bytes(layout, length) for length in lengths)


@given(layouts(), LENGTHS, st.integers(1, 200_000))
def test_more_rows_never_take_less(layout: Layout, lengths: list[int], more: int) -> None:
    longest = max(lengths)
    assert cache_bytes(layout, longest + more) >= cache_bytes(layout, longest)
    assert padded_bytes(layout, [*lengths, more]) >= padded_bytes(layout, lengths)


@given(
    layouts(),
    st.lists(LENGTHS, max_size=4),
    st.integers(1, 200_000),
    st.integers(0, 1 << 32),
    st.floats(1, 3),
    st.integers(0, 1 << 28),
)
def test_the_chosen_group_keeps_the_rule_and_the_room(
    layout: Layout, groups: list[list[int]], length: int, spare: int, ratio: float, slack: int
) -> None:
    rule = PaddingRule(ratio, slack)

    def added(lengths: list[int]) -> int:
        joined = padded_bytes(layout, [*lengths, length])
        return joined - padded_bytes(layout, lengths) - cache_bytes(layout, length)

    index = choose_group(layout, groups, length, rule, spare)
    fitting = [g for g in groups if may_share(layout, [*g, length], rule) and added(g) <= spare]
    if index is None:
        assert not fitting
    else:
        assert groups[index] in fitting
        assert added(groups[index]) == min(added(g) for g in fitting)


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=6))
def test_every_prompt_is_read_in_the_end_whatever_comes_after_it(remaining: list[int]) -> None:
    """Short prompts arrive without end; the oldest is still finished."""
    left = [50, *remaining]
    for turn in range(4 * 50):
        index = next_prefill(left, turn)
        left[index] -= 1
        if index == 0 and left[0] == 0:
            return
        if left[index] == 0:
            left[index] = 1
    raise AssertionError("the oldest prompt was never finished")


def test_the_shortest_prompt_goes_first() -> None:
    assert next_prefill([900, 20, 300], 0) == 1
    assert next_prefill([900, 20, 300], 3) == 0
    assert next_prefill([20, 20], 1) == 0
