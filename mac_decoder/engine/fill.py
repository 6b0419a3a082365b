"""Bringing a request's cache to N-1: the remote lane, and the local one behind it.

MLX thread only, but for the two callbacks that the handoff thread calls. A request enters by
:meth:`Filling.start` and leaves by ``ready`` with its caches, by ``failed``, or by
:meth:`withdraw`. When a handoff fails, for whatever reason, the reason is logged, counted and
kept for the report, and the prompt is computed here, unless its lane is ``remote``: then the
request fails with the link's error.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.models.cache import make_prompt_cache

from mac_decoder.engine.admission import next_prefill
from mac_decoder.engine.events import Progress
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.rates import FIRST_GUESS, Average, Probing, Speeds, threshold
from mac_decoder.engine.remote import Decision, Fetch, RemoteLane, Situation, decide
from mac_decoder.engine.request import Request, Stage
from mac_decoder.handoff.link import Handoff, Link
from mac_decoder.kv.install import build, canonical
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reporting import traced
from protocol.errors import BatonError, LocalProtocolError, RequestError, TransferError
from protocol.layout import payload_bytes

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
"""Shortest time between two Progress events of one request."""

SILENCE: Final = frozenset({"peer_silent", "connect_timeout", "producer_unreachable"})
"""Failures that the next handoff would wait for just as long."""

Emit = Callable[[int, Progress], None]


@dataclass(frozen=True)
class _Computing:
    """A prompt that is being computed here."""

    request: Request
    prefill: LocalPrefill


@dataclass(frozen=True)
class _Fetching:
    """The handoff that is under way."""

    request: Request
    fetch: Fetch
    shadow: Shadow


class Filling:
    """All requests whose cache is not at N-1 yet."""

    def __init__(
        self,
        loaded: LoadedModel,
        step: int,
        fixed_threshold: int | None,
        link: Link | None,
        *,
        fetched: Callable[[int, Future[Handoff]], None],
        progress: Emit,
        ready: Callable[[Request, list[Any]], None],
        failed: Callable[[Request, BatonError], None],
    ) -> None:
        """``fetched`` and ``progress`` are called in the handoff thread, the others here."""
        self._loaded = loaded
        self._step = step
        self._fixed_threshold = fixed_threshold
        self._link = link
        self._lane = None if link is None else RemoteLane(link, self._remote_progress, fetched)
        self._progress = progress
        self._ready = ready
        self._failed = failed
        self._for_lane: deque[Request] = deque()
        self._fetching: _Fetching | None = None
        self._prefills: list[_Computing] = []
        self._local = Average()
        self._overhead = Average()
        self._probing = Probing()
        self._turn = 0
        # Of a prompt long enough that window rows and states hardly count.
        self._bytes_per_token = payload_bytes(loaded.layout, 0, 1 << 14) / (1 << 14)
        self.fallbacks: Counter[str] = Counter()
        self.handoffs = 0

    # -- what the worker asks

    @property
    def has_tile(self) -> bool:
        """Whether there is a tile to compute."""
        return bool(self._prefills)

    @property
    def reserved(self) -> int:
        """Bytes reserved for the requests in here, a handoff that was withdrawn included."""
        held = [computing.request for computing in self._prefills]
        held += self._for_lane
        if self._fetching is not None:
            held.append(self._fetching.request)
        return sum(request.nbytes for request in held)

    @property
    def speeds(self) -> Speeds:
        """The measured rates of both lanes."""
        measured = None if self._link is None else self._link.rates
        overhead = self._overhead
        return Speeds(
            local=self._local.per_second,
            producer=measured.compute_tokens_per_s if measured else 0.0,
            link=measured.wire_bytes_per_s if measured else 0.0,
            overhead_s=overhead.seconds / overhead.amount if overhead.amount else 0.0,
        )

    def status(self) -> dict[str, Any]:
        """Counts and rates in plain types."""
        speeds = self.speeds
        return {
            "prefilling": len(self._prefills),
            "waiting_for_producer": len(self._for_lane),
            "fetching": self._fetching is not None,
            "handoffs": self.handoffs,
            "fallbacks": dict(self.fallbacks),
            "rates": {
                "local_tokens_per_s": round(speeds.local, 1),
                "producer_tokens_per_s": round(speeds.producer, 1),
                "link_bytes_per_s": round(speeds.link),
                "handoff_overhead_ms": round(speeds.overhead_s * 1e3, 3),
            },
            "remote_threshold": self._fixed_threshold or threshold(self._bytes_per_token, speeds),
        }

    # -- the way in and out

    def start(self, request: Request) -> None:
        """Choose the lane and begin."""
        end = request.end
        if end == 0:
            request.reasons.append("nothing_to_prefill")
            request.enter(Stage.PREFILL, time.perf_counter(), "queue")
            self._ready(request, make_prompt_cache(self._loaded.model))
            return
        now = time.perf_counter()
        decision = decide(request.generation.lane, end, self._situation(end, now))
        self._probing = self._probed(decision, end, now)
        request.reasons += decision.reasons
        request.fallback = decision.fallback
        if decision.refused:
            self._failed(request, self._unavailable(decision.reasons[0]))
            return
        if decision.source == "local":
            self.fallbacks.update(decision.reasons if decision.fallback else ())
            self._begin_prefill(request, "queue")
            return
        request.enter(Stage.REMOTE, time.perf_counter(), "queue")
        self._for_lane.append(request)
        self._next_handoff()

    def withdraw(self, request: Request) -> None:
        """Let go of a request that is in here; a handoff under way is told to stop."""
        self._prefills = [entry for entry in self._prefills if entry.request is not request]
        if request in self._for_lane:
            self._for_lane.remove(request)
        if self._fetching is not None and self._fetching.request is request:
            self._fetching.fetch.withdrawn.set()

    def close(self) -> None:
        """Withdraw everything and end the handoff thread."""
        self._for_lane.clear()
        self._prefills.clear()
        if self._lane is not None:
            self._lane.close()

    # -- local

    def compute_tile(self) -> None:
        """Compute one tile of one prompt."""
        remaining = [entry.prefill.remaining for entry in self._prefills]
        entry = self._prefills[next_prefill(remaining, self._turn)]
        request, prefill = entry.request, entry.prefill
        self._turn += 1
        began = time.perf_counter()
        tokens = prefill.advance()
        now = time.perf_counter()
        self._local = self._local.with_sample(tokens, now - began, now)
        done = prefill.remaining == 0
        if done or now - request.reported_at >= PROGRESS_INTERVAL_S:
            request.reported_at = now
            self._progress(request.key, Progress(prefill.position, request.end, "local"))
        if done:
            self._prefills.remove(entry)
            request.enter(Stage.PREFILL, now, "compute")
            self._ready(request, prefill.caches)

    def _begin_prefill(self, request: Request, phase: str) -> None:
        now = time.perf_counter()
        request.enter(Stage.PREFILL, now, phase)
        request.reported_at = now
        prefill = LocalPrefill(self._loaded.model, request.generation.tokens, self._step)
        self._prefills.append(_Computing(request, prefill))

    # -- remote

    def _situation(self, end: int, now: float) -> Situation:
        backlog = sum(request.end for request in self._for_lane)
        if self._fetching is not None:
            backlog += self._fetching.request.end
        return Situation(
            link=None if self._link is None else self._link.state,
            fixed_threshold=self._fixed_threshold,
            speeds=self.speeds,
            bytes_per_token=payload_bytes(self._loaded.layout, 0, end) / end,
            backlog_tokens=backlog,
            probe=self._probing.due(now),
        )

    def _probed(self, decision: Decision, end: int, now: float) -> Probing:
        match decision.reasons[0]:
            case "producer_probe":
                return self._probing.probed(now)
            case "above_threshold":
                return Probing()
            case "rates_favour_local" | "below_threshold" if end >= FIRST_GUESS:
                return self._probing.refused(now)
            case _:
                return self._probing

    def _unavailable(self, reason: str) -> BatonError:
        """Why a request that insists on the producer cannot have it."""
        if self._link is None:
            return RequestError(
                "this decoder has no producer", reason="no_producer", field="baton.lane"
            )
        error = self._link.error()
        return error or TransferError("the producer is not connected", reason=reason)

    def _next_handoff(self) -> None:
        if self._lane is None or self._fetching is not None or not self._for_lane:
            return
        request = self._for_lane.popleft()
        request.enter(Stage.REMOTE, time.perf_counter(), "queue")
        shadow = Shadow(self._loaded.layout, 0, request.end)
        generation = request.generation
        fetch = Fetch(request.key, generation.request_id, generation.tokens)
        self._fetching = _Fetching(request, fetch, shadow)
        self._lane.start(fetch, shadow)

    def take_fetched(self, outcome: Future[Handoff], *, wanted: bool) -> None:
        """The handoff under way has ended: install it, or do without it.

        ``wanted`` is false when its request was cancelled in the meantime.
        """
        if self._fetching is None:
            raise LocalProtocolError("no handoff is under way", reason="handoff_unknown")
        fetching, self._fetching = self._fetching, None
        request = fetching.request
        raised = outcome.exception()
        if raised is None:
            error = self._install(fetching, outcome.result(), wanted=wanted)
        else:
            error = _bare(raised, request.generation.request_id)
        # The next handoff, or the prefill here, is to find this one's memory free.
        del fetching
        if error is not None and wanted:
            self._do_without(request, error)
        if error is not None:
            self._decide_again(error)
        self._next_handoff()

    def _install(self, fetching: _Fetching, handoff: Handoff, *, wanted: bool) -> BatonError | None:
        """Build the caches and hand them on; returns what refused them, if anything did."""
        request, fetch = fetching.request, fetching.fetch
        if not wanted:
            handoff.discarded("cancelled")
            return None
        try:
            caches = build(self._loaded.model, self._loaded.layout, fetching.shadow)
            canonical(caches)
        except BatonError as error:
            handoff.discarded(error.reason)
            return _bare(error, request.generation.request_id)
        phases = handoff.phases_ms
        now = time.perf_counter()
        # Waiting for others' turns is no property of a handoff. Rows travel while the next are
        # computed: the longer of the two scales with length.
        scaled_ms = max(phases.get("compute", 0.0), phases.get("wire", 0.0))
        fixed_ms = (now - request.stage_began) * 1e3 - phases.get("queue", 0.0) - scaled_ms
        self._overhead = self._overhead.with_sample(1.0, max(fixed_ms, 1e-3) / 1e3, now)
        request.add_handoff(phases, handoff.transferred_bytes, fetch.ended_at)
        self.handoffs += 1
        handoff.committed()
        self._ready(request, caches)
        return None

    def _decide_again(self, error: BatonError) -> None:
        """Keep nothing waiting for a producer that, after ``error``, is known to be away."""
        if self._link is None:
            return
        away = self._link.state.name in ("down", "refused", "off")
        if not away and error.reason not in SILENCE:
            return
        waiting, self._for_lane = self._for_lane, deque()
        for request in waiting:
            known = self._link.error() if away else None
            self._do_without(request, known or copy.copy(error), "queue")

    def _do_without(
        self, request: Request, error: BatonError, phase: str = "failed_handoff"
    ) -> None:
        """Prefill here, or fail where the request insists on the producer."""
        name, reason = request.generation.request_id, error.reason
        if request.generation.lane == "remote":
            log.warning("request %s: handoff failed (%s), and so does it", name, reason)
            self._failed(request, error)
            return
        log.warning("request %s: handoff failed (%s), prefilling here", name, reason)
        self.fallbacks[reason] += 1
        request.fallback = True
        request.reasons.append(reason)
        self._begin_prefill(request, phase)

    def _remote_progress(self, fetch: Fetch, processed: int, total: int) -> None:
        """In the handoff thread, which alone touches ``fetch.reported_at``."""
        now = time.perf_counter()
        if processed >= total or now - fetch.reported_at >= PROGRESS_INTERVAL_S:
            fetch.reported_at = now
            self._progress(fetch.key, Progress(processed, total, "remote"))


def _bare(error: BaseException, name: str) -> BatonError:
    """``error`` without the frames that it came through, which hold shadows and prompts.

    A bug in the link is logged here, with its place, and becomes a ``TransferError``.
    """
    if not isinstance(error, BatonError):
        log.error("handoff of %s broke: %s", name, traced(error))
        return TransferError("the handoff broke; the log has the place", reason="handoff_broke")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
