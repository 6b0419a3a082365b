"""What is shown is what the snapshot says: every number has its place there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import msgspec
import pytest
from hypothesis import given

from app.view import words
from app.view.cache import cache, saved_today
from app.view.facts import Fact, Segment
from app.view.icon import icon
from app.view.nodes import line, producers
from app.view.overview import about, counts, engine, headline, where
from app.view.requests import ended, running, segments
from app.view.standing import Standing
from mac_decoder.reuse.accounting import Accounts
from protocol.status.figures import UNAVAILABLE
from protocol.status.snapshot import Cache, Nodes, Recent, Snapshot
from tests.app.view.snapshots import (
    FINISHED,
    IDLE,
    IN_HAND,
    NOW,
    READY,
    SERVED,
    exactly,
    with_engine,
    with_node,
    with_requests,
)
from tests.app.view.snapshots import (
    about as estimate,
)
from tests.protocol.status.made import few, snapshots

HERE = Standing("connected", "http://127.0.0.1:8000")


def every_fact(part: Any) -> Iterator[Fact]:
    """All facts in a tree of dataclasses and tuples."""
    if isinstance(part, Fact):
        yield part
    elif is_dataclass(part):
        for field in fields(part):
            yield from every_fact(getattr(part, field.name))
    elif isinstance(part, tuple):
        for one in part:
            yield from every_fact(one)


def shown(snapshot: Snapshot) -> list[Fact]:
    pages = (
        running(snapshot, NOW),
        ended(snapshot, NOW),
        cache(snapshot, NOW),
        producers(snapshot, NOW),
        engine(snapshot),
        about(snapshot),
        counts(snapshot),
    )
    return list(every_fact(pages))


def at(path: str | None, told: Any) -> Any:
    """What a snapshot's JSON has at a path; names may contain dots, or nothing."""
    if path is None:
        return told
    if isinstance(told, list):
        place, _, rest = path.partition(".")
        return at(rest or None, told[int(place)])
    name = max((name for name in told if path == name or path.startswith(f"{name}.")), key=len)
    return at(None if path == name else path[len(name) + 1 :], told[name])


@few
@given(snapshots)
def test_every_number_is_the_snapshots_own(snapshot: Snapshot) -> None:
    told = msgspec.json.decode(msgspec.json.encode(snapshot))
    for fact in shown(snapshot):
        if fact.path:
            there = at(fact.path, told)
            basis = there["basis"] if isinstance(there, dict) else None
            value = there["value"] if isinstance(there, dict) else there
            assert value == fact.value, fact
            assert basis is None or fact.basis == basis, fact
        else:
            assert not isinstance(fact.value, float), f"{fact} comes from nowhere"


@few
@given(snapshots)
def test_what_is_not_known_is_a_dash_and_never_a_number(snapshot: Snapshot) -> None:
    for fact in shown(snapshot):
        if fact.basis == "unavailable":
            assert fact.text == words.DASH
            assert fact.value is None
        if fact.basis == "estimated":
            assert fact.text.startswith(words.ABOUT)


def test_phases_stand_in_the_order_in_which_they_happen() -> None:
    (one,) = ended(IDLE, NOW)
    assert [part.label for part in one.segments] == ["waiting", "computing", "checking", "decoding"]
    assert sum(part.share for part in one.segments) == pytest.approx(1.0)
    assert one.segments[-1].share == pytest.approx(2000 / 2200)


def test_a_phase_of_another_release_is_shown_last() -> None:
    found: tuple[Segment, ...] = segments({"new": exactly(1.0), "queue": exactly(1.0)}, "p")
    assert [part.label for part in found] == ["waiting", "new"]


def test_a_phase_that_took_no_time_is_in_no_bar() -> None:
    assert [
        part.label for part in segments({"queue": exactly(0.04), "read": exactly(2.0)}, "p")
    ] == ["reading"]


def test_a_qualification_is_nobodys_request_and_says_what_it_is() -> None:
    one = with_engine(with_node(IDLE, state="qualifying"), doing="qualifying")
    assert headline(one, HERE).text == "Qualifying gb10: comparing it with this machine"
    assert icon(one, HERE).picture == "idle"
    other = msgspec.structs.replace(READY, name="wss://other:1", called="other")
    several = with_engine(
        msgspec.structs.replace(IDLE, nodes=Nodes((READY, other))), doing="qualifying"
    )
    assert headline(several, HERE).text == "Qualifying a producer: comparing it with this machine"
    answering = with_requests(
        one, "qualifying", msgspec.structs.replace(IN_HAND, stage="answering")
    )
    assert (
        headline(answering, HERE).text
        == "Qualifying gb10: comparing it with this machine, 1 request"
    )


