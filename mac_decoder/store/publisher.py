"""Publishing behind the response: one thread, a bounded queue, drained at a clean shutdown.

Steps of a prefill that a later cut in the queue extends are not written only to be deleted:
they wait for that cut, and share its outcome.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mac_decoder.reuse.cut import BlockBody, CutBody
from mac_decoder.reuse.line import Line
from mac_decoder.store.manifest import Role
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from protocol.errors import BatonError
from protocol.identity import Identity

_LOG = logging.getLogger(__name__)

FORGOTTEN: Final = "forgotten"
"""The reason of a publication that was given up because its cut is to be deleted."""

MOST_WAITING: Final = 64
_TIDY_EVERY_S: Final = 30.0
_LOOK_EVERY_S: Final = 0.1
_NICENESS: Final = 10


@dataclass(frozen=True, eq=False)
class Job:
    """A cut to publish. ``release`` is called once, after the outcome is told.

    ``blocks`` are bodies of its whole blocks but for the first ones, those of ``line`` that are
    on disk when its turn comes. ``resident``: memory holds this very cut too.
    """

    space: bytes
    identity: Identity
    cut: CutBody
    blocks: Sequence[BlockBody]
    role: Role = "turn"
    line: Line | None = None
    resident: bool = True
    release: Callable[[], None] = lambda: None
    waiting_too: tuple[Job, ...] = field(default=(), repr=False)

    @property
    def name(self) -> bytes:
        """The cut's name."""
        return self.cut.digest(self.space)

    def extends(self, other: Job) -> bool:
        """Whether this cut's tokens begin with those of ``other``, and go on."""
        ours, theirs = self.cut, other.cut
        return (
            self.space == other.space
            and ours.position > theirs.position
            and ours.blocks[: len(theirs.blocks)] == theirs.blocks
            and bool((ours.tokens[: theirs.position] == theirs.tokens).all())
        )


Told = Callable[[Job, Published | Refused], None]
"""Called in the publisher's thread with each job's outcome, while nobody else may write to the
store; must not wait."""


