"""Deltas through the engine: held rows and sent ones are the cache that a full handoff gives."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mac_decoder.engine.composing import Composing
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.keeper import Keeper
from mac_decoder.kv.install import extract
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reuse.facts import DeltaHandoff
from mac_decoder.tiers import restores
from protocol.errors import IntegrityError, TransferError
from protocol.layout import payload_bytes
from tests.mac_decoder.engine.drive import Told, ask, loaded_copy, prompt, running, told, until
from tests.mac_decoder.engine.links import CopyingLink
from tests.mac_decoder.engine.test_reuse import keeper_for, last_live, settled
from tests.mac_decoder.reuse.made import emptied
from tests.ordinary import usual

KINDS = ("llama", "muse_glimmer", "lfm2", "qwen3_next")
TILE = 64
WINDOW = 32
ALWAYS = EngineSettings(prefill_step=TILE, remote_threshold=1)
SHARED = 200

Checkpoint = Callable[..., Path]


def branches(length: int, shared: int = SHARED) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt of ``length`` tokens, and one as long that parts from it at ``shared``."""
    first = prompt(length, 1)
    return first, (*first[:shared], *prompt(length - shared, 2))


def link_for(path: Path, *prompts: tuple[int, ...]) -> CopyingLink:
    loaded = loaded_copy(path)
    link = CopyingLink(loaded.layout, TILE)
    for tokens in prompts:
        link.prepare(loaded, tokens)
    return link


def same_rows(one: dict[Any, np.ndarray], other: dict[Any, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(rows, other[place]) for place, rows in one.items()
    )


class Delta:
    """A prompt that is held, one that branches off it, and what a full handoff of that gives."""

    def __init__(self, path: Path, length: int = 300, shared: int = SHARED) -> None:
        self.path = path
        self.layout = loaded_copy(path).layout
        self.first, self.second = branches(length, shared)
        self.link = link_for(path, self.first, self.second)
        self.end = length - 1

    async def answered(self, engine: Engine, tokens: tuple[int, ...], **more: Any) -> Told:
        answer = await told(engine, ask(tokens, 12, **more))
        await settled(engine)
        return answer

    async def full(self) -> tuple[list[int], dict[Any, np.ndarray]]:
        """Tokens, and all rows at the answer's end, of an engine that holds nothing."""
        async with running(self.path, ALWAYS, self.link, keeper_for(self.path)) as engine:
            answer = await self.answered(engine, self.second)
            assert answer.finished.report.source == "remote"
            return answer.tokens, self.rows(engine)

    def rows(self, engine: Engine) -> dict[Any, np.ndarray]:
        live = last_live(engine)
        return extract(live.caches, self.layout, live.position)

    def check(self, answer: Told, start: int) -> None:
        """It was a delta from ``start``, to the byte."""
        report = answer.finished.report
        sent = payload_bytes(self.layout, start, self.end)
        assert (report.source, report.reused_tokens) == ("remote", start)
        assert report.transferred_bytes == sent
        assert report.restore_bytes == payload_bytes(self.layout, 0, self.end) - sent
        assert report.prefilled_tokens == self.end - start
        assert report.computed_tokens == self.end - self.link.holds
        assert not report.fallback


@pytest.mark.both_blas
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("lane", ["local", "auto"])
def test_a_delta_gives_what_a_full_handoff_gives(
    checkpoint: Checkpoint, name: str, lane: Any
) -> None:
    """Whoever made the held rows: every byte and every token, also of what goes on from it."""
    it = Delta(checkpoint(name))

    async def main() -> None:
        tokens, rows = await it.full()
        async with running(it.path, ALWAYS, it.link, keeper_for(it.path)) as engine:
            await it.answered(engine, it.first, lane=lane)
            it.link.holds = 64
            delta = await it.answered(engine, it.second)
            it.check(delta, SHARED // TILE * TILE)
            assert delta.tokens == tokens
            assert same_rows(it.rows(engine), rows)
            engine._worker._sequences.close()
            again = await it.answered(engine, it.second)
            assert again.finished.report.source == "resident"
            assert again.tokens == tokens
            assert same_rows(it.rows(engine), rows)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["muse_glimmer"])
@pytest.mark.parametrize(
    ("length", "shared"),
    usual(
        itertools.product([97, 134, 171, 208, 245], [64, 65, 95]), [(97, 95), (208, 64), (208, 65)]
    ),
)
def test_deltas_around_the_window(
    checkpoint: Checkpoint, name: str, length: int, shared: int
) -> None:
    """Where the held ring has the rows that are missing, and where it lost them."""
    it = Delta(checkpoint(name), length, shared)

    async def main() -> None:
        tokens, rows = await it.full()
        async with running(it.path, ALWAYS, it.link, keeper_for(it.path)) as engine:
            await it.answered(engine, it.first)
            answer = await it.answered(engine, it.second)
            it.check(answer, shared // TILE * TILE)
            assert answer.tokens == tokens
            assert same_rows(it.rows(engine), rows)

    asyncio.run(main())


@pytest.mark.parametrize("name", usual(KINDS, ["muse_glimmer", "lfm2"]))
def test_a_durable_cut_is_the_lower_part_after_a_restart(
    checkpoint: Checkpoint, name: str, tmp_path: Path
) -> None:
    """The disk is searched by whole blocks, and then by the tokens of the nearest cut."""
    it = Delta(checkpoint(name), 450, 330)

    async def main() -> None:
        tokens, rows = await it.full()
        keeper = keeper_for(it.path, tmp_path)
        async with running(it.path, ALWAYS, it.link, keeper) as engine:
            await it.answered(engine, it.first)
        keeper = keeper_for(it.path, tmp_path)
        async with running(it.path, ALWAYS, it.link, keeper) as engine:
            answer = await it.answered(engine, it.second)
            it.check(answer, 320)
            assert answer.tokens == tokens
            assert same_rows(it.rows(engine), rows)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "tier"),
    usual(
        itertools.product(["llama", "muse_glimmer", "lfm2"], ["resident", "durable"]),
        [("muse_glimmer", "durable"), ("lfm2", "resident")],
    ),
)
def test_everything_may_be_sent_in_place_of_a_delta(
    checkpoint: Checkpoint, name: str, tier: str, tmp_path: Path
) -> None:
    """It takes the place of what was placed, and of all that is said about it."""
    it = Delta(checkpoint(name), 450, 330)
    it.link.sends_all = True

    async def main() -> None:
        tokens, rows = await it.full()
        keeper = keeper_for(it.path, tmp_path if tier == "durable" else None)
        async with running(it.path, ALWAYS, it.link, keeper) as engine:
            await it.answered(engine, it.first)
            if tier == "durable":
                await asyncio.to_thread(keeper.drain)
                emptied(keeper._resident)
            answer = await it.answered(engine, it.second)
            report = answer.finished.report
            assert (report.source, report.reused_tokens) == ("remote", 0)
            assert report.transferred_bytes == payload_bytes(it.layout, 0, it.end)
            assert "full_for_delta" in report.reasons
            assert answer.tokens == tokens
            assert same_rows(it.rows(engine), rows)

    asyncio.run(main())