@pytest.mark.parametrize(
    ("tokens", "by", "text", "note"),
    [
        (1, "rates", "1 token on", "follows from the measured rates"),
        (512, "set", "512 tokens on", "as it was set (--remote-threshold)"),
        (256, "first_guess", "256 tokens on", "a first guess: not every rate is measured yet"),
        (None, "rates", "–", "by the measured rates this machine is faster at any length"),
        (None, None, "–", ""),
        (64, None, "64 tokens on", ""),
    ],
)
def test_from_which_length_a_producer_is_asked_and_why(
    tokens: int | None, by: Any, text: str, note: str
) -> None:
    told = with_engine(
        with_node(IDLE, asked_from_tokens=tokens, asked_from_by=by),
        asked_from_tokens=tokens,
        asked_from_by=by,
    )
    found = [fact for fact in shown(told) if fact.label in ("asked from", "producer asked from")]
    assert [(fact.text, fact.note) for fact in found] == [(text, note)] * 2


def test_a_rate_that_moves_says_that_it_is_an_average() -> None:
    (here,) = [fact for fact in engine(IDLE) if fact.label == "prefill here"]
    assert here.note == "moving average"


def test_counters_have_names_that_people_know() -> None:
    counters = {"cache_hits": 5, "disagg_bytes_installed": 4_096, "tier_live": 1, "new_one": 2}
    kept = msgspec.structs.replace(IDLE.cache, counters=counters)
    found = cache(msgspec.structs.replace(IDLE, cache=kept), NOW).counters
    assert [(title, [(fact.label, fact.text) for fact in those]) for title, those in found] == [
        ("Prompts", [("hits", "5"), ("received from producers", "4.1 kB"), ("new one", "2")]),
        ("Where caches came from", [("live", "1")]),
    ]


def test_every_counter_that_there_is_has_a_name() -> None:
    counters = dict.fromkeys(Accounts().counters(), 1)
    kept = msgspec.structs.replace(IDLE.cache, counters=counters)
    for _, those in cache(msgspec.structs.replace(IDLE, cache=kept), NOW).counters:
        assert not {fact.label for fact in those} & {name.replace("_", " ") for name in counters}


def test_a_row_says_where_reuse_stopped_and_why() -> None:
    (one,) = ended(IDLE, NOW)
    assert one.shortfall == (
        "stopped at 3,840 tokens, parts at 3,900: prompts_part, between_blocks"
    )
    assert [code for code, _ in one.reasons] == list(FINISHED.served.reasons)  # type: ignore[union-attr]
    assert all(means for _, means in one.reasons)
    assert one.source is not None
    assert one.source.text == "durable"
    assert one.ago == "1 min ago"


def test_a_request_that_came_to_nothing_shows_no_numbers_of_it() -> None:
    failed = msgspec.structs.replace(FINISHED, outcome="failed", code="queue_full", served=None)
    recent = msgspec.structs.replace(IDLE.recent, finished=(failed,))
    (one,) = ended(msgspec.structs.replace(IDLE, recent=recent), NOW)
    assert (one.source, one.reused.text, one.first_token.text) == (None, "–", "–")
    assert (one.outcome.text, one.outcome.note, one.outcome.tone) == ("failed", "queue_full", "bad")


def test_a_request_in_hand_says_how_far_it_is_and_who_does_it() -> None:
    busy = with_node(with_requests(IDLE, "prefilling_there", IN_HAND), fetching=True)
    (one,) = running(busy, NOW)
    assert one.title == "prefilling on gb10, 45 % of 65,535 tokens"
    assert one.progress == pytest.approx(29_491 / 65_535)
    assert headline(busy, HERE).text == "Prefilling on gb10, 45 % of 65,535 tokens"


def test_of_two_producers_that_prefill_none_is_named() -> None:
    busy = msgspec.structs.replace(READY, fetching=True)
    other = msgspec.structs.replace(busy, name="wss://other:1", called="other")
    both = msgspec.structs.replace(
        with_requests(IDLE, "prefilling_there", IN_HAND), nodes=Nodes((busy, other))
    )
    assert running(both, NOW)[0].title.startswith("prefilling there, ")


def test_a_decoding_request_has_its_rate() -> None:
    one = msgspec.structs.replace(
        IN_HAND, stage="decoding", generated_tokens=312, tokens_per_s=exactly(41.7)
    )
    assert headline(with_requests(IDLE, "decoding", one), HERE).text == (
        "Decoding, 312 tokens, 41.7 tokens/s"
    )


def test_a_first_token_has_no_rate_yet() -> None:
    one = msgspec.structs.replace(
        IN_HAND, stage="decoding", generated_tokens=1, tokens_per_s=UNAVAILABLE
    )
    assert headline(with_requests(IDLE, "decoding", one), HERE).text == "Decoding, 1 token"


