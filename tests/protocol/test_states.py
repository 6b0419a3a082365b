"""The transition tables: closed, reachable, complete, and the same in the README."""

from __future__ import annotations

from pathlib import Path

import pytest

import protocol
from protocol.messages import MESSAGES
from protocol.states import DECODER, PRODUCER, State, Transitions, drawn

TABLES = {"decoder": DECODER, "producer": PRODUCER}
RECEIVED = {tag.upper() for tag in MESSAGES} | {"FRAME"}


@pytest.mark.parametrize("role", TABLES)
def test_the_readme_shows_the_table(role: str) -> None:
    readme = (Path(protocol.__file__).parent / "README.md").read_text()
    assert drawn(TABLES[role]) in readme


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_every_state_is_reached_and_left(table: Transitions) -> None:
    reached, frontier = {State.START}, [State.START]
    while frontier:
        source = frontier.pop()
        for (state, _), target in table.items():
            if state is source and target not in reached:
                reached.add(target)
                frontier.append(target)
    named = {state for state, _ in table} | set(table.values())
    assert reached == named
    for state in named:
        assert any(source is state and target is not state for (source, _), target in table.items())


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_triggers_are_messages_or_own_calls(table: Transitions) -> None:
    for _, trigger in table:
        assert trigger in RECEIVED if trigger.isupper() else trigger.islower()


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_whatever_may_be_aborted_here_may_be_aborted_there(table: Transitions) -> None:
    for state in State:
        assert ((state, "abort") in table) == (table.get((state, "ABORT")) is State.RELEASING)


def test_each_side_receives_what_the_other_sends() -> None:
    to_decoder = {"HELLO_ACK", "PROOF", "BEGIN", "PROGRESS", "FRAME", "SEAL", "ABORT", "ABORTED"}
    to_decoder.add("RESUMED")
    to_producer = {"HELLO", "PROOF", "PREFILL", "CREDIT", "COMMITTED", "ABORT", "ABORTED"}
    to_producer.add("RESUME")
    assert {trigger for _, trigger in DECODER if trigger.isupper()} == to_decoder
    assert {trigger for _, trigger in PRODUCER if trigger.isupper()} == to_producer
    assert to_decoder | to_producer == RECEIVED
