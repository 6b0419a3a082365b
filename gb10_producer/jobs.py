"""Which prefill runs next: a bounded queue for one device, shared by identical requests.

Pure: no thread, socket or clock; ``now`` is seconds of any monotonic clock. ``device`` drives
it under a lock. The rules:

- at most one job runs; the others wait in order of arrival, at most ``waiting_limit`` of them;
- a *ticket* is one request. Requests with equal keys want the same rows and share a job, as
  long as that job waits, or runs and still holds all the rows that it made;
- a job that all its tickets left is dropped if it waits, and *abandoned* if it runs: it keeps
  the device until it says that it stopped, and nobody joins it any more;
- a closed queue takes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from protocol.errors import CapacityError, LocalProtocolError

_SHORTEST_RETRY_S = 1.0
_LONGEST_RETRY_S = 120.0
_KEPT = 0.7
"""Weight that all jobs before keep when another has ended."""
_GUESSED_TOKENS = 1000
"""What the first guess of the device's speed weighs."""


class Withdrawal(Enum):
    """What leaving did to the ticket's job."""

    UNKNOWN = "unknown"
    """The ticket had no job: it never had, or the job is over."""
    SHARED = "shared"
    """Others still want the job."""
    DROPPED = "dropped"
    """The job waited and is gone."""
    ABANDONED = "abandoned"
    """The job runs for nobody: stop it at the next tile."""


@dataclass(frozen=True)
class Placement:
    """Where a request went: its job, whether that existed before, and the jobs ahead of it."""

    job: int
    joined: bool
    ahead: int


@dataclass
class _Job:
    number: int
    key: bytes
    tokens: int
    tickets: list[str] = field(default_factory=list)
    joinable: bool = True
    started_s: float | None = None


class JobQueue:
    """The queue of one device. Not thread-safe.

    ``waiting_limit`` counts jobs that wait, not the one that runs. ``seconds_per_token`` is the
    first guess of the device's speed, replaced by a moving average of what is measured, weighted
    by tokens: a short job's time says little about a long one's.
    """

    def __init__(self, waiting_limit: int, seconds_per_token: float = 1e-3) -> None:
        self._limit = waiting_limit
        self._measured_tokens = float(_GUESSED_TOKENS)
        self._measured_s = _GUESSED_TOKENS * seconds_per_token
        self._running: _Job | None = None
        self._waiting: list[_Job] = []
        self._numbers = 0
        self._closed: str | None = None

    def submit(self, ticket: str, key: bytes, tokens: int, now: float) -> Placement:
        """Place a request for ``tokens`` positions; equal ``key`` means equal rows.

        Raises ``CapacityError`` (``queue_full`` with the time to wait, or the reason given
        to :meth:`close`) and ``LocalProtocolError`` for a ticket that is in use.
        """
        if self._closed is not None:
            raise CapacityError("The producer takes no new work.", reason=self._closed)
        if any(ticket in job.tickets for job in self._jobs()):
            raise LocalProtocolError("A ticket was submitted twice.", field="ticket")
        for job in self._jobs():
            if job.joinable and job.key == key:
                job.tickets.append(ticket)
                return Placement(job.number, True, self._ahead_of(job))
        if len(list(self._jobs())) > self._limit:
            raise CapacityError(
                "The producer's queue is full.",
                reason="queue_full",
                retry_after_s=self.retry_after_s(now),
                found=len(self._waiting),
                expected=self._limit,
            )
        self._numbers += 1
        job = _Job(self._numbers, key, tokens, [ticket])
        self._waiting.append(job)
        return Placement(job.number, False, self._ahead_of(job))

    def start(self, now: float) -> int | None:
        """The number of the job to run now; ``None`` while one runs or none waits."""
        if self._running is not None or not self._waiting:
            return None
        self._running = self._waiting.pop(0)
        self._running.started_s = now
        return self._running.number

    def computes(self, job: int, tokens: int) -> None:
        """Note that of all its positions ``job``, which runs, computes ``tokens`` only."""
        if self._running is not None and self._running.number == job:
            self._running.tokens = tokens

    def finish(self, job: int, now: float, computed: int = 0) -> tuple[str, ...]:
        """Free the device; return the tickets that still wanted the job.

        ``computed`` is the number of tokens computed, 0 when the job failed or was stopped.
        """
        running = self._running
        if running is None or running.number != job:
            raise LocalProtocolError("A job ended that does not run.", field="job", found=job)
        self._running = None
        if computed > 0 and running.started_s is not None:
            took_s = max(0.0, now - running.started_s)
            self._measured_tokens = _KEPT * self._measured_tokens + computed
            self._measured_s = _KEPT * self._measured_s + took_s
        return tuple(running.tickets)

    def withdraw(self, ticket: str) -> Withdrawal:
        """Take a request out, whatever became of it."""
        for job in self._jobs():
            if ticket not in job.tickets:
                continue
            job.tickets.remove(ticket)
            if job.tickets:
                return Withdrawal.SHARED
            job.joinable = False
            if job is self._running:
                return Withdrawal.ABANDONED
            self._waiting.remove(job)
            return Withdrawal.DROPPED
        return Withdrawal.UNKNOWN

    def holds_up(self, ticket: str) -> bool:
        """Whether others wait for what the ticket's job has: jobs behind it, or its other tickets.

        A job that is over holds nobody up here.
        """
        jobs = list(self._jobs())
        for index, job in enumerate(jobs):
            if ticket in job.tickets:
                return len(job.tickets) > 1 or index < len(jobs) - 1
        return False

    def rows_are_gone(self, job: int) -> None:
        """Note that ``job`` let go of rows: who comes now has missed them and cannot join."""
        if self._running is not None and self._running.number == job:
            self._running.joinable = False

    def abandoned(self, job: int) -> bool:
        """Whether nobody wants ``job`` any more."""
        running = self._running
        return running is None or running.number != job or not running.tickets

    def close(self, reason: str) -> tuple[str, ...]:
        """Take nothing from now on, drop what waits; return the tickets that had a job.

        The job that runs stays until :meth:`finish`. Closing again changes nothing.
        """
        tickets = tuple(ticket for job in self._jobs() for ticket in job.tickets)
        self._waiting.clear()
        if self._closed is None:
            self._closed = reason
        return tickets

    def retry_after_s(self, now: float) -> float:
        """Seconds until the queue has probably moved on by one job, between 1 and 120."""
        running = self._running
        expected = 0.0
        each_s = self._measured_s / self._measured_tokens
        if running is not None and running.started_s is not None:
            expected = running.tokens * each_s - (now - running.started_s)
        elif self._waiting:
            expected = self._waiting[0].tokens * each_s
        return min(max(expected, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)

    @property
    def waiting(self) -> int:
        """Jobs that wait."""
        return len(self._waiting)

    @property
    def running(self) -> int | None:
        """The job that has the device."""
        return None if self._running is None else self._running.number

    def _jobs(self) -> Iterator[_Job]:
        if self._running is not None:
            yield self._running
        yield from self._waiting

    def _ahead_of(self, job: _Job) -> int:
        return next(index for index, other in enumerate(self._jobs()) if other is job)
