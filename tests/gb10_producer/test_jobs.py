"""The queue of one device: order, bounds, single flight, cancellation."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gb10_producer.jobs import JobQueue, Withdrawal
from protocol.errors import CapacityError, LocalProtocolError
from tests.ordinary import examples


def test_jobs_run_one_at_a_time_in_order_of_arrival() -> None:
    queue = JobQueue(4)
    first = queue.submit("a", b"1", 10, 0.0)
    second = queue.submit("b", b"2", 10, 0.0)
    assert (first.ahead, second.ahead) == (0, 1)
    assert queue.start(0.0) == first.job
    assert queue.start(0.0) is None
    assert queue.finish(first.job, 1.0, 10) == ("a",)
    assert queue.start(1.0) == second.job


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    queue = JobQueue(1, seconds_per_token=0.5)
    running = queue.submit("a", b"1", 100, 0.0).job
    assert queue.start(0.0) == running
    queue.submit("b", b"2", 100, 0.0)
    with pytest.raises(CapacityError) as refused:
        queue.submit("c", b"3", 100, 10.0)
    assert refused.value.reason == "queue_full"
    assert refused.value.retry_after_s == 40.0
    assert queue.submit("d", b"2", 100, 10.0).joined, "identical requests need no place"


@pytest.mark.parametrize(
    ("tokens", "elapsed_s", "told_s"),
    [(100, 0.0, 50.0), (100, 49.5, 1.0), (100, 9000.0, 1.0), (10_000, 0.0, 120.0)],
    ids=["between", "nearly done", "overdue", "very long"],
)
def test_whoever_is_refused_comes_again_neither_at_once_nor_never(
    tokens: int, elapsed_s: float, told_s: float
) -> None:
    queue = JobQueue(0, seconds_per_token=0.5)
    queue.submit("a", b"1", tokens, 0.0)
    queue.start(0.0)
    with pytest.raises(CapacityError) as refused:
        queue.submit("b", b"2", 1, elapsed_s)
    assert refused.value.retry_after_s == told_s


def test_who_waits_for_a_job_waits_for_what_it_computes() -> None:
    queue = JobQueue(0, seconds_per_token=0.5)
    job = queue.submit("a", b"1", 100, 0.0).job
    queue.computes(job, 20)  # it waits, and what is held may be forgotten until it runs
    assert queue.retry_after_s(0.0) == 50.0
    queue.start(0.0)
    queue.computes(job + 1, 20)
    assert queue.retry_after_s(0.0) == 50.0
    queue.computes(job, 20)
    assert queue.retry_after_s(4.0) == 6.0


def test_the_speed_is_measured_in_what_was_computed() -> None:
    """A token's job has fixed costs mostly: it hardly counts beside one of many tokens."""
    queue = JobQueue(0, seconds_per_token=0.001)
    for computed, took_s in ((100_000, 1000.0), (1, 2.0), (0, 500.0)):
        job = queue.submit("a", b"1", 100_000, 0.0).job
        queue.start(0.0)
        queue.finish(job, took_s, computed)
    queue.submit("a", b"1", 2000, 0.0)
    assert queue.retry_after_s(0.0) == pytest.approx(20.0, rel=0.01)


def test_no_place_to_wait_still_serves_one() -> None:
    queue = JobQueue(0)
    job = queue.submit("a", b"1", 1, 0.0).job
    with pytest.raises(CapacityError):
        queue.submit("b", b"2", 1, 0.0)
    assert queue.start(0.0) == job


def test_identical_requests_share_a_job_while_its_rows_are_held() -> None:
    queue = JobQueue(4)
    job = queue.submit("a", b"k", 10, 0.0).job
    assert queue.submit("b", b"k", 10, 0.0).job == job
    queue.start(0.0)
    assert queue.submit("c", b"k", 10, 0.0).job == job
    queue.rows_are_gone(job)
    late = queue.submit("d", b"k", 10, 0.0)
    assert (late.job != job, late.joined) == (True, False)
    assert queue.finish(job, 1.0, 10) == ("a", "b", "c")


