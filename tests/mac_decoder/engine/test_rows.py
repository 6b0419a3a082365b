"""Rows of a prompt for somebody who compares them: computed among the others, kept nowhere."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mac_decoder.engine.cuts import Segment
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.kv.install import extract
from protocol.checkpoint import read_checkpoint
from protocol.errors import BatonError, EngineFault, RequestError
from tests.crossing import own_prefill
from tests.mac_decoder.engine.drive import ask, loaded_copy, prompt, running, told
from tests.mac_decoder.engine.test_reuse import keeper_for, settled

Checkpoints = Callable[..., Path]
SETTINGS = EngineSettings(prefill_step=64)


@pytest.mark.both_blas
def test_they_are_those_of_a_prefill(checkpoint: Checkpoints) -> None:
    path = checkpoint("muse_glimmer")
    loaded = loaded_copy(path)
    tokens = prompt(200)
    expected = extract(own_prefill(loaded.model, tokens, 199), loaded.layout, 199)

    async def main() -> None:
        keeper = keeper_for(path)
        async with running(path, SETTINGS, keeper=keeper) as engine:
            busy = asyncio.create_task(told(engine, ask(prompt(90, 1), 40)))
            rows, one, none = await asyncio.gather(
                engine.rows(tokens), engine.rows(tokens[:2]), engine.rows(tokens[:1])
            )
            assert len((await busy).tokens) == 40
            await settled(engine)
            assert rows.keys() == expected.keys()
            assert all(np.array_equal(rows[place], expected[place]) for place in rows)
            assert one.keys() == rows.keys()
            assert none == {}
            # Nothing of it is kept, counted, or left behind.
            held = await told(engine, ask(tokens, 1))
            assert held.finished.report.reused_tokens == 0
            assert engine.counters().get("cache_misses", 0) <= 2
            assert sum(engine.status()["requests"].values()) == 0
            assert engine.status()["qualifying"] == 0
            assert engine.status()["ended"] == {"length": 2}

    asyncio.run(main())


class Gate:
    """Holds a prefill before its first tile; ``begun`` has the prompt's end of each tile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self.begun: list[int] = []
        advance = LocalPrefill.advance

        def gated(prefill: LocalPrefill) -> Segment | None:
            self.begun.append(prefill.end)
            self.reached.set()
            assert self.go.wait(60)
            return advance(prefill)

        monkeypatch.setattr(LocalPrefill, "advance", gated)

    async def closed(self) -> None:
        """Return once somebody stands before it."""
        assert await asyncio.to_thread(self.reached.wait, 60)


def test_whoever_leaves_is_not_computed_for(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(checkpoint("llama"), SETTINGS) as engine:
            gate = Gate(monkeypatch)
            asked = asyncio.create_task(engine.rows(prompt(3000)))
            await gate.closed()
            try:
                assert engine.status()["qualifying"] == 1
                assert sum(engine.status()["requests"].values()) == engine.status()["open"] == 0
                assert engine.stages() == {}
                asked.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asked
            finally:
                gate.go.set()
            answer = await told(engine, ask(prompt(20), 3))
            assert len(answer.tokens) == 3
            await settled(engine)
            assert gate.begun == [2999, 19]
            assert engine.status()["qualifying"] == 0
            assert engine.status()["ended"] == {"length": 1}
            assert engine._wanted == {}

    asyncio.run(main())


def test_an_engine_that_ends_says_so(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with running(checkpoint("llama"), SETTINGS) as engine:
            gate = Gate(monkeypatch)
            asked = asyncio.create_task(engine.rows(prompt(3000)))
            await gate.closed()
            # After the first step of closing, which tells the engine to stop.
            asyncio.get_running_loop().call_soon(gate.go.set)
        with pytest.raises(EngineFault) as caught:
            await asyncio.wait_for(asked, 20)
        assert caught.value.reason == "engine_stopping"
        # The round in which it was told to stop is its last.
        assert gate.begun == [2999, 2999]
        with pytest.raises(EngineFault) as caught:
            await engine.rows(prompt(3))
        assert caught.value.reason == "engine_not_ready"

    asyncio.run(main())


def test_what_cannot_be_computed_is_refused(checkpoint: Checkpoints) -> None:
    vocabulary = int(read_checkpoint(checkpoint("llama")).config["vocab_size"])

    async def main() -> None:
        small = EngineSettings(prefill_step=64, cache_bytes=1 << 20)
        async with running(checkpoint("llama"), small) as engine:
            for tokens, reason in (
                ((vocabulary,), "token_out_of_vocabulary"),
                (prompt(3000), "memory_exceeded"),
            ):
                with pytest.raises(RequestError) as caught:
                    await engine.rows(tokens)
                assert caught.value.reason == reason
            with pytest.raises(BatonError):
                await engine.rows(())

    asyncio.run(main())
