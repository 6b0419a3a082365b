"""The engine as the rest of the decoder sees it: asyncio in front, the MLX thread behind.

:meth:`Engine.submit` queues a request and returns a stream of events; everything else is
arithmetic. Nothing here calls MLX, and nothing blocks the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

from mac_decoder.engine.admission import cache_bytes
from mac_decoder.engine.events import (
    Event,
    Failed,
    Finished,
    Generation,
    Progress,
    Report,
    Token,
)
from mac_decoder.engine.live import LiveCut
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.power import PowerAssertion
from mac_decoder.engine.prompts import Prompts
from mac_decoder.engine.rates import Average
from mac_decoder.engine.sampling import check_vocabulary
from mac_decoder.engine.sequences import Sequences
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.engine.template import Rendered
from mac_decoder.engine.worker import (
    AddProducer,
    Ask,
    Cancel,
    Limits,
    Stop,
    Submit,
    Worker,
    reserved_rows,
)
from mac_decoder.handoff.link import Link, described
from mac_decoder.keeper import Forgotten, Keeper
from mac_decoder.kv.install import Rows
from mac_decoder.reporting import traced
from protocol.errors import BatonError, CapacityError, EngineFault, RequestError

log = logging.getLogger(__name__)

T = TypeVar("T")


class Stream:
    """The events of one request, in order. Belongs to the event loop's thread.

    An asynchronous iterator, and a context manager that cancels the request when it is left
    early. Iteration ends after ``Finished`` or ``Failed``, or when the request is cancelled.
    """

    def __init__(
        self, key: int, generation: Generation, leave: Callable[[Stream, bool], None]
    ) -> None:
        self.generation = generation
        self.report: Report | None = None
        """Where the prompt came from, from the first token on; also of a cancelled request."""
        self.progress: Progress | None = None
        """The latest that was told of its prefill."""
        self.generated = 0
        """How many tokens were generated; the first and the last at readings of a clock."""
        self.first_token_at = self.last_token_at = 0.0
        self._prefill: tuple[Progress, float] | None = None
        self._progress_at = 0.0
        self.key = key
        self._leave = leave
        self._events: deque[Event] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._opened = time.monotonic()

    def cancel(self) -> None:
        """Give up the request: its slot is free at the next step, and iteration ends."""
        self._end(stopped=False)

    def stop(self) -> None:
        """End the request as it should end, at a word that the client named: as ``cancel``."""
        self._end(stopped=True)

    def _end(self, *, stopped: bool) -> None:
        if not self._closed:
            self._leave(self, stopped)
            self._close()

    @property
    def backlog(self) -> int:
        """Events that wait to be taken. Nothing bounds them but ``max_tokens``."""
        return len(self._events)

    @property
    def ended(self) -> bool:
        """Whether nothing more comes from the engine."""
        return self._closed

    @property
    def prefilled(self) -> tuple[int, float] | None:
        """Positions, and the seconds in which whoever prefills now has filled them; ``None``
        before there was progress twice.
        """
        if self._prefill is None or self.progress is None:
            return None
        first, began = self._prefill
        positions = self.progress.processed - first.processed
        return (positions, self._progress_at - began) if positions > 0 else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def age(self) -> float:
        """Seconds since the request was submitted."""
        return time.monotonic() - self._opened

    def _push(self, event: Event | Report) -> None:
        if isinstance(event, Report):
            self.report = event
            return
        self._note(event)
        self._events.append(event)
        if isinstance(event, (Finished, Failed)):
            self._close()
        else:
            self._wake()

    def _note(self, event: Event) -> None:
        match event:
            case Progress():
                self._progress_at = time.monotonic()
                known = self.progress
                # Another one may have taken over, from wherever it begins.
                if not known or known.tier != event.tier or event.processed < known.processed:
                    self._prefill = event, self._progress_at
                self.progress = event
            case Token():
                self.last_token_at = time.monotonic()
                self.first_token_at = self.first_token_at or self.last_token_at
                self.generated += 1
            case Finished(report=report):
                self.report = report
            case _:
                pass

    def _close(self) -> None:
        self._closed = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        self._waiter = None


class Engine:
    """One model, one MLX thread, any number of requests.

    Used on one event loop. ``fault`` is resolved with the error when the MLX thread has died;
    the process should then exit with ``EXIT_ENGINE_FAULT``.
    """

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        settings: EngineSettings | None = None,
        links: Sequence[Link] = (),
        keeper: Keeper | None = None,
    ) -> None:
        """``load`` runs on the MLX thread, which then owns the weights; ``keeper`` keeps
        nothing if ``None``, and is closed by whoever made it.
        """
        self._settings = settings or EngineSettings()
        self._worker = Worker(load, self._settings, links, keeper, self._deliver, self._started)
        self._links = tuple(links)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-mlx")
        self._text: Prompts | None = None
        self._streams: dict[int, Stream] = {}
        self._wanted: dict[int, Future[Rows]] = {}
        self._asked: set[Future[Any]] = set()
        self._keys = 0
        self._durations = Average()
        self._power = PowerAssertion()
        self._loaded: LoadedModel | None = None
        self._limits: Limits | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None
        self.fault: Future[EngineFault] = Future()

    # -- life

    async def start(self) -> None:
        """Load the model and generate a first token; returns when the engine is ready.

        Raises what ``load`` raises (``ConfigError``), and ``EngineFault`` for anything else
        that goes wrong on the MLX thread.
        """
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        ended = self._thread.submit(self._worker.run)
        ended.add_done_callback(self._thread_ended)
        await self._ready

    async def failed(self) -> EngineFault:
        """Wait until the MLX thread dies, which it may never do, and return why."""
        return await asyncio.wrap_future(self.fault)

    async def close(self) -> None:
        """End every request with ``EngineFault`` (``engine_stopping``), then the threads."""
        self._closing = True
        self._end_all(EngineFault("the decoder is stopping", reason="engine_stopping"))
        self._worker.post(Stop())
        await asyncio.to_thread(self._power.close)
        await asyncio.to_thread(self._thread.shutdown)
        if self._text is not None:
            await asyncio.to_thread(self._text.close)

    def ready(self) -> bool:
        """Whether a request would be worked on now."""
        return self._loaded is not None and not self._closing and not self.fault.done()

    @property
    def loaded(self) -> LoadedModel:
        """The model, once started. Only the MLX thread may compute with it."""
        if self._loaded is None:
            raise EngineFault("the engine has not started", reason="engine_not_ready")
        return self._loaded

    def status(self) -> dict[str, Any]:
        """What the engine is doing, in plain JSON types."""
        return {
            "ready": self.ready(),
            "fault": self.fault.result().reason if self.fault.done() else None,
            "open": len(self._streams),
            "open_limit": self._settings.max_active + self._settings.max_waiting,
            "power_assertion": self._power.held,
            "links": [described(link) for link in self._links if link.state.name != "off"],
            **self._worker.snapshot,
        }

    def add_producer(self, link: Link) -> None:
        """Ask one more producer from here on. A closed link is ``off``, and not asked or told
        of any more.
        """
        self._links = (*self._links, link)
        self._worker.post(AddProducer(link))

    def stages(self) -> Mapping[int, str]:
        """Where requests stand (``request.Stage``), by the keys of their streams."""
        return self._worker.stages

    def cache_status(self) -> dict[str, Any]:
        """What the tiers hold and what reuse gave, in plain JSON types; takes milliseconds."""
        return self._worker.cache_status() if self._loaded is not None else {}

    def counters(self) -> dict[str, int]:
        """Counters of reuse since the start."""
        return self._worker.counters() if self._loaded is not None else {}

    # -- requests

    def submit(self, generation: Generation) -> Stream:
        """Queue a request. On the event loop's thread; returns at once.

        Raises ``CapacityError`` (``queue_full``, with ``retry_after_s``), ``RequestError``
        (``token_out_of_vocabulary``; ``memory_exceeded`` for a prompt that never fits), and
        ``EngineFault`` (``engine_not_ready``) before start, after a fault and in shutdown.
        """
        if not self.ready() or self._limits is None:
            raise EngineFault("the engine is not ready", reason="engine_not_ready")
        self._check(generation, self._limits)
        self._keys += 1
        stream = Stream(self._keys, generation, self._left)
        self._streams[self._keys] = stream
        self._worker.post(Submit(self._keys, generation, time.perf_counter()))
        self._power.hold()
        return stream

    async def rows(self, tokens: Sequence[int]) -> Rows:
        """Rows and states of a prompt's cache at N-1, computed here and nowhere kept.

        It waits and is computed among the others, tile by tile. Raises as :meth:`submit`, and
        what ends a request early.
        """
        if not self.ready() or self._limits is None:
            raise EngineFault("the engine is not ready", reason="engine_not_ready")
        generation = Generation("rows", tuple(tokens), 1, lane="local", reuse=False)
        self._check(generation, self._limits)
        self._keys += 1
        key, answer = self._keys, Future[Rows]()
        self._wanted[key] = answer
        self._worker.post(Submit(key, generation, time.perf_counter(), answer))
        try:
            return await asyncio.wrap_future(answer)
        finally:
            del self._wanted[key]
            if answer.cancelled():
                self._worker.post(Cancel(key))

    # -- keeping house

    async def live(self) -> tuple[LiveCut, ...]:
        """The finished sequences that are still in the engine; none before it is ready, and
        after it has ended.
        """
        return await self._ask(lambda sequences: sequences.live.cuts(), ())

    async def forget(
        self, keys: Collection[int] | None = None, cuts: Collection[bytes] | None = None
    ) -> tuple[int, int, Future[Forgotten] | None]:
        """Let go of live sequences, by their keys, and of cuts that the keeper has in memory or
        is to publish, by their names; or of all. Everything that ended before goes, nothing
        that ends later. How many sequences, their bytes, and what becomes of the cuts: ``None``
        where the engine is not ready, and did nothing.
        """
        nothing: tuple[int, int, Future[Forgotten] | None] = (0, 0, None)
        return await self._ask(lambda sequences: sequences.forget(keys, cuts), nothing)

    async def _ask(self, question: Callable[[Sequences], T], otherwise: T) -> T:
        if not self.ready():
            return otherwise
        answer: Future[T] = Future()
        self._asked.add(answer)
        self._worker.post(Ask(answer, question))
        try:
            return await asyncio.wrap_future(answer)
        except EngineFault:
            return otherwise
        finally:
            self._asked.discard(answer)

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        continue_final: bool = False,
    ) -> Rendered:
        """:func:`template.render` with the model's tokenizer, off the event loop; also raises
        ``RequestError`` (``context_length_exceeded``) before it tokenises what cannot fit.
        """
        return await self._prompts.render(messages, tools, options, continue_final=continue_final)

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """:func:`template.encode` with the model's tokenizer, off the event loop; also raises
        ``RequestError`` (``context_length_exceeded``).
        """
        return await self._prompts.encode(text, special=special)

    @property
    def _prompts(self) -> Prompts:
        if self._text is None:
            raise EngineFault("the engine has not started", reason="engine_not_ready")
        return self._text

    def _check(self, generation: Generation, limits: Limits) -> None:
        check_vocabulary(generation, limits.vocabulary)
        rows = reserved_rows(generation, self._settings.growth_rows)
        needed = cache_bytes(limits.layout, rows, limits.prefill_step)
        if needed > limits.cache_bytes:
            raise RequestError(
                "the prompt needs more cache memory than this machine has",
                reason="memory_exceeded",
                field="prompt",
                found=needed,
                expected=limits.cache_bytes,
            )
        settings = self._settings
        if len(self._streams) >= settings.max_active + settings.max_waiting:
            raise CapacityError(
                "the queue is full", reason="queue_full", retry_after_s=self._retry_after()
            )

    def _retry_after(self) -> float:
        """About when a place in the queue comes free: at the rate at which requests end."""
        if self._durations.amount == 0:
            return 1.0
        one = self._durations.seconds / self._durations.amount
        return min(max(one / self._settings.max_active, 1.0), 60.0)

    def _left(self, stream: Stream, stopped: bool) -> None:
        self._worker.post(Cancel(stream.key, stopped))
        if stopped:
            self._durations = self._durations.with_sample(1.0, stream.age(), time.monotonic())
        self._forget(stream.key)

    def _forget(self, key: int) -> None:
        self._streams.pop(key, None)
        if not self._streams:
            self._power.release()

    # -- from the other threads

    def _deliver(self, events: list[tuple[int, Event | Report]]) -> None:
        self._call(self._hand_out, events)

    def _started(self, loaded: LoadedModel, limits: Limits) -> None:
        self._call(self._become_ready, loaded, limits)

    def _thread_ended(self, outcome: Future[None]) -> None:
        error = outcome.exception()
        if error is not None:
            self._call(self._fail, error)

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # -- on the event loop

    def _become_ready(self, loaded: LoadedModel, limits: Limits) -> None:
        self._loaded, self._limits = loaded, limits
        self._text = Prompts(loaded.tokenizer, loaded.checkpoint.max_context)
        self._answer_start(None)

    def _answer_start(self, error: BatonError | None) -> None:
        """Let :meth:`start` return or raise; it may have been given up in the meantime."""
        if self._ready is None or self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _hand_out(self, events: list[tuple[int, Event | Report]]) -> None:
        for key, event in events:
            stream = self._streams.get(key)
            if stream is None:
                continue
            stream._push(event)
            if isinstance(event, Finished):
                self._durations = self._durations.with_sample(1.0, stream.age(), time.monotonic())
            if isinstance(event, (Finished, Failed)):
                self._forget(key)

    def _fail(self, error: BaseException) -> None:
        """The MLX thread has died of ``error``: end every request, and say so."""
        if self._loaded is None and isinstance(error, BatonError):
            self._answer_start(error)
            return
        log.critical("the MLX thread has died: %s", traced(error))
        fault = EngineFault("the engine failed", found=type(error).__name__)
        fault.__cause__ = error
        self.fault.set_result(fault)
        self._answer_start(fault)
        self._end_all(fault)

    def _end_all(self, error: BatonError) -> None:
        for key, stream in list(self._streams.items()):
            stream._push(Failed(error))
            self._forget(key)
        for answer in (*self._wanted.values(), *self._asked):
            with contextlib.suppress(InvalidStateError):  # it has just come
                answer.set_exception(error)
