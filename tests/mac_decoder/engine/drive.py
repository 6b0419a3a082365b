"""Driving an engine from a test: one running engine, and what a request's stream gave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step

from mac_decoder.engine.events import (
    Event,
    Failed,
    Fallback,
    Finished,
    Generation,
    Lane,
    Progress,
    Sampling,
    Token,
)
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import LoadedModel, load
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.link import Link
from mac_decoder.keeper import Keeper
from protocol.checkpoint import read_checkpoint

GREEDY = Sampling(temperature=0.0)


def prompt(length: int, salt: int = 0, vocabulary: int = 512) -> tuple[int, ...]:
    """A prompt of ``length`` ids without repetition, another for every ``salt``."""
    return tuple((7919 * (index + 1 + 13 * salt) % 104729) % vocabulary for index in range(length))


def ask(
    tokens: Sequence[int],
    count: int = 16,
    sampling: Sampling = GREEDY,
    *,
    lane: Lane = "auto",
    top_logprobs: int | None = None,
    stops: Sequence[int] = (),
    turns: Sequence[int] = (),
    next_turn: int = 0,
    reuse: bool = True,
) -> Generation:
    """A request with a name of its own length."""
    return Generation(
        f"request-{len(tokens)}",
        tuple(tokens),
        count,
        sampling,
        top_logprobs=top_logprobs,
        stop_token_ids=frozenset(stops),
        lane=lane,
        turns=tuple(turns),
        next_turn=next_turn,
        reuse=reuse,
    )


@dataclass
class Told:
    """All events of one request."""

    events: list[Event] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]

    @property
    def progress(self) -> list[Progress]:
        return [event for event in self.events if isinstance(event, Progress)]

    @property
    def fallbacks(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Fallback)]

    @property
    def finished(self) -> Finished:
        last = self.events[-1]
        assert isinstance(last, Finished), last
        return last

    @property
    def failed(self) -> Failed:
        last = self.events[-1]
        assert isinstance(last, Failed), last
        return last


@asynccontextmanager
async def running(
    path: Path,
    settings: EngineSettings | None = None,
    link: Link | Sequence[Link] | None = None,
    keeper: Keeper | None = None,
) -> AsyncIterator[Engine]:
    """An engine that is ready, and closed at the end; ``keeper`` is closed too."""
    checkpoint = read_checkpoint(path)
    links = link if isinstance(link, Sequence) else [] if link is None else [link]
    engine = Engine(lambda: load(checkpoint), settings, links, keeper)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        if keeper is not None:
            keeper.close()


async def told(engine: Engine, generation: Generation) -> Told:
    """Run one request to its end."""
    found = Told()
    async with engine.submit(generation) as stream:
        async for event in stream:
            found.events.append(event)
    return found


async def all_told(engine: Engine, generations: Sequence[Generation]) -> list[Told]:
    """Run requests side by side."""
    return list(await asyncio.gather(*(told(engine, generation) for generation in generations)))


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for ``condition``, however slow the machine is."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


def loaded_copy(path: Path) -> LoadedModel:
    """A second copy of the model, for what a test computes itself."""
    return load(read_checkpoint(path))


def reference(loaded: LoadedModel, tokens: Sequence[int], count: int, step: int = 64) -> list[int]:
    """Greedy tokens of mlx-lm's ``generate_step``, prefilled in tiles of ``step``."""
    steps = generate_step(
        mx.array(list(tokens)), loaded.model, max_tokens=count, prefill_step_size=step
    )
    return [int(token) for token, _logprobs in steps]


def logprobs_after(loaded: LoadedModel, tokens: Sequence[int]) -> Any:
    """Log probabilities of the next token after ``tokens``, one forward pass, float32."""
    logits = loaded.model(mx.array([list(tokens)]))[0, -1].astype(mx.float32)
    return logits - mx.logsumexp(logits)
