"""Warm equals cold: whatever tier a cache came from, its bytes are those of its history."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.live import LiveSequence
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.keeper import Keeper
from mac_decoder.kv.install import extract
from mac_decoder.store.store import Store
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.engine.drive import Told, ask, loaded_copy, prompt, running, told
from tests.mac_decoder.engine.replay import Replay
from tests.tiny_models import WINDOW

KINDS = ("llama", "muse_glimmer", "deepseek_v3", "qwen3_next", "lfm2", "falcon_h1")
"""Full rows, rings, latents, two states, one state, and both in composite caches."""

POSITIONS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 255, 256, 257)
STEP = 64
KEY = bytes(range(32))
RAM = 1 << 28
SETTINGS = EngineSettings(prefill_step=STEP, ram_bytes=RAM)

Tier = Literal["live", "resident", "durable", "restarted"]
Checkpoint = Callable[..., Path]


def keeper_for(path: Path, directory: Path | None = None) -> Keeper:
    """A keeper of the checkpoint, on disk where a directory is given."""
    checkpoint = read_checkpoint(path)
    keeper = Keeper(checkpoint.identity, checkpoint.layout, KEY, RAM)
    if directory is not None:
        keeper.attach(Store.open(directory, KEY, 1 << 30, 0, listener=keeper.heard))
    return keeper


def last_live(engine: Engine) -> LiveSequence:
    """The sequence that ended last, in the engine's own caches."""
    held = engine._worker._sequences.live._held
    return held[max(held)]


async def settled(engine: Engine) -> None:
    """Wait until the engine has done what it does behind an answer."""
    await asyncio.to_thread(engine._worker.idle)


def check_replay(loaded: LoadedModel, live: LiveSequence, answer: Told) -> None:
    """Every byte and every token are those of a replay of the same history."""
    replay = Replay(loaded, live.tokens, live.history)
    rows = extract(live.caches, loaded.layout, live.position)
    assert replay.differences(rows) == []
    first = live.position - len(answer.tokens)
    assert answer.tokens == [replay.drawn[position - 1] for position in range(first, live.position)]


@pytest.fixture
def loaded(checkpoint: Checkpoint, name: str) -> LoadedModel:
    return loaded_copy(checkpoint(name))


@pytest.mark.both_blas
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("tier", ["live", "resident", "durable", "restarted"])
def test_warm_is_a_replay_of_its_history(
    checkpoint: Checkpoint, loaded: LoadedModel, name: str, tier: Tier, tmp_path: Path
) -> None:
    path = checkpoint(name)

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            for length in POSITIONS:
                await cold(engine, length)
            if tier != "restarted":
                for length in POSITIONS:
                    await warm(engine, length)
        if tier == "restarted":
            async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
                for length in POSITIONS:
                    await warm(engine, length)

    async def cold(engine: Engine, length: int) -> None:
        tokens = prompt(length + 1, length)
        answer = await told(engine, ask(tokens, 9))
        assert answer.finished.report.source == "local"
        await settled(engine)
        check_replay(loaded, last_live(engine), answer)

    async def warm(engine: Engine, length: int) -> None:
        tokens, held = prompt(length + 1, length), length
        if tier == "live":
            tokens = (*last_tokens(engine, tokens), *prompt(70, length + 1))
            held = length + 10
        elif tier == "durable":
            keeper = engine._worker._keeper
            assert keeper is not None
            await asyncio.to_thread(keeper.drain)
            keeper._resident.clear()
        answer = await told(engine, ask(tokens, 24))
        report = answer.finished.report
        assert report.source == ("durable" if tier == "restarted" else tier), report
        assert report.reused_tokens == held
        assert report.prefilled_tokens == len(tokens) - 1 - held
        await settled(engine)
        check_replay(loaded, last_live(engine), answer)

    asyncio.run(main())


def last_tokens(engine: Engine, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens of the live sequence that goes on from a prompt."""
    held = engine._worker._sequences.live._held.values()
    (found,) = [one for one in held if tuple(one.tokens[: len(tokens)].tolist()) == tokens]
    return tuple(found.tokens.tolist())
