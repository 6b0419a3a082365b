"""A producer computes the rest of what it computed before, and all of it once it was restarted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mac_decoder.engine.events import Report
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.kv.install import extract
from protocol.checkpoint import read_checkpoint
from protocol.layout import payload_bytes
from tests.e2e.linked import KEY, linked
from tests.e2e.running import RunningProducer, until
from tests.mac_decoder.engine.drive import ask, prompt, running, told
from tests.mac_decoder.engine.test_reuse import keeper_for, last_live, settled

TILE = 64
SETTINGS = EngineSettings(prefill_step=TILE, remote_threshold=1)
FIRST = prompt(400, 1)
SECOND = (*FIRST[:300], *prompt(150, 2))
THIRD = (*FIRST[:300], *prompt(150, 3))
SHARED = 256
END = 449


@pytest.mark.both_blas
@pytest.mark.parametrize("name", ["muse_glimmer", pytest.param("lfm2", marks=pytest.mark.soak)])
def test_a_delta_computes_the_suffix_and_a_restarted_producer_everything(
    produce: Callable[..., RunningProducer],
    checkpoint: Callable[..., Path],
    name: str,
    tmp_path: Path,
) -> None:
    """Only the suffix is sent either way, and every byte is that of a full handoff."""
    path = checkpoint(name)
    known = read_checkpoint(path)
    producer = produce(
        *("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(TILE)), key=KEY
    ).await_ready()

    async def answered(engine: Engine, tokens: tuple[int, ...]) -> tuple[Report, Any]:
        answer = await told(engine, ask(tokens, 16))
        await settled(engine)
        report = answer.finished.report
        assert report.source == "remote"
        live = last_live(engine)
        return report, (answer.tokens, extract(live.caches, known.layout, live.position))

    async def restarted(link: ProducerLink) -> None:
        await asyncio.to_thread(producer.kill_the_one_that_computes)
        await asyncio.to_thread(until, lambda: not link.state.ready)
        await asyncio.to_thread(until, lambda: link.state.ready)

    def delta(report: Report, computed: int) -> None:
        assert (report.reused_tokens, report.prefilled_tokens) == (SHARED, END - SHARED)
        assert report.transferred_bytes == payload_bytes(known.layout, SHARED, END)
        assert report.computed_tokens == computed

    def full(report: Report, computed: int, end: int = END) -> None:
        assert (report.reused_tokens, report.prefilled_tokens) == (0, end)
        assert report.transferred_bytes == payload_bytes(known.layout, 0, end)
        assert report.computed_tokens == computed

    async def main(link: ProducerLink) -> None:
        async with running(path, SETTINGS, link, keeper_for(path)) as engine:
            report, _ = await answered(engine, FIRST)
            full(report, len(FIRST) - 1, len(FIRST) - 1)
            report, second = await answered(engine, SECOND)
            delta(report, END - SHARED)
            await restarted(link)
            report, third = await answered(engine, THIRD)
            delta(report, END)
        async with running(path, SETTINGS, link, keeper_for(path)) as engine:
            report, found = await answered(engine, SECOND)
            full(report, END - SHARED)
            assert same(found, second)
            report, found = await answered(engine, THIRD)
            assert report.computed_tokens == 1
            assert same(found, third)

    with linked(producer.url, known.identity, known.layout, tmp_path) as link:
        asyncio.run(main(link))


def same(one: Any, other: Any) -> bool:
    """Tokens, and every byte of rows and states."""
    (tokens, rows), (others, expected) = one, other
    return tokens == others and all(np.array_equal(rows[place], expected[place]) for place in rows)
