"""Distances of rows, the bounds on them, and the prompts that are compared."""

from __future__ import annotations

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

LAYOUT = Layout(
    (
        FullLayer(0, 1, 2, 2, "bfloat16"),
        SlidingLayer(1, 1, 2, 2, "float16", 4),
        RecurrentLayer(2, (StateArray("state", (3,), "float32"),)),
    )
)


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


def test_the_distance_is_that_of_the_worst_array() -> None:
    same = distance(LAYOUT, rows(), rows())
    assert same[:2] == (0.0, 0.0)
    found = rows()
    found[2, STATE] = np.frombuffer(np.array([1, 1, 1 + 3**0.5], np.float32).tobytes(), np.uint8)
    apart = distance(LAYOUT, found, rows())
    assert (apart.where, apart.median) == ("layer 2, state 0", 0.0)
    assert apart.worst == pytest.approx(1.0)
    found = rows()
    found[1, KEY][:2] = [0, 0x40]  # 2
    assert distance(LAYOUT, found, rows()).worst == pytest.approx(8**-0.5)
    assert distance(LAYOUT, found, rows()).where == "layer 1, keys"


@pytest.mark.parametrize("place", [(0, 1), (1, 0), (2, STATE)])
def test_what_is_no_number_is_as_far_as_can_be(place: tuple[int, int]) -> None:
    found = rows()
    found[place][:] = 0xFF
    apart = distance(LAYOUT, found, rows())
    assert apart.worst == NO_NUMBER
    assert not apart.within(BOUNDS["bfloat16"])
    # Of the decoder's own it says nothing about the producer.
    with pytest.raises(IntegrityError) as caught:
        distance(LAYOUT, rows(), found)
    assert caught.value.reason == "rows_not_finite"


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
