"""The transition tables are the law: every message in every state that does not list it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tests.golden
from protocol.errors import BatonError, LocalProtocolError
from protocol.handoff import State
from protocol.reasons import REASONS
from protocol.states import DECODER, PRODUCER, Transitions
from tests.machines.joined import TO_DECODER, TO_PRODUCER, Item, Joined

FROZEN = json.loads((Path(tests.golden.__file__).parent / "wire_v1.json").read_text())
TEXTS = {
    json.loads(written["text"])["type"].upper(): written["text"].encode()
    for written in (*FROZEN["from_decoder"], *FROZEN["from_producer"])
    if "text" in written
}
FRAME = next(
    Item(None, bytes.fromhex(written["header"]), bytes.fromhex(written["payload"]))
    for written in FROZEN["from_producer"]
    if "header" in written
)
CALLS = ("connect", "start", "commit", "abort", "release", "begin", "progress", "frame", "seal")


def unlisted(table: Transitions) -> list[tuple[State, str]]:
    named = {state for state, _ in table} | set(table.values())
    return [
        (state, trigger)
        for state in State
        for trigger in (*TEXTS, "FRAME")
        if state in named and (state, trigger) not in table
    ]


def placed(direction: str, state: State) -> Joined:
    """A connection whose one machine has been put into a state."""
    pair = Joined().connect()
    machine = pair.decoder if direction == TO_DECODER else pair.producer
    machine._state = state
    return pair


@pytest.mark.parametrize(("state", "trigger"), unlisted(DECODER))
def test_a_decoder_refuses_what_its_table_lacks(state: State, trigger: str) -> None:
    pair = placed(TO_DECODER, state)
    item = FRAME if trigger == "FRAME" else Item(TEXTS[trigger])
    with pytest.raises(BatonError) as caught:
        pair.give(TO_DECODER, item)
    expected = "frame_unexpected" if trigger == "FRAME" else "message_unexpected"
    assert caught.value.reason == expected
    assert pair.decoder.state is State.CLOSED
    assert len(pair.decoder.outgoing()) == 1


@pytest.mark.parametrize(
    ("state", "trigger"), [pair for pair in unlisted(PRODUCER) if pair[1] != "FRAME"]
)
def test_a_producer_refuses_what_its_table_lacks(state: State, trigger: str) -> None:
    pair = placed(TO_PRODUCER, state)
    with pytest.raises(BatonError) as caught:
        pair.give(TO_PRODUCER, Item(TEXTS[trigger]))
    assert caught.value.reason == "message_unexpected"
    assert pair.producer.state is State.CLOSED
    assert len(pair.producer.outgoing()) == 1


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_a_table_lacks_change_nothing(call: str) -> None:
    for direction, table in ((TO_DECODER, DECODER), (TO_PRODUCER, PRODUCER)):
        for state in {state for state, _ in table}:
            pair = placed(direction, state)
            machine = pair.decoder if direction == TO_DECODER else pair.producer
            if (state, call) in table:
                continue
            with pytest.raises(LocalProtocolError):
                machine._allowed(call)
            assert machine.state is state
            assert machine.outgoing() == []


@given(st.binary(max_size=120), st.sampled_from(sorted(State)), st.booleans())
def test_noise_is_refused_in_every_state(raw: bytes, state: State, framed: bool) -> None:
    if state is State.CLOSED:
        return
    for direction, table in ((TO_DECODER, DECODER), (TO_PRODUCER, PRODUCER)):
        if not any(source is state for source, _ in table):
            continue
        pair = placed(direction, state)
        noise = Item(None, raw[:80], raw[80:]) if framed else Item(raw)
        if framed and direction == TO_PRODUCER:
            continue
        with pytest.raises(BatonError) as caught:
            pair.give(direction, noise)
        assert caught.value.reason in REASONS
        assert pair.installed == []
