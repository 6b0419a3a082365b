"""Distances of rows, the bounds on them, and the prompts that are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_decoder.qualify.compare import BOUNDS, NO_NUMBER, bound_of, distance
from mac_decoder.qualify.probes import DEEP, SHORT, probes
from protocol.errors import IntegrityError
from protocol.layout import KEY, STATE, FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray
from protocol.layouts_named import muse_glimmer
from tests.strategies import layouts

ATTENTION = FullLayer(0, 1, 2, 2, "bfloat16")
LAYOUT = Layout(
    (
        ATTENTION,
        SlidingLayer(1, 1, 2, 2, "float16", 4),
        RecurrentLayer(2, (StateArray("state", (3,), "float32"),)),
    )
)
DEEP_LAYOUT = Layout((FullLayer(0, 1, 8, 8, "float32"),) * 3)
SMEARED = Layout((LAYOUT.layers[2], ATTENTION, LAYOUT.layers[2], ATTENTION))
BOUND = BOUNDS["float32"]


def rows() -> dict[tuple[int, int], np.ndarray]:
    """One in every element, in every format."""
    one = {"bfloat16": b"\x80\x3f", "float16": b"\x00\x3c", "float32": b"\x00\x00\x80\x3f"}

    def ones(dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(one[dtype] * count, np.uint8).copy()

    return {
        (0, 0): ones("bfloat16", 8),
        (0, 1): ones("bfloat16", 8),
        (1, 0): ones("float16", 8),
        (1, 1): ones("float16", 8),
        (2, STATE): ones("float32", 3),
    }


def changed(off: Mapping[int, Sequence[float] | np.ndarray]) -> float:
    """The excess of three layers of keys, each row off by what ``off`` says of a layer."""
    own = np.ones((len(next(iter(off.values()), [0])), 8), np.float32)
    expected = {(index, role): own.view(np.uint8).ravel() for index in range(3) for role in (0, 1)}
    found = dict(expected)
    for index, by in off.items():
        other = own * (1 + np.asarray(by, np.float32))[:, None]
        found[index, KEY] = other.astype(np.float32).view(np.uint8).ravel()
    return distance(DEEP_LAYOUT, found, expected).excess


def test_in_the_first_layer_every_row_counts() -> None:
    assert changed({}) == 0.0
    assert changed({0: [0, 0, 0, 0, 0.9 * BOUND.first]}) == pytest.approx(0.9, rel=1e-2)
    assert changed({0: [0, 0, 0, 0, 1.1 * BOUND.first]}) == pytest.approx(1.1, rel=1e-2)


def test_later_single_rows_do_not_and_what_most_are_off_by_may_grow() -> None:
    assert changed({1: [1.0, 1.0, 0, 0, 0]}) == 0.0
    tenth = BOUND.first / 10
    least = 4 * tenth + BOUND.slack
    assert changed({1: [0.9 * least] * 5}) == pytest.approx(0.9, rel=1e-2)
    assert changed({1: [1.1 * least] * 5}) == pytest.approx(1.1, rel=1e-2)
    grown = 4 * 2 * tenth + BOUND.slack
    first = {0: [2 * tenth] * 5}
    assert changed(first | {1: [0.9 * grown] * 5}) == pytest.approx(0.9, rel=1e-2)
    assert changed(first | {1: [1.1 * grown] * 5}) == pytest.approx(1.1, rel=1e-2)
    # From what any layer before was off by; and never beyond the roof.
    assert changed(first | {1: [0.9 * grown] * 5, 2: [3 * grown] * 5}) < 1.0
    far = {0: [0.9 * BOUND.first] * 5, 1: [4 * BOUND.first] * 5, 2: [1.1 * BOUND.worst] * 5}
    assert changed(far) > 1.0
    assert changed({1: [1.1 * BOUND.worst] * 5}) > 10.0


@pytest.mark.parametrize("wrong", [range(33), range(100, 149), range(367, 400)])
def test_a_stretch_of_wrong_rows_is_enough(wrong: range) -> None:
    """A mistake that begins at some position is one of those rows alone."""
    off = np.zeros(400)
    off[wrong] = 1.0
    assert changed({1: off}) > 10.0
    off[wrong[:25]] = 0.0
    assert changed({1: off}) == 0.0


def test_one_number_that_is_none_is_enough() -> None:
    off = np.zeros(400)
    off[7] = np.nan
    assert changed({2: off}) == NO_NUMBER
    off[7] = np.inf
    assert changed({2: off}) == NO_NUMBER


def test_behind_recurrent_layers_the_median_row_counts() -> None:
    state = np.ones(3, np.float32).view(np.uint8)
    bound = BOUNDS["bfloat16"]
    own = np.full((5, 2), 0x3F80, np.uint16)
    expected = {(0, STATE): state, (2, STATE): state}
    expected |= {(index, role): own.view(np.uint8).ravel() for index in (1, 3) for role in (0, 1)}
    other = own.copy()
    other[:2] = 0x4000
    found = expected | {(1, KEY): other.view(np.uint8).ravel()}
    assert distance(SMEARED, found, expected).apart == 0.0
    other[2] = 0x4000
    found = expected | {(1, KEY): other.view(np.uint8).ravel()}
    assert distance(SMEARED, found, expected) == (1.0, bound.behind, "layer 1, keys")
    found = expected | {(3, KEY): other.view(np.uint8).ravel()}
    least = 10 * bound.first / 10 + bound.slack
    assert distance(SMEARED, found, expected) == (1.0, pytest.approx(least), "layer 3, keys")
    # Of states the first ones alone say something in this format; but numbers they are.
    off = (np.ones(3, np.float32) * 1.5).view(np.uint8)
    first = distance(SMEARED, expected | {(0, STATE): off}, expected)
    assert first == (0.5, bound.first, "layer 0, state 0")
    assert distance(SMEARED, expected | {(2, STATE): off}, expected).excess == 0.0
    off = np.array([1, 1, np.nan], np.float32).view(np.uint8)
    assert not distance(SMEARED, expected | {(2, STATE): off}, expected).explained
    # In float32 they do.
    layout = Layout((DEEP_LAYOUT.layers[0], LAYOUT.layers[2]))
    rows = {(0, role): np.ones(8, np.float32).view(np.uint8) for role in (0, 1)}
    rows[1, STATE] = state
    off = (np.ones(3, np.float32) * 1.5).view(np.uint8)
    assert distance(layout, rows | {(1, STATE): off}, rows) == (0.5, 2e-2, "layer 1, state 0")


@pytest.mark.parametrize("place", [(0, 1), (1, 0), (2, STATE)])
def test_what_is_no_number_is_as_far_as_can_be(place: tuple[int, int]) -> None:
    found = rows()
    found[place][:] = 0xFF
    apart = distance(LAYOUT, found, rows())
    assert apart.apart == NO_NUMBER
    assert not apart.explained
    # Of the decoder's own it says nothing about the producer.
    with pytest.raises(IntegrityError) as caught:
        distance(LAYOUT, rows(), found)
    assert caught.value.reason == "rows_not_finite"


def test_rows_that_nearly_vanish_are_measured_by_the_others() -> None:
    own = np.ones((4, 2), np.float32)
    own[0] = 1e-6
    other = own.copy()
    other[0] = 2e-6
    layout = Layout((FullLayer(0, 1, 2, 2, "float32"),))
    given = {(0, role): own.view(np.uint8).ravel() for role in (0, 1)}
    assert distance(layout, given | {(0, 0): other.view(np.uint8).ravel()}, given).apart < 2e-5
    zero = {place: np.zeros_like(array) for place, array in given.items()}
    assert distance(layout, zero, zero).apart == 0.0
    assert distance(layout, given, zero).apart == pytest.approx(2**0.5)


def test_a_layout_has_the_bound_of_its_roughest_array() -> None:
    assert bound_of(LAYOUT) == BOUNDS["bfloat16"]
    assert bound_of(Layout(LAYOUT.layers[1:])) == BOUNDS["float16"]
    assert bound_of(Layout(LAYOUT.layers[2:])) == BOUNDS["float32"]


@given(
    layouts(), st.binary(min_size=32, max_size=32), st.integers(2, 1 << 18), st.integers(1, 4096)
)
def test_probes_are_of_the_model_and_fit_it(
    layout: Layout, identity: bytes, vocabulary: int, most: int
) -> None:
    found = probes(layout, identity, vocabulary, most)
    assert found == probes(layout, identity, vocabulary, most)
    assert len(found) == 3
    for probe in found:
        assert probe
        assert len(probe) <= most
        assert all(0 <= token < vocabulary for token in probe)


def test_probes_cross_the_window_and_2048_tokens() -> None:
    short, crossing, deep = (len(p) for p in probes(muse_glimmer(), bytes(32), 1 << 17, 1 << 17))
    assert (short, deep) == (SHORT, DEEP)
    assert crossing > 2048 + SHORT
    assert probes(LAYOUT, bytes(32), 99, 999) != probes(LAYOUT, bytes([1]) * 32, 99, 999)
