"""What BEGIN must say: both sides count alike, and a schedule is bounded before it is walked."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from protocol.errors import BatonError, ConfigError
from protocol.layout import (
    FullLayer,
    Layout,
    RecurrentLayer,
    StateArray,
    payload_bytes,
    schedule,
    spans,
)
from protocol.layouts_named import named
from protocol.manifest import (
    frames_at_most,
    make_begin,
    require_carriable,
    require_manifest,
    require_request,
    spans_digest,
    totals,
)
from protocol.messages import MAX_TOKENS, Begin, History, Prefill, Recipe, encode_tokens
from tests.machines.joined import LAYOUT, Joined
from tests.strategies import layouts, ranges


@given(layouts(), ranges(), st.integers(1, 70))
def test_totals_are_those_of_the_schedule(layout: Layout, ends: tuple[int, int], tile: int) -> None:
    cut, end = ends
    counted = totals(layout, cut, end, tile)
    slots = list(schedule(layout, cut, end, tile))
    assert counted.frames == len(slots) <= frames_at_most(layout, cut, end, tile)
    assert counted.payload_bytes == sum(slot.nbytes for slot in slots)
    assert counted.payload_bytes == payload_bytes(layout, cut, end)


def test_the_spans_digest_is_what_the_readme_says() -> None:
    expected = hashlib.sha256(b"baton spans 1")
    for span in spans(LAYOUT, 2, 9):
        expected.update(span.index.to_bytes(2, "big"))
        expected.update(span.first.to_bytes(8, "big") + span.last.to_bytes(8, "big"))
    assert spans_digest(LAYOUT, 2, 9) == expected.digest()
    assert spans_digest(LAYOUT, 2, 9) != spans_digest(LAYOUT, 2, 8)


def test_the_deepest_real_prompt_is_allowed() -> None:
    assert totals(named("muse-glimmer"), 0, 131_071, 512).frames < 20_000


def asked_and_answered(cut: int = 4) -> tuple[Prefill, Begin]:
    tokens = encode_tokens(range(9))
    prefill = Prefill("r", 1, bytes(32), bytes(32), bytes(32), 4, (), 1, 1, tokens)
    whole = (History(cut, 9, Recipe("producer", "cpu", "bfloat16", 4)),)
    begin = make_begin(
        prefill, LAYOUT, 4, transfer=bytes(16), cut=cut, computed_tokens=9, history=whole
    )
    return prefill, begin


def test_an_honest_manifest_passes() -> None:
    prefill, begin = asked_and_answered()
    _, whole = asked_and_answered(cut=0)
    for or_full in (False, True):
        require_manifest(begin, prefill, LAYOUT, 4, or_full=or_full)
    require_manifest(whole, prefill, LAYOUT, 4, or_full=True)


@pytest.mark.parametrize(("cut", "or_full"), [(0, False), (1, True), (2, True), (3, True)])
def test_nothing_between_a_delta_and_all_of_it_is_accepted(cut: int, or_full: bool) -> None:
    prefill, begin = asked_and_answered(cut)
    with pytest.raises(BatonError) as caught:
        require_manifest(begin, prefill, LAYOUT, 4, or_full=or_full)
    assert caught.value.reason == "cut_not_accepted"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": bytes(32)}, "layout_differs"),
        ({"end": 8}, "end_differs"),
        ({"end": 10}, "end_differs"),
        ({"cut": 0}, "cut_not_accepted"),
        ({"cut": 5}, "cut_not_accepted"),
        ({"tile": 5}, "tile_differs"),
        ({"frames": 0}, "frames_differ"),
        ({"payload_bytes": 0}, "bytes_differ"),
        ({"spans": bytes(32)}, "spans_differ"),
        ({"payload_bytes": 1 << 40}, "bytes_differ"),
        ({"cut": 3}, "cut_not_accepted"),
        ({"tokens": bytes(32)}, "tokens_differ"),
        ({"computed_tokens": 10}, "computed_invalid"),
        ({"history": (History(3, 9, Recipe("producer", "cpu", "float16", 4)),)}, "history_invalid"),
        (
            {"history": (History(2, 10, Recipe("producer", "cpu", "float16", 4)),)},
            "history_invalid",
        ),
    ],
)
def test_a_manifest_is_refused_as_such(changes: dict[str, Any], reason: str) -> None:
    prefill, begin = asked_and_answered()
    with pytest.raises(BatonError) as caught:
        require_manifest(structs.replace(begin, **changes), prefill, LAYOUT, 4, or_full=False)
    assert caught.value.reason == reason


def test_endless_schedules_are_refused_without_walking_them() -> None:
    wide = Layout(tuple(FullLayer(index, 1, 1, 1, "float16") for index in range(1000)))
    with pytest.raises(BatonError) as caught:
        totals(wide, 0, MAX_TOKENS, 1)
    assert caught.value.reason == "frames_too_many"


@pytest.mark.parametrize(
    "layout",
    [
        Layout((FullLayer(0, 1, (1 << 19) + 1, 1, "bfloat16"),)),
        Layout((FullLayer(0, 1, 1, (1 << 19) + 1, "bfloat16"),)),
        Layout(
            (RecurrentLayer(0, tuple(StateArray(str(n), (1,), "float32") for n in range(255))),)
        ),
        Layout(tuple(FullLayer(0, 1, 1, 1, "float16") for _ in range((1 << 16) + 1))),
    ],
    ids=["keys", "values", "states", "layers"],
)
def test_a_layout_that_frames_cannot_carry_is_refused_at_once(layout: Layout) -> None:
    with pytest.raises(ConfigError) as caught:
        require_carriable(layout)
    assert caught.value.reason == "layout_not_carriable"
    with pytest.raises(ConfigError):
        Joined(layout=layout)


def test_the_largest_row_is_carried() -> None:
    require_carriable(Layout((FullLayer(0, 1, 1 << 19, 1 << 19, "bfloat16"),)))


@pytest.mark.parametrize(
    ("extra", "most"),
    [((8,), 0), ((7,), 4), ((9,), 4), ((8, 8), 4), ((4,), 4)],
)
def test_extra_cuts_are_those_that_divide_the_last_tile_alone(
    extra: tuple[int, ...], most: int
) -> None:
    prefill = structs.replace(asked_and_answered()[0], extra_cuts=extra)
    with pytest.raises(BatonError) as caught:
        require_request(prefill, LAYOUT, 4, most)
    assert (caught.value.reason, caught.value.field) == ("cut_invalid", "extra_cuts")
    require_request(structs.replace(prefill, extra_cuts=(8,)), LAYOUT, 4, 1)


def test_an_extra_cut_lies_where_its_rows_end() -> None:
    """Rows that were computed in one go with later ones are those of no prompt that ends there."""
    prefill = structs.replace(asked_and_answered()[0], extra_cuts=(8,))
    coarse = Recipe("producer", "cpu", "bfloat16", 5)
    for history, good in (
        ((History(4, 9, coarse),), False),
        ((History(4, 8, coarse), History(8, 9, coarse)), True),
        ((History(4, 9, Recipe("producer", "cpu", "bfloat16", 4)),), True),
    ):
        begin = make_begin(
            prefill, LAYOUT, 4, transfer=bytes(16), cut=4, computed_tokens=9, history=history
        )
        if good:
            require_manifest(begin, prefill, LAYOUT, 4, or_full=False)
            continue
        with pytest.raises(BatonError) as caught:
            require_manifest(begin, prefill, LAYOUT, 4, or_full=False)
        assert (caught.value.reason, caught.value.field) == ("history_invalid", "extra_cuts")
