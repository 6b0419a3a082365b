"""Running a request: engine streams in, one HTTP answer out, whole or as events.

One task writes the answer, a second waits for the client to leave. Either way the engine's
streams are cancelled when the answer ends, so that a slot is never held for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mac_decoder.api import sse
from mac_decoder.api.choice import Choice, Delta
from mac_decoder.api.errors import error_body
from mac_decoder.api.service import Record, Service
from mac_decoder.engine.events import (
    Event,
    Failed,
    Fallback,
    Finished,
    Generation,
    Progress,
    Report,
    Token,
)
from mac_decoder.engine.facade import Stream
from mac_decoder.status.told import merged
from protocol.errors import BatonError, Cancelled, EngineFault

MAX_BACKLOG = 4096
"""Tokens that may wait for a client that reads slower than the model writes."""

_LINE_LENGTH = 64


class Form(Protocol):
    """How an endpoint writes its answers: payloads ready for JSON."""

    def first(self, choice: Choice) -> list[dict[str, Any]]:
        """The chunk that opens a choice, if the form has one."""
        ...

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """The chunks that tell ``delta``."""
        ...

    def last(self, choice: Choice) -> dict[str, Any]:
        """The chunk that tells ``choice.finish_reason``."""
        ...

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk without choices that tells the usage."""
        ...

    def whole(self, answers: Sequence[Answered], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer in one piece."""
        ...


@dataclass(frozen=True)
class Job:
    """One choice to be generated. Jobs with the same ``prompt`` share its tokens in usage."""

    choice: Choice
    generation: Generation
    prompt: int = 0


@dataclass(frozen=True)
class Answered:
    """A choice that ended, and all that it told."""

    choice: Choice
    deltas: Sequence[Delta]


class Answer(Response):
    """The response to one request; generates while it is being sent.

    Errors before the first byte are raised (and become an HTTP status); later ones are told
    as an error event, after which the stream ends without ``[DONE]``.
    """

    def __init__(
        self,
        service: Service,
        record: Record,
        form: Form,
        jobs: Sequence[Job],
        *,
        streamed: bool,
        with_usage: bool,
        ignored: Sequence[str],
    ) -> None:
        super().__init__()
        self._service = service
        self._record = record
        self._form = form
        self._jobs = jobs
        self._streamed = streamed
        self._with_usage = with_usage
        self._ignored = list(ignored)
        self._left = set(range(len(jobs)))
        self._streams: list[Stream] = []
        self._reports: dict[int, Report] = {}
        self._progress: Progress | None = None
        self._trouble: BatonError | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {"x-request-id": self._record.id}
        with ExitStack() as closing:
            closing.callback(self._record.abandoned)
            self._submit(closing)
            watcher = asyncio.create_task(self._watch(receive))
            closing.callback(watcher.cancel)
            try:
                if self._streamed:
                    out = sse.EventStream(send, self._service.settings.stall_timeout_s)
                    await self._send_events(out, headers)
                else:
                    await self._send_whole(scope, receive, send, headers)
            except BatonError as error:
                self._note()
                self._record.broken(error)
                if not isinstance(error, Cancelled):
                    raise
            else:
                self._note()
                self._record.completed()

    def _submit(self, closing: ExitStack) -> None:
        try:
            for job in self._jobs:
                stream = self._service.engine.submit(job.generation)
                closing.callback(stream.cancel)
                self._streams.append(stream)
        except BatonError as error:
            self._record.broken(error)
            raise
        self._record.submitted(self._streams)

    # -- the two ways to answer

    async def _send_whole(
        self, scope: Scope, receive: Receive, send: Send, headers: dict[str, str]
    ) -> None:
        told: list[list[Delta]] = [[] for _ in self._jobs]

        async def collect(index: int, deltas: Sequence[Delta]) -> None:
            told[index] += deltas

        await self._run(collect, None)
        answers = [
            Answered(job.choice, deltas) for job, deltas in zip(self._jobs, told, strict=True)
        ]
        payload = self._form.whole(answers, self._usage()) | {"baton": self._baton()}
        body = msgspec.json.encode(payload)
        response = Response(body, headers=headers, media_type="application/json")
        async with sse.patience(self._service.settings.stall_timeout_s):
            await response(scope, receive, send)

    async def _send_events(self, out: sse.EventStream, headers: dict[str, str]) -> None:
        await out.open(headers)
        try:
            await self._run(partial(self._tell, out, set()), out)
        except Cancelled:
            raise
        except BatonError as error:
            self._note()
            self._record.broken(error)
            await out.close(sse.event(error_body(error)))
            return
        closing = b""
        if self._with_usage:
            closing = sse.event(self._form.usage(self._usage()) | {"baton": self._baton()})
        await out.close(closing + sse.DONE)

    async def _tell(
        self, out: sse.EventStream, opened: set[int], index: int, deltas: Sequence[Delta]
    ) -> None:
        """Write the chunks of one step of a choice, and its last one where it has ended."""
        form, choice = self._form, self._jobs[index].choice
        payloads: list[dict[str, Any]] = []
        if index not in opened:
            opened.add(index)
            payloads += form.first(choice)
        for delta in deltas:
            payloads += form.chunks(choice, delta)
        if choice.finish_reason is not None:
            last = form.last(choice)
            if not self._left and not self._with_usage:
                last["baton"] = self._baton()
            payloads.append(last)
        await out.write(b"".join(map(sse.event, payloads)))

    # -- from the engine's events to what is told

    async def _run(
        self,
        tell: Callable[[int, Sequence[Delta]], Awaitable[None]],
        out: sse.EventStream | None,
    ) -> None:
        """Go through the events of all streams; ``tell`` gets what is new of a choice.

        Its last call for a choice finds ``finish_reason`` set. Where nothing has been written
        to ``out`` for a while, a comment is.
        """
        heartbeat_s = self._service.settings.heartbeat_s
        with _Merged(self._streams) as events:
            while self._left:
                try:
                    async with asyncio.timeout(heartbeat_s):
                        index, event = await events.next()
                except TimeoutError:
                    await self._keep_alive(out)
                    continue
                except StopAsyncIteration:
                    raise self._trouble or _closing() from None
                self._service.board.touch()
                if self._trouble is not None:
                    raise self._trouble
                if index not in self._left:
                    continue
                choice = self._jobs[index].choice
                deltas = self._advance(index, choice, event)
                if choice.finish_reason is not None:
                    self._left.discard(index)
                    self._stop(index)
                elif isinstance(event, Fallback) and out is not None:
                    await out.write(sse.comment(f"{event.reason}: prefilled here"))
                    continue
                elif not deltas:
                    await self._keep_alive(out)
                    continue
                await tell(index, deltas)

    def _advance(self, index: int, choice: Choice, event: Event) -> list[Delta]:
        match event:
            case Token():
                return choice.token(event)
            case Progress():
                self._progress = event
                return []
            case Fallback():
                return []
            case Finished(reason=reason, report=report):
                self._reports[index] = report
                return choice.ended(reason)
            case Failed(error=error):
                raise error

    def _stop(self, index: int) -> None:
        """End a stream whose choice has ended; the report of its prompt is kept."""
        self._keep_reports()
        self._streams[index].stop()

    def _keep_reports(self) -> None:
        """Take the reports of streams that have not told theirs in a last event."""
        for index, stream in enumerate(self._streams):
            if stream.report is not None:
                self._reports.setdefault(index, stream.report)

    async def _keep_alive(self, out: sse.EventStream | None) -> None:
        if out is None or out.silent_s < self._service.settings.heartbeat_s / 2:
            return
        generated = sum(job.choice.completion_tokens for job in self._jobs)
        if generated:
            await out.write(sse.comment(f"generated {generated}"))
        elif self._progress is not None:
            progress = self._progress
            await out.write(sse.comment(f"prefill {progress.processed}/{progress.total}"))
        elif (total := self._first_positions()) and self._admitted():
            await out.write(sse.comment(f"prefill 0/{total}"))
        else:
            await out.write(sse.comment("queued"))

    def _first_positions(self) -> int:
        """Positions to fill of the first prompt that is not answered yet; the engine's total."""
        return len(self._jobs[min(self._left)].generation.tokens) - 1

    def _admitted(self) -> bool:
        """Whether the engine works on every request that it was given, and so on this one.

        Its first event may come only when a whole tile was computed, on a slow machine a while
        after the request left the queue.
        """
        status = self._service.engine.status()
        stages: dict[str, int] = status.get("requests", {})
        queued = stages.get("waiting", 0) + status.get("waiting_for_producer", 0)
        return not queued and sum(stages.values()) >= status.get("open", 1)

    async def _watch(self, receive: Receive) -> None:
        """Cancel the streams when the client leaves, or reads too slowly to be waited for."""
        leaving = asyncio.ensure_future(receive())
        try:
            while True:
                done, _ = await asyncio.wait({leaving}, timeout=1.0)
                if done and leaving.result()["type"] == "http.disconnect":
                    self._give_up(Cancelled("the client left", reason="client_left"))
                    return
                if done:
                    leaving = asyncio.ensure_future(receive())
                if self._streamed and max(one.backlog for one in self._streams) > MAX_BACKLOG:
                    self._give_up(Cancelled("the client reads slowly", reason="client_too_slow"))
                    return
        finally:
            leaving.cancel()

    def _give_up(self, error: BatonError) -> None:
        self._trouble = error
        for stream in self._streams:
            stream.cancel()

    # -- what it took

    def _note(self) -> None:
        """Put the figures into the record."""
        self._keep_reports()
        record = self._record
        record.prompt_tokens = self._prompt_tokens()
        record.completion_tokens = sum(job.choice.completion_tokens for job in self._jobs)
        record.finish_reasons = tuple(job.choice.finish_reason or "" for job in self._jobs)
        record.reports = tuple(self._reports.values())
        record.notes = self._notes()

    def _notes(self) -> tuple[str, ...]:
        return tuple(note for job in self._jobs for note in job.choice.notes)

    def _prompt_tokens(self) -> int:
        lengths = {job.prompt: len(job.generation.tokens) for job in self._jobs}
        return sum(lengths.values())

    def _usage(self) -> dict[str, Any]:
        prompt = self._prompt_tokens()
        completion = sum(job.choice.completion_tokens for job in self._jobs)
        cached: dict[int, int] = {}
        for index, report in self._reports.items():
            number = self._jobs[index].prompt
            cached[number] = min(report.reused_tokens, cached.get(number, report.reused_tokens))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
            "completion_tokens_details": {
                "reasoning_tokens": sum(job.choice.reasoning_tokens for job in self._jobs)
            },
        }

    def _baton(self) -> dict[str, Any]:
        told = merged(list(self._reports.values()), self._notes()) if self._reports else {}
        return told | ({"ignored": self._ignored} if self._ignored else {})


def _closing() -> EngineFault:
    return EngineFault("the engine is closing", reason="engine_not_ready")


class _Merged:
    """The events of several streams in one line, with the index of each one's stream.

    ``next`` may be cancelled without losing an event, and raises ``StopAsyncIteration`` when
    all streams have ended. A line that is full holds the streams back.
    """

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._only = streams[0] if len(streams) == 1 else None
        self._line: asyncio.Queue[tuple[int, Event | None]] = asyncio.Queue(_LINE_LENGTH)
        self._running = 0
        self._pumps: list[asyncio.Task[None]] = []
        if self._only is None:
            self._running = len(streams)
            self._pumps = [
                asyncio.create_task(self._pump(index, stream))
                for index, stream in enumerate(streams)
            ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for task in self._pumps:
            task.cancel()

    async def next(self) -> tuple[int, Event]:
        if self._only is not None:
            return 0, await anext(self._only)
        while self._running:
            index, event = await self._line.get()
            if event is not None:
                return index, event
            self._running -= 1
        raise StopAsyncIteration

    async def _pump(self, index: int, stream: Stream) -> None:
        async for event in stream:
            await self._line.put((index, event))
        await self._line.put((index, None))
