"""How numbers read."""

from __future__ import annotations

import pytest

from app.view import words


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.0 ms"),
        (0.00042, "0.4 ms"),
        (0.084, "84 ms"),
        (0.9996, "1.0 s"),
        (1.24, "1.2 s"),
        (59.96, "1 min"),
        (125.0, "2 min 5 s"),
        (3600.0, "1 h"),
        (7_500.0, "2 h 5 min"),
        (90_000.0, "1 d 1 h"),
        (-2.0, "−2.0 s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


@pytest.mark.parametrize(
    ("age", "text"),
    [
        (-3, "just now"),
        (4, "just now"),
        (7, "5 s ago"),
        (59, "55 s ago"),
        (61, "1 min ago"),
        (7300, "2 h ago"),
        (200_000, "2 d ago"),
    ],
)
def test_ages(age: float, text: str) -> None:
    assert words.ago(1000.0 - age, 1000.0) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (954_190_848, "954.2 MB"), (5_000_000_000_000, "5000.0 GB")],
)
def test_bytes(count: int, text: str) -> None:
    assert words.human_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0"),
        (0.0000035, "3.5 × 10⁻⁶"),
        (0.00096, "0.00096"),
        (0.05, "0.05"),
        (1234.5, "1,234"),
    ],
)
def test_numbers_however_small(value: float, text: str) -> None:
    assert words.plain(value) == text


def test_one_and_many() -> None:
    assert words.counted(1, "cut") == "1 cut"
    assert words.counted(1200, "cut") == "1,200 cuts"
