"""Which lane a prompt takes, and why."""

from __future__ import annotations

import dataclasses

import pytest

from mac_decoder.engine.events import Lane
from mac_decoder.engine.rates import Speeds
from mac_decoder.engine.remote import Decision, Situation, decide
from mac_decoder.handoff.link import LinkState

READY = Situation(LinkState("ready"), None, Speeds(18.0, 600.0, 1e9, 0.2), 23040.0)
"""Measured: the producer wins from 4 tokens."""

SLOW = Speeds(18.0, 600.0, 1e9, 1000.0)
"""As after a handoff that waited for something long: it wins from thousands of tokens."""


@pytest.mark.parametrize(
    ("lane", "uncached", "change", "expected"),
    [
        ("auto", 0, {}, ("local", "nothing_to_prefill")),
        ("remote", 0, {}, ("local", "nothing_to_prefill")),
        ("local", 900, {}, ("local", "lane_local")),
        ("auto", 900, {"link": None}, ("local", "no_producer")),
        ("remote", 900, {"link": None}, ("refused", "no_producer")),
        ("auto", 900, {"link": LinkState("down", "producer_down")}, ("local", "producer_down")),
        (
            "remote",
            900,
            {"link": LinkState("refused", "weights_differ")},
            ("refused", "weights_differ"),
        ),
        ("auto", 900, {"link": LinkState("connecting")}, ("local", "producer_connecting")),
        ("remote", 1, {}, ("remote", "lane_remote")),
        ("auto", 900, {}, ("remote", "above_threshold")),
        ("auto", 3, {}, ("local", "below_threshold")),
        ("auto", 4, {}, ("remote", "above_threshold")),
        ("auto", 99, {"fixed_threshold": 100}, ("local", "below_threshold")),
        ("auto", 100, {"fixed_threshold": 100}, ("remote", "above_threshold")),
        ("auto", 900, {"bytes_per_token": 1e9}, ("local", "rates_favour_local")),
        ("auto", 256, {"bytes_per_token": 1e9, "probe": True}, ("remote", "producer_probe")),
        ("auto", 255, {"bytes_per_token": 1e9, "probe": True}, ("local", "rates_favour_local")),
        (
            "auto",
            900,
            {"bytes_per_token": 1e9, "probe": True, "backlog_tokens": 1},
            ("local", "rates_favour_local"),
        ),
        ("auto", 900, {"speeds": SLOW, "probe": True}, ("remote", "producer_probe")),
        ("auto", 900, {"speeds": SLOW}, ("local", "below_threshold")),
        ("auto", 900, {"probe": True}, ("remote", "above_threshold")),
        ("auto", 900, {"fixed_threshold": 901, "probe": True}, ("local", "below_threshold")),
        ("auto", 20, {"backlog_tokens": 100_000}, ("local", "producer_backlog")),
        (
            "auto",
            20,
            {"backlog_tokens": 100_000, "fixed_threshold": 10},
            ("remote", "above_threshold"),
        ),
        ("remote", 20, {"backlog_tokens": 100_000}, ("remote", "lane_remote")),
    ],
)
def test_decide(lane: Lane, uncached: int, change: dict, expected: tuple[str, str]) -> None:
    verdict, reason = expected
    situation = dataclasses.replace(READY, **change)
    decision = decide(lane, uncached, situation)
    away = situation.link is not None and not situation.link.ready
    assert decision == Decision(
        "remote" if verdict == "remote" else "local",
        (reason,),
        fallback=away and lane == "auto",
        refused=verdict == "refused",
    )
