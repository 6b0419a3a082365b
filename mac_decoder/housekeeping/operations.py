"""One operation on what is kept: what it is doing, how far it is, and what came of it.

Belongs to the event loop; its work goes on in threads, which only tell how far they are. Whoever
follows it may come late and leave early: the operation goes on.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from mac_decoder.store.events import PassedOver
from mac_decoder.store.sweep import Pace
from protocol.errors import BatonError, Cancelled

Kind = Literal["verify", "prune", "forget", "clear"]
State = Literal["running", "done", "cancelled", "failed"]
Phase = Literal["memory", "disk"]

_TELL_EVERY_S: Final = 0.1

R = TypeVar("R")


@dataclass(frozen=True)
class Progress:
    """Bytes done, and bytes in all; 0 in all where there is nothing to count."""

    phase: Phase
    done: int
    total: int


class Operation(Generic[R]):
    """An operation that runs or has ended.

    ``cancelled``: it was asked to stop before it had ended; ``outcome`` says what was done by
    then, where that is known. ``error`` is why it failed. ``passed_over`` is what it came to on
    disk, could not remove, and left.
    """

    def __init__(self, kind: Kind, clock: Callable[[], float] = time.time) -> None:
        self.kind: Kind = kind
        self.state: State = "running"
        self.began_at = clock()
        self.ended_at: float | None = None
        self.progress = Progress("memory" if kind in ("forget", "clear") else "disk", 0, 0)
        self.outcome: R | None = None
        self.error: BatonError | None = None
        self.passed_over: tuple[PassedOver, ...] = ()
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._stop = threading.Event()
        self._told_at = 0.0

    def cancel(self) -> None:
        """Let it stop where it is; what was done by then stays so. Returns at once."""
        if self.state == "running":
            self._stop.set()

    async def follow(self) -> AsyncIterator[Progress]:
        """How far it is: now, and as that changes, until it has ended."""
        while True:
            changed = self._changed
            yield self.progress
            if self.state != "running":
                return
            await changed.wait()

    async def result(self) -> R:
        """What came of it, once it has ended. Raises what it failed of, and ``Cancelled``."""
        async for _ in self.follow():
            pass
        if self.error is not None:
            raise self.error
        if self.outcome is None or self.state == "cancelled":
            raise Cancelled("the operation was given up")
        return self.outcome

    # -- for whoever carries it out

    def stopped(self) -> bool:
        """Whether it is to stop. Any thread."""
        return self._stop.is_set()

    def pace(self, patience_s: float = 0.0) -> Pace:
        """How a deletion of it goes on."""
        return Pace(self.tell, self.stopped, patience_s, self._leave)

    def _leave(self, passed: PassedOver) -> None:
        self.passed_over = (*self.passed_over, passed)

    def tell(self, done: int, total: int) -> None:
        """Say how many bytes of the directory are done. Any thread."""
        self.progress = Progress("disk", done, total)
        now = time.monotonic()
        if now - self._told_at >= _TELL_EVERY_S or done == total:
            self._told_at = now
            self._loop.call_soon_threadsafe(self._wake)

    def end(self, outcome: R | None = None, error: BatonError | None = None) -> None:
        """It has ended; on the event loop."""
        stopped = self.stopped() or isinstance(error, Cancelled)
        self.state = "cancelled" if stopped else "done" if error is None else "failed"
        self.outcome = outcome
        self.error = None if stopped else error
        self.ended_at = self._clock()
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
