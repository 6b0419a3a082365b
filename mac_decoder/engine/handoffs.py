"""One producer's handoffs: which prompts wait for it, which one is under way, and its end.

MLX thread only, but for the callbacks that the handoff thread calls. A request enters by
:meth:`Handoffs.start` and leaves by ``ready`` with caches at N-1, or by ``failed`` with the
error that refused it, whoever then does the work.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

from mac_decoder.engine.composing import Composing
from mac_decoder.engine.events import Fallback, Progress
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.rates import FIRST_GUESS, Average, Probing, Speeds, all_measured, threshold
from mac_decoder.engine.remote import Arrived, Fetch, RemoteLane
from mac_decoder.engine.request import Cut, Request, Stage
from mac_decoder.engine.sequences import Sequences
from mac_decoder.handoff.link import Handoff, Link
from mac_decoder.keeper import Restored
from mac_decoder.kv.install import build_all, canonical
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reporting import traced
from mac_decoder.reuse import facts
from mac_decoder.reuse.cut import extended, supplies_delta
from mac_decoder.reuse.facts import DeltaHandoff, Plan
from mac_decoder.reuse.remote import RemotePrefixes
from protocol.errors import (
    BatonError,
    EngineFault,
    LocalProtocolError,
    TransferError,
)
from protocol.layout import extra_cuts, payload_bytes
from protocol.messages import space_of

log = logging.getLogger(__name__)

PROGRESS_INTERVAL_S = 0.1
"""Shortest time between two Progress events of one request."""

SILENCE: Final = frozenset({"peer_silent", "connect_timeout", "producer_unreachable"})
"""Failures that the next handoff would wait for just as long."""

Emit = Callable[[int, Progress | Fallback], None]
Fetched = Callable[[int, Future[Arrived]], None]


@dataclass(frozen=True)
class _Fetching:
    """The handoff that is under way."""

    request: Request
    fetch: Fetch
    shadow: Shadow


class Handoffs:
    """The queue before the remote lane, and what its past says about the next."""

    def __init__(
        self,
        loaded: LoadedModel,
        fixed_threshold: int | None,
        link: Link,
        sequences: Sequences,
        fetched: Fetched,
        progress: Emit,
        *,
        ready: Callable[[Request, list[Any]], None],
        failed: Callable[[Request, BatonError, str], None],
        lost: Callable[[Request, str], None],
    ) -> None:
        """``fetched`` and ``progress`` are called in the handoff thread, the others here.

        ``failed`` and ``lost`` are told under which phase the time since the request's stage
        began counts; ``lost`` gets a request whose delta lacks its lower part.
        """
        self._loaded = loaded
        self._fixed_threshold = fixed_threshold
        self._link = link
        self._lane = RemoteLane(link, self._remote_progress, fetched)
        self._progress = progress
        self._ready = ready
        self._failed = failed
        self._lost = lost
        self._sequences = sequences
        self._waiting: deque[Request] = deque()
        self._fetching: _Fetching | None = None
        self._prefixes = RemotePrefixes()
        self._overhead = Average()
        self._probing = Probing()
        # Of a prompt long enough that window rows and states hardly count.
        self._bytes_per_token = payload_bytes(loaded.layout, 0, 1 << 14) / (1 << 14)
        self._done = 0

    # -- what is known of the producer

    def held(self) -> list[Request]:
        """The requests in here, one that was withdrawn in mid-handoff included."""
        fetching = [] if self._fetching is None else [self._fetching.request]
        return [*self._waiting, *fetching]

    def speeds(self, local: float) -> Speeds:
        """The measured rates of both lanes; ``local`` is this machine's, in tokens per second."""
        measured, overhead = self._link.rates, self._overhead
        return Speeds(
            local=local,
            producer=measured.compute_tokens_per_s,
            link=measured.wire_bytes_per_s,
            overhead_s=overhead.seconds / overhead.amount if overhead.amount else 0.0,
        )

    def facts(self, request: Request, local: float, now: float) -> facts.Remote:
        """The producer, for the ladder's plan of ``request``."""
        state, tile = self._link.state, self._link.tile
        if not state.ready:
            self._prefixes.forget()
        prompt = request.reuse.looked.tokens[: request.end]
        return facts.Remote(
            tile=tile or 1,
            holds=self._prefixes.holds(request.reuse.looked.space, prompt, tile or 1),
            deltas=tile > 0 and self._sequences.keeper is not None,
            ready=state.ready,
            reason=state.reason or f"producer_{state.name}",
            backlog_tokens=sum(request.end for request in self.held()),
            fixed_threshold=self._fixed_threshold,
            probe=self._probing.due(now),
            speeds=self.speeds(local),
        )

    def planned(self, plan: Plan, end: int, now: float) -> None:
        """Note what the rates decided: a producer that they refuse is doubted later on."""
        why = set(plan.reasons)
        if "producer_probe" in why:
            self._probing = self._probing.probed(now)
        elif "above_threshold" in why:
            self._probing = Probing()
        elif why & {"rates_favour_local", "below_threshold"} and end >= FIRST_GUESS:
            self._probing = self._probing.refused(now)

    @property
    def name(self) -> str:
        """What people know the producer by."""
        return self._link.name

    @property
    def ready(self) -> bool:
        """Whether the producer could be asked now."""
        return self._link.state.ready

    @property
    def off(self) -> bool:
        """Whether its link was closed, which nothing opens again."""
        return self._link.state.name == "off"

    def error(self) -> BatonError | None:
        """Why it could not; ``None`` when it can."""
        return self._link.error()

    def status(self, local: float) -> dict[str, Any]:
        """Counts and rates in plain types."""
        speeds = self.speeds(local)
        return {
            "name": self.name,
            "waiting_for_producer": len(self._waiting),
            "fetching": self._fetching is not None,
            "handoffs": self._done,
            "rates": rates_of(speeds),
            "remote_threshold": self._fixed_threshold or threshold(self._bytes_per_token, speeds),
            "threshold_by": self._threshold_by(speeds),
        }

    def _threshold_by(self, speeds: Speeds) -> str:
        if self._fixed_threshold:
            return "set"
        return "rates" if all_measured(speeds) else "first_guess"

    # -- the way through

    def start(self, request: Request, phase: str, delta: DeltaHandoff | None = None) -> None:
        """Queue a request for the producer; the time since its last stage counts as ``phase``."""
        request.enter(Stage.REMOTE, time.perf_counter(), phase)
        keeper = self._sequences.keeper
        if delta is not None and keeper is not None:
            request.reuse.arm(delta, keeper.arm(delta))
        self._waiting.append(request)
        self._next()

    def withdraw(self, request: Request) -> None:
        """Let go of a request; a handoff under way is told to stop."""
        if request in self._waiting:
            self._waiting.remove(request)
            request.reuse.disarm()
        if self._fetching is not None and self._fetching.request is request:
            self._fetching.fetch.withdrawn.set()

    def close(self) -> None:
        """Withdraw everything and end the handoff thread."""
        for request in self._waiting:
            request.reuse.disarm()
        self._waiting.clear()
        self._lane.close()

    def _next(self) -> None:
        if self._fetching is not None or not self._waiting:
            return
        request = self._waiting.popleft()
        request.enter(Stage.REMOTE, time.perf_counter(), "queue")
        delta, keeper = request.reuse.delta, self._sequences.keeper
        generation = request.generation
        start = delta.position if delta else 0
        extra = self._extra_cuts(request, start, delta)
        shadow = Shadow(self._loaded.layout, start, request.end, extra)
        space = space_of(request.reuse.looked.space)
        fetch = Fetch(request.key, generation.request_id, generation.tokens, space)
        self._fetching = _Fetching(request, fetch, shadow)
        if delta is None or keeper is None:
            self._lane.start(fetch, shadow)
        else:
            self._lane.start(fetch, Composing(keeper, delta, shadow, fetch.withdrawn))

    def take(self, outcome: Future[Arrived], *, wanted: bool) -> None:
        """The handoff under way has ended: install it, or do without it.

        ``wanted`` is false when its request was cancelled in the meantime.
        """
        if self._fetching is None:
            raise LocalProtocolError("no handoff is under way", reason="handoff_unknown")
        fetching, self._fetching = self._fetching, None
        request, delta = fetching.request, fetching.request.reuse.delta
        error: BatonError | None = None
        lost = ""
        if (raised := outcome.exception()) is not None:
            error = _bare(raised, request.generation.request_id)
            del raised  # and the frames that it came through, which hold the shadow
        elif (arrived := outcome.result()).handoff is not None:
            error = self._install(fetching, arrived.handoff, arrived.restored, wanted=wanted)
        else:
            lost = arrived.lost
        # The next handoff, or the prefill here, is to find this one's memory free.
        del fetching
        request.reuse.disarm()
        if lost and wanted and delta is not None:
            log.warning(
                "request %s: the held part of a delta is gone (%s)",
                request.generation.request_id,
                lost,
            )
            request.reuse.lost(delta.source, delta.key, lost)
            self._lost(request, "failed_handoff")
        if error is not None and wanted:
            self._failed(request, error, "failed_handoff")
        if error is not None:
            self._decide_again(error)
        self._next()

    def _install(
        self, fetching: _Fetching, handoff: Handoff, restored: Restored | None, *, wanted: bool
    ) -> BatonError | None:
        """Build the caches and hand them on; returns what refused them, if anything did.

        ``restored`` is the lower part of a delta, ``None`` where the producer sent everything.

        Raises ``EngineFault`` where mlx fails: that is nobody's fault but this machine's.
        """
        request, fetch = fetching.request, fetching.fetch
        done = False
        try:
            if not wanted:
                handoff.discarded("cancelled")
                return None
            if self._link.state.name == "unfit":  # which became known meanwhile
                handoff.discarded("producer_unfit")
                return self._link.error()
            built = build_all(self._loaded.model, self._loaded.layout, fetching.shadow)
            caches = built.pop(request.end)
            canonical(caches)
            done = True
        except EngineFault as error:
            handoff.discarded(error.reason)
            raise
        except BatonError as error:
            handoff.discarded(error.reason)
            return _bare(error, request.generation.request_id)
        finally:
            if not done and restored is not None and restored.pinned is not None:
                restored.pinned.release()
        phases = dict(handoff.phases_ms)
        now = time.perf_counter()
        # What is held may take longer to place than the rest to come.
        composed_ms = (fetch.ended_at - fetch.sealed_at) * 1e3
        if restored is not None:
            phases["compose"] = composed_ms
        # Waiting for others' turns is no property of a handoff. Rows travel while the next are
        # computed: the longer of the two scales with length.
        scaled_ms = max(phases.get("compute", 0.0), phases.get("wire", 0.0))
        waited_ms = phases.get("queue", 0.0) + composed_ms
        fixed_ms = (now - request.stage_began) * 1e3 - waited_ms - scaled_ms
        self._overhead = self._overhead.with_sample(1.0, max(fixed_ms, 1e-3) / 1e3, now)
        request.add_handoff(phases, handoff.transferred_bytes, fetch.ended_at)
        self._note_provenance(request, handoff, restored)
        request.computed_tokens = handoff.manifest.computed_tokens
        prompt = request.reuse.looked.tokens[: request.end]
        space, tile = request.reuse.looked.space, handoff.manifest.tile
        self._prefixes.handed_off(space, prompt, request.computed_tokens, tile)
        self._done += 1
        handoff.committed()
        for position, others in built.items():
            # Its states and its windows' oldest rows have no part in the first token.
            self._sequences.keep_later(request, Cut(others, position, "turn"), finite=True)
        self._ready(request, caches)
        return None

    def _extra_cuts(
        self, request: Request, start: int, delta: DeltaHandoff | None
    ) -> tuple[int, ...]:
        """Where a cut is asked for too: where the next turn is expected to part from this one."""
        position, layout = request.generation.next_turn, self._loaded.layout
        if not (self._link.extra_cuts and self._link.tile and request.reuse.looked.space):
            return ()
        found = extra_cuts(layout, start, request.end, self._link.tile, [position])
        if found and delta is not None and not supplies_delta(layout, delta.held, start, found[0]):
            return ()
        return found

    def _note_provenance(
        self, request: Request, handoff: Handoff, restored: Restored | None
    ) -> None:
        """How the rows were made, and what of them is kept already."""
        reuse = request.reuse
        reuse.history = ()
        if handoff.resumed:
            request.reasons.append("handoff_resumed")
        if reuse.delta is not None and restored is not None:
            self._sequences.restored(request, restored, reuse.delta.position)
            reuse.restore_s = restored.read_s + restored.verify_s + restored.place_s
        elif reuse.delta is not None:
            request.reasons.append("full_for_delta")
        for span in handoff.manifest.history:
            reuse.history = extended(reuse.history, span)

    def _decide_again(self, error: BatonError) -> None:
        """Keep nothing waiting for a producer that, after ``error``, is known to be away."""
        away = self._link.state.name in ("down", "refused", "off")
        if not away and error.reason not in SILENCE:
            return
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            request.reuse.disarm()
            known = self._link.error() if away else None
            self._failed(request, known or copy.copy(error), "queue")

    def _remote_progress(self, fetch: Fetch, processed: int, total: int) -> None:
        """In the handoff thread, which alone touches ``fetch.reported_at``."""
        now = time.perf_counter()
        if processed >= total or now - fetch.reported_at >= PROGRESS_INTERVAL_S:
            fetch.reported_at = now
            self._progress(fetch.key, Progress(processed, total, "remote"))


def rates_of(speeds: Speeds) -> dict[str, float]:
    """Measured rates in plain types."""
    return {
        "local_tokens_per_s": round(speeds.local, 1),
        "producer_tokens_per_s": round(speeds.producer, 1),
        "link_bytes_per_s": round(speeds.link),
        "handoff_overhead_ms": round(speeds.overhead_s * 1e3, 3),
    }


def _bare(error: BaseException, name: str) -> BatonError:
    """``error`` without the frames that it came through, which hold shadows and prompts.

    A bug in the link is logged here, with its place, and becomes a ``TransferError``.
    """
    if not isinstance(error, BatonError):
        log.error("handoff of %s broke: %s", name, traced(error))
        return TransferError("the handoff broke; the log has the place", reason="handoff_broke")
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
