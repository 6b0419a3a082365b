"""What was saved today, when a day ends while nobody asks anything."""

from __future__ import annotations

from datetime import date
from typing import Any

from mac_decoder.engine.sequences import Sequences
from mac_decoder.reuse.accounting import Served
from tests.mac_decoder.reuse.made import FULL

COLD = Served("cold", "local", 1001, cut=b"one", prefilled_here=1000, prefill_s=8.0)
HIT = Served(
    "hit",
    "resident",
    1001,
    reused_tokens=1000,
    shared_tokens=1000,
    cut=b"one",
    restore_bytes=5000,
    restore_s=1.0,
)
UNAVAILABLE = {"value": None, "tag": "unavailable"}


def test_the_first_day_is_the_time_since_the_start() -> None:
    sequences = Sequences(FULL, "float32", 64, None, lambda: 0, today=lambda: date(2026, 1, 1))
    # What was on disk before is restored before anything was prefilled: what it saved is not known.
    sequences.count(HIT)
    derived = sequences.status()["derived"]
    assert derived["seconds_saved_today"] == derived["seconds_saved"] == UNAVAILABLE
    sequences.count(Served("new", "local", 9001, cut=b"two", prefilled_here=9000, prefill_s=9.0))
    derived = sequences.status()["derived"]
    assert derived["seconds_saved_today"] == derived["seconds_saved"]
    assert derived["seconds_saved"]["tag"] == "estimated"


def test_a_day_begins_with_nothing_saved() -> None:
    days = [date(2026, 1, 1)]
    sequences = Sequences(FULL, "float32", 64, None, lambda: 0, today=lambda: days[-1])

    def today() -> Any:
        return sequences.status()["derived"]["seconds_saved_today"]

    assert today() == UNAVAILABLE
    sequences.count(COLD)
    sequences.count(HIT)
    sequences.count(HIT)
    assert today() == {"value": 14.0, "tag": "measured"}
    days.append(date(2026, 1, 2))
    assert today() == UNAVAILABLE, "midnight has come, and no request since"
    # The rate of all days is another one from here on.
    sequences.count(Served("new", "local", 9001, cut=b"two", prefilled_here=9000, prefill_s=1.0))
    assert today() == UNAVAILABLE
    sequences.count(HIT)
    assert today() == {"value": 7.0, "tag": "measured"}
    assert sequences.status()["derived"]["seconds_saved"]["value"] == 21.0