@pytest.mark.parametrize("name", usual(["llama", "muse_glimmer"], ["muse_glimmer"]))
@pytest.mark.parametrize("how", ["gone", "damaged", "broken"])
def test_a_delta_without_its_lower_part_is_sent_whole(
    checkpoint: Checkpoint, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason is told, the producer is not blamed, and the next request is fine."""
    it = Delta(checkpoint(name))

    def fails(*_: Any) -> None:
        if how == "damaged":
            raise IntegrityError("a digest differs", reason="digest_differs")
        if how == "broken":
            raise KeyError("a defect")

    async def main() -> None:
        tokens, rows = await it.full()
        async with running(it.path, ALWAYS, it.link, keeper_for(it.path)) as engine:
            await it.answered(engine, it.first)
            with monkeypatch.context() as patched:
                patched.setattr(restores, "from_memory", fails)
                answer = await it.answered(engine, it.second)
            report = answer.finished.report
            reason = {"gone": "cut_gone", "damaged": "digest_differs", "broken": "restore_broke"}
            assert (report.source, report.reused_tokens) == ("remote", 0)
            assert reason[how] in report.reasons
            assert "failed_handoff" in report.phases
            assert answer.tokens == tokens
            assert same_rows(it.rows(engine), rows)
            assert engine.status()["fallbacks"] == {}
            engine._worker._sequences.close()
            await settled(engine)
            resident = engine._worker._keeper._resident  # type: ignore[union-attr]
            await until(lambda: resident.stats().pinned_bytes == 0)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["muse_glimmer"])
def test_a_held_token_that_differs_is_no_part_of_it(checkpoint: Checkpoint, name: str) -> None:
    """One token early: nothing of what is held serves, and the whole is sent."""
    it = Delta(checkpoint(name))
    changed = (it.first[0] ^ 1, *it.first[1:])
    it.link.prepare(loaded_copy(it.path), changed)

    async def main() -> None:
        tokens, rows = await it.full()
        async with running(it.path, ALWAYS, it.link, keeper_for(it.path)) as engine:
            await it.answered(engine, changed)
            answer = await it.answered(engine, it.second)
            assert answer.finished.report.reused_tokens == 0
            assert answer.tokens == tokens
            assert same_rows(it.rows(engine), rows)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["muse_glimmer"])
@pytest.mark.parametrize("how", ["fails", "cancelled", "waiting"])
def test_a_delta_that_ends_early_holds_nothing(checkpoint: Checkpoint, name: str, how: str) -> None:
    """A producer that fails, a client that leaves in mid-handoff or in the queue before it."""
    it = Delta(checkpoint(name))

    async def main() -> None:
        keeper = keeper_for(it.path)
        async with running(it.path, ALWAYS, it.link, keeper) as engine:
            await it.answered(engine, it.first)
            engine._worker._sequences.close()
            await settled(engine)
            if how == "fails":
                it.link.raises = TransferError("gone", reason="connection_lost")
                report = (await it.answered(engine, it.second)).finished.report
                assert (report.source, report.fallback) == ("local", True)
                assert "connection_lost" in report.reasons
            else:
                it.link.hold = threading.Event()
                tasks = [asyncio.create_task(it.answered(engine, it.second))]
                await until(lambda: len(it.link.shadows) == 2)
                if how == "waiting":
                    tasks.append(asyncio.create_task(it.answered(engine, it.second)))
                    await until(lambda: engine.status()["waiting_for_producer"] == 1)
                for task in reversed(tasks):
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                await until(lambda: it.link.cancellations == 1)
                it.link.hold = None
            engine._worker._sequences.close()
            await settled(engine)
            await until(lambda: keeper._resident.stats().pinned_bytes == 0)
            it.link.raises = None
            answer = await it.answered(engine, it.second)
            assert answer.tokens == (await it.full())[0]

    asyncio.run(main())


class Gate:
    """Holds the copying of held rows at its first piece."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        compose = Keeper.compose

        def gated(
            keeper: Keeper, delta: Any, end: int, extra: Any, into: Any, cancelled: Any
        ) -> Any:
            def held(*place: int) -> memoryview:
                view = into(*place)
                self.reached.set()
                assert self.go.wait(20)
                return view

            return compose(keeper, delta, end, extra, held, cancelled)

        monkeypatch.setattr(Keeper, "compose", gated)


class Following(CopyingLink):
    """A link whose producer answers only when the copying of held rows is under way."""

    gate: Gate

    def fetch(self, *args: Any, **more: Any) -> Any:
        assert self.gate.reached.wait(20)
        return super().fetch(*args, **more)


@pytest.mark.parametrize("name", ["muse_glimmer"])
@pytest.mark.parametrize("how", ["sealed first", "everything", "withdrawn", "fails"])
def test_held_rows_that_are_slow_to_come(
    checkpoint: Checkpoint, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever becomes of the handoff meanwhile, nobody writes where somebody else does, and
    its memory is free at once: without a round of the collector of cycles.
    """
    it = Delta(checkpoint(name))

    async def main() -> None:
        tokens, rows = await it.full()
        keeper = keeper_for(it.path)
        async with running(it.path, ALWAYS, it.link, keeper) as engine:
            await it.answered(engine, it.first)
            engine._worker._sequences.close()
            await settled(engine)
            gate = Gate(monkeypatch)
            link = Following(it.layout, TILE, made=it.link.made, sends_all=how == "everything")
            link.gate = gate
            if how == "fails":
                link.raises = TransferError("gone", reason="connection_lost")
            engine._worker._filling.producers._each[0]._lane._link = link  # type: ignore[union-attr]
            gc.collect()
            gc.disable()
            try:
                task = asyncio.create_task(it.answered(engine, it.second))
                await asyncio.to_thread(gate.reached.wait, 20)
                if how == "sealed first":
                    await until(lambda: len(link.handoffs) == 1)
                elif how == "withdrawn":
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                gate.go.set()
                if how == "withdrawn":
                    await until(lambda: engine.status()["fetching"] is False)
                else:
                    answer = await task
                    assert answer.tokens == tokens
                if how == "sealed first":
                    it.check(answer, SHARED // TILE * TILE)
                    assert answer.finished.report.phases["compose"] >= 0
                if how in ("sealed first", "everything"):
                    assert same_rows(it.rows(engine), rows)
                engine._worker._sequences.close()
                await settled(engine)
                await until(lambda: keeper._resident.stats().pinned_bytes == 0)
                assert [reference() for reference in link.shadows if reference() is not None] == []
            finally:
                gc.enable()

    asyncio.run(main())


@pytest.mark.parametrize("name", ["llama"])
def test_held_rows_behind_others_restores_keep_nobody_waiting(
    checkpoint: Checkpoint, name: str
) -> None:
    """What was not begun is taken back; a keeper that is closed has nothing."""
    it = Delta(checkpoint(name))
    keeper = keeper_for(it.path)
    busy = threading.Event()
    others = [keeper._restores.submit(busy.wait, 20) for _ in range(2)]
    delta = DeltaHandoff("resident", b"no such cut", 300, 192)
    composing = Composing(keeper, delta, Shadow(it.layout, 192, 299), threading.Event())
    assert not composing.lost
    composing.begin(0)
    assert composing.cut == 0
    assert composing.wait() == (None, "")
    waiting = Composing(keeper, delta, Shadow(it.layout, 192, 299), threading.Event())
    keeper._restores.shutdown(wait=False, cancel_futures=True)
    assert waiting.lost
    assert waiting.wait() == (None, "cut_gone")
    busy.set()
    for other in others:
        other.result()
    keeper.close()
