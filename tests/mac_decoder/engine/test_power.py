"""Sleep is noticed by the clocks; nothing is asserted away from macOS."""

from __future__ import annotations

import sys
import time

import hypothesis.strategies as st
import pytest
from hypothesis import given

from mac_decoder.engine import power
from mac_decoder.engine.power import Clocks, PowerAssertion, slept

TIMES = st.floats(0, 1e9)


@given(TIMES, TIMES, st.floats(0, 1e6))
def test_clocks_that_run_together_tell_of_no_sleep(wall: float, mono: float, passed: float):
    assert not slept(Clocks(wall, mono), Clocks(wall + passed, mono + passed))


@given(TIMES, TIMES, st.floats(0, 1e6), st.floats(6, 1e6))
def test_a_wall_clock_that_ran_ahead_tells_of_sleep(
    wall: float, mono: float, passed: float, asleep: float
) -> None:
    assert slept(Clocks(wall, mono), Clocks(wall + passed + asleep, mono + passed))


def test_a_wall_clock_that_was_set_back_is_not_sleep() -> None:
    assert not slept(Clocks(1000.0, 10.0), Clocks(400.0, 11.0))


def test_two_readings_now_are_awake() -> None:
    assert not slept(Clocks.now(), Clocks.now())


@pytest.mark.skipif(sys.platform == "darwin", reason="caffeinate exists on macOS")
def test_nothing_is_asserted_elsewhere() -> None:
    assertion = PowerAssertion()
    assertion.hold()
    assert not assertion.held
    assertion.release()


def until_held(assertion: PowerAssertion, held: bool) -> None:
    limit = time.monotonic() + 10
    while assertion.held is not held:
        assert time.monotonic() < limit
        time.sleep(0.005)


@pytest.mark.parametrize("command", [None, ("/bin/sleep", "60")])
def test_an_assertion_is_held_and_released(
    command: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command is not None:
        monkeypatch.setattr(power, "COMMAND", command)
    elif sys.platform != "darwin":
        pytest.skip("needs macOS")
    assertion = PowerAssertion()
    assertion.hold()
    assertion.hold()
    until_held(assertion, True)
    assertion.release()
    assertion.release()
    until_held(assertion, False)
    assertion.hold()
    until_held(assertion, True)
    assertion.close()
    assert not assertion.held


def test_a_command_that_cannot_be_started_is_logged_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(power, "COMMAND", ("/no/such/command",))
    assertion = PowerAssertion()
    assertion.hold()
    assertion.close()
    assert not assertion.held
    assert "/no/such/command" in caplog.text
