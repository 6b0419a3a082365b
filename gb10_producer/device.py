"""The one thread that computes: takes jobs from the queue, runs them, hands rows to backlogs.

Everything that other threads see of a job is a :class:`Ticket`. A device that failed stays
failed: the queue closes, every ticket gets the error, and :attr:`Device.fault` says what it was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gb10_producer.backlog import Backlog, Pool, Reader
from gb10_producer.jobs import JobQueue, Withdrawal
from gb10_producer.memory import Ledger, prefill_bytes
from gb10_producer.prefill import Prefiller
from protocol.errors import BatonError, CapacityError, EngineFault
from protocol.messages import NO_SPACE

log = logging.getLogger(__name__)

_RELIEF_S = 5.0
"""How often a device without work looks whether the machine runs short of memory."""


@dataclass(frozen=True)
class Work:
    """What to compute: rows of ``[cut, end)`` of ``tokens``, and what cuts at ``extra`` need.

    Equal ``key``, equal rows and ``space``, which is whose prompts are kept together.
    """

    key: bytes
    tokens: NDArray[np.uint32] = field(repr=False)
    cut: int
    end: int
    space: bytes = NO_SPACE
    extra: tuple[int, ...] = ()


@dataclass
class _Job:
    """One prefill as the device sees it; times in seconds of the monotonic clock."""

    work: Work
    backlog: Backlog
    submitted: float
    started: float | None = None
    finished: float | None = None
    computes: int | None = None
    position: int = 0
    error: BatonError | None = None
    tickets: list[Ticket] = field(default_factory=list)


class Ticket:
    """One request's view of its job. Made by :meth:`Device.submit`, ended by ``withdraw``."""

    def __init__(self, name: str, job: _Job, reader: Reader, joined: bool, now: float) -> None:
        self.name = name
        self.reader = reader
        self.joined = joined
        self._job = job
        self._submitted = now

    @property
    def started(self) -> bool:
        """Whether the device has begun, and it is known how much it will compute."""
        return self._job.computes is not None

    @property
    def finished(self) -> bool:
        """Whether nothing more will be computed: all rows are in the backlog, or it failed."""
        return self._job.finished is not None

    @property
    def computed_tokens(self) -> int:
        """How many tokens the device computes, of those before the end, once it has begun."""
        return self._job.computes or 0

    @property
    def position(self) -> int:
        """Position reached so far, from 0 on."""
        return self._job.position

    @property
    def error(self) -> BatonError | None:
        """Why the job failed, if it did."""
        return self._job.error

    @property
    def queue_s(self) -> float:
        """Seconds from the request to the device's start on it; 0 for one that joined later."""
        started = self._job.started
        return 0.0 if started is None else max(0.0, started - self._submitted)

    @property
    def compute_s(self) -> float:
        """Seconds from the device's start to its end, or to now, without waiting for the wire."""
        if self._job.started is None:
            return 0.0
        elapsed = (self._job.finished or time.monotonic()) - self._job.started
        return max(0.0, elapsed - self._job.backlog.blocked_s)


