"""A delta that waits for its turn, and a memory that needs room meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mac_decoder.kv.install import extract
from protocol.layout import FullLayer, payload_bytes
from tests.mac_decoder.engine.drive import ask, loaded_copy, prompt, running, told, until
from tests.mac_decoder.engine.links import CopyingLink
from tests.mac_decoder.engine.test_delta import ALWAYS, TILE, branches
from tests.mac_decoder.engine.test_reuse import keeper_for, last_live, settled

SHARED = 200


@pytest.mark.parametrize("name", ["llama", "muse_glimmer"])
@pytest.mark.parametrize("armed", [True, False])
def test_an_armed_cut_outlives_an_eviction(
    checkpoint: Callable[..., Path], name: str, armed: bool
) -> None:
    """Everything else goes, at once; the cut goes when its delta has ended.

    Evicted before the prompt came, there is no delta to arm.
    """
    path = checkpoint(name)
    first, second = branches(300, SHARED)
    other = prompt(300, 9)
    loaded = loaded_copy(path)
    link = CopyingLink(loaded.layout, TILE)
    for tokens in (first, second, other):
        link.prepare(loaded, tokens)

    async def main() -> None:
        keeper = keeper_for(path)
        async with running(path, ALWAYS, link, keeper) as engine:
            for tokens in (first, prompt(300, 9)[:100]):
                await told(engine, ask(tokens, 4, lane="local"))
            engine._worker._sequences.close()  # live ones would keep their cuts
            await settled(engine)
            link.hold = threading.Event()
            tasks = [asyncio.create_task(told(engine, ask(other, 4, reuse=False)))]
            await until(lambda: len(link.shadows) == 1)
            evicted_before = keeper._resident.stats().evicted_cuts
            if armed:
                tasks.append(asyncio.create_task(told(engine, ask(second, 12))))
                await until(lambda: engine.status()["waiting_for_producer"] == 1)
            keeper._resident.resize(0)
            assert keeper._resident.stats().evicted_cuts > evicted_before
            assert keeper._resident.stats().cuts == armed
            if not armed:
                tasks.append(asyncio.create_task(told(engine, ask(second, 12))))
                await until(lambda: engine.status()["waiting_for_producer"] == 1)
            link.hold.set()
            answer = (await asyncio.gather(*tasks))[1]
            await settled(engine)
            report = answer.finished.report
            start = SHARED // TILE * TILE if armed else 0
            assert (report.source, report.reused_tokens) == ("remote", start)
            assert report.transferred_bytes == payload_bytes(loaded.layout, start, 299)
            assert "cut_gone" not in report.reasons
            live = last_live(engine)
            rows = extract(live.caches, loaded.layout, live.position)
            for (index, role), whole in link.made[second].items():
                if isinstance(loaded.layout.layers[index], FullLayer):
                    assert np.array_equal(rows[index, role][: whole.nbytes], whole)
            # What was just kept is held for as long as another thread looks at it.
            await until(lambda: keeper._resident.stats().cuts == 0)

    asyncio.run(main())
