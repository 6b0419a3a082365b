"""The MLX thread: the only one that computes, and the owner of every cache.

One turn of its loop takes the commands that have come, admits what fits, makes one step of
every decode group, and computes at most one tile of one prompt. Nothing blocks it but MLX
itself, and an empty inbox when there is nothing to do. Events leave it in batches, one per
step, through ``deliver``.

What a single request can break ends that request. Whatever else comes out of here ends the
thread, and with it the process: see ``facade``.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from mac_decoder.engine.admission import cache_bytes
from mac_decoder.engine.events import (
    Event,
    Failed,
    Finished,
    Generation,
    GenerationFault,
    Report,
    Sampling,
    Token,
)
from mac_decoder.engine.fill import Answers, Filling
from mac_decoder.engine.groups import Groups
from mac_decoder.engine.member import Left, Member, Step
from mac_decoder.engine.memory import cache_budget, default_step, resident_budget
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.remote import Arrived
from mac_decoder.engine.request import Request, Reuse, Stage
from mac_decoder.engine.sampling import Draw
from mac_decoder.engine.sequences import Sequences
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.link import Link
from mac_decoder.keeper import Keeper, Looked, Restored, nothing
from mac_decoder.kv.install import Rows, views
from protocol.errors import BatonError, CapacityError
from protocol.layout import Layout

WARM_UP = 17
"""Length of the prompt that is generated from before the engine calls itself ready."""


@dataclass(frozen=True, slots=True)
class Submit:
    """A new request, ``submitted`` at a reading of ``time.perf_counter``.

    ``rows``: it ends with its cache at N-1, whose rows and states are all that is wanted of it.
    """

    key: int
    generation: Generation
    submitted: float
    rows: Future[Rows] | None = None


@dataclass(frozen=True, slots=True)
class Cancel:
    """The client of ``key`` has left, or its answer ended at a word that was to stop it."""

    key: int
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Fetched:
    """The handoff of ``key`` has ended, one way or the other."""

    producer: int
    key: int
    outcome: Future[Arrived]


@dataclass(frozen=True, slots=True)
class LookedUp:
    """The tiers have said what they hold of the prompt of ``key``."""

    key: int
    outcome: Future[Looked]


@dataclass(frozen=True, slots=True)
class RestoreEnded:
    """The restore for ``key`` has ended, one way or the other."""

    key: int
    outcome: Future[Restored | None]


@dataclass(frozen=True, slots=True)
class AddProducer:
    """One more producer may be asked from here on."""

    link: Link


@dataclass(frozen=True, slots=True)
class Stop:
    """Drop everything and end the thread."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Resolve ``answer`` once everything before it is done, with what ``question`` says.

    It must take no time: everybody's next token waits for it.
    """

    answer: Future[Any]
    question: Callable[[Sequences], object] = lambda sequences: None


Command = Submit | Cancel | LookedUp | RestoreEnded | Fetched | AddProducer | Ask | Stop
Deliver = Callable[[list[tuple[int, Event | Report]]], None]
"""Events in order; a request's report goes before its first token, and is no event."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against before it is queued; known once the model is loaded."""

    layout: Layout
    vocabulary: int
    cache_bytes: int
    prefill_step: int


