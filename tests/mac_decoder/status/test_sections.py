"""What is not told is not made up: a dash, a null, or nothing at all."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from mac_decoder.handoff.link import LinkName as Link
from mac_decoder.reuse.accounting import Accounts
from mac_decoder.status import sections
from protocol.status.figures import UNAVAILABLE, measured
from protocol.status.snapshot import Cache, Figure, LinkName, Nodes

LINK: dict[str, Any] = {
    "name": "wss://box:1",
    "called": "box",
    "state": "ready",
    "reason": "",
    "detail": "cuda",
    "attempts": 0,
    "retry_in_s": 0.0,
    "tile": 512,
    "compute_tokens_per_s": 2000.0,
    "wire_bytes_per_s": 0,
    "round_trip_ms": 0.42,
    "handoffs": 3,
    "resumed": 1,
    "failures": {"connection_lost": 2},
    "qualified": None,
}
PRODUCER: dict[str, Any] = {
    "name": "wss://box:1",
    "waiting_for_producer": 2,
    "fetching": True,
    "handoffs": 3,
    "rates": {"handoff_overhead_ms": 12.0},
    "remote_threshold": 256,
    "threshold_by": "rates",
}


def stages(**counts: int) -> dict[str, int]:
    names = ("waiting", "lookup", "restore", "remote", "prefill", "decode")
    return {name: counts.get(name, 0) for name in names}


def test_before_a_model_is_loaded_nothing_is_known() -> None:
    engine = sections.engine({"ready": False, "open": 0}, loaded=False)
    assert engine.doing == "loading"
    assert engine.cache_bytes_limit is None
    assert engine.local_tokens_per_s == UNAVAILABLE
    assert sections.nodes({}) == Nodes(())
    assert sections.cache({}) == Cache(live=None, resident=None, durable=None, counters={})


@pytest.mark.parametrize(
    ("counts", "doing"),
    [
        ({}, "idle"),
        ({"decode": 3}, "decoding"),
        ({"decode": 3, "prefill": 1}, "prefilling_here"),
        ({"prefill": 1, "remote": 1}, "prefilling_there"),
        ({"restore": 1, "decode": 1}, "restoring"),
        ({"lookup": 1}, "restoring"),
        ({"qualifying": 1}, "qualifying"),
        ({"qualifying": 1, "decode": 1}, "decoding"),
    ],
)
def test_of_several_things_that_is_told_which_others_wait_for(
    counts: dict[str, int], doing: str
) -> None:
    told = {
        "ready": True,
        "requests": stages(**counts),
        "qualifying": counts.get("qualifying", 0),
    }
    assert sections.engine(told, loaded=True).doing == doing


@pytest.mark.parametrize(
    ("told", "loaded"),
    [({"ready": False, "fault": "engine_fault"}, False), ({"ready": False}, True)],
)
def test_an_engine_that_failed_or_stops_is_in_trouble(told: dict[str, Any], loaded: bool) -> None:
    busy = told | {"requests": stages(decode=1)}
    assert sections.engine(busy, loaded=loaded).doing == "trouble"


def test_without_a_producer_there_is_no_length_from_which_it_is_asked() -> None:
    """The engine says a first guess, also where there is nobody to be asked."""
    told: dict[str, Any] = {"ready": True, "remote_threshold": 256, "producers": []}
    told["threshold_by"] = "first_guess"
    found = sections.engine(told, loaded=True)
    assert (found.asked_from_tokens, found.asked_from_by) == (None, None)
    told["producers"] = [PRODUCER]
    found = sections.engine(told, loaded=True)
    assert (found.asked_from_tokens, found.asked_from_by) == (256, "first_guess")


def test_a_rate_of_nothing_is_no_rate() -> None:
    (node,) = sections.nodes({"links": [LINK], "producers": [PRODUCER]}).producers
    assert node.compute_tokens_per_s == measured(2000.0)
    assert node.wire_bytes_per_s == UNAVAILABLE
    assert node.round_trip_ms == measured(0.42)
    assert node.handoff_overhead_ms == measured(12.0)
    assert (node.waiting, node.fetching) == (2, True)
    assert (node.asked_from_tokens, node.asked_from_by) == (256, "rates")


def test_a_producer_that_nothing_is_known_of_yet() -> None:
    fresh = LINK | {"tile": 0, "compute_tokens_per_s": 0.0, "round_trip_ms": 0.0}
    (node,) = sections.nodes({"links": [fresh]}).producers
    assert node.tile is None
    assert (node.asked_from_tokens, node.asked_from_by) == (None, None)
    figures = (node.compute_tokens_per_s, node.round_trip_ms, node.handoff_overhead_ms)
    assert set(figures) == {UNAVAILABLE}


def test_links_of_one_name_have_their_own_figures() -> None:
    other = PRODUCER | {"waiting_for_producer": 5}
    told = {"links": [LINK, LINK, LINK | {"name": "new"}], "producers": [PRODUCER, other]}
    assert [node.waiting for node in sections.nodes(told).producers] == [2, 5, 0]


def test_a_qualification_is_told() -> None:
    past = {"at": 1700, "fit": False, "apart": 0.5, "allowed": 0.01, "where": "layer 3"}
    (node,) = sections.nodes({"links": [LINK | {"qualified": past}]}).producers
    assert node.qualified is not None
    assert node.qualified.apart == measured(0.5)
    assert (node.qualified.fit, node.qualified.where) == (False, "layer 3")


def test_derived_figures_keep_their_standing() -> None:
    derived = {name: one._asdict() for name, one in Accounts().derived().items()}
    assert derived["hit_rate"]["tag"] == "unavailable"
    derived["hit_rate"] = {"value": 0.5, "tag": "measured"}
    derived["seconds_saved"] = {"value": 3.0, "tag": "estimated"}
    found = sections.cache({"derived": derived, "counters": {"cache_hits": 1}})
    assert found.hit_rate == measured(0.5)
    assert found.seconds_saved == Figure(3.0, "estimated")
    assert found.joules_saved == UNAVAILABLE


def test_names_are_those_of_their_makers() -> None:
    """They are written down twice, since ``protocol`` knows neither side."""
    assert get_args(LinkName) == get_args(Link)
    assert set(Accounts().derived()) <= set(Cache.__struct_fields__)
