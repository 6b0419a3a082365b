"""What fails alone, and what stops the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mac_decoder.engine.events import GenerationFault, Token
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import LoadedModel, load
from protocol.checkpoint import read_checkpoint
from protocol.errors import EngineFault
from tests.mac_decoder.engine.drive import all_told, ask, prompt, told

Checkpoint = Callable[..., Path]

POISON = 300
"""A token whose embedding is made NaN."""


def poisoned(path: Path) -> LoadedModel:
    loaded = load(read_checkpoint(path))
    embedding = loaded.model.model.embed_tokens
    embedding.weight[POISON] = math.nan
    mx.eval(embedding.weight)
    return loaded


def test_logits_that_are_not_finite_end_their_request_alone(checkpoint: Checkpoint) -> None:
    clean = [tuple(token for token in prompt(n, n) if token != POISON) for n in (5, 40, 70)]
    sick = (*prompt(12), POISON, 4, 9)

    async def main() -> None:
        engine = Engine(lambda: poisoned(checkpoint("llama")))
        await engine.start()
        alone = [await told(engine, ask(tokens, 25)) for tokens in clean]
        assert not any(POISON in found.tokens for found in alone)
        requests = [ask(tokens, 25) for tokens in clean]
        *together, failed = await all_told(engine, [*requests, ask(sick, 25)])
        assert [t.tokens for t in together] == [t.tokens for t in alone]
        assert failed.tokens == []
        assert isinstance(failed.failed.error, GenerationFault)
        assert failed.failed.error.reason == "logits_not_finite"
        assert engine.ready()
        again = await told(engine, requests[0])
        assert again.tokens == alone[0].tokens
        assert engine.status()["ended"]["logits_not_finite"] == 1
        await engine.close()

    asyncio.run(main())


class Breaking:
    """A model that raises what MLX raises, once it is told to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.broken = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.broken:
            raise RuntimeError("[METAL] Command buffer execution failed")
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_a_fault_of_the_machine_ends_everything_and_says_so(checkpoint: Checkpoint) -> None:
    models: list[Breaking] = []

    def loader() -> LoadedModel:
        loaded = load(read_checkpoint(checkpoint("llama")))
        models.append(Breaking(loaded.model))
        return dataclasses.replace(loaded, model=models[0])

    async def main() -> None:
        engine = Engine(loader)
        await engine.start()
        streams = [engine.submit(ask(prompt(n), 10_000)) for n in (5, 9)]
        async for event in streams[0]:
            if isinstance(event, Token):
                break
        models[0].broken = True
        fault = await asyncio.wait_for(engine.failed(), 5)
        assert isinstance(fault, EngineFault)
        assert fault.found == "RuntimeError"
        for stream in streams:
            last = [event async for event in stream][-1]
            assert getattr(last, "error", None) is fault
        assert not engine.ready()
        assert engine.status()["fault"] == "engine_fault"
        with pytest.raises(EngineFault) as caught:
            engine.submit(ask((1,), 1))
        assert caught.value.reason == "engine_not_ready"
        await engine.close()

    asyncio.run(main())


def test_a_model_that_cannot_generate_never_becomes_ready(checkpoint: Checkpoint) -> None:
    def loader() -> LoadedModel:
        loaded = load(read_checkpoint(checkpoint("llama")))
        model = Breaking(loaded.model)
        model.broken = True
        return dataclasses.replace(loaded, model=model)

    async def main() -> None:
        engine = Engine(loader)
        with pytest.raises(EngineFault):
            await engine.start()
        assert not engine.ready()
        assert engine.fault.done()
        await engine.close()

    asyncio.run(main())
