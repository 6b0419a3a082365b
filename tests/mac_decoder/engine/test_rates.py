"""Moving averages, and the length from which the producer is worth asking."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mac_decoder.engine.rates import (
    FIRST_GUESS,
    HALF_LIFE_S,
    LONGEST_PROBE_PAUSE_S,
    MEMORY,
    PROBE_AFTER_S,
    Average,
    Probing,
    Speeds,
    local_seconds,
    remote_seconds,
    threshold,
)

RATES = st.floats(0.1, 1e6)


def test_a_threshold_is_guessed_until_both_sides_are_measured() -> None:
    assert threshold(1000.0, Speeds()) == FIRST_GUESS
    assert threshold(1000.0, Speeds(local=100.0)) == FIRST_GUESS
    assert threshold(1000.0, Speeds(producer=100.0, link=1e9)) == FIRST_GUESS


def test_a_slow_link_makes_the_producer_useless_at_any_length() -> None:
    assert threshold(1e6, Speeds(local=100.0, producer=5000.0, link=1e6)) is None


def test_the_demo_machine_asks_from_a_dozen_tokens() -> None:
    """18 tokens/s here, 600 there, a fifth of a second of overhead."""
    speeds = Speeds(local=18.0, producer=600.0, link=1e9, overhead_s=0.2)
    assert threshold(23040.0, speeds) == 4


@given(st.floats(0, 1e5), RATES, RATES, st.floats(1e3, 1e10), st.floats(0, 100))
def test_at_the_threshold_the_handoff_is_faster_and_below_it_is_not(
    nbytes: float, local: float, producer: float, link: float, overhead: float
) -> None:
    speeds = Speeds(local, producer, link, overhead)
    limit = threshold(nbytes, speeds)

    def gain(tokens: int) -> float:
        here, there = local_seconds(tokens, speeds), remote_seconds(tokens, tokens * nbytes, speeds)
        assert here is not None
        assert there is not None
        return here - there

    if limit is None:
        assert gain(1 << 20) <= 1e-6
        return
    assert gain(limit) >= -1e-6 * max(1.0, overhead)
    if limit > 1:
        assert gain(limit - 1) <= 1e-6 * max(1.0, overhead)


def test_a_long_sample_counts_for_more_than_a_short_one() -> None:
    """A tile of 8 tokens, slow by its fixed cost, hardly moves what a tile of 512 showed."""
    average = Average().with_sample(512, 1.0, 1.0).with_sample(8, 0.1, 1.1)
    assert 450 < average.per_second < 512


@given(
    st.lists(
        st.tuples(st.floats(1, 1e6), st.floats(1e-3, 1e3), st.floats(0, 1e7)),
        min_size=1,
        max_size=30,
    )
)
def test_an_average_lies_between_its_samples(samples: list[tuple[float, float, float]]) -> None:
    """Whenever they came, and even if the clock went back."""
    average = Average()
    for amount, seconds, now in samples:
        average = average.with_sample(amount, seconds, now)
    rates = [amount / seconds for amount, seconds, _now in samples]
    assert min(rates) * 0.999 <= average.per_second <= max(rates) * 1.001


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1), (1, 0), (-1, 1)])
def test_a_sample_without_amount_or_time_changes_nothing(amount: float, seconds: float) -> None:
    average = Average(10.0, 2.0)
    assert average.with_sample(amount, seconds, 1e9) == average


def test_what_was_measured_long_ago_weighs_less() -> None:
    """Ten minutes after a stall, one short handoff says more than the long one that stalled."""
    stalled = Average().with_sample(1e6, 1e6, 0.0)
    soon, late = stalled.with_sample(1e5, 1.0, 1.0), stalled.with_sample(1e5, 1.0, 600.0)
    assert soon.per_second < 2
    assert late.per_second > 100
    aged = stalled.with_sample(1.0, 1.0, HALF_LIFE_S)
    assert aged.amount == pytest.approx(1e6 * MEMORY / 2 + 1)


def test_a_refused_producer_is_probed_after_a_while_and_ever_more_rarely() -> None:
    fresh = Probing()
    assert not fresh.due(1e9)
    refused = fresh.refused(10.0)
    assert not refused.due(10.0 + PROBE_AFTER_S - 1)
    assert refused.refused(40.0) == refused
    now, pauses = 10.0, []
    probing = refused
    for _ in range(7):
        pause = next(s for s in range(10_000) if probing.due(now + s))
        now += pause
        pauses.append(pause)
        probing = probing.probed(now).refused(now + 1)
    assert pauses == [60, 120, 240, 480, 960, 960, 960]
    assert max(pauses) == LONGEST_PROBE_PAUSE_S
