"""Bringing a request's cache to N-1: from a tier, from the producer, or computed here.

MLX thread only, but for the callbacks that other threads call. A request enters by
:meth:`Filling.start` and leaves by ``ready`` with its caches, by ``failed``, or by
:meth:`withdraw`. What the tiers hold is looked up first, then ``reuse/ladder`` plans. A rung
that fails, for whatever reason, is logged, counted and kept for the report, and the next one
down is tried; a handoff that fails a request of lane ``remote`` ends it with the link's error.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any, Final

from mlx_lm.models.cache import make_prompt_cache

from mac_decoder.engine.admission import next_prefill
from mac_decoder.engine.cuts import segments
from mac_decoder.engine.events import Progress
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.rates import FIRST_GUESS, Average, Probing, Speeds, threshold
from mac_decoder.engine.remote import Fetch, RemoteLane
from mac_decoder.engine.request import Due, Request, Stage
from mac_decoder.engine.sequences import Sequences
from mac_decoder.handoff.link import Handoff, Link
from mac_decoder.keeper import Looked, Restored
from mac_decoder.kv.install import build, canonical
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reporting import traced
from mac_decoder.reuse import facts, ladder
from mac_decoder.reuse.facts import ContinueLive, Facts, FetchedTier, Plan, Restore
from protocol.errors import (
    BatonError,
    Cancelled,
    IntegrityError,
    LocalProtocolError,
    RequestError,
    TransferError,
)
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


@dataclass(frozen=True)
class _Restoring:
    """A restore that is under way; ``withdrawn`` may be set from any thread."""

    request: Request
    action: Restore
    shadow: Shadow
    withdrawn: Event = field(default_factory=Event)


@dataclass(frozen=True)
class Answers:
    """What other threads call with an outcome, which then comes back to this one."""

    looked: Callable[[int, Future[Looked]], None]
    restored: Callable[[int, Future[Restored | None]], None]
    fetched: Callable[[int, Future[Handoff]], None]
    progress: Emit


class Filling:
    """All requests whose cache is not at N-1 yet."""

    def __init__(
        self,
        loaded: LoadedModel,
        step: int,
        fixed_threshold: int | None,
        link: Link | None,
        sequences: Sequences,
        answers: Answers,
        *,
        ready: Callable[[Request, list[Any]], None],
        failed: Callable[[Request, BatonError], None],
    ) -> None:
        """``answers`` are called in other threads, ``ready`` and ``failed`` here."""
        self._loaded = loaded
        self._step = step
        self._fixed_threshold = fixed_threshold
        self._link = link
        self._sequences = sequences
        self._answers = answers
        self._lane = (
            None if link is None else RemoteLane(link, self._remote_progress, answers.fetched)
        )
        self._progress = answers.progress
        self._installed = ready
        self._failed = failed
        self._looking: dict[int, Request] = {}
        self._restoring: dict[int, _Restoring] = {}
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
        """Bytes reserved for the requests in here; handoffs and restores that were withdrawn
        count until they have ended.
        """
        held = [computing.request for computing in self._prefills]
        held += [restoring.request for restoring in self._restoring.values()]
        held += self._looking.values()
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
            "restoring": len(self._restoring),
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
        """Ask the tiers what they hold of the prompt; what follows is planned then."""
        generation = request.generation
        keeper = self._sequences.keeper if generation.reuse and request.end else None
        if keeper is None:
            self._go_on(request)
            return
        request.enter(Stage.LOOKUP, time.perf_counter(), "queue")
        self._looking[request.key] = request
        looking = keeper.look(generation.tokens, generation.salt)
        looking.add_done_callback(lambda outcome: self._answers.looked(request.key, outcome))

    def take_looked(self, key: int, outcome: Future[Looked], *, wanted: bool) -> None:
        """The tiers have said what they hold."""
        request = self._looking.pop(key)
        if wanted:
            request.reuse.looked = outcome.result()
            request.add_phase("lookup", (time.perf_counter() - request.stage_began) * 1e3)
            request.stage_began = time.perf_counter()
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """Plan with what is known by now, and begin."""
        now = time.perf_counter()
        known = self._facts(request, now)
        plan = ladder.plan(known)
        request.reuse.plan = plan
        request.reasons = [*request.reuse.failures, *plan.reasons]
        request.fallback = plan.fallback
        self._probing = self._probed(plan, request.end, now)
        if plan.refused:
            self._failed(request, self._unavailable(plan.reasons[-1]))
            return
        self.fallbacks.update(plan.reasons[-1:] if plan.fallback else ())
        phase = "queue" if request.stage is Stage.WAITING else "lookup"
        match plan.action:
            case ContinueLive(key=key, position=position):
                caches = self._sequences.continued(request, key, position)
                self._begin_prefill(request, phase, caches)
            case Restore() as action:
                self._begin_restore(request, action, phase)
            case facts.Local():
                self._begin_prefill(request, phase)
            case _:
                request.enter(Stage.REMOTE, now, phase)
                self._for_lane.append(request)
                self._next_handoff()

    def _facts(self, request: Request, now: float) -> Facts:
        looked = request.reuse.looked
        return Facts(
            tokens=len(request.generation.tokens),
            layout=self._loaded.layout,
            lane=request.generation.lane,
            live=self._sequences.live.offers(looked.space, looked.tokens) if looked.space else (),
            resident=looked.resident,
            durable=looked.durable,
            remote=self._remote(now),
            reuse=bool(looked.space),
        )

    def withdraw(self, request: Request) -> None:
        """Let go of a request that is in here; a handoff under way is told to stop."""
        self._prefills = [entry for entry in self._prefills if entry.request is not request]
        if request in self._for_lane:
            self._for_lane.remove(request)
        if self._fetching is not None and self._fetching.request is request:
            self._fetching.fetch.withdrawn.set()
        if request.key in self._restoring:
            self._restoring[request.key].withdrawn.set()

    def close(self) -> None:
        """Withdraw everything and end the handoff thread."""
        for restoring in self._restoring.values():
            restoring.withdrawn.set()
        self._for_lane.clear()
        self._prefills.clear()
        if self._lane is not None:
            self._lane.close()

    # -- restores

    def _begin_restore(self, request: Request, action: Restore, phase: str) -> None:
        keeper = self._sequences.keeper
        if keeper is None:
            raise LocalProtocolError("nothing is kept here", reason="cut_unknown")
        request.enter(Stage.RESTORE, time.perf_counter(), phase)
        shadow = Shadow(self._loaded.layout, 0, action.position)
        restoring = _Restoring(request, action, shadow)
        self._restoring[request.key] = restoring
        outcome = keeper.restore(action, shadow.place_piece, restoring.withdrawn.is_set)
        outcome.add_done_callback(lambda done: self._answers.restored(request.key, done))

    def take_restored(self, key: int, outcome: Future[Restored | None], *, wanted: bool) -> None:
        """A restore has ended: go on from it, or go one rung down.

        Raises ``EngineFault`` where mlx fails: that says nothing about the cut, which is kept.
        """
        restoring = self._restoring.pop(key)
        raised = outcome.exception()
        restored = outcome.result() if raised is None else None
        if not wanted:
            if restored is not None and restored.pinned is not None:
                restored.pinned.release()
            return
        if raised is not None and not isinstance(raised, (IntegrityError, Cancelled)):
            raise raised
        if restored is None:
            reason = raised.reason if isinstance(raised, BatonError) else "cut_gone"
            self._go_down(restoring, reason)
            return
        request, position = restoring.request, restoring.action.position
        placed = time.perf_counter()
        caches = build(self._loaded.model, self._loaded.layout, restoring.shadow)
        canonical(caches)
        now = time.perf_counter()
        reuse = request.reuse
        reuse.restore_s, reuse.swap_s = now - request.stage_began, now - placed
        for name, seconds in (
            ("read", restored.read_s),
            ("verify", restored.verify_s),
            ("place", restored.place_s),
            ("swap", reuse.swap_s),
        ):
            request.add_phase(name, seconds * 1e3)
        request.stage_began = now
        request.source = restoring.action.tier
        self._sequences.restored(request, restored, restoring.action)
        if restoring.action.tier == "durable":
            # Views of the shadow's memory, copied elsewhere while this goes on.
            self._sequences.keep(request, Due(caches, position, "turn", publish=False))
        self._begin_prefill(request, "compute", caches)

    def _go_down(self, restoring: _Restoring, reason: str) -> None:
        """The rung failed: plan again without it, with its reason on record."""
        request, action = restoring.request, restoring.action
        log.warning(
            "request %s: a cut of the %s tier could not be restored (%s)",
            request.generation.request_id,
            action.tier,
            reason,
        )
        request.reuse.failures.append(reason)
        request.add_phase("failed_restore", (time.perf_counter() - request.stage_began) * 1e3)
        request.stage_began = time.perf_counter()
        request.reuse.looked = _without(request.reuse.looked, action.tier, action.key)
        self._go_on(request)

    # -- local

    def compute_tile(self) -> None:
        """Compute one tile of one prompt."""
        remaining = [entry.prefill.remaining for entry in self._prefills]
        entry = self._prefills[next_prefill(remaining, self._turn)]
        request, prefill = entry.request, entry.prefill
        self._turn += 1
        began, first = time.perf_counter(), prefill.position
        stop = prefill.advance()
        now = time.perf_counter()
        request.reuse.prefill_s += now - began
        self._local = self._local.with_sample(prefill.position - first, now - began, now)
        done = prefill.remaining == 0
        if done or now - request.reported_at >= PROGRESS_INTERVAL_S:
            request.reported_at = now
            self._progress(request.key, Progress(prefill.position, request.end, "local"))
        if stop is not None:
            self._sequences.prefilled(request, stop.end)
        if done:
            self._prefills.remove(entry)
            request.enter(Stage.PREFILL, now, "compute")
            self._ready(request, prefill.caches)
        elif stop is not None:
            self._sequences.keep(request, Due(prefill.caches, stop.end, stop.role))

    def _begin_prefill(self, request: Request, phase: str, caches: list[Any] | None = None) -> None:
        """Compute what is missing beyond ``request.reuse.start``, where ``caches`` are."""
        now = time.perf_counter()
        request.enter(Stage.PREFILL, now, phase)
        request.reported_at = now
        generation, start = request.generation, request.reuse.start
        if start == request.end:
            known = make_prompt_cache(self._loaded.model) if caches is None else caches
            self._ready(request, known)
            return
        prefill = LocalPrefill(
            self._loaded.model,
            generation.tokens,
            self._step,
            segments(request.end, generation.turns),
            caches=caches,
            position=start,
        )
        self._prefills.append(_Computing(request, prefill))

    def _ready(self, request: Request, caches: list[Any]) -> None:
        """Hand on caches at N-1, which are kept once the first token is out."""
        restored_here = request.reuse.start == request.end and request.source != "remote"
        if not restored_here:
            request.reuse.due.append(Due(caches, request.end, "turn"))
        self._installed(request, caches)
        self._sequences.count(request.served(self._loaded.layout))

    # -- remote

    def _remote(self, now: float) -> facts.Remote | None:
        if self._link is None:
            return None
        backlog = sum(request.end for request in self._for_lane)
        if self._fetching is not None:
            backlog += self._fetching.request.end
        state = self._link.state
        return facts.Remote(
            ready=state.ready,
            reason=state.reason or f"producer_{state.name}",
            backlog_tokens=backlog,
            fixed_threshold=self._fixed_threshold,
            probe=self._probing.due(now),
            speeds=self.speeds,
        )

    def _probed(self, plan: Plan, end: int, now: float) -> Probing:
        why = set(plan.reasons)
        if "producer_probe" in why:
            return self._probing.probed(now)
        if "above_threshold" in why:
            return Probing()
        if why & {"rates_favour_local", "below_threshold"} and end >= FIRST_GUESS:
            return self._probing.refused(now)
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
        request.reuse.history = tuple(handoff.manifest.history)
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


def _without(looked: Looked, tier: FetchedTier, key: object) -> Looked:
    """What is held, without a cut that failed this request."""
    held = looked.resident if tier == "resident" else looked.durable
    return looked if held is None else replace(looked, **{tier: facts.without(held, key)})


def _bare(error: BaseException, name: str) -> BatonError:
    """``error`` without the frames that it came through, which hold shadows and prompts.

    A bug in the link is logged here, with its place, and becomes a ``TransferError``.
    """
    if not isinstance(error, BatonError):
        log.error("handoff of %s broke: %s", name, traced(error))
        return TransferError("the handoff broke; the log has the place", reason="handoff_broke")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
