"""When a process is started again: tables, and what holds for every history."""

from __future__ import annotations

import signal

from hypothesis import given
from hypothesis import strategies as st

from protocol.restarts import Policy, Restarts, described


def test_three_failed_starts_in_a_row_latch_it_off() -> None:
    restarts = Restarts()
    for number, status in enumerate((75, -11, 1), start=1):
        assert not restarts.latched
        restarts = restarts.after(status, None)
        assert restarts.failed == restarts.deaths == restarts.total == number
    assert restarts.latched


def test_faults_of_a_process_that_was_ready_are_no_failed_starts() -> None:
    restarts = Restarts()
    for _ in range(3):
        restarts = restarts.after(75, 59.0)
    assert not restarts.latched
    assert restarts.pause_s == 2.0


def test_becoming_ready_ends_the_row_of_failed_starts_but_not_the_pauses() -> None:
    restarts = Restarts(Policy(first_pause_s=1.0)).after(75, None).after(75, None)
    assert restarts.pause_s == 2.0
    restarts = restarts.after(-9, 2.0)
    assert (restarts.failed, restarts.pause_s) == (0, 4.0)
    restarts = restarts.after(75, None)
    assert (restarts.failed, restarts.pause_s, restarts.latched) == (1, 8.0, False)


def test_dying_soon_after_every_start_latches_in_the_end() -> None:
    restarts = Restarts(Policy(quick_deaths=4))
    latched = []
    for _ in range(4):
        restarts = restarts.after(-signal.SIGABRT, 1.0)
        latched.append(restarts.latched)
    assert latched == [False, False, False, True]


def test_a_settled_service_forgives_everything_but_the_total() -> None:
    restarts = Restarts()
    for _ in range(20):
        restarts = restarts.after(-signal.SIGABRT, Policy().settled_s)
        assert (restarts.failed, restarts.deaths, restarts.pause_s) == (0, 1, 0.5)
    assert restarts.total == 20
    assert not restarts.latched


@given(
    st.lists(
        st.tuples(st.sampled_from([75, 1, -6, -9]), st.none() | st.floats(0, 100)), max_size=60
    )
)
def test_pauses_are_bounded_and_only_a_row_of_faults_latches(
    ends: list[tuple[int, float | None]],
) -> None:
    restarts = Restarts()
    policy = restarts.policy
    failed = deaths = 0
    for status, served in ends:
        restarts = restarts.after(status, served)
        failed = failed + 1 if served is None else 0
        deaths = 1 if served is not None and served >= policy.settled_s else deaths + 1
        latched = failed >= policy.failed_starts or deaths >= policy.quick_deaths
        assert restarts.latched is latched
        assert 0 < restarts.pause_s <= policy.longest_pause_s
    assert restarts.total == len(ends)


def test_faults_have_names() -> None:
    assert described(-signal.SIGABRT) == "signal SIGABRT"
    assert described(-250) == "signal 250"
    assert described(75) == "exit 75"
