"""The remote lane: the thread that asks the producer to prefill a prompt.

The producer has one device, so handoffs run one after another, and a shadow is allocated only
when its turn has come. Whether it is asked at all is ``reuse/ladder``'s decision.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from mac_decoder.engine.composing import Composing
from mac_decoder.handoff.link import Destination, Handoff, Link
from mac_decoder.keeper import Restored
from mac_decoder.kv.shadow import Shadow
from protocol.errors import Cancelled


@dataclass
class Fetch:
    """One prompt's way through the lane. ``withdrawn`` may be set from any thread.

    It outlives the handoff by a little, so the shadow is not a part of it.
    """

    key: int
    request_id: str
    tokens: Sequence[int]
    space: bytes
    withdrawn: threading.Event = field(default_factory=threading.Event)
    reported_at: float = 0.0
    sealed_at: float = 0.0
    ended_at: float = 0.0


@dataclass(frozen=True)
class Arrived:
    """What a handoff brought. ``lost`` says why the lower part of a delta is not there, and then
    there is nothing; ``restored`` is that part, ``None`` where everything was sent.
    """

    handoff: Handoff | None
    restored: Restored | None = None
    lost: str = ""


class RemoteLane:
    """One handoff at a time, in a thread of its own."""

    def __init__(
        self,
        link: Link,
        progress: Callable[[Fetch, int, int], None],
        fetched: Callable[[int, Future[Arrived]], None],
    ) -> None:
        """``progress(fetch, processed, total)`` and ``fetched(key, future)`` run in it."""
        self._link = link
        self._progress = progress
        self._fetched = fetched
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-handoff")
        self._last: Fetch | None = None

    def start(self, fetch: Fetch, shadow: Shadow | Composing) -> None:
        """Begin a handoff into ``shadow``; the one before it must have ended."""
        self._last = fetch
        if isinstance(shadow, Composing):
            future = self._thread.submit(self._delta, fetch, shadow)
        else:
            future = self._thread.submit(self._whole, fetch, shadow)
        future.add_done_callback(partial(self._ended, fetch))

    def _whole(self, fetch: Fetch, shadow: Destination) -> Arrived:
        return Arrived(self._fetch(fetch, shadow, fetch.withdrawn.is_set))

    def _delta(self, fetch: Fetch, composing: Composing) -> Arrived:
        """Fetch the upper part while the lower one is placed; without it, there is no use in it."""
        done = False
        try:
            try:
                handoff = self._fetch(
                    fetch, composing, lambda: fetch.withdrawn.is_set() or composing.lost
                )
            except Cancelled:
                if fetch.withdrawn.is_set() or not composing.lost:
                    raise
                return Arrived(None, lost=composing.wait()[1])
            restored, lost = composing.wait()
            if lost:
                handoff.discarded(lost)
                return Arrived(None, lost=lost)
            done = True
            return Arrived(handoff, restored)
        finally:
            if not done:
                composing.give_up()

    def _fetch(
        self, fetch: Fetch, destination: Destination, cancelled: Callable[[], bool]
    ) -> Handoff:
        handoff = self._link.fetch(
            fetch.tokens,
            destination,
            request_id=fetch.request_id,
            space=fetch.space,
            cancelled=cancelled,
            progress=partial(self._progress, fetch),
        )
        fetch.sealed_at = time.perf_counter()
        return handoff

    def _ended(self, fetch: Fetch, outcome: Future[Arrived]) -> None:
        fetch.ended_at = time.perf_counter()
        # What has ended needs no withdrawing; kept here it would keep its shadow too.
        self._last = None
        self._fetched(fetch.key, outcome)

    def close(self) -> None:
        """Withdraw what runs and wait for the thread (a fetch polls at least every 100 ms)."""
        last = self._last
        if last is not None:
            last.withdrawn.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