class Worker:
    """The loop and its state. Other threads call :meth:`post`, and read ``snapshot`` and
    ``stages``.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        settings: EngineSettings,
        links: Sequence[Link],
        keeper: Keeper | None,
        deliver: Deliver,
        started: Callable[[LoadedModel, Limits], None],
    ) -> None:
        """``load`` and ``started`` run on the MLX thread, ``deliver`` on that and others."""
        self._load = load
        self._settings = settings
        self._links = links
        self._keeper = keeper
        self._deliver = deliver
        self._started = started
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._requests: dict[int, Request] = {}
        self._waiting: deque[Request] = deque()
        self._events: list[tuple[int, Event | Report]] = []
        self._ended: Counter[str] = Counter()
        self._generated = 0
        self._owed_s = 0.0
        self._stopping = False
        self.snapshot: dict[str, Any] = {}
        self.stages: Mapping[int, str] = {}

    def post(self, command: Command) -> None:
        """Hand a command to the MLX thread; returns at once."""
        self._inbox.put(command)

    def idle(self, timeout_s: float | None = None) -> None:
        """Wait until what was done behind the answers so far is done."""
        answer: Future[None] = Future()
        self.post(Ask(answer))
        answer.result(timeout_s)

    def run(self) -> None:
        """Load, warm up, and serve until :class:`Stop`; the body of the MLX thread."""
        wired = maybe_set_recommended_wired_limit()
        self._open(self._load())
        self._publish()
        self._started(self._loaded, self.limits)
        while not self._stopping:
            self._admit()
            self._take_commands()
            self._decode()
            self._prefill()
        self._filling.close()
        self._groups.close()
        self._sequences.close()
        if wired is not None:
            mx.synchronize()
            mx.set_wired_limit(wired)

    # -- start

    def _open(self, loaded: LoadedModel) -> None:
        settings = self._settings
        self._loaded = loaded
        self.limits = Limits(
            layout=loaded.layout,
            vocabulary=loaded.vocabulary,
            cache_bytes=cache_budget(settings.cache_bytes),
            prefill_step=settings.prefill_step or default_step(),
        )
        stream = mx.default_stream(mx.default_device())
        self._groups = Groups(loaded.model, loaded.layout, settings.padding, stream)
        if self._keeper is not None:
            self._keeper.resize(resident_budget(settings.ram_bytes))
        self._sequences = Sequences(
            loaded.layout,
            loaded.checkpoint.dtype,
            self.limits.prefill_step,
            self._keeper,
            room=lambda: self.limits.cache_bytes - self._reserved,
            active_parameters=loaded.active_parameters,
        )
        self._filling = Filling(
            loaded,
            self.limits.prefill_step,
            settings.remote_threshold,
            self._links,
            self._sequences,
            Answers(
                looked=lambda key, outcome: self.post(LookedUp(key, outcome)),
                restored=lambda key, outcome: self.post(RestoreEnded(key, outcome)),
                fetched=lambda producer, key, outcome: self.post(Fetched(producer, key, outcome)),
                progress=lambda key, progress: self._deliver([(key, progress)]),
            ),
            ready=self._begin_decode,
            failed=self._fail,
        )
        self._warm_up()

    def _warm_up(self) -> None:
        """Generate two tokens, so that being ready means that a token can be generated."""
        generation = Generation("warm-up", (0,) * WARM_UP, 2, Sampling(temperature=0.0))
        prefill = LocalPrefill(self._loaded.model, generation.tokens, self.limits.prefill_step)
        while prefill.remaining:
            prefill.advance()
        draw = Draw(generation.sampling, None, self.limits.vocabulary)
        self._groups.insert(
            Member(0, generation, draw, prefill.end, WARM_UP + 2), prefill.caches, 0
        )
        while len(self._groups):
            for step in self._groups.step():
                if not step.drawn.finite:
                    raise GenerationFault("the warm-up gave no finite logits")
        mx.clear_cache()

    # -- commands

    def _take_commands(self) -> None:
        """Take what has come; where there is nothing to compute, wait for it.

        Whoever calls this has admitted what could be: a request that still waits does so for
        a place or for bytes that a handoff holds, and the end of that handoff is a command.
        """
        self._flush()
        if not (len(self._groups) or self._filling.has_tile):
            self._apply(self._inbox.get())
        while not self._inbox.empty():
            self._apply(self._inbox.get())
        self._admit()

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(key, generation, submitted, rows):
                looked = nothing(generation.tokens)
                request = Request(key, generation, submitted, Reuse(looked), wanted=rows)
                self._requests[key] = request
                self._waiting.append(request)
            case Cancel(key, stopped):
                self._cancel(key, "stop" if stopped else "cancelled")
            case LookedUp(key, outcome):
                self._filling.take_looked(key, outcome)
                if (missing := self._missing()) > 0:
                    # What was set aside for it is not gone on with after all.
                    self._sequences.make_room(missing)
            case RestoreEnded(key, outcome):
                self._filling.restores.take(key, outcome, wanted=key in self._requests)
            case Fetched(producer, key, outcome):
                self._filling.producers.take(producer, outcome, wanted=key in self._requests)
            case AddProducer(link):
                self._filling.producers.add(link)
            case Ask(answer, question):
                found = question(self._sequences)
                self._give_back()
                with contextlib.suppress(InvalidStateError):  # whoever asked has just left
                    answer.set_result(found)
            case Stop():
                self._stopping = True
        self._publish()

    def _cancel(self, key: int, why: str) -> None:
        request = self._requests.pop(key, None)
        if request is None:
            return
        self._count_end(request, why)
        match request.stage:
            case Stage.WAITING:
                self._waiting.remove(request)
            case Stage.LOOKUP | Stage.RESTORE | Stage.REMOTE | Stage.PREFILL:
                self._filling.withdraw(request)
                self._sequences.dropped(request)
            case Stage.DECODE:
                # What was generated is a turn like any other: a stop word ends it here too.
                self._leave(request, self._groups.remove(key))
        self._give_back()

    def _leave(self, request: Request, left: Left | None) -> None:
        """Keep what a sequence that decoded leaves, if it leaves anything."""
        if left is None:
            self._sequences.dropped(request)
            return
        # Its first token may have been drawn and not handed on: a good one all the same.
        self._sequences.first_token_out(request)
        self._sequences.ended(request, left)

    def _give_back(self) -> None:
        """Let the system have what MLX keeps for reuse, once nobody is left to reuse it."""
        if not self._requests:
            mx.clear_cache()

    # -- admission

    @property
    def _reserved(self) -> int:
        return self._groups.reserved + self._filling.reserved

    def _admit(self) -> None:
        """Start waiting requests, in order, while slots and bytes last."""
        while (
            self._waiting and len(self._requests) - len(self._waiting) < self._settings.max_active
        ):
            request = self._waiting[0]
            rows = reserved_rows(request.generation, self._settings.growth_rows)
            nbytes = cache_bytes(self.limits.layout, rows, self.limits.prefill_step)
            if self._reserved + nbytes > self.limits.cache_bytes and self._reserved > 0:
                return
            self._waiting.popleft()
            self._sequences.promise(request)
            missing = self._missing(nbytes)
            if missing > 0:
                self._sequences.make_room(missing, request)
                mx.clear_cache()
            request.rows, request.nbytes = rows, nbytes
            self._filling.start(request)
            self._publish()

    def _missing(self, nbytes: int = 0) -> int:
        """Bytes that the live tier would have to give up for ``nbytes`` more."""
        held = self._reserved + self._sequences.evictable
        return held + nbytes - self.limits.cache_bytes

    # -- decode

    def _begin_decode(self, request: Request, caches: list[Any]) -> None:
        """Put a cache at N-1 into a group; its boundary step is launched at once."""
        generation = request.generation
        if request.wanted is not None:
            found = views(caches, self.limits.layout, request.end) if request.end else {}
            self._drop(request, "rows")
            with contextlib.suppress(InvalidStateError):  # whoever asked has just left
                request.wanted.set_result(found)
            return
        draw = Draw(generation.sampling, generation.top_logprobs, self.limits.vocabulary)
        member = Member(request.key, generation, draw, request.end, request.rows)
        request.member = member
        alone = cache_bytes(self.limits.layout, request.rows)
        self._groups.insert(member, caches, self.limits.cache_bytes - self._reserved - alone)
        # Padding may have taken what finished sequences had.
        if (missing := self._missing()) > 0:
            self._sequences.make_room(missing, request)
        request.enter(Stage.DECODE, time.perf_counter(), "install")

    def _decode(self) -> None:
        if not len(self._groups):
            self._owed_s = 0.0
            return
        began = time.perf_counter()
        steps = self._groups.step()
        now = time.perf_counter()
        self._owed_s -= now - began
        left = [(self._requests[step.key], self._take_step(step, now)) for step in steps]
        self._flush()
        # Nobody waits for these: every token of the step is on its way.
        for request, step in left:
            self._sequences.first_token_out(request)
            if step.ended is not None:
                self._leave(request, step.left)
                self._give_back()

    def _take_step(self, step: Step, now: float) -> Step:
        request = self._requests[step.key]
        if request.first_token_at is None:
            request.saw_first_token(now)
            self._events.append((request.key, request.report()))
        if not step.drawn.finite:
            self._fail(request, GenerationFault("the model's logits are not finite"))
            # It has ended, and leaves nothing, whatever this step would have been.
            return replace(step, ended=None, left=None)
        if step.ended != "stop":
            self._generated += 1
            self._emit(request, Token(step.drawn.token, step.drawn.logprob, step.drawn.top))
        if step.ended is not None:
            self._end(
                request, Finished("stop" if step.ended == "stop" else "length", request.report())
            )
        else:
            self._grow(request)
        return step

    def _grow(self, request: Request) -> None:
        """Reserve more rows for a sequence that comes to the end of its own."""
        member = request.member
        if member is None or member.position + 2 < member.rows:
            return
        most = len(request.generation.tokens) + request.generation.max_tokens
        if member.rows >= most:
            return
        rows = min(member.rows + self._settings.growth_rows, most)
        added = self._groups.grow(request.key, rows)
        if (missing := self._missing()) > 0:
            self._sequences.make_room(missing, request)
        if added and self._reserved > self.limits.cache_bytes:
            error = CapacityError(
                "the answer outgrew the memory for caches", reason="cache_memory_exhausted"
            )
            self._fail(request, error)

    # -- prefill

    def _prefill(self) -> None:
        """One tile, unless a first token is due, or those who decode are owed time."""
        if not self._filling.has_tile or self._groups.fresh:
            return
        if self._owed_s > 0 and len(self._groups):
            return
        began = time.perf_counter()
        self._filling.compute_tile()
        share = self._settings.decode_share
        self._owed_s = (time.perf_counter() - began) * share / (1 - share)
        self._publish()

    def cache_status(self) -> dict[str, Any]:
        """Figures of the tiers. Any thread, once the worker has started."""
        return self._sequences.status()

    def counters(self) -> dict[str, int]:
        """Counters of reuse. Any thread, once the worker has started."""
        return self._sequences.counters()

    # -- endings and events

    def _emit(self, request: Request, event: Event) -> None:
        self._events.append((request.key, event))

    def _fail(self, request: Request, error: BatonError) -> None:
        self._groups.remove(request.key)
        self._sequences.dropped(request)
        if request.wanted is None:
            self._end(request, Failed(error))
            return
        self._drop(request, error.reason)
        with contextlib.suppress(InvalidStateError):
            request.wanted.set_exception(error)

    def _end(self, request: Request, event: Finished | Failed) -> None:
        self._emit(request, event)
        self._drop(request, event.error.reason if isinstance(event, Failed) else event.reason)

    def _drop(self, request: Request, why: str) -> None:
        del self._requests[request.key]
        self._count_end(request, why)
        self._publish()
        self._give_back()

    def _count_end(self, request: Request, why: str) -> None:
        if request.wanted is None:
            self._ended[why] += 1

    def _flush(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)

    def _publish(self) -> None:
        """Make a new snapshot for :meth:`facade.Engine.status`; the old one stays as it was."""
        # Rows that somebody compares are nobody's request.
        self.stages = {
            key: request.stage.value
            for key, request in self._requests.items()
            if request.wanted is None
        }
        stages = Counter(self.stages.values())
        self.snapshot = {
            "requests": {stage.value: stages.get(stage.value, 0) for stage in Stage},
            "qualifying": len(self._requests) - len(self.stages),
            "groups": self._groups.sizes,
            "cache_bytes_reserved": self._reserved,
            "cache_bytes_limit": self.limits.cache_bytes,
            "generated_tokens": self._generated,
            "ended": dict(self._ended),
            "prefill_step": self.limits.prefill_step,
            **self._filling.status(),
        }


def reserved_rows(generation: Generation, growth: int) -> int:
    """Rows to reserve when a request starts: its prompt, and the answer up to ``growth``."""
    return len(generation.tokens) + min(generation.max_tokens, growth)
