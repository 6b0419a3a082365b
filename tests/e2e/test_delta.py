"""Deltas from a real producer: the cache and the answer of a full handoff, for fewer bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import trust_of_key
from mac_decoder.kv.install import extract
from protocol.checkpoint import read_checkpoint
from protocol.layout import payload_bytes
from tests.e2e.running import RunningProducer, until
from tests.mac_decoder.engine.drive import Told, ask, prompt, running, told
from tests.mac_decoder.engine.test_reuse import keeper_for, last_live, settled

KEY = bytes(range(32))
TILE = 64
KINDS = ("llama", "muse_glimmer", "lfm2")
SETTINGS = EngineSettings(prefill_step=TILE, remote_threshold=1)


@pytest.mark.both_blas
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("muse_glimmer", 32),
        *(pytest.param(name, 256, marks=pytest.mark.soak) for name in KINDS),
    ],
)
def test_full_prefix_and_delta_agree(
    produce: Callable[..., RunningProducer],
    checkpoint: Callable[..., Path],
    name: str,
    count: int,
    tmp_path: Path,
) -> None:
    """Every byte and every greedy token; a prompt with one other token early shares nothing."""
    path = checkpoint(name)
    layout = read_checkpoint(path).layout
    producer = produce(
        *("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(TILE)), key=KEY
    ).await_ready()
    first = prompt(400, 1)
    second = (*first[:300], *prompt(150, 2))
    early = (first[0] ^ 1, *first[1:])

    async def answered(engine: Engine, tokens: tuple[int, ...], count: int = count) -> Told:
        answer = await told(engine, ask(tokens, count))
        await settled(engine)
        assert answer.finished.report.source == "remote"
        return answer

    def rows(engine: Engine) -> dict[Any, np.ndarray]:
        live = last_live(engine)
        return extract(live.caches, layout, live.position)

    async def main(link: ProducerLink) -> None:
        async with running(path, SETTINGS, link, keeper_for(path)) as engine:
            full = await answered(engine, second)
            expected = rows(engine)
            assert full.finished.report.reused_tokens == 0
        for before, start in ((first, 256), (early, 0)):
            async with running(path, SETTINGS, link, keeper_for(path)) as engine:
                await answered(engine, before, 4)
                delta = await answered(engine, second)
                report = delta.finished.report
                assert report.reused_tokens == start
                assert report.transferred_bytes == payload_bytes(layout, start, 449)
                assert delta.tokens == full.tokens
                assert len(delta.tokens) == count
                found = rows(engine)
                assert [p for p in expected if not np.array_equal(expected[p], found[p])] == []

    numbers = Generations(tmp_path / "generations.json", KEY, 0)
    known = read_checkpoint(path)
    target = Producer(producer.url, trust_of_key(KEY), known.identity, known.layout)
    with ProducerLink(target, numbers) as link:
        until(lambda: link.state.ready)
        asyncio.run(main(link))
