"""Requests are checked where they are made."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mac_decoder.engine.events import Generation, Sampling
from protocol.errors import RequestError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.5),
        ("top_p", -1),
        ("min_p", 2),
        ("top_k", -1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("penalty_context", 0),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_a_value_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        Sampling(**{field: value})
    assert caught.value.reason == "parameter_out_of_range"
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": ()}, "prompt_empty"),
        ({"max_tokens": 0}, "parameter_out_of_range"),
        ({"top_logprobs": 21}, "parameter_out_of_range"),
        ({"top_logprobs": -1}, "parameter_out_of_range"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(change: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {"request_id": "a", "tokens": (1, 2), "max_tokens": 4}
    Generation(**fields)
    with pytest.raises(RequestError) as caught:
        Generation(**(fields | change))
    assert caught.value.reason == reason


def test_greedy_is_temperature_zero() -> None:
    assert Sampling(temperature=0.0).greedy
    assert not Sampling().greedy