def test_a_job_lives_as_long_as_somebody_wants_it() -> None:
    queue = JobQueue(4)
    job = queue.submit("a", b"k", 10, 0.0).job
    queue.submit("b", b"k", 10, 0.0)
    queue.start(0.0)
    assert queue.withdraw("a") is Withdrawal.SHARED
    assert not queue.abandoned(job)
    assert queue.withdraw("b") is Withdrawal.ABANDONED
    assert queue.abandoned(job)
    again = queue.submit("c", b"k", 10, 0.0)
    assert again.job != job, "nobody joins a job that is being stopped"
    assert queue.start(0.0) is None, "it keeps the device until it says that it stopped"
    assert queue.finish(job, 1.0) == ()
    assert queue.start(1.0) == again.job


def test_a_waiting_job_that_nobody_wants_is_dropped() -> None:
    queue = JobQueue(4)
    queue.submit("a", b"k", 10, 0.0)
    assert queue.withdraw("a") is Withdrawal.DROPPED
    assert queue.withdraw("a") is Withdrawal.UNKNOWN
    assert queue.start(0.0) is None


def test_a_closed_queue_takes_nothing_and_names_its_reason() -> None:
    queue = JobQueue(4)
    job = queue.submit("a", b"1", 10, 0.0).job
    queue.start(0.0)
    queue.submit("b", b"2", 10, 0.0)
    assert queue.close("producer_stopping") == ("a", "b")
    assert queue.close("other") == ("a",)
    with pytest.raises(CapacityError) as refused:
        queue.submit("c", b"1", 10, 0.0)
    assert refused.value.reason == "producer_stopping"
    queue.finish(job, 1.0)
    assert queue.start(1.0) is None


def test_misuse_is_a_local_error() -> None:
    queue = JobQueue(4)
    job = queue.submit("a", b"1", 10, 0.0).job
    with pytest.raises(LocalProtocolError):
        queue.submit("a", b"2", 10, 0.0)
    with pytest.raises(LocalProtocolError):
        queue.finish(job, 0.0)


class QueueMachine(RuleBasedStateMachine):
    """Any order of calls: bounds hold, order is kept, every ticket has at most one job."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 3
        self.queue = JobQueue(self.limit)
        self.now = 0.0
        self.names = 0
        self.jobs: dict[str, int] = {}
        self.keys: dict[int, bytes] = {}
        self.started: list[int] = []

    @rule(key=st.sampled_from([b"x", b"y", b"z"]), tokens=st.integers(1, 1000))
    def submit(self, key: bytes, tokens: int) -> None:
        self.names += 1
        name = str(self.names)
        full = self.queue.waiting + (self.queue.running is not None) > self.limit
        try:
            placed = self.queue.submit(name, key, tokens, self.now)
        except CapacityError as refused:
            self.refused(full, refused)
            return
        assert self.keys.setdefault(placed.job, key) == key
        assert placed.joined == (placed.job in self.jobs.values())
        waiting = self.queue.waiting + (self.queue.running is not None)
        assert 0 <= placed.ahead < waiting
        assert placed.joined or placed.ahead == waiting - 1
        self.jobs[name] = placed.job

    def refused(self, full: bool, error: CapacityError) -> None:
        assert full
        assert error.reason == "queue_full"

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.jobs)))
        job = self.jobs.pop(name)
        others = job in self.jobs.values()
        left = self.queue.withdraw(name)
        if others:
            assert left is Withdrawal.SHARED
        elif job == self.queue.running:
            assert (left, self.queue.abandoned(job)) == (Withdrawal.ABANDONED, True)
        else:
            assert left is Withdrawal.DROPPED

    @rule()
    def start(self) -> None:
        busy = self.queue.running is not None
        job = self.queue.start(self.now)
        if job is not None:
            assert not busy
            self.started.append(job)

    @rule(seconds=st.floats(0.0, 1e4), computed=st.integers(0, 1000))
    def finish(self, seconds: float, computed: int) -> None:
        self.now += seconds
        job = self.queue.running
        if job is None:
            return
        wanted = self.queue.finish(job, self.now, computed)
        assert set(wanted) == {name for name, of in self.jobs.items() if of == job}
        for name in wanted:
            del self.jobs[name]

    @rule()
    def forget_rows(self) -> None:
        if self.queue.running is not None:
            self.queue.rows_are_gone(self.queue.running)

    @invariant()
    def bounded_and_in_order(self) -> None:
        assert self.queue.waiting + (self.queue.running is not None) <= self.limit + 1
        assert self.started == sorted(set(self.started))


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(examples(60), stateful_step_count=30, deadline=None)
