"""A machine whose memory holds no cut: a conversation costs it no more, and is as deep on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.keeper import Keeper, Kept
from mac_decoder.reuse.cut import block_sizes
from mac_decoder.store.store import Store
from protocol.blocks import BLOCK
from protocol.checkpoint import read_checkpoint
from protocol.layout import payload_bytes
from tests.mac_decoder.engine.drive import ask, prompt, running, told

KEY = bytes(range(32))
TURNS = 6

Checkpoint = Callable[..., Path]


class Noted(Keeper):
    """A keeper that notes what it was handed: position, whole blocks left out, bytes."""

    def __init__(self, path: Path, directory: Path) -> None:
        known = read_checkpoint(path)
        super().__init__(known.identity, known.layout, KEY)
        self.attach(Store.open(directory, KEY, 1 << 30, 0, listener=self.heard))
        self.cuts: list[tuple[int, int, int]] = []

    def keep(self, kept: Kept) -> None:
        self.cuts.append((len(kept.tokens), kept.known, kept.nbytes))
        super().keep(kept)


async def settled(engine: Engine, keeper: Keeper) -> None:
    """Wait until everything of the answers so far is kept and published."""
    await asyncio.to_thread(engine._worker.idle)
    assert await asyncio.to_thread(keeper.drain, 30)


async def spoken(engine: Engine, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The next turn's prompt: all that is in the caches, and what the user says to it."""
    held = engine._worker._sequences.live._held
    last = held[max(held)].tokens.tolist()
    assert tuple(last[: len(tokens)]) == tokens
    return (*last, *prompt(130, len(last)))


def chat(path: Path, directory: Path, ram: int) -> dict[str, Any]:
    """Six turns, a restart, two turns more: what they brought, wrote and reused."""
    settings = EngineSettings(prefill_step=64, ram_bytes=ram)
    found: dict[str, Any] = {"reused": [], "sources": [], "answers": []}

    async def turn(engine: Engine, keeper: Keeper, tokens: tuple[int, ...]) -> tuple[int, ...]:
        answer = await told(engine, ask(tokens, 8))
        report = answer.finished.report
        found["reused"].append(report.reused_tokens)
        found["sources"].append(report.source)
        found["answers"].append(answer.tokens)
        await settled(engine, keeper)
        return await spoken(engine, tokens)

    async def main() -> None:
        tokens = prompt(300)
        keeper = Noted(path, directory)
        async with running(path, settings, keeper=keeper) as engine:
            for _ in range(TURNS):
                tokens = await turn(engine, keeper, tokens)
            found["cuts"], found["status"] = keeper.cuts, engine.cache_status()
        again = Noted(path, directory)
        async with running(path, settings, keeper=again) as engine:
            for _ in range(2):
                tokens = await turn(engine, again, tokens)
            found["cuts after"], found["status after"] = again.cuts, engine.cache_status()

    asyncio.run(main())
    return found


@pytest.mark.parametrize(
    "name", ["muse_glimmer", pytest.param("qwen3_next", marks=pytest.mark.soak)]
)
def test_six_turns_bring_and_write_each_block_once_and_a_restart_finds_them_all(
    checkpoint: Checkpoint, name: str, tmp_path: Path
) -> None:
    path = checkpoint(name)
    layout = read_checkpoint(path).layout
    block = sum(block_sizes(layout).values())
    small, plenty = chat(path, tmp_path / "small", 0), chat(path, tmp_path / "plenty", 1 << 28)
    # What was handed over: of each cut what no cut before had, and its own rest.
    before = 0
    for position, known, nbytes in small["cuts"]:
        assert known == before // BLOCK
        assert nbytes == payload_bytes(layout, 0, position) - known * block
        before = position
    status = small["status"]
    assert status["brought_bytes"] == sum(nbytes for _, _, nbytes in small["cuts"])
    assert status["brought_bytes"] == plenty["status"]["brought_bytes"]
    assert status["resident"]["cuts"] == 0
    assert set(status["kept"]) == {"put_no_room", "put_past_memory"}
    # What was written: the same as with all the memory there is.
    for figure in ("cuts", "blocks", "on_disk"):
        assert status["durable"][figure] == plenty["status"]["durable"][figure], figure
    written = [run["status"]["durable"]["counts"]["written_bytes"] for run in (small, plenty)]
    assert written[0] == written[1]
    assert status["durable"]["blocks"] == before // BLOCK
    # After the restart nothing of it is brought or written again, and the hit is as deep.
    assert small["sources"][TURNS:] == ["durable", "live"]
    for what in ("reused", "answers"):
        assert small[what] == plenty[what], what
    assert small["reused"][TURNS] == before
    assert small["cuts after"][0][1] == before // BLOCK
    after = small["status after"]["durable"]
    last = small["cuts after"][-1][0]
    assert after["blocks"] == last // BLOCK
    assert set(small["status after"]["kept"]) == {"put_no_room", "put_past_memory"}
