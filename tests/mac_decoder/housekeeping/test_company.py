"""Keeping house while a model answers: the same tokens, the same bytes, and nothing comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.sequences import Sequences
from mac_decoder.housekeeping.house import Housekeeping
from mac_decoder.store.store import Store
from protocol.errors import EngineFault
from tests.mac_decoder.engine.drive import Told, ask, loaded_copy, prompt, running, told
from tests.mac_decoder.engine.test_reuse import (
    KEY,
    SETTINGS,
    check_replay,
    keeper_for,
    last_live,
    settled,
)
from tests.mac_decoder.housekeeping.test_house import Gate, Gated, walked

Checkpoint = Callable[..., Path]

LENGTHS = (300, 520, 301)
"""The second extends the first by what was said; the third parts from both."""


@pytest.fixture
def path(checkpoint: Checkpoint) -> Path:
    return checkpoint("muse_glimmer")


@pytest.fixture
def loaded(path: Path) -> LoadedModel:
    return loaded_copy(path)


def texts() -> Sequence[tuple[int, ...]]:
    long = prompt(600)
    return (long[:300], long[:520], (*long[:256], *prompt(45, 3)))


def test_requests_beside_every_operation_are_those_without(
    path: Path, loaded: LoadedModel, tmp_path: Path
) -> None:
    """Requests come one after another while operations do: each answer is a replay of what its
    cache says of itself, byte for byte, whatever was deleted under it.
    """

    async def main() -> None:
        keeper = keeper_for(path, tmp_path)
        async with running(path, SETTINGS, keeper=keeper) as engine:
            house = Housekeeping(keeper, engine)
            try:
                done = asyncio.Event()
                keeping = asyncio.create_task(keep_house(house, done))
                sources = [
                    await answered(engine, loaded, text) for _ in range(4) for text in texts()
                ]
                done.set()
                kinds = await keeping
            finally:
                await house.close()
        assert {"verify", "prune", "forget", "clear"} <= kinds
        assert "local" in sources

    async def keep_house(house: Housekeeping, done: asyncio.Event) -> set[str]:
        kinds: set[str] = set()
        while not done.is_set() or len(kinds) < 4:
            found = await house.verify().result()
            assert found.bad == []
            kinds.add("verify")
            shown = (await house.conversations()).shown
            if shown:
                operation = house.forget(shown[-1].id)
                kinds.add("forget")
                async for _ in operation.follow():
                    pass
                assert operation.error is None or operation.error.reason == "conversation_unknown"
            await house.prune((await house.footprint()).on_disk // 2).result()
            kinds.add("prune")
            await house.clear(foreign=True).result()
            kinds.add("clear")
        return kinds

    async def answered(engine: Engine, loaded: LoadedModel, text: Sequence[int]) -> str:
        answer = await told(engine, ask(text, 6))
        await settled(engine)
        held = engine._worker._sequences.live._held
        if held:
            live = last_live(engine)
            if live.position == len(text) - 1 + len(answer.tokens):
                check_replay(loaded, live, answer)
        return answer.finished.report.source

    asyncio.run(main())


def test_what_is_cleared_is_in_no_tier_and_comes_back_with_its_use(
    path: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        keeper = keeper_for(path, tmp_path)
        async with running(path, SETTINGS, keeper=keeper) as engine:
            house = Housekeeping(keeper, engine)
            try:
                first, longer, third = texts()
                cold = [await one(engine, text) for text in (first, longer, third)]
                shown = (await house.conversations()).shown
                assert {tier for each in shown for tier in each.tiers} == {
                    "live", "resident", "durable"
                }  # fmt: skip
                assert sum(each.live_bytes for each in shown) == sum(
                    live.nbytes for live in await engine.live()
                )
                would = await house.would_clear()
                before = walked(tmp_path)
                gone = await house.clear().result()
                assert gone == would
                assert (gone.files, gone.nbytes) == (len(before), sum(before.values()))
                assert gone.live == 3
                assert walked(tmp_path) == {}
                assert (await house.conversations()).shown == ()
                assert await engine.live() == ()
                again = await one(engine, longer)
                assert again.finished.report.source == "local"
                assert again.finished.report.reasons[0] == "no_shared_prefix"
                assert again.tokens == cold[1].tokens
                assert walked(tmp_path) != {}
                # Everything of it is used: none of it is capped, or thought to be on disk.
                more = await one(engine, (*longer, *again.tokens, *prompt(9, 5)))
                assert more.finished.report.source == "live"
                assert "capped_by_durable" not in more.finished.report.reasons
            finally:
                await house.close()

    async def one(engine: Engine, text: Sequence[int]) -> Told:
        answer = await told(engine, ask(text, 6, lane="local"))
        await settled(engine)
        assert await asyncio.to_thread(engine._worker._sequences.keeper.drain, 20)  # type: ignore[union-attr]
        return answer

    asyncio.run(main())


def test_a_conversation_is_forgotten_in_every_tier_and_its_branch_stays(
    path: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        keeper = keeper_for(path, tmp_path)
        async with running(path, SETTINGS, keeper=keeper) as engine:
            house = Housekeeping(keeper, engine)
            try:
                _, longer, third = texts()
                for text in (longer, third):
                    await told(engine, ask(text, 6, turns=(256,), lane="local"))
                    await settled(engine)
                assert await asyncio.to_thread(keeper.drain, 20)
                shown = (await house.conversations()).shown
                (going,) = [each for each in shown if each.position > 500]
                (staying,) = [each for each in shown if each.position < 400]
                assert [cut.position for cut in staying.cuts][-1] == 256
                before = walked(tmp_path)
                would = await house.would_forget(going.id)
                gone = await house.forget(going.id).result()
                assert gone == would
                assert gone.live == 1
                after = walked(tmp_path)
                assert gone.files == len(before) - len(after)
                assert gone.nbytes == sum(before.values()) - sum(after.values())
                (left,) = (await house.conversations()).shown
                assert left.id == staying.id
                assert len(await engine.live()) == 1
                # The turn that both share serves both.
                back = await told(engine, ask(longer, 6, turns=(256,), lane="local"))
                assert back.finished.report.reused_tokens == 256
            finally:
                await house.close()

    asyncio.run(main())


def test_a_fault_of_the_engine_ends_no_look_and_no_deletion(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLX thread dies of what an operation asks it, while a look waits for it too."""

    def breaks(*arguments: object) -> None:
        raise RuntimeError("[METAL] Command buffer execution failed")

    async def main() -> None:
        keeper = keeper_for(path, tmp_path)
        async with running(path, SETTINGS, keeper=keeper) as engine:
            house = Housekeeping(keeper, engine)
            await told(engine, ask(prompt(300), 4))
            await settled(engine)
            assert await asyncio.to_thread(keeper.drain, 20)
            before = walked(tmp_path)
            assert before
            monkeypatch.setattr(Sequences, "forget", breaks)
            operation = house.clear()
            asking = asyncio.create_task(house.conversations())
            gone = await asyncio.wait_for(operation.result(), 20)
            fault = await asyncio.wait_for(engine.failed(), 20)
            assert (type(fault), fault.found) == (EngineFault, "RuntimeError")
            await asyncio.wait_for(asking, 20)
            assert (gone.live, gone.files) == (0, len(before))
            assert gone.cuts > 0
            assert keeper.resident.stats().cuts == 0
            assert walked(tmp_path) == {}
            assert await engine.live() == ()
            assert (await house.conversations()).shown == ()
            await house.close()

    asyncio.run(main())


def test_the_engine_is_closed_before_an_operation_ends(path: Path, tmp_path: Path) -> None:
    """As when the decoder stops: open answers end first."""

    async def main() -> None:
        disk, gate = Gated(), Gate()
        keeper = keeper_for(path)
        keeper.attach(Store.open(tmp_path, KEY, 1 << 28, 0, disk, keeper.heard))
        async with running(path, SETTINGS, keeper=keeper) as engine:
            house = Housekeeping(keeper, engine)
            for text in texts()[1:]:
                await told(engine, ask(text, 4))
                await settled(engine)
            assert await asyncio.to_thread(keeper.drain, 20)
            disk.before["unlink"] = gate
            operation = house.clear()
            assert await asyncio.to_thread(gate.reached.wait, 20)
            await engine.close()
            assert operation.state == "running"
            closing = asyncio.create_task(house.close())
            await asyncio.sleep(0)
            gate.go.set()
            await asyncio.wait_for(closing, 20)
            assert operation.state == "cancelled"
            assert operation.outcome is not None
            assert operation.outcome.live == 2
            assert operation.outcome.files > 0

    asyncio.run(main())
