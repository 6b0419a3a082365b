"""Moving averages, and the length from which the producer is worth asking."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mac_decoder.engine.rates import (
    FIRST_GUESS,
    Average,
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
        here, there = local_seconds(tokens, speeds), remote_seconds(tokens, nbytes, speeds)
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
    average = Average().with_sample(512, 1.0).with_sample(8, 0.1)
    assert 450 < average.per_second < 512


@given(st.lists(st.tuples(st.floats(1, 1e6), st.floats(1e-3, 1e3)), min_size=1, max_size=30))
def test_an_average_lies_between_its_samples(samples: list[tuple[float, float]]) -> None:
    average = Average()
    for amount, seconds in samples:
        average = average.with_sample(amount, seconds)
    rates = [amount / seconds for amount, seconds in samples]
    assert min(rates) * 0.999 <= average.per_second <= max(rates) * 1.001


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1), (1, 0), (-1, 1)])
def test_a_sample_without_amount_or_time_changes_nothing(amount: float, seconds: float) -> None:
    average = Average(10.0, 2.0)
    assert average.with_sample(amount, seconds) == average
