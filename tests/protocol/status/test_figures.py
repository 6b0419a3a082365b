"""A figure cannot lie about what it rests on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.status.figures import UNAVAILABLE, Figure, measured, rate
from tests.protocol.status.made import figures


@pytest.mark.parametrize(
    ("value", "basis"),
    [(None, "measured"), (None, "estimated"), (0.0, "unavailable"), (1.5, "unavailable")],
)
def test_a_value_and_its_basis_come_together(value: Any, basis: Any) -> None:
    with pytest.raises(ValueError):
        Figure(value, basis)
    text = msgspec.json.encode({"value": value, "basis": basis})
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Figure)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_figure_is_a_number(value: float) -> None:
    """JSON has none of these: msgspec would write ``null``, an unavailable one in disguise."""
    with pytest.raises(ValueError):
        Figure(value, "measured")


@pytest.mark.parametrize("text", ['{"value":1}', '{"basis":"measured"}', '{"value":1,"basis":"x"}'])
def test_nothing_is_assumed(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=Figure)


@given(figures)
def test_figures_travel(figure: Figure) -> None:
    assert msgspec.json.decode(msgspec.json.encode(figure), type=Figure) == figure


def test_zero_is_a_measurement_but_not_a_rate() -> None:
    assert measured(0) == Figure(0.0, "measured")
    assert measured(None) == UNAVAILABLE
    assert rate(0.0) == UNAVAILABLE
    assert rate(-1.0) == UNAVAILABLE


@given(st.floats(0.1, 1e6))
def test_a_rate_is_measured(value: float) -> None:
    assert rate(value) == Figure(round(value, 1), "measured")
