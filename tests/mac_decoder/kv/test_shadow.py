"""The shadow: each byte placed once, in order, in the place that the layout gives it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.kv import shadow as room
from mac_decoder.kv.memory import unwritten
from mac_decoder.kv.shadow import Shadow
from protocol.errors import IntegrityError, LocalProtocolError
from protocol.layout import (
    KEY,
    STATE,
    VALUE,
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    Slot,
    StateArray,
    payload_bytes,
    regions,
    schedule,
)
from tests.ordinary import examples

WINDOW = 16
LAYOUT = Layout(
    (
        FullLayer(0, 2, 3, 5, "bfloat16"),
        SlidingLayer(1, 1, 4, 4, "float32", WINDOW),
        RecurrentLayer(2, (StateArray("conv", (3, 2), "float16"),)),
    )
)


POISON = 0x5A


@pytest.fixture(autouse=True, scope="module")
def poisoned() -> Iterator[None]:
    """Memory comes with anything in it."""

    def with_old_bytes(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, np.ndarray]:
        array, written = unwritten(shape, dtype)
        written[:] = POISON
        return array, written

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(room, "unwritten", with_old_bytes)
        yield


def _held(cut: int, end: int) -> list[tuple[int, int, int, int]]:
    """The pieces of a cache at ``end`` that a delta from ``cut`` leaves out."""
    sent = {(r.index, r.role): r.nbytes for r in regions(LAYOUT, cut, end)}
    found = [
        (r.index, r.role, 0, r.nbytes - sent[r.index, r.role]) for r in regions(LAYOUT, 0, end)
    ]
    return [piece for piece in found if piece[3]]


def _fill(shadow: Shadow, slots: list[Slot], seed: int = 0) -> None:
    source = np.random.default_rng(seed)
    for slot in slots:
        shadow.place(slot)[:] = source.bytes(slot.nbytes)


@settings(max_examples=30, deadline=None)
@given(end=st.integers(1, 60), cut=st.integers(0, 59), tile=st.integers(1, 20))
def test_a_handoff_and_what_is_held_fill_the_cut(end: int, cut: int, tile: int) -> None:
    cut = min(cut, end - 1)
    shadow = Shadow(LAYOUT, cut, end)
    assert shadow.nbytes == payload_bytes(LAYOUT, 0, end)
    held = _held(cut, end)
    for index, role, _, nbytes in held:
        for at in range(0, nbytes, 7):
            shadow.place_piece(index, role, at, min(7, nbytes - at))[:] = bytes(min(7, nbytes - at))
    _fill(shadow, list(schedule(LAYOUT, cut, end, tile, 64)))
    shadow.check_complete()
    assert sum(piece[3] for piece in held) == shadow.nbytes - payload_bytes(LAYOUT, cut, end)


@pytest.mark.parametrize("placed", [0, 1, 3])
def test_everything_may_come_in_place_of_a_delta(placed: int) -> None:
    """What was placed before is void."""
    shadow = Shadow(LAYOUT, 20, 30)
    for piece in _held(20, 30)[:placed]:
        shadow.place_piece(*piece)
    with pytest.raises(LocalProtocolError):
        shadow.begin(10)
    shadow.begin(20)
    shadow.begin(0)
    assert shadow.cut == 0
    _fill(shadow, list(schedule(LAYOUT, 0, 30, 8, 64)), 3)
    shadow.check_complete()
    again = Shadow(LAYOUT, 0, 30)
    _fill(again, list(schedule(LAYOUT, 0, 30, 8, 64)), 3)
    for region in regions(LAYOUT, 0, 30):
        place = (region.index, region.role)
        one, other = (np.array(each.take(*place).view(mx.uint8)) for each in (shadow, again))
        assert np.array_equal(one, other)


def test_bytes_land_position_major_and_come_out_by_head() -> None:
    shadow = Shadow(LAYOUT, 0, 4)
    values = np.arange(4 * 2 * 5, dtype=np.uint16)
    for slot in schedule(LAYOUT, 0, 4, 64):
        data = bytes(slot.nbytes)
        if (slot.index, slot.role) == (0, VALUE):
            data = values.tobytes()
        shadow.place(slot)[:] = data
    taken = shadow.take(0, VALUE)
    assert (taken.shape, taken.dtype) == ((1, 2, 4, 5), mx.bfloat16)
    bits = np.array(taken.view(mx.uint16))
    assert np.array_equal(bits[0], values.reshape(4, 2, 5).transpose(1, 0, 2))
    state = shadow.take(2, STATE)
    assert (state.shape, state.dtype) == ((1, 3, 2), mx.float16)


def test_order_is_the_schedules() -> None:
    slots = list(schedule(LAYOUT, 0, 30, 8))
    shadow = Shadow(LAYOUT, 0, 30)
    later = next(s for s in slots[1:] if (s.index, s.role) == (slots[0].index, slots[0].role))
    with pytest.raises(LocalProtocolError) as caught:
        shadow.place(later)
    assert caught.value.reason == "shadow_misplaced"
    shadow.place(slots[0])
    with pytest.raises(LocalProtocolError):
        shadow.place(slots[0])


@pytest.mark.parametrize(
    "wrong",
    [
        Slot(0, 0, KEY, 0, 5, 0, 4 * 12 + 1),
        Slot(0, 0, KEY, 0, 0, 0, 0),
        Slot(0, 0, KEY, 0, 1, 0, -12),
        Slot(0, 0, KEY, 0, 1, -12, 12),
        Slot(0, 9, KEY, 0, 1, 0, 12),
        Slot(0, 0, STATE, 0, 1, 0, 12),
    ],
)
def test_what_does_not_fit_is_refused(wrong: Slot) -> None:
    with pytest.raises(LocalProtocolError) as caught:
        Shadow(LAYOUT, 0, 4).place(wrong)
    assert caught.value.reason == "shadow_misplaced"


def test_what_is_held_is_placed_once_and_must_be() -> None:
    shadow = Shadow(LAYOUT, 20, 30)
    # the window of the sliding layer reaches below the cut, the recurrent layer has no rows
    held = _held(20, 30)
    assert held == [
        (0, KEY, 0, 20 * 12),
        (0, VALUE, 0, 20 * 20),
        (1, KEY, 0, 6 * 16),
        (1, VALUE, 0, 6 * 16),
    ]
    _fill(shadow, list(schedule(LAYOUT, 20, 30, 64)))
    with pytest.raises(IntegrityError):
        shadow.check_complete()
    for piece in held:
        shadow.place_piece(*piece)
    shadow.check_complete()
    for wrong in (held[0], (0, KEY, 20 * 12, 12), (7, KEY, 0, 20)):
        with pytest.raises(LocalProtocolError):
            shadow.place_piece(*wrong)


@pytest.mark.parametrize(("cut", "end"), [(0, 0), (5, 5), (6, 5), (-1, 5)])
def test_an_empty_cut_is_a_mistake(cut: int, end: int) -> None:
    with pytest.raises(ValueError):
        Shadow(LAYOUT, cut, end)


@dataclass
class _Stop:
    after: int

    def __call__(self) -> bool:
        self.after -= 1
        return self.after < 0


WIDE = Layout(tuple(FullLayer(index, 4, 64, 64, "float32") for index in range(3)))


def test_prefaulting_never_writes_over_what_arrived() -> None:
    end = 6000
    shadow = Shadow(WIDE, 0, end)
    slots = list(schedule(WIDE, 0, end, 512))
    touching = threading.Thread(target=shadow.prefault)
    touching.start()
    for slot in slots:
        shadow.place(slot)[:] = b"\xa5" * slot.nbytes
    touching.join()
    shadow.prefault()
    shadow.check_complete()
    for region in regions(WIDE, 0, end):
        taken = np.array(shadow.take(region.index, region.role).view(mx.uint32))
        assert (taken == 0xA5A5A5A5).all()


def test_prefaulting_stops_when_told() -> None:
    shadow = Shadow(WIDE, 0, 6000)
    stop = _Stop(after=2)
    shadow.prefault(stop)
    assert stop.after == -1


# -- never a region that was not filled


def _pieces(end: int) -> list[tuple[int, int, int, int]]:
    """Every region of ``LAYOUT`` in pieces of at most 100 bytes, for ``place_piece``."""
    return [
        (region.index, region.role, start, min(100, region.nbytes - start))
        for region in regions(LAYOUT, 0, end)
        for start in range(0, region.nbytes, 100)
    ]


@pytest.mark.parametrize("number", range(len(_pieces(30))))
def test_a_region_with_a_hole_is_not_given_up(number: int) -> None:
    pieces = _pieces(30)
    missing = pieces.pop(number)
    place, nbytes = missing[:2], missing[3]
    random.Random(number).shuffle(pieces)
    shadow = Shadow(LAYOUT, 0, 30)
    for piece in pieces:
        shadow.place_piece(*piece)[:] = bytes(piece[3])
    whole = {(r.index, r.role): r.nbytes for r in regions(LAYOUT, 0, 30)}
    for refused in (shadow.check_complete, lambda: shadow.take(*place)):
        with pytest.raises(IntegrityError) as caught:
            refused()
        assert caught.value.reason == "shadow_incomplete"
        assert caught.value.field == f"layer {place[0]} role {place[1]}"
        assert caught.value.found == whole[place] - nbytes
        assert caught.value.expected == whole[place]
    shadow.place_piece(*missing)[:] = bytes(nbytes)
    shadow.check_complete()
    for each in whole:
        assert not np.array(shadow.take(*each).view(mx.uint8)).any()


def test_received_rows_alone_are_not_given_up() -> None:
    shadow = Shadow(LAYOUT, 20, 30)
    _fill(shadow, list(schedule(LAYOUT, 20, 30, 64)))
    for piece in _held(20, 30):
        with pytest.raises(IntegrityError):
            shadow.take(*piece[:2])
        shadow.place_piece(*piece)
        shadow.take(*piece[:2])


ONE = Layout((FullLayer(0, 1, 2, 0, "bfloat16"),))
"""Four bytes a position, and values of no bytes."""


@examples(300)
@given(st.lists(st.tuples(st.integers(-4, 44), st.integers(-2, 44)), max_size=12))
def test_pieces_have_each_byte_once(pieces: list[tuple[int, int]]) -> None:
    shadow, free = Shadow(ONE, 0, 10), set(range(40))
    for offset, nbytes in pieces:
        wanted = set(range(offset, offset + nbytes))
        if wanted and wanted <= free:
            view = shadow.place_piece(0, KEY, offset, nbytes)
            assert view.nbytes == nbytes
            view[:] = bytes(nbytes)
            free -= wanted
        else:
            with pytest.raises(LocalProtocolError) as caught:
                shadow.place_piece(0, KEY, offset, nbytes)
            assert caught.value.reason == "shadow_misplaced"
    if free:
        with pytest.raises(IntegrityError) as found:
            shadow.check_complete()
        assert found.value.found == 40 - len(free)
        shadow.prefault()
    for byte in sorted(free, key=lambda byte: (byte % 3, byte)):
        shadow.place_piece(0, KEY, byte, 1)[:] = b"\0"
    shadow.check_complete()
    assert not np.array(shadow.take(0, KEY).view(mx.uint8)).any()


def test_rows_do_not_come_twice_as_pieces_and_in_order() -> None:
    shadow = Shadow(ONE, 0, 10)
    shadow.place_piece(0, KEY, 20, 20)
    with pytest.raises(LocalProtocolError):
        shadow.place(Slot(0, 0, KEY, 0, 6, 0, 24))
    shadow.place(Slot(0, 0, KEY, 0, 5, 0, 20))
    shadow.check_complete()


def test_pieces_of_rows_that_are_received_are_refused() -> None:
    shadow = Shadow(ONE, 5, 10)
    for at, nbytes in ((20, 20), (19, 2), (39, 1)):
        with pytest.raises(LocalProtocolError):
            shadow.place_piece(0, KEY, at, nbytes)
    shadow.place_piece(0, KEY, 0, 20)
    with pytest.raises(IntegrityError):
        shadow.check_complete()


def test_a_region_of_no_bytes_is_complete() -> None:
    shadow = Shadow(ONE, 0, 10)
    shadow.place_piece(0, KEY, 0, 40)
    shadow.check_complete()
    assert shadow.take(0, VALUE).shape == (1, 1, 10, 0)


def test_prefaulting_writes_over_no_piece() -> None:
    end = 6000
    shadow = Shadow(WIDE, 0, end)
    pieces = [
        (region.index, region.role, start, region.nbytes // 8)
        for region in regions(WIDE, 0, end)
        for start in range(0, region.nbytes, region.nbytes // 8)
    ]
    random.Random(1).shuffle(pieces)
    touching = threading.Thread(target=shadow.prefault)
    touching.start()
    for piece in pieces:
        shadow.place_piece(*piece)[:] = b"\xa5" * piece[3]
    touching.join()
    for region in regions(WIDE, 0, end):
        taken = np.array(shadow.take(region.index, region.role).view(mx.uint32))
        assert (taken == 0xA5A5A5A5).all()
