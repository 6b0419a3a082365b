"""Nothing that could be worked on waits for somebody else to send something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mac_decoder.engine.settings import EngineSettings
from protocol.errors import TransferError
from tests.mac_decoder.engine.drive import all_told, ask, loaded_copy, prompt, running, until
from tests.mac_decoder.engine.links import CopyingLink

Checkpoint = Callable[..., Path]

PATIENCE_S = 30.0


@pytest.mark.parametrize("count", [1, 2, 9])
def test_one_place_and_many_requests(checkpoint: Checkpoint, count: int) -> None:
    """The last active request ends in a decode step, and the next one must start then."""
    settings = EngineSettings(max_active=1, prefill_step=64)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            requests = [ask(prompt(length, length), count) for length in (1, 9, 70, 2)]
            found = await asyncio.wait_for(all_told(engine, requests), PATIENCE_S)
            assert [len(told.tokens) for told in found] == [count] * 4

    asyncio.run(main())


def test_memory_for_one_and_many_requests(checkpoint: Checkpoint) -> None:
    """As with one place, but it is bytes that the next one waits for."""
    settings = EngineSettings(cache_bytes=600_000, prefill_step=64, growth_rows=16)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            requests = [ask(prompt(length, length), 3) for length in (200, 190, 210)]
            found = await asyncio.wait_for(all_told(engine, requests), PATIENCE_S)
            assert [len(told.tokens) for told in found] == [3] * 3

    asyncio.run(main())


@pytest.mark.parametrize("how", ["cancelled", "failed"])
def test_a_request_behind_a_handoff_that_ends_badly_starts(
    checkpoint: Checkpoint, how: str
) -> None:
    """One place, taken by a handoff: the next request starts when it is over."""
    path = checkpoint("llama")
    settings = EngineSettings(max_active=1, prefill_step=64, remote_threshold=1)
    loaded = loaded_copy(path)
    link = CopyingLink(loaded.layout)
    link.prepare(loaded, prompt(80))
    gate = link.hold = threading.Event()

    class Failing(CopyingLink):
        def fetch(self, *args, **kwargs):
            super().fetch(*args, **kwargs)
            raise TransferError("gone", reason="connection_lost")

    failing = Failing(link.layout, made=link.made, hold=link.hold)

    async def main() -> None:
        async with running(path, settings, link if how == "cancelled" else failing) as engine:
            first = engine.submit(ask(prompt(80), 3, lane="remote"))
            await until(lambda: engine.status()["fetching"])
            others = [ask(prompt(length), 3, lane="local") for length in (9, 12)]
            second = asyncio.ensure_future(all_told(engine, others))
            await until(lambda: engine.status()["open"] == 3)
            if how == "cancelled":
                first.cancel()
            else:
                gate.set()
            found = await asyncio.wait_for(second, PATIENCE_S)
            assert [len(told.tokens) for told in found] == [3, 3]

    asyncio.run(main())