class Device:
    """Runs prefills of one :class:`Prefiller`, one at a time, in its own thread.

    ``on_fault`` is called once, from any thread, when the device failed.
    """

    def __init__(
        self,
        prefiller: Prefiller,
        *,
        pool: Pool,
        ledger: Ledger,
        waiting_limit: int,
        on_fault: Callable[[], None] = lambda: None,
    ) -> None:
        self._prefiller = prefiller
        self._pool = pool
        self._ledger = ledger
        self._queue = JobQueue(waiting_limit)
        self._jobs: dict[int, _Job] = {}
        self._on_fault = on_fault
        self._stopping = False
        self._relieve_at = 0.0
        self.fault: EngineFault | None = None
        self.prefills = 0
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Take no more work, stop at the next tile; return whether the thread ended in time."""
        with self._pool.changed:
            self._stopping = True
            self._queue.close("producer_stopping")
            for job in self._jobs.values():
                if job.started is None:
                    self._end(job, _stopping())
            self._pool.changed.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, name: str, work: Work, wake: Callable[[], None]) -> Ticket:
        """Queue ``work``; ``wake`` is called, from any thread, when the ticket changed.

        Raises ``CapacityError``: ``queue_full``, ``memory_exceeded`` (the cache can
        never fit), or the reason for which no work is taken.
        """
        self._ledger.check(prefill_bytes(self._prefiller.layout, work.end, self._prefiller.tile))
        now = time.monotonic()
        with self._pool.changed:
            placed = self._queue.submit(name, work.key, work.end, now)
            job = self._jobs.get(placed.job)
            if job is None:
                job = self._new_job(placed.job, work, now)
            ticket = Ticket(name, job, job.backlog.reader(wake), placed.joined, now)
            job.tickets.append(ticket)
            self._pool.changed.notify_all()
            return ticket

    def withdraw(self, ticket: Ticket) -> None:
        """End a ticket: its request is over, for whatever reason. Idempotent."""
        with self._pool.changed:
            left = self._queue.withdraw(ticket.name)
            ticket.reader.close()
            if left is Withdrawal.DROPPED:
                self._jobs = {n: job for n, job in self._jobs.items() if ticket not in job.tickets}

    def waits_for(self, ticket: Ticket) -> bool:
        """Whether others wait for the device, for rows or for memory that ``ticket`` holds."""
        with self._pool.changed:
            if ticket.finished:
                return self._pool.blocked > 0
            return self._queue.holds_up(ticket.name)

    def fail(self, fault: EngineFault) -> None:
        """Fail closed: every ticket gets ``fault``, and nothing is computed any more."""
        with self._pool.changed:
            if self.fault is not None:
                return
            self.fault = fault
            self._stopping = True
            self._queue.close("producer_stopping")
            for job in self._jobs.values():
                self._end(job, fault)
            self._jobs.clear()
            self._pool.changed.notify_all()
        log.error("device failed", extra={"error": fault.message, "reason": fault.reason})
        self._on_fault()

    def _new_job(self, number: int, work: Work, now: float) -> _Job:
        backlog = Backlog(
            self._pool,
            abandoned=lambda: self._stopping or self._queue.abandoned(number),
            rows_are_gone=lambda: self._queue.rows_are_gone(number),
        )
        job = _Job(work, backlog, now)
        self._jobs[number] = job
        return job

    def _run(self) -> None:
        while self.fault is None and (number := self._next_or_fail()) is not None:
            job, computed = self._jobs[number], 0
            # What is not one of our errors leaves this thread: then the rows are not to be
            # trusted, and the fault stands.
            error: BatonError | None = EngineFault("The prefill broke off.")
            try:
                computed = self._compute(number, job)
                error = None
            except BatonError as raised:
                error = raised
            finally:
                self._finish(number, job, computed, error)
                if isinstance(error, EngineFault):
                    self.fail(error)

    def _next_or_fail(self) -> int | None:
        """The next job; what goes wrong between jobs is the device's fault like any other."""
        done = False
        try:
            number = self._next()
            done = True
            return number
        finally:
            if not done:
                self.fail(EngineFault("The device failed between two prefills."))

    def _next(self) -> int | None:
        while True:
            with self._pool.changed:
                if self._stopping:
                    return None
                number = self._queue.start(time.monotonic())
                if number is not None:
                    self._jobs[number].started = time.monotonic()
                    return number
                self._pool.changed.wait(_RELIEF_S)
            self._relieve(time.monotonic())

    def _relieve(self, now: float) -> None:
        """Now and then, without a job that would need what is kept, look after the machine."""
        if now >= self._relieve_at:
            self._relieve_at = now + _RELIEF_S
            self._ledger.relieve()

    def _compute(self, number: int, job: _Job) -> int:
        work = job.work
        needed = prefill_bytes(self._prefiller.layout, work.end, self._prefiller.tile)

        def cancelled() -> bool:
            with self._pool.changed:
                return self._stopping or self._queue.abandoned(number)

        def progress(position: int) -> None:
            job.position = position

        self._prefiller.turn_to(work.space)
        self._prefiller.recall(work.tokens, work.end, work.extra)  # room is made elsewhere first
        with self._ledger.reserve(needed):
            computes = work.end - self._prefiller.recall(work.tokens, work.end, work.extra)
            self._told(number, job, computes)
            self.prefills += 1
            computed = self._prefiller.prefill(
                work.tokens.tolist(),
                work.cut,
                work.end,
                job.backlog.put,
                cancelled,
                progress,
                work.extra,
            )
        log.info("prefilled", extra={"computed": computed, "reused": work.end - computed})
        return computed

    def _told(self, number: int, job: _Job, computes: int) -> None:
        """The job is known to compute that many tokens: its handoffs may begin."""
        with self._pool.changed:
            self._queue.computes(number, computes)
            job.computes = computes
            self._wake(job)

    def _finish(self, number: int, job: _Job, computed: int, error: BatonError | None) -> None:
        with self._pool.changed:
            self._queue.finish(number, time.monotonic(), computed)
            self._jobs.pop(number, None)
            self._end(job, error)

    def _end(self, job: _Job, error: BatonError | None) -> None:
        if job.finished is not None:
            return
        job.error = error
        job.finished = time.monotonic()
        if error is None:
            job.backlog.end()
        else:
            job.backlog.discard()

    def _wake(self, job: _Job) -> None:
        for ticket in job.tickets:
            ticket.reader.wake()


def _stopping() -> CapacityError:
    return CapacityError("The producer is stopping.", reason="producer_stopping")
