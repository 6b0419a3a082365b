"""Where the next turn will part from a prompt the producer brings a cut too, for its few bytes.

A reasoning model's next turn drops its thoughts, so that it parts before the end of what was
handed off, where states are gone and windows have passed.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.plan import plan_handoff
from gb10_producer.prefill import Rows
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.kv.install import extract
from mac_decoder.qualify.gate import Gate
from protocol.checkpoint import read_checkpoint
from protocol.layout import SlidingLayer, payload_bytes
from tests.e2e.linked import KEY, linked
from tests.e2e.running import RunningProducer, until
from tests.mac_decoder.engine.drive import Told, ask, prompt, running, told
from tests.mac_decoder.engine.test_reuse import keeper_for, last_live, settled
from tests.mac_decoder.qualify.lying import Rewriting, gated, prefiller_of
from tests.mac_decoder.test_node import Decoder
from tests.ordinary import usual
from tests.proxy import Proxy
from tests.tiny_models import WINDOW
from tests.tiny_tokenizer import think

TILE = 64
END, NEXT = 405, 399
"""Both in the tile that begins at 384."""
SYSTEM = "You answer about trains, ferries and the bicycles that they carry. " * 8
KINDS = ("muse_glimmer", "lfm2", "llama", "qwen3_next")
SETTINGS = EngineSettings(prefill_step=TILE, remote_threshold=1)


class Arms:
    """One producer, and the bytes that passed."""

    def __init__(self, producer: RunningProducer, path: Path, state: Path, tier: Path | None):
        self.producer, self.path, self.state, self.tier = producer, path, state, tier
        self.known = read_checkpoint(path)
        self.layout = self.known.layout

    def two_turns(
        self, name: str, first: tuple[int, ...], next_turn: int, second: tuple[int, ...]
    ) -> tuple[Told, dict[Any, np.ndarray], int]:
        """A prompt that is handed off, and what a next one, here, makes of what is kept; with
        its rows and the payload bytes that passed.
        """
        directory = None if self.tier is None else self.tier / name

        async def handed_off(proxy: Proxy) -> None:
            ends = proxy.url, self.known.identity, self.layout, self.state / name
            with linked(*ends) as link:
                async with running(
                    self.path, SETTINGS, link, keeper_for(self.path, directory)
                ) as engine:
                    answer = await told(engine, ask(first, 3, next_turn=next_turn, lane="remote"))
                    await settled(engine)
                    assert answer.finished.report.source == "remote"
                    if directory is None:
                        outcome.append(await self._continued(engine, second))
            if directory is not None:  # another process' life, which has what is on disk
                async with running(
                    self.path, SETTINGS, keeper=keeper_for(self.path, directory)
                ) as engine:
                    outcome.append(await self._continued(engine, second))

        outcome: list[tuple[Told, dict[Any, np.ndarray]]] = []
        with Proxy(self.producer.url) as proxy:
            asyncio.run(handed_off(proxy))
            return *outcome[0], proxy.payload_bytes

    async def after(
        self,
        name: str,
        before: tuple[int, ...] | None,
        first: tuple[int, ...],
        second: tuple[int, ...] | None,
    ) -> tuple[int, list[int], dict[Any, np.ndarray]]:
        """The payload bytes of ``first`` once ``before`` is held, and what goes on from it."""
        with Proxy(self.producer.url) as proxy:
            ends = proxy.url, self.known.identity, self.layout, self.state / name
            with linked(*ends) as link:
                async with running(self.path, SETTINGS, link, keeper_for(self.path)) as engine:
                    if before is not None:
                        await told(engine, ask(before, 1, lane="remote"))
                        await settled(engine)
                    passed = proxy.payload_bytes
                    await told(engine, ask(first, 3, next_turn=NEXT, lane="remote"))
                    await settled(engine)
                    passed = proxy.payload_bytes - passed
                    if second is None:
                        return passed, [], {}
                    answer, rows = await self._continued(engine, second)
                    assert answer.finished.report.reused_tokens == NEXT
                    return passed, answer.tokens, rows

    async def _continued(
        self, engine: Engine, second: tuple[int, ...]
    ) -> tuple[Told, dict[Any, np.ndarray]]:
        answer = await told(engine, ask(second, 24, lane="local"))
        await settled(engine)
        live = last_live(engine)
        return answer, extract(live.caches, self.layout, live.position)


@pytest.mark.both_blas
@pytest.mark.parametrize(
    ("name", "tier"),
    usual(
        itertools.product(KINDS, ("resident", "durable")),
        [("muse_glimmer", "durable")],
    ),
)
def test_the_next_turn_goes_on_where_it_parts(
    produce: Callable[..., RunningProducer],
    checkpoint: Callable[..., Path],
    name: str,
    tier: str,
    tmp_path: Path,
) -> None:
    """Every byte and every token are those that go on from a handoff that ended there."""
    path = checkpoint(name)
    producer = produce(
        *("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(TILE)), key=KEY
    ).await_ready()
    arms = Arms(producer, path, tmp_path, tmp_path / "disk" if tier == "durable" else None)
    first = prompt(END + 1, 1)
    second = (*first[:NEXT], first[NEXT] ^ 1, *prompt(40, 2))

    found, rows, passed = arms.two_turns("with", first, NEXT, second)
    report = found.finished.report
    assert (report.source, report.reused_tokens) == (tier, NEXT)
    assert passed == plan_handoff(arms.layout, END + 1, 0, (NEXT,)).payload_bytes

    expected, theirs, _ = arms.two_turns("there", first[: NEXT + 1], 0, second)
    assert expected.finished.report.reused_tokens == NEXT
    assert found.tokens == expected.tokens
    assert len(found.tokens) == 24
    assert rows.keys() == theirs.keys()
    assert [place for place in rows if not np.array_equal(rows[place], theirs[place])] == []

    without, _, passed = arms.two_turns("without", first, 0, second)
    assert without.finished.report.reused_tokens < NEXT
    assert passed == payload_bytes(arms.layout, 0, END)


@pytest.mark.both_blas
@pytest.mark.parametrize("name", usual(["muse_glimmer", "lfm2"], ["muse_glimmer"]))
def test_a_delta_brings_it_as_a_full_handoff_does(
    produce: Callable[..., RunningProducer],
    checkpoint: Callable[..., Path],
    name: str,
    tmp_path: Path,
) -> None:
    """Window rows below the delta come from what is held, the states with what lies above."""
    path = checkpoint(name)
    producer = produce(
        *("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(TILE)), key=KEY
    ).await_ready()
    arms = Arms(producer, path, tmp_path, None)
    first = prompt(END + 1, 1)
    second = (*first[:NEXT], first[NEXT] ^ 1, *prompt(40, 2))
    full, ours, rows = asyncio.run(arms.after("full", None, first, second))
    assert full == payload_bytes(arms.layout, 0, END, (NEXT,))
    # A window that reaches below the delta's beginning, and one that does not.
    for shared, start in ((392, 384), (300, 256)):
        before = (*first[:shared], first[shared] ^ 1, *prompt(4, 3))
        delta, tokens, found = asyncio.run(arms.after(f"from {start}", before, first, second))
        assert delta == payload_bytes(arms.layout, start, END, (NEXT,))
        assert tokens == ours
        assert [place for place in rows if not np.array_equal(rows[place], found[place])] == []


def test_it_is_not_asked_for_where_the_held_window_does_not_reach_back_to_it(
    produce: Callable[..., RunningProducer], checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    path = checkpoint("muse_glimmer")
    producer = produce(
        *("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(TILE)), key=KEY
    ).await_ready()
    arms = Arms(producer, path, tmp_path, None)
    first = prompt(END + 1, 1)
    before = (*first[:392], first[392] ^ 1, *prompt(9, 3))
    assert END > len(before) - 1 > NEXT
    passed, *_ = asyncio.run(arms.after("held", before, first, None))
    assert passed == payload_bytes(arms.layout, 384, END)


def test_a_reasoning_models_next_turn_goes_on_without_the_producer(
    produce: Callable[..., RunningProducer],
    serve: Callable[..., Decoder],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    """Over HTTP: the template says where the next turn parts, and the producer is gone by then."""
    path = tmp_path / "thinking"
    shutil.copytree(checkpoint("muse_glimmer", reasoning=True), path)
    think(path)
    model = *("--model", str(path)), *("--port", "0")
    producer = produce(*model, "--device", "cpu", "--tile", "256", key=KEY).await_ready()
    decoder = serve(
        *model, *("--producer", producer.url, "--remote-threshold", "16"), key=KEY
    ).await_ready()
    until(lambda: decoder.get("/status").json()["engine"]["links"][0]["state"] == "ready")
    chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "When?"}]
    first = decoder.chat(messages=chat, max_tokens=4).json()
    assert first["baton"]["source"] == "remote"
    producer.close()
    chat += [{"role": "assistant", "content": "At ten."}, {"role": "user", "content": "And back?"}]
    second = decoder.chat(messages=chat, max_tokens=4).json()
    reused = second["baton"]["reused_tokens"]
    assert first["usage"]["prompt_tokens"] - 10 < reused < first["usage"]["prompt_tokens"] - 1
    assert second["baton"]["source"] == "resident"


def test_rows_of_it_that_are_no_numbers_are_not_kept(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The oldest rows of its last window have no part in any token of the prompt it came with."""
    path = checkpoint("muse_glimmer")
    known = read_checkpoint(path)
    last = max(
        index for index, one in enumerate(known.layout.layers) if isinstance(one, SlidingLayer)
    )
    first = prompt(END + 1, 1)
    second = (*first[:NEXT], first[NEXT] ^ 1, *prompt(40, 2))

    def spoiled(rows: Rows) -> Rows:
        """NaN in the row that only the extra cut's window still has."""
        oldest = NEXT - WINDOW
        if rows.index != last or not rows.first <= oldest < rows.last:
            return rows
        width = rows.key.nbytes // (rows.last - rows.first)
        keys = bytearray(rows.key)
        at = (oldest - rows.first) * width
        keys[at : at + width] = b"\xff" * width
        return rows._replace(key=memoryview(keys))

    async def main(gate: Gate) -> None:
        free = Gate(gate.link, None)
        async with running(path, SETTINGS, free, keeper_for(path)) as engine:
            answer = await told(engine, ask(first, 3, next_turn=NEXT, lane="remote"))
            await settled(engine)
            assert answer.finished.report.source == "remote"
            following = await told(engine, ask(second, 3, lane="local"))
            assert following.finished.report.reused_tokens < NEXT
            assert len(following.tokens) == 3

    with gated(known, Rewriting(prefiller_of(path, TILE), spoiled), tmp_path) as gate:
        asyncio.run(main(gate))
