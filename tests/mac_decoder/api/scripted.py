"""An engine that plays what a test writes, behind the real engine's interface.

For what a real model does on no command: errors in the middle, long silences, exact times.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from mlx_lm.utils import load_tokenizer

from mac_decoder.engine import template
from mac_decoder.engine.events import Event, Finished, Generation, Report, Token
from mac_decoder.engine.facade import Stream
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.template import Rendered
from protocol.checkpoint import Checkpoint
from protocol.errors import BatonError

Play = Callable[["Part"], Awaitable[None]]

REPORT = Report("remote", 0, 7, 1234, 12.5, {"queue": 1.0, "wire": 2.0}, ("above_threshold",))


class Part:
    """One request's stream, as the player sees it."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.generation = stream.generation
        self.left = asyncio.Event()

    def say(self, *events: Event | Report) -> None:
        for event in events:
            self._stream._push(event)

    def token(self, number: int) -> None:
        self.say(Token(number))

    def end(self, reason: Any = "stop", report: Report = REPORT) -> None:
        self.say(Finished(reason, report))

    def close(self) -> None:
        """As when the engine shuts down: the stream ends without a last event."""
        self._stream._close()


class ScriptedEngine:
    """``play`` is run for every request; ``refusal`` is raised by ``submit`` if set.

    ``figures`` are told as a part of its status.
    """

    def __init__(self, checkpoint: Checkpoint, play: Play) -> None:
        tokenizer = load_tokenizer(checkpoint.path)
        stops = frozenset(tokenizer.eos_token_ids)
        self.loaded = LoadedModel(None, tokenizer, checkpoint, stops, 1 << 20)
        self.is_ready = True
        self.refusal: BatonError | None = None
        self.figures: dict[str, Any] = {}
        self.parts: list[Part] = []
        self._play = play
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None: ...

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def ready(self) -> bool:
        return self.is_ready

    def status(self) -> dict[str, Any]:
        return {"ready": self.is_ready, **self.figures}

    def stages(self) -> dict[int, str]:
        return {}

    def counters(self) -> dict[str, int]:
        return {}

    def cache_status(self) -> dict[str, Any]:
        return {}

    def submit(self, generation: Generation) -> Stream:
        if self.refusal is not None:
            raise self.refusal
        number = len(self.parts)
        stream = Stream(number, generation, self._leave)
        part = Part(stream)
        self.parts.append(part)
        task = asyncio.ensure_future(self._play(part))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        return await asyncio.to_thread(
            partial(template.render, self.loaded.tokenizer, messages, tools, options)
        )

    async def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        return template.encode(self.loaded.tokenizer, text, special=special)

    def _leave(self, stream: Stream, stopped: bool) -> None:
        key = stream.key
        self.parts[key].left.set()
