"""What is counted, when, and how sure a derived figure is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.reuse.accounting import (
    REMEMBERED_CUTS,
    UNAVAILABLE,
    Accounts,
    Figure,
    Matrix,
    Served,
    active_matmul_parameters,
    recomputed_bytes,
)
from mac_decoder.reuse.cut import pieces
from mac_decoder.reuse.facts import Facts, FullHandoff, Remote, Restore
from mac_decoder.reuse.ladder import plan
from mac_decoder.reuse.resident import Resident
from protocol.layout import FullLayer, Layout, SlidingLayer, payload_bytes
from protocol.layouts_named import named
from protocol.messages import History, Recipe
from tests.mac_decoder.reuse.made import FULL, RECURRENT, SLIDING, SPACE, made_of

CUT = bytes(range(32))
OTHER = bytes(32)
HIT = Served(
    "hit", "resident", 1001, 1000, 1000, cut=CUT, restore_bytes=5000, restore_s=0.01
)  # fmt: skip
LIVE = Served("live", "live", 1001, 900, 900, prefilled_here=100, prefill_s=1.0)
HANDOFF = Served("handoff", "remote", 1001, installed_bytes=5000, reasons=("no_shared_prefix",))
COLD = Served("cold", "local", 1001, cut=CUT, prefilled_here=1000, prefill_s=8.0)


def changes(before: Accounts, after: Accounts) -> dict[str, int]:
    old, new = before.counters(), after.counters()
    differences = {name: count - old.get(name, 0) for name, count in new.items()}
    return {name: count for name, count in differences.items() if count}


# -- the alibi


@pytest.mark.parametrize("layout", [FULL, SLIDING, RECURRENT])
def test_the_alibi(layout: Layout) -> None:
    """One cold request, one declared warm-up, five warm ones of 2,048 tokens."""
    prompt = list(range(2048))
    tier = Resident(1 << 30)
    producer = Remote(tile=512)
    accounts = Accounts()

    def planned():
        facts = Facts(len(prompt), layout, resident=tier.holding(SPACE, prompt), remote=producer)
        return plan(replace(facts, durable=tier.holding(SPACE, prompt)))

    cold = planned()
    assert cold.action == FullHandoff()
    recipe = Recipe("producer", "cpu", "float32", 512)
    cut, bodies = made_of(layout, prompt[:-1], history=(History(0, 2047, recipe),))
    whole = payload_bytes(layout, 0, 2047)
    accounts = accounts.after(
        Served("cold", "remote", 2048, installed_bytes=whole, reasons=cold.reasons)
    )
    key = tier.put(SPACE, cut, bodies, publication="published").key
    assert accounts.counters() == {
        "cache_hits": 0,
        "cache_misses": 1,
        "session_continuation_hits": 0,
        "disagg_prefills": 1,
        "delta_prefills": 0,
        "disagg_bytes_installed": whole,
        "bytes_served_from_cache": 0,
        "bytes_recomputed": 0,
        "tier_remote": 1,
        "fell_short_no_shared_prefix": 1,
    }
    after_cold = accounts
    for number in range(6):
        warm = planned()
        assert warm.action == Restore("resident", key, 2047, 2047)
        with tier.pin(key) or pytest.fail("gone") as held:
            placed = sum(p.nbytes for p in pieces(layout, held.cut.position, 2047))
        accounts = accounts.after(
            Served(
                f"warm {number}",
                "resident",
                2048,
                reused_tokens=warm.action.position,
                shared_tokens=warm.shared,
                parts_at=warm.parts_at,
                cut=key,
                restore_bytes=placed,
                restore_s=0.001,
                reasons=warm.reasons,
            )
        )
        assert accounts.cache_hits == number + 1
        assert accounts.disagg_prefills == 1
    assert changes(after_cold, accounts) == {
        "cache_hits": 6,
        "tier_resident": 6,
        "bytes_served_from_cache": 6 * whole,
    }


# -- each kind of request moves its own counters and no others

MOVES: list[tuple[str, Served, dict[str, int]]] = [
    ("a hit", HIT, {"cache_hits": 1, "tier_resident": 1, "bytes_served_from_cache": 5000}),
    (
        "a durable hit",
        replace(HIT, source="durable"),
        {"cache_hits": 1, "tier_durable": 1, "bytes_served_from_cache": 5000},
    ),
    ("a live session is no hit", LIVE, {"session_continuation_hits": 1, "tier_live": 1}),
    (
        "a handoff is no hit",
        HANDOFF,
        {
            "cache_misses": 1,
            "disagg_prefills": 1,
            "disagg_bytes_installed": 5000,
            "tier_remote": 1,
            "fell_short_no_shared_prefix": 1,
        },
    ),
    ("computed here", COLD, {"cache_misses": 1, "tier_local": 1}),
    ("one token asks no cache", Served("one", "local", 1), {"tier_local": 1}),
    (
        "a delta is neither hit nor miss",
        replace(HIT, source="remote", installed_bytes=700),
        {
            "disagg_prefills": 1,
            "delta_prefills": 1,
            "disagg_bytes_installed": 700,
            "tier_remote": 1,
            "bytes_served_from_cache": 5000,
        },
    ),
    (
        "a restore that failed is no hit, and says why",
        replace(COLD, recomputed_bytes=40, failures=("digest_differs",)),
        {
            "cache_misses": 1,
            "tier_local": 1,
            "bytes_recomputed": 40,
            "fell_short_digest_differs": 1,
        },
    ),
    (
        "reuse that fell short",
        replace(HIT, reasons=("prompts_part", "capped_by_durable", "lane_local")),
        {
            "cache_hits": 1,
            "tier_resident": 1,
            "bytes_served_from_cache": 5000,
            "fell_short_prompts_part": 1,
            "fell_short_capped_by_durable": 1,
        },
    ),
]


@pytest.mark.parametrize(("what", "served", "expected"), MOVES, ids=lambda v: str(v)[:40])
def test_what_a_request_moves(what: str, served: Served, expected: dict[str, int]) -> None:
    assert changes(Accounts(), Accounts().after(served)) == expected, what


@given(st.lists(st.sampled_from([line[1] for line in MOVES]), max_size=20))
def test_counters_are_sums(requests: list[Served]) -> None:
    accounts = Accounts()
    expected: dict[str, int] = {}
    moves = {id(line[1]): line[2] for line in MOVES}
    for served in requests:
        accounts = accounts.after(served)
        for name, count in moves[id(served)].items():
            expected[name] = expected.get(name, 0) + count
    assert changes(Accounts(), accounts) == expected
    hits, misses = expected.get("cache_hits", 0), expected.get("cache_misses", 0)
    rate = Figure(hits / (hits + misses), "measured") if hits + misses else UNAVAILABLE
    assert accounts.derived()["hit_rate"] == rate


def test_neither_sessions_nor_handoffs_raise_the_hit_rate() -> None:
    accounts = Accounts().after(HIT).after(COLD)
    before = accounts.derived()["hit_rate"]
    assert before == Figure(0.5, "measured")
    assert accounts.after(LIVE).derived()["hit_rate"] == before
    assert accounts.after(HANDOFF).derived()["hit_rate"] == Figure(1 / 3, "measured")


@pytest.mark.parametrize(
    "change",
    [
        {"reused_tokens": 1001},
        {"reused_tokens": -1},
        {"reused_tokens": 0},
        {"restore_bytes": 0},
        {"cut": b""},
    ],
)
def test_a_hit_of_nothing_cannot_be_counted(change: dict) -> None:
    with pytest.raises(ValueError):
        replace(HIT, **change)


# -- bytes


def test_recomputed_bytes_are_those_of_the_spans() -> None:
    layout = Layout((FullLayer(0, 1, 1, 1, "float32"), SlidingLayer(1, 1, 1, 1, "float32", 10)))
    assert recomputed_bytes(layout, 100, 100, 500) == 0
    assert recomputed_bytes(layout, 100, 90, 500) == 0
    assert recomputed_bytes(layout, 100, 105, 500) == 2 * 5 * 8
    assert recomputed_bytes(layout, 100, 300, 500) == 200 * 8 + 10 * 8
    assert recomputed_bytes(layout, 100, 9999, 500) == payload_bytes(layout, 100, 500)
    glimmer = named("muse-glimmer")
    assert recomputed_bytes(glimmer, 1024, 2047, 2047) == 54_472_704


# -- derived figures and their standing

SPEEDUP, SECONDS = "restore_speedup", "seconds_saved"


def test_nothing_is_known_of_nothing() -> None:
    assert set(Accounts().derived().values()) == {UNAVAILABLE}
    assert Accounts(active_parameters=10).derived()["gflops_avoided"] == Figure(0.0, "estimated")


@pytest.mark.parametrize("order", [(HIT, COLD), (COLD, HIT)])
def test_a_restore_and_a_prefill_of_the_same_cut_are_a_measurement(order: tuple) -> None:
    accounts = Accounts().after(order[0]).after(order[1])
    assert accounts.derived()[SPEEDUP] == Figure(pytest.approx(800.0), "measured")
    assert accounts.derived()[SECONDS] == Figure(pytest.approx(7.99), "measured")


def test_of_another_cut_they_are_an_estimate() -> None:
    other = replace(COLD, cut=OTHER, prompt_tokens=2001, prefilled_here=2000, prefill_s=16.0)
    accounts = Accounts().after(HIT).after(other)
    assert accounts.derived()[SPEEDUP] == Figure(pytest.approx(800.0), "estimated")
    assert accounts.derived()[SECONDS] == Figure(pytest.approx(7.99), "estimated")


def test_without_any_prefill_here_nothing_can_be_told() -> None:
    accounts = Accounts().after(HANDOFF).after(HIT)
    assert accounts.derived()[SPEEDUP] == UNAVAILABLE
    assert accounts.derived()[SECONDS] == UNAVAILABLE


def test_a_handoff_is_no_local_prefill() -> None:
    accounts = Accounts().after(replace(HANDOFF, cut=CUT)).after(HIT)
    assert accounts.derived()[SPEEDUP] == UNAVAILABLE


def test_what_goes_on_from_a_restore_is_a_rate_and_no_pair() -> None:
    partly = replace(HIT, prompt_tokens=1101, prefilled_here=100, prefill_s=1.0)
    assert Accounts().after(partly).derived()[SPEEDUP] == Figure(pytest.approx(1000.0), "estimated")


def test_one_unpaired_restore_makes_the_sum_an_estimate_and_leaves_the_speedup_measured() -> None:
    accounts = Accounts().after(COLD).after(HIT).after(replace(HIT, cut=OTHER, restore_s=0.02))
    assert accounts.derived()[SPEEDUP] == Figure(pytest.approx(800.0), "measured")
    assert accounts.derived()[SECONDS] == Figure(pytest.approx(7.99 + 7.98), "estimated")


def test_several_timings_of_a_cut_are_averaged() -> None:
    accounts = Accounts()
    for served in (COLD, replace(COLD, prefill_s=4.0), HIT, replace(HIT, restore_s=0.02)):
        accounts = accounts.after(served)
    assert accounts.derived()[SPEEDUP] == Figure(pytest.approx(12.0 / 0.03), "measured")
    assert accounts.derived()[SECONDS] == Figure(pytest.approx(11.97), "measured")


def test_a_slow_restore_saves_less_than_nothing() -> None:
    accounts = Accounts().after(COLD).after(replace(HIT, restore_s=10.0))
    assert accounts.derived()[SPEEDUP] == Figure(pytest.approx(0.8), "measured")
    assert accounts.derived()[SECONDS] == Figure(pytest.approx(-2.0), "measured")


def test_forgotten_cuts_stay_in_the_sums() -> None:
    accounts = Accounts().after(COLD).after(HIT).after(replace(HIT, cut=OTHER))
    before = accounts.derived()
    for number in range(REMEMBERED_CUTS + 5):
        later = replace(COLD, cut=number.to_bytes(32, "big") + b"later")
        accounts = accounts.after(later)
    assert len(accounts._timings) == REMEMBERED_CUTS
    assert accounts.derived()[SPEEDUP] == before[SPEEDUP]
    assert accounts.derived()[SECONDS] == before[SECONDS]


def test_what_a_restore_saved_today_is_not_valued_anew() -> None:
    """A rate that is another one later, and a cut that is timed later, change no earlier sum."""
    slow = replace(COLD, cut=b"slow", prefilled_here=100, prefill_s=10.0)
    fast = replace(COLD, cut=CUT, prefilled_here=100_000, prefill_s=10.0)
    small = replace(HIT, cut=OTHER, reused_tokens=100, restore_s=0.01)
    first = Accounts().after(slow).after(HIT)
    assert first.saved_today == Figure(pytest.approx(99.99), "estimated")
    assert first.after(fast).saved_today == first.saved_today
    second = first.on_a_new_day()
    assert second.saved_today == UNAVAILABLE
    assert second.after(fast).saved_today == UNAVAILABLE
    after = second.after(fast).after(small)
    expected = 100 * 20.0 / 100_100 - 0.01
    assert after.saved_today == Figure(pytest.approx(expected), "estimated")
    assert expected > 0


def test_what_was_saved_today_is_measured_where_each_restore_is() -> None:
    accounts = Accounts().after(COLD)
    assert accounts.saved_today == UNAVAILABLE
    twice = accounts.after(HIT).after(replace(HIT, source="durable"))
    assert twice.saved_today == Figure(pytest.approx(2 * 7.99), "measured")
    assert twice.after(LIVE).after(HANDOFF).after(COLD).saved_today == twice.saved_today
    mixed = twice.after(replace(HIT, cut=OTHER))
    assert mixed.saved_today == Figure(pytest.approx(3 * 7.99), "estimated")
    assert mixed.after(HIT).saved_today == Figure(pytest.approx(4 * 7.99), "estimated")
    # The next day does not go on from yesterday's doubts.
    assert mixed.on_a_new_day().after(HIT).saved_today == Figure(pytest.approx(7.99), "measured")
    slow = accounts.after(replace(HIT, restore_s=10.0))
    assert slow.saved_today == Figure(pytest.approx(-2.0), "measured")


def test_of_restores_whose_saving_nobody_can_tell_nothing_is_said() -> None:
    untold = Accounts().after(HIT)
    assert untold.saved_today == UNAVAILABLE
    # What comes after it is told, and is not all of it.
    assert untold.after(COLD).saved_today == UNAVAILABLE
    known = untold.after(COLD).after(HIT)
    assert known.saved_today == Figure(pytest.approx(7.99), "estimated")
    assert known.on_a_new_day().derived() == known.derived()


def test_energy_needs_a_power_source() -> None:
    accounts = Accounts().after(COLD).after(HIT)
    assert accounts.derived()["joules_saved"] == UNAVAILABLE
    assert accounts.derived(watts=50.0)["joules_saved"] == Figure(pytest.approx(399.5), "estimated")
    assert Accounts().derived(watts=50.0)["joules_saved"] == UNAVAILABLE


def test_operations_are_a_floor_of_the_routed_experts() -> None:
    dense = [Matrix(576, 576), Matrix(1536, 576)]
    experts = [Matrix(768, 2048, experts=128, active=8)]
    assert active_matmul_parameters(dense) == 576 * 576 + 1536 * 576
    assert active_matmul_parameters(experts) == 8 * 768 * 2048
    accounts = Accounts(active_parameters=3_000_000_000)
    for served in (HIT, LIVE, HANDOFF, COLD):
        accounts = accounts.after(served)
    # Only the hit's 1,000 tokens were restored.
    assert accounts.derived()["gflops_avoided"] == Figure(6000.0, "estimated")
    assert Accounts().after(HIT).derived()["gflops_avoided"] == UNAVAILABLE


def test_a_part_that_was_held_is_work_that_nobody_did() -> None:
    accounts = Accounts(active_parameters=10**9)
    part, whole = (accounts.after(replace(HIT, source=source)) for source in ("remote", "resident"))
    assert part.derived()["gflops_avoided"] == whole.derived()["gflops_avoided"]
    assert accounts.after(HANDOFF).derived()["gflops_avoided"].value == 0.0


@settings(max_examples=60)
@given(st.lists(st.sampled_from([line[1] for line in MOVES]), max_size=12))
def test_a_figure_has_a_value_exactly_if_it_is_available(requests: list[Served]) -> None:
    accounts = Accounts(active_parameters=7)
    for served in requests:
        accounts = accounts.after(served)
    for watts in (None, 30.0):
        for figure in accounts.derived(watts).values():
            assert (figure.value is None) == (figure.tag == "unavailable")


def test_accounts_are_values() -> None:
    accounts = Accounts()
    accounts.after(HIT)
    assert accounts == Accounts()
    with pytest.raises(AttributeError):
        accounts.cache_hits = 1  # type: ignore[misc]


# -- the line