def test_requests_that_stand_apart_are_told_apart() -> None:
    there = msgspec.structs.replace(IN_HAND, id="other", stage="prefilling_there")
    here = msgspec.structs.replace(IN_HAND, stage="decoding")
    found = headline(with_requests(IDLE, "prefilling_there", here, there, here), HERE)
    assert found.text == "3 requests: 1 prefilling there, 2 decoding"


def test_what_the_machine_does_for_nobody_is_not_lost_among_requests() -> None:
    queued = msgspec.structs.replace(IN_HAND, stage="queued")
    told = with_requests(IDLE, "qualifying", queued, IN_HAND)
    assert headline(told, HERE).text.startswith("Qualifying ")


def test_several_requests_are_counted() -> None:
    found = headline(with_requests(IDLE, "decoding", IN_HAND, IN_HAND), HERE)
    assert found.text == "Decoding, 2 requests"


@pytest.mark.parametrize(
    ("state", "reason", "text", "tone"),
    [
        ("absent", "", "No decoder runs", "plain"),
        ("latched", "engine_fault", "is not started again (engine_fault)", "bad"),
        ("key_needed", "", "asks for an API key", "bad"),
    ],
)
def test_without_a_decoder_its_standing_is_the_headline(
    state: Any, reason: str, text: str, tone: str
) -> None:
    found = headline(IDLE, Standing(state, "http://127.0.0.1:8000", reason))
    assert text in found.text
    assert found.tone == tone


def test_where_names_model_and_port() -> None:
    assert where(IDLE, HERE) == "a-model on port 8000"
    assert where(None, HERE) == "port 8000"


def test_a_producers_line() -> None:
    assert line(READY) == "gb10: ready, 2,100 tokens/s, 1.2 GB/s"
    assert line(msgspec.structs.replace(READY, state="down", reason="connection_refused")) == (
        "gb10: down (connection_refused)"
    )
    unknown = msgspec.structs.replace(
        READY, compute_tokens_per_s=UNAVAILABLE, wire_bytes_per_s=UNAVAILABLE
    )
    assert line(unknown) == "gb10: ready"


def test_a_producer_that_is_qualified_anew_was_not_never_qualified() -> None:
    (one,) = producers(
        with_node(IDLE, state="qualifying", reason="producer_qualifying", qualified=None), NOW
    )
    assert one.line == "gb10: qualifying"
    assert [fact.text for fact in one.qualified] == ["under way"]
    (one,) = producers(with_node(IDLE, state="down", reason="x", qualified=None), NOW)
    assert [fact.text for fact in one.qualified] == [words.DASH]


@pytest.mark.parametrize("fell", [True, False])
def test_a_request_that_fell_back_says_so(fell: bool) -> None:
    served = msgspec.structs.replace(SERVED, fallback=fell)
    finished = msgspec.structs.replace(FINISHED, served=served)
    told = msgspec.structs.replace(IDLE, recent=Recent((finished,)))
    (one,) = ended(told, NOW)
    assert (one.fallback is not None and one.fallback.tone == "warn") == fell


def test_one_span_of_time_has_one_saving() -> None:
    def savings(now: float) -> list[str]:
        return [fact.label for fact in cache(IDLE, now).gains if fact.label.startswith("saved")]

    assert len(savings(NOW)) == 1
    assert savings(NOW + 2 * 86_400) == ["saved today", "saved since the start"]


def test_savings_of_a_decoder_that_started_today_are_since_then() -> None:
    assert saved_today(IDLE, NOW).text == "≈ 2 min 4 s"
    assert saved_today(IDLE, NOW).label.startswith("saved since ")
    assert saved_today(IDLE, NOW + 2 * 86_400).label == "saved today"


def test_the_two_figures_of_the_disk_have_two_names() -> None:
    found = cache(IDLE, NOW).durable
    assert found is not None
    assert found.share == pytest.approx(0.034)
    assert {fact.label: fact.text for fact in found.facts}.items() >= {
        "on disk": "3.4 GB",
        "referenced": "9.0 GB",
        "cap": "100.0 GB",
    }.items()


def test_without_tiers_there_are_none() -> None:
    without = msgspec.structs.replace(IDLE, cache=Cache(None, None, None, {}))
    found = cache(without, NOW)
    assert (found.live, found.resident, found.durable) == (None, None, None)
    assert {fact.text for fact in found.gains} == {"–"}


def test_an_estimate_says_that_it_is_one() -> None:
    assert words.figure(estimate(178.0), "tokens/s") == "≈ 178 tokens/s"
