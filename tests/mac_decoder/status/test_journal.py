"""Requests in hand and ended: bounded, and only what is known."""

from __future__ import annotations

from typing import Any

import pytest

from mac_decoder.engine import facade
from mac_decoder.engine.events import Failed, Finished, Generation, Progress, Report, Token
from mac_decoder.engine.facade import Stream
from mac_decoder.status.journal import Begun, Ending, Journal
from mac_decoder.status.told import merged
from protocol.errors import RequestError
from protocol.status.figures import UNAVAILABLE, measured
from protocol.status.snapshot import MOST_RECENT, InHand

REPORT = Report("durable", 300, 99, 0, 12.5, {"queue": 1.0, "read": 2.0}, ("cut_at_end",))
OTHER = Report("local", 0, 399, 0, 20.0, {"queue": 2.0}, ("no_shared_prefix",))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(facade, "time", made)
    return made


def stream(key: int = 1) -> Stream:
    return Stream(key, Generation("r", (1, 2, 3), 10), lambda _stream, _stopped: None)


def begun(*streams: Stream, name: str = "r") -> Begun:
    return Begun(name, "chat", True, 5.0, 3, streams)


def ending(outcome: Any = "completed", **more: Any) -> Ending:
    known: dict[str, Any] = {
        "code": None,
        "ended_at": 9.0,
        "total_ms": 50.0,
        "prompt_tokens": 3,
        "generated_tokens": 2,
        "finish_reasons": ("stop",),
        "told": None,
    }
    return Ending(outcome, **(known | more))


def in_hand(journal: Journal, **stages: str) -> InHand:
    known = {int(name.removeprefix("key")): stage for name, stage in stages.items()}
    return journal.requests(known).in_hand[0]


@pytest.mark.parametrize(
    ("stage", "shown"),
    [
        ("waiting", "queued"),
        ("lookup", "looking_up"),
        ("restore", "restoring"),
        ("remote", "prefilling_there"),
        ("prefill", "prefilling_here"),
        ("decode", "decoding"),
    ],
)
def test_a_request_stands_where_the_engine_says(stage: str, shown: str) -> None:
    journal = Journal()
    journal.began(begun(stream()))
    assert in_hand(journal, key1=stage).stage == shown


def test_before_and_after_the_engine_knows_it() -> None:
    journal, one = Journal(), stream()
    journal.began(begun(one))
    assert in_hand(journal).stage == "queued"
    one._push(REPORT)
    assert in_hand(journal).stage == "answering"
    one._push(Finished("stop", REPORT))
    assert in_hand(journal, key1="decode").stage == "answering"


def test_of_several_choices_the_one_that_is_least_far_is_shown() -> None:
    journal, one, two = Journal(), stream(1), stream(2)
    journal.began(begun(one, two))
    one._push(REPORT)
    one._push(Token(1))
    found = in_hand(journal, key1="decode", key2="prefill")
    assert (found.stage, found.source, found.generated_tokens) == ("prefilling_here", "durable", 1)
    two._push(OTHER)
    assert in_hand(journal, key1="decode", key2="decode").source == "mixed"


def test_a_source_is_known_from_the_first_token_on() -> None:
    """Progress of this machine says nothing of what was reused below it."""
    journal, one = Journal(), stream()
    journal.began(begun(one))
    one._push(Progress(350, 399, "local"))
    assert in_hand(journal, key1="prefill").source is None
    one._push(REPORT)
    assert in_hand(journal, key1="decode").source == "durable"


def test_the_rate_of_a_prefill_is_measured_between_its_progress(clock: Clock) -> None:
    journal, one = Journal(), stream()
    journal.began(begun(one))
    assert in_hand(journal, key1="prefill").tokens_per_s == UNAVAILABLE
    one._push(Progress(100, 1000, "remote"))
    assert in_hand(journal, key1="remote").tokens_per_s == UNAVAILABLE
    clock.now += 2.0
    one._push(Progress(500, 1000, "remote"))
    assert in_hand(journal, key1="remote").tokens_per_s == measured(200.0)
    # The producer failed: this machine begins anew, and its rate is its own.
    clock.now += 1.0
    one._push(Progress(64, 1000, "local"))
    assert in_hand(journal, key1="prefill").tokens_per_s == UNAVAILABLE
    clock.now += 1.0
    one._push(Progress(128, 1000, "local"))
    assert in_hand(journal, key1="prefill").tokens_per_s == measured(64.0)


def test_the_rate_of_decoding_is_that_between_tokens(clock: Clock) -> None:
    journal, one = Journal(), stream()
    journal.began(begun(one))
    one._push(REPORT)
    one._push(Token(1))
    assert in_hand(journal, key1="decode").tokens_per_s == UNAVAILABLE
    for _ in range(4):
        clock.now += 0.5
        one._push(Token(1))
    assert in_hand(journal, key1="decode").tokens_per_s == measured(2.0)
    clock.now += 100.0  # nothing came since: what was measured stays what it is
    assert in_hand(journal, key1="decode").tokens_per_s == measured(2.0)
    journal.ended("r", "chat", True, ending(told=merged([REPORT])))
    ended = journal.recent().finished[0]
    assert ended.decode_ms == measured(2000.0)
    assert ended.tokens_per_s == measured(2.0)
    assert ended.served is not None
    assert ended.served.restore_ms == UNAVAILABLE


def test_an_error_is_an_end_without_figures() -> None:
    journal, one = Journal(), stream()
    journal.began(begun(one))
    one._push(Failed(RequestError("no", reason="no")))
    assert in_hand(journal).stage == "answering"
    journal.ended("r", "chat", True, ending("failed", code="no"))
    ended = journal.recent().finished[0]
    assert (ended.code, ended.served) == ("no", None)
    assert ended.decode_ms == ended.tokens_per_s == UNAVAILABLE
    assert journal.requests({}).in_hand == ()


def test_the_latest_are_kept_and_everything_is_counted() -> None:
    journal = Journal()
    for number in range(MOST_RECENT + 50):
        journal.began(begun(stream(), name=str(number)))
        journal.ended(str(number), "chat", False, ending())
    names = [one.id for one in journal.recent().finished]
    assert names == [str(MOST_RECENT + 49 - number) for number in range(MOST_RECENT)]
    assert journal.requests({}).outcomes == {"completed": MOST_RECENT + 50}


def test_refusals_push_nobody_out() -> None:
    journal = Journal()
    journal.began(begun(stream(), name="kept"))
    journal.ended("kept", "chat", False, ending())
    known = journal.recent()
    for number in range(1000):
        journal.ended(str(number), "chat", False, ending("refused", code="invalid_value"))
    assert journal.recent() is known
    assert journal.requests({}).outcomes == {"completed": 1, "refused": 1000}
