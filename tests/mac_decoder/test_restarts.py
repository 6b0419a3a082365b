"""When a child is started again: a table."""

from __future__ import annotations

import signal

from mac_decoder.restarts import MOST_IN_A_ROW, STABLE_S, Restarts, described


def test_three_in_a_row_latch_it_off():
    restarts = Restarts()
    for number in range(1, MOST_IN_A_ROW + 1):
        assert not restarts.latched
        restarts = restarts.after(75, 1.0)
        assert restarts.in_a_row == restarts.total == number
    assert restarts.latched


def test_a_stable_time_between_them_starts_the_row_over():
    restarts = Restarts()
    for _ in range(10):
        restarts = restarts.after(-signal.SIGABRT, STABLE_S)
        assert restarts.in_a_row == 1
    assert restarts.total == 10


def test_pauses_grow():
    first = Restarts().after(75, 0.0)
    assert 0 < first.pause_s < first.after(75, 0.0).pause_s


def test_faults_have_names():
    assert described(-signal.SIGABRT) == "signal SIGABRT"
    assert described(-250) == "signal 250"
    assert described(75) == "exit 75"
