"""Drawing tokens: seeds, filters, log probabilities, and logits that are not finite."""

from __future__ import annotations

import math
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest

from mac_decoder.engine.events import Generation, Sampling
from mac_decoder.engine.sampling import Draw, Drawn, check_vocabulary, processors
from protocol.errors import RequestError

VOCABULARY = 64


def row(seed: int = 0, scale: float = 2.0) -> mx.array:
    """Log probabilities of one position, as the batch hands them to a sampler."""
    logits = mx.random.normal((1, VOCABULARY), key=mx.random.key(seed)) * scale
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def drawn(draw: Draw, logprobs: mx.array) -> tuple[int, Drawn]:
    token = draw(logprobs).tolist()
    assert isinstance(token, list)
    return token[0], draw.read()


def many(sampling: Sampling, logprobs: mx.array, count: int) -> Counter[int]:
    draw = Draw(sampling, None, VOCABULARY)
    return Counter(drawn(draw, logprobs)[0] for _ in range(count))


def test_greedy_takes_the_most_likely() -> None:
    for sampling in (Sampling(temperature=0.0), Sampling(top_p=0.0), Sampling(top_k=1)):
        assert set(many(sampling, row(), 5)) == {int(mx.argmax(row()).item())}


def test_a_seed_gives_the_same_draws_whatever_is_drawn_in_between() -> None:
    alone = Draw(Sampling(seed=11), None, VOCABULARY)
    first = [drawn(alone, row(step))[0] for step in range(40)]
    again, other = (Draw(Sampling(seed=seed), None, VOCABULARY) for seed in (11, 12))
    second: list[int] = []
    third: list[int] = []
    for step in range(40):
        mx.random.seed(step)
        third.append(drawn(other, row(step))[0])
        second.append(drawn(again, row(step))[0])
    assert first == second
    assert first != third


def test_without_a_seed_draws_differ() -> None:
    draws = [Draw(Sampling(), None, VOCABULARY) for _ in range(2)]
    first, second = ([drawn(draw, row(step))[0] for step in range(40)] for draw in draws)
    assert first != second


@pytest.mark.parametrize("seed", [0, -1, 1 << 63, -(1 << 63), 1 << 200])
def test_any_integer_is_a_seed(seed: int) -> None:
    token, _facts = drawn(Draw(Sampling(seed=seed), None, VOCABULARY), row())
    assert 0 <= token < VOCABULARY


def test_draws_follow_the_distribution() -> None:
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.2]]))
    draw = Draw(Sampling(seed=3), None, 3)
    counts = Counter(drawn(draw, logprobs)[0] for _ in range(2000))
    for token, probability in enumerate((0.5, 0.3, 0.2)):
        assert abs(counts[token] / 2000 - probability) < 0.04


def test_top_p_is_taken_of_the_distribution_after_temperature() -> None:
    """At temperature 2 the two likely tokens hold 0.67 of the mass, at 1 they hold 0.8."""
    logprobs = mx.log(mx.array([[0.6, 0.2, 0.1, 0.1]]))
    at_one = many_of(Sampling(temperature=1.0, top_p=0.75, seed=1), logprobs)
    at_two = many_of(Sampling(temperature=2.0, top_p=0.75, seed=1), logprobs)
    assert at_one == {0, 1}
    assert at_two >= {0, 1, 2}


def many_of(sampling: Sampling, logprobs: mx.array) -> set[int]:
    draw = Draw(sampling, None, logprobs.shape[-1])
    return {drawn(draw, logprobs)[0] for _ in range(300)}


def test_top_k_keeps_the_k_most_likely() -> None:
    best = set(np.argsort(-np.array(row())[0])[:3].tolist())
    assert many_of(Sampling(top_k=3, seed=5, temperature=3.0), row()) == best


def test_min_p_is_measured_against_the_most_likely() -> None:
    logprobs = mx.log(mx.array([[0.5, 0.3, 0.1, 0.1]]))
    assert many_of(Sampling(min_p=0.5, seed=5), logprobs) == {0, 1}


def test_filters_that_keep_everything_are_left_out() -> None:
    token, _facts = drawn(Draw(Sampling(top_k=10_000, seed=1), None, VOCABULARY), row())
    assert 0 <= token < VOCABULARY


@pytest.mark.parametrize("temperature", [1e-4, 0.01])
def test_a_tiny_temperature_is_nearly_greedy_and_finite(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9, seed=1)
    assert set(many(sampling, row(), 20)) == {int(mx.argmax(row()).item())}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1e-40, seed=1),
        Sampling(temperature=1e-38, seed=1),
        Sampling(temperature=1e-7, seed=1),
        Sampling(top_p=1e-300, seed=1),
        Sampling(top_p=1e-9, seed=1),
    ],
)
def test_what_single_precision_cannot_hold_is_greedy(sampling: Sampling) -> None:
    assert set(many(sampling, row(scale=20.0), 20)) == {int(mx.argmax(row(scale=20.0)).item())}
    assert set(many(sampling, row(), 20)) == {int(mx.argmax(row()).item())}


