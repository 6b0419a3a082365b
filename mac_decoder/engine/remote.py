"""The remote lane: whether the producer should prefill a prompt, and the thread that asks it.

The choice is a pure function with reasons. The lane itself owns one thread: the producer has
one device, so handoffs run one after another, and a shadow is allocated only when its turn
has come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from mac_decoder.engine.events import Lane, Source
from mac_decoder.engine.rates import (
    FIRST_GUESS,
    Speeds,
    local_seconds,
    remote_seconds,
    threshold,
)
from mac_decoder.handoff.link import Handoff, Link, LinkState
from mac_decoder.kv.shadow import Shadow


@dataclass(frozen=True)
class Decision:
    """Who prefills, and the stable codes that say why.

    ``fallback`` says that the producer was wanted and could not be asked; ``refused`` that
    this request insists on it, so that nobody prefills.
    """

    source: Source
    reasons: tuple[str, ...]
    fallback: bool = False
    refused: bool = False


@dataclass(frozen=True)
class Situation:
    """What the choice of lane depends on besides the request.

    ``link`` is ``None`` without a producer; ``fixed_threshold`` the configured one, if any;
    ``bytes_per_token`` what a handoff of this prompt ships; ``backlog_tokens`` the prompts
    that the producer has been asked for already; ``probe`` that rates which refuse it should
    be doubted now (see ``rates.Probing``).
    """

    link: LinkState | None
    fixed_threshold: int | None
    speeds: Speeds
    bytes_per_token: float
    backlog_tokens: int = 0
    probe: bool = False


def decide(lane: Lane, uncached: int, situation: Situation) -> Decision:
    """Choose the lane for ``uncached`` positions that no cache holds.

    ``lane`` ``local`` never asks the producer; ``remote`` asks it whatever the rates say;
    ``auto`` asks it where that is expected to be faster. A producer that cannot be asked
    leaves an ``auto`` prompt to this machine and refuses a ``remote`` one, with the link's
    reason.
    """
    if uncached == 0:
        return Decision("local", ("nothing_to_prefill",))
    if lane == "local":
        return Decision("local", ("lane_local",))
    if situation.link is None:
        return Decision("local", ("no_producer",), refused=lane == "remote")
    if not situation.link.ready:
        reason = situation.link.reason or f"producer_{situation.link.name}"
        return Decision("local", (reason,), fallback=lane == "auto", refused=lane == "remote")
    if lane == "remote":
        return Decision("remote", ("lane_remote",))
    if situation.fixed_threshold is None:
        return _by_rates(uncached, situation)
    if uncached < situation.fixed_threshold:
        return Decision("local", ("below_threshold",))
    return Decision("remote", ("above_threshold",))


def _by_rates(uncached: int, situation: Situation) -> Decision:
    limit = threshold(situation.bytes_per_token, situation.speeds)
    if limit is None or uncached < limit:
        if situation.probe and uncached >= FIRST_GUESS and not situation.backlog_tokens:
            return Decision("remote", ("producer_probe",))
        return Decision("local", ("rates_favour_local" if limit is None else "below_threshold",))
    if _busy(uncached, situation):
        return Decision("local", ("producer_backlog",))
    return Decision("remote", ("above_threshold",))


def _busy(uncached: int, situation: Situation) -> bool:
    """Whether waiting for the producer's backlog takes longer than prefilling here."""
    here = local_seconds(uncached, situation.speeds)
    there = remote_seconds(
        uncached + situation.backlog_tokens, situation.bytes_per_token, situation.speeds
    )
    return here is not None and there is not None and here < there


@dataclass
class Fetch:
    """One prompt's way through the lane. ``withdrawn`` may be set from any thread.

    It outlives the handoff by a little, so the shadow is not a part of it.
    """

    key: int
    request_id: str
    tokens: Sequence[int]
    withdrawn: threading.Event = field(default_factory=threading.Event)
    reported_at: float = 0.0
    ended_at: float = 0.0


class RemoteLane:
    """One handoff at a time, in a thread of its own."""

    def __init__(
        self,
        link: Link,
        progress: Callable[[Fetch, int, int], None],
        fetched: Callable[[int, Future[Handoff]], None],
    ) -> None:
        """``progress(fetch, processed, total)`` and ``fetched(key, future)`` run in it."""
        self._link = link
        self._progress = progress
        self._fetched = fetched
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-handoff")
        self._last: Fetch | None = None

    def start(self, fetch: Fetch, shadow: Shadow) -> None:
        """Begin a handoff into ``shadow``; the one before it must have ended."""
        self._last = fetch
        future = self._thread.submit(
            self._link.fetch,
            fetch.tokens,
            shadow,
            request_id=fetch.request_id,
            cancelled=fetch.withdrawn.is_set,
            progress=partial(self._progress, fetch),
        )
        future.add_done_callback(partial(self._ended, fetch))

    def _ended(self, fetch: Fetch, outcome: Future[Handoff]) -> None:
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