class Publisher:
    """Publishes jobs in the order in which they came."""

    def __init__(self, store: Store, told: Told) -> None:
        self._store = store
        self._told = told
        self._queue: deque[Job] = deque()
        self._ready = threading.Condition()
        self._busy: Job | None = None
        self._open = True
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="store-publish", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """Queue a job. False, and its outcome told, where it cannot be queued."""
        with self._ready:
            reason = "" if self._open else "store_closed"
            absorbed = self._absorbed(job) if not reason else []
            if not reason and len(self._queue) - len(absorbed) >= MOST_WAITING:
                reason = "publisher_behind"
            if not reason:
                for step in absorbed:
                    self._queue.remove(step)
                earlier = tuple(kept for step in absorbed for kept in (*step.waiting_too, step))
                # What only they have is not on disk when this one's turn comes.
                bodies = {body.hash: body for step in absorbed for body in step.blocks}
                bodies |= {body.hash: body for body in job.blocks}
                whole = replace(job, blocks=tuple(bodies.values()), waiting_too=earlier)
                self._queue.append(whole)
                self._ready.notify_all()
        if reason:
            self._tell(job, Refused(job.name, job.cut.position, reason))
        return not reason

    def waiting(self) -> int:
        """Jobs that have no outcome yet."""
        with self._ready:
            return self._unfinished()

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until every job has its outcome; whether that was reached."""
        with self._ready:
            self._ready.wait_for(lambda: self._ended or not self._unfinished(), timeout_s)
            return not self._unfinished()

    def unfinished(self) -> tuple[Job, ...]:
        """The jobs that have no outcome yet, steps that wait with others included."""
        with self._ready:
            jobs = [*([self._busy] if self._busy is not None else []), *self._queue]
        return tuple(each for job in jobs for each in (*job.waiting_too, job))

    def withdraw(self, cuts: Collection[bytes] | None = None) -> int:
        """Give up the jobs that wait of ``cuts``, by their names, or all; how many that were.

        Their outcome is told as ``forgotten``, and so is that of steps that waited with them.
        The job in progress is finished: see :meth:`finish_current`.
        """
        with self._ready:
            going = [job for job in self._queue if cuts is None or job.name in cuts]
            for job in going:
                self._queue.remove(job)
            self._ready.notify_all()
        for job in going:
            self._tell(job, Refused(job.name, job.cut.position, FORGOTTEN))
        return sum(1 + len(job.waiting_too) for job in going)

    def finish_current(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Wait until the job that is in progress now, if any, has its outcome, or for that to be
        ``stopped``.
        """
        with self._ready:
            job = self._busy

            def over() -> bool:
                return self._ended or job is None or self._busy is not job

            while not over() and not stopped():
                self._ready.wait_for(over, _LOOK_EVERY_S)

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more jobs, drain, end the thread; whether all jobs were published in time.

        After the time-out the jobs that wait are refused as ``store_closed``; the one in
        progress is finished first.
        """
        with self._ready:
            self._open = False
        drained = self.drain(timeout_s)
        with self._ready:
            left = list(self._queue)
            self._queue.clear()
            self._ready.notify_all()
        for job in left:
            self._tell(job, Refused(job.name, job.cut.position, "store_closed"))
        self._thread.join()
        return drained

    def _unfinished(self) -> int:
        return len(self._queue) + (self._busy is not None)

    def _absorbed(self, job: Job) -> list[Job]:
        """Steps on the way to ``job``. Another line's rows of the same tokens may be others."""
        found: list[Job] = []
        for other in reversed(self._queue):
            if other.line is not job.line:
                continue
            if other.role == "step" and job.extends(other):
                found.append(other)
            elif job.line is not None:
                # It goes on from the steps before it, which have to be there first.
                break
        return found[::-1]

    def _run(self) -> None:
        _give_way()
        try:
            self._loop()
        finally:
            with self._ready:
                # Whatever ended it: nobody waits for this thread for ever.
                self._open, self._ended = False, True
                self._ready.notify_all()

    def _loop(self) -> None:
        while True:
            with self._ready:
                woken = self._ready.wait_for(lambda: self._queue or not self._open, _TIDY_EVERY_S)
                if woken and not self._queue:
                    return
                job = self._busy = self._queue.popleft() if self._queue else None
            if job is None:
                self._store.flush()
                continue
            try:
                self._publish(job)
            finally:
                # Its rows may be nobody else's: they are not to stay until the next job comes.
                del job
                with self._ready:
                    self._busy = None
                    self._ready.notify_all()

    def _publish(self, job: Job) -> None:
        files = job.line.files if job.line is not None else ()

        def told(outcome: Published | Refused) -> None:
            if job.line is not None:
                job.line.files = outcome.block_files
            self._tell(job, outcome)

        try:
            self._store.publish(
                job.space,
                job.identity,
                job.cut,
                job.blocks,
                role=job.role,
                block_files=files,
                told=told,
            )
        except BatonError as error:
            # The cut itself is wrong: a fault of ours that must not end the thread.
            _LOG.error("a cut cannot be published: %s (%s)", error.message, error.reason)
            self._tell(job, Refused(job.name, job.cut.position, error.reason))

    def _tell(self, job: Job, outcome: Published | Refused) -> None:
        for each in (*job.waiting_too, job):
            name, position = each.name, each.cut.position
            mine = outcome
            if each is not job:
                mine = replace(outcome, name=name, position=position)
                if isinstance(mine, Published):
                    held = self._store.holds(name)
                    gone = () if held else (name,)
                    mine = Published(name, position, existed=held, superseded=gone)
            self._told(each, mine)
            each.release()


def _give_way() -> None:
    """Let requests go first, where the system has priorities for threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
