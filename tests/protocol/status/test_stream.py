"""Two sides of ``/status/stream`` in memory: what is told, and what is made of it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from protocol.errors import PeerProtocolError
from protocol.status.snapshot import MOST_RECENT, SECTIONS, VERSION, Recent, Snapshot
from protocol.status.stream import Change, Full, Hello, apply, decode, diff, encode
from tests.protocol.status.made import few, finished, next_ones, snapshots

HELLO = Hello(at=1.0, version=VERSION, process="p", full_every_s=10.0)


def an_example() -> Snapshot:
    """Any snapshot, but always the same."""
    found: list[Snapshot] = []

    @settings(max_examples=1, database=None, derandomize=True)
    @given(snapshots)
    def take(snapshot: Snapshot) -> None:
        found.append(snapshot)

    take()
    return found[0]


@few
@given(st.data())
def test_a_change_makes_the_one_of_the_other(data: st.DataObject) -> None:
    before = data.draw(snapshots)
    after = data.draw(next_ones(before))
    change = decode(encode(diff(before, after, 5.0)))
    assert isinstance(change, Change)
    assert apply(change, before) == after


@few
@given(snapshots, snapshots)
def test_any_two_will_do(before: Snapshot, after: Snapshot) -> None:
    """A client that was slow misses what lay between, whatever it was."""
    assert apply(diff(before, after, 5.0), before) == after


@few
@given(st.data())
def test_only_what_differs_is_told(data: st.DataObject) -> None:
    before = data.draw(snapshots)
    after = data.draw(next_ones(before))
    told = json.loads(encode(diff(before, after, 5.0)))
    told["recent"] = told.pop("finished", told.get("recent"))
    differ = {name for name in SECTIONS if getattr(before, name) != getattr(after, name)}
    assert {name for name in SECTIONS if told.get(name) is not None} == differ


@few
@given(snapshots, st.lists(finished, min_size=1, max_size=3).map(tuple))
def test_of_recent_requests_only_new_ones_are_told(before: Snapshot, more: Any) -> None:
    after = msgspec.structs.replace(before, recent=Recent(more + before.recent.finished))
    change = diff(before, after, 5.0)
    # Ids are drawn at random in life; here the same request may be drawn twice.
    twice = any(one in before.recent.finished for one in more)
    assert change.recent is UNSET or twice
    if change.recent is UNSET:
        assert apply(change, before) == after


def test_old_requests_are_forgotten_on_both_sides() -> None:
    before = an_example()
    one = _finished("a")
    full = msgspec.structs.replace(before, recent=Recent((one,) * MOST_RECENT))
    new = _finished("b")
    after = msgspec.structs.replace(full, recent=Recent((new,) + (one,) * (MOST_RECENT - 1)))
    change = diff(full, after, 5.0)
    assert change.finished == (new,)
    assert apply(change, full) == after


def test_a_change_that_is_not_the_next_one_is_refused() -> None:
    before = an_example()
    change = diff(before, before, 5.0)
    missed = msgspec.structs.replace(before, revision=before.revision + 1)
    with pytest.raises(PeerProtocolError) as caught:
        apply(change, missed)
    assert caught.value.reason == "status_out_of_order"


@few
@given(snapshots)
def test_messages_travel(snapshot: Snapshot) -> None:
    for message in (HELLO, Full(at=2.0, snapshot=snapshot), diff(snapshot, snapshot, 3.0)):
        assert decode(encode(message)) == message


def test_another_version_is_named_as_such() -> None:
    told = json.loads(encode(HELLO)) | {"version": VERSION + 1, "more": 1}
    with pytest.raises(PeerProtocolError) as caught:
        decode(json.dumps(told))
    assert caught.value.reason == "status_version_differs"


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", '{"type":"bye"}', '{"type":"full","at":1,"snapshot":{}}', b"\xff"),
        '{"x":' + "[" * 10_000 + "]" * 10_000 + ',"type":"hello"}',
        '{"type":"\ud800"}',
    ],
)
def test_what_is_no_message_is_refused(text: str | bytes) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        decode(text)
    assert caught.value.reason == "status_malformed"


@few
@given(snapshots, st.sampled_from(SECTIONS))
def test_an_unknown_field_is_no_field_of_this_version(snapshot: Snapshot, name: str) -> None:
    told = json.loads(encode(Full(at=2.0, snapshot=snapshot)))
    told["snapshot"][name]["new"] = 1
    with pytest.raises(PeerProtocolError):
        decode(json.dumps(told))


def _finished(name: str) -> Any:
    found: list[Any] = []

    @settings(max_examples=1, database=None, derandomize=True)
    @given(finished)
    def take(one: Any) -> None:
        found.append(msgspec.structs.replace(one, id=name))

    take()
    return found[0]
