"""Bringing a request's cache to N-1: from a tier, from the producer, or computed here.

MLX thread only, but for the callbacks that other threads call. A request enters by
:meth:`Filling.start` and leaves by ``ready`` with its caches, by ``failed``, or by
:meth:`withdraw`. What the tiers hold is looked up first, then ``reuse/ladder`` plans. A rung
that fails, for whatever reason, is logged, counted and kept for the report, and the next one
down is tried; a handoff that fails a request of lane ``remote`` ends it with the link's error.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from mlx_lm.models.cache import make_prompt_cache

from mac_decoder.engine.admission import next_prefill
from mac_decoder.engine.cuts import segments
from mac_decoder.engine.events import Fallback, Progress
from mac_decoder.engine.handoffs import PROGRESS_INTERVAL_S, Emit
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.producers import Fetched, Producers
from mac_decoder.engine.rates import Average
from mac_decoder.engine.request import Cut, Request, Stage
from mac_decoder.engine.restores import Ended, Restores
from mac_decoder.engine.sequences import Sequences
from mac_decoder.handoff.link import Link
from mac_decoder.keeper import Looked
from mac_decoder.reporting import traced
from mac_decoder.reuse import facts
from mac_decoder.reuse.facts import (
    ContinueLive,
    DeltaHandoff,
    Facts,
    FullHandoff,
    Restore,
)
from protocol.errors import BatonError

log = logging.getLogger(__name__)

_CHOSEN: Final = frozenset({"above_threshold", "producer_probe"})
"""Why a producer was asked that then failed."""


@dataclass(frozen=True)
class _Computing:
    """A prompt that is being computed here."""

    request: Request
    prefill: LocalPrefill


@dataclass(frozen=True)
class Answers:
    """What other threads call with an outcome, which then comes back to this one."""

    looked: Callable[[int, Future[Looked]], None]
    restored: Ended
    fetched: Fetched
    progress: Emit


class Filling:
    """All requests whose cache is not at N-1 yet."""

    def __init__(
        self,
        loaded: LoadedModel,
        step: int,
        fixed_threshold: int | None,
        links: Sequence[Link],
        sequences: Sequences,
        answers: Answers,
        *,
        ready: Callable[[Request, list[Any]], None],
        failed: Callable[[Request, BatonError], None],
    ) -> None:
        """``answers`` are called in other threads, ``ready`` and ``failed`` here."""
        self._loaded = loaded
        self._step = step
        self._sequences = sequences
        self._looked = answers.looked
        self._progress = answers.progress
        self._installed = ready
        self._failed = failed
        self.restores = Restores(
            loaded,
            sequences,
            answers.restored,
            ready=lambda request, caches: self._begin_prefill(request, "compute", caches),
            failed=lambda request: self._go_on(request, "lookup"),
        )
        self.producers = Producers(
            loaded,
            fixed_threshold,
            links,
            sequences,
            answers.fetched,
            answers.progress,
            ready=self._ready,
            failed=self._do_without,
            lost=self._go_on,
        )
        self._looking: dict[int, Request] = {}
        self._prefills: list[_Computing] = []
        self._local = Average()
        self._turn = 0
        self.fallbacks: Counter[str] = Counter()

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
        held += [*self._looking.values(), *self.restores.held(), *self.producers.held()]
        return sum(request.nbytes for request in held)

    def status(self) -> dict[str, Any]:
        """Counts and rates in plain types."""
        return {
            "prefilling": len(self._prefills),
            "restoring": len(self.restores.held()),
            "fallbacks": dict(self.fallbacks),
            **self.producers.status(self._local.per_second),
        }

    # -- the way in and out

    def start(self, request: Request) -> None:
        """Ask the tiers what they hold of the prompt; what follows is planned then."""
        generation = request.generation
        keeper = self._sequences.keeper if generation.reuse and request.end else None
        if keeper is None:
            self._go_on(request, "queue")
            return
        request.enter(Stage.LOOKUP, time.perf_counter(), "queue")
        self._looking[request.key] = request
        looking = keeper.look(generation.tokens, generation.salt)
        looking.add_done_callback(lambda outcome: self._looked(request.key, outcome))

    def take_looked(self, key: int, outcome: Future[Looked]) -> None:
        """The tiers have said what they hold; a request that was withdrawn is not in here."""
        request = self._looking.pop(key, None)
        if request is None:
            return
        error = outcome.exception()
        if error is None:
            request.reuse.looked = outcome.result()
        else:
            # It costs a hit, and nobody an answer.
            log.error("what is held could not be looked up: %s", traced(error))
            request.reuse.failures.append("lookup_broke")
            request.reuse.tried.append("lookup_broke")
        self._go_on(request, "lookup")

    def _go_on(self, request: Request, phase: str) -> None:
        """Plan with what is known by now, and begin; the time since the last stage is ``phase``."""
        now, reuse = time.perf_counter(), request.reuse
        first = reuse.plan is None
        known, local = self._facts(request), self._local.per_second
        producer, plan = self.producers.plan(request, known, local, now)
        reuse.plan = plan
        if first:
            reuse.shared, reuse.parts_at = plan.shared, plan.parts_at
        request.reasons = [*dict.fromkeys(reuse.tried), *plan.reasons]
        self._sequences.planned(request)
        if plan.refused:
            self._failed(request, self.producers.unavailable(producer, plan.reasons[-1]))
            return
        if plan.fallback and not request.fallback:
            self.fallbacks.update(plan.reasons[-1:])
            self._progress(request.key, Fallback(plan.reasons[-1]))
        request.fallback = plan.fallback
        match plan.action:
            case ContinueLive(key=key, position=position):
                caches = self._sequences.continued(request, key, position)
                self._begin_prefill(request, phase, caches)
            case Restore() as action:
                self.restores.start(request, action, phase)
            case facts.Local():
                self._begin_prefill(request, phase)
            case FullHandoff():
                assert producer is not None
                producer.start(request, phase)
            case DeltaHandoff() as delta:
                assert producer is not None
                producer.start(request, phase, delta)

    def _facts(self, request: Request) -> Facts:
        looked = request.reuse.looked
        return Facts(
            tokens=len(request.generation.tokens),
            layout=self._loaded.layout,
            lane=request.generation.lane,
            live=self._sequences.live.offers(looked.space, looked.tokens) if looked.space else (),
            resident=looked.resident,
            durable=looked.durable,
            reuse=bool(looked.space),
        )

    def withdraw(self, request: Request) -> None:
        """Let go of a request that is in here; what is under way for it is told to stop."""
        self._prefills = [entry for entry in self._prefills if entry.request is not request]
        self._looking.pop(request.key, None)
        self.producers.withdraw(request)
        self.restores.withdraw(request)

    def close(self) -> None:
        """Withdraw everything and end the handoff thread."""
        self._prefills.clear()
        self.restores.close()
        self.producers.close()

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
            cut = Cut(prefill.caches, stop.end, stop.role)
            self._sequences.keep(request, cut, finite=True)

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
        """Hand on caches at N-1, which are kept once the first token is out.

        Taken before they are. Who decodes alone goes on in the same memory: mlx does not write
        to arrays that somebody else looks at, and copies them first.
        """
        if request.wanted is not None:
            self._installed(request, caches)
            return
        held_there = request.reuse.start == request.end and request.source != "remote"
        if not held_there and request.end:
            self._sequences.keep_later(request, Cut(caches, request.end, "turn"))
        self._installed(request, caches)
        self._sequences.count(request.served(self._loaded.layout))

    def _do_without(self, request: Request, error: BatonError, phase: str) -> None:
        """Go on without the producer, or fail where the request insists on it."""
        name, reason = request.generation.request_id, error.reason
        if self.producers.another(request):
            log.warning("request %s: handoff failed (%s), asking another producer", name, reason)
            request.reuse.away = reason
            request.reuse.tried.append(reason)
            self._go_on(request, phase)
            return
        if request.generation.lane == "remote":
            log.warning("request %s: handoff failed (%s), and so does it", name, reason)
            self._failed(request, error)
            return
        log.warning("request %s: handoff failed (%s), going on without", name, reason)
        planned = request.reuse.plan.reasons if request.reuse.plan else ()
        request.reuse.tried += [why for why in planned if why in _CHOSEN]
        request.reuse.away = reason
        self._go_on(request, phase)