def test_log_probabilities_are_the_distribution_before_temperature_and_filters() -> None:
    logprobs = row()
    draw = Draw(Sampling(temperature=0.3, top_p=0.5, seed=9), 5, VOCABULARY)
    token, facts = drawn(draw, logprobs)
    exact = np.array(logprobs)[0]
    assert facts.logprob == pytest.approx(exact[token], abs=1e-6)
    order = np.argsort(-exact)[:5]
    assert [identifier for identifier, _value in facts.top] == order.tolist()
    assert [value for _identifier, value in facts.top] == pytest.approx(exact[order], abs=1e-6)


def test_none_reports_nothing_and_zero_the_chosen_alone() -> None:
    token, facts = drawn(Draw(Sampling(), None, VOCABULARY), row())
    assert facts == Drawn(token, True)
    _token, facts = drawn(Draw(Sampling(), 0, VOCABULARY), row())
    assert facts.logprob is not None
    assert facts.top == ()


def test_half_precision_is_normalised_again_in_single() -> None:
    draw = Draw(Sampling(temperature=0.0), VOCABULARY, VOCABULARY)
    _token, facts = drawn(draw, row().astype(mx.bfloat16))
    assert sum(math.exp(value) for _token, value in facts.top) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "logits",
    [
        [math.nan, 1.0, 2.0],
        [1.0, 2.0, math.nan],
        [math.inf, 1.0, 2.0],
        [1.0, math.inf, math.inf],
        [-math.inf, -math.inf, -math.inf],
        [math.nan, math.nan, math.nan],
    ],
)
def test_logits_that_are_not_finite_are_noticed(temperature: float, logits: list[float]) -> None:
    values = mx.array([logits])
    logprobs = values - mx.logsumexp(values, axis=-1, keepdims=True)
    draw = Draw(Sampling(temperature=temperature, seed=1), 1, 3)
    token, facts = drawn(draw, logprobs)
    assert not facts.finite
    assert 0 <= token < 3


def test_a_masked_token_is_not_a_fault() -> None:
    values = mx.array([[1.0, -math.inf, 2.0]])
    logprobs = values - mx.logsumexp(values, axis=-1, keepdims=True)
    token, facts = drawn(Draw(Sampling(temperature=0.0), 2, 3), logprobs)
    assert facts.finite
    assert token == 2


def test_penalties_that_change_nothing_make_no_processor() -> None:
    assert processors(Sampling(), 1) == []
    idle = Sampling(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    assert processors(idle, 1) == []
    assert len(processors(Sampling(repetition_penalty=1.1, logit_bias={1: 2.0}), 1)) == 2


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_presence_and_frequency_count_all_generated_tokens_and_none_of_the_prompt(
    dtype: mx.Dtype,
) -> None:
    """OpenAI's formula, over an answer longer than mlx-lm's context of 20 tokens."""
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    answer = [5, 6, 5, *range(10, 40), 5]
    (penalise,) = processors(sampling, 3)
    found = penalise(mx.array([7, 8, 9, *answer]), mx.zeros((1, 50), dtype=dtype))
    assert found.dtype == dtype
    expected = [0.0] * 50
    for token in set(answer):
        expected[token] = -(0.5 + 0.25 * answer.count(token))
    assert np.array(found.astype(mx.float32))[0].tolist() == expected
    # Before the first token is drawn there is nothing to penalise.
    start = penalise(mx.array([7, 8, 9]), mx.ones((1, 50)))
    assert np.array(start)[0].tolist() == [1.0] * 50


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": (1, VOCABULARY)}, "tokens"),
        ({"tokens": (-1,)}, "tokens"),
        ({"sampling": Sampling(logit_bias={VOCABULARY: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(logit_bias={-1: 1.0})}, "logit_bias"),
    ],
)
def test_ids_that_the_model_does_not_have_are_refused(change: dict, field: str) -> None:
    fields = {"request_id": "a", "tokens": (1, VOCABULARY - 1), "max_tokens": 1}
    check_vocabulary(Generation(**fields), VOCABULARY)
    with pytest.raises(RequestError) as caught:
        check_vocabulary(Generation(**(fields | change)), VOCABULARY)
    assert caught.value.reason == "token_out_of_vocabulary"
    assert caught.value.field == field
