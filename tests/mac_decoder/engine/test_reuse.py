"""Warm equals cold: whatever tier a cache came from, its bytes are those of its history."""

from __future__ import annotations

import asyncio
import errno
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import mlx.core as mx
import pytest
from msgspec import structs

from mac_decoder.engine.admission import cache_bytes
from mac_decoder.engine.cuts import Segment
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.live import LiveSequence
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.sampling import Draw, Drawn
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.link import Rates
from mac_decoder.keeper import Keeper
from mac_decoder.kv import memory
from mac_decoder.kv.install import extract
from mac_decoder.store.files import RealDisk
from mac_decoder.store.store import Store
from mac_decoder.tiers import restores
from mac_decoder.tiers.lookups import Lookups
from protocol.checkpoint import read_checkpoint
from protocol.errors import EngineFault, TransferError
from protocol.identity import Identity
from protocol.layout import FullLayer, payload_bytes, regions
from tests.mac_decoder.engine.drive import Told, ask, loaded_copy, prompt, running, told, until
from tests.mac_decoder.engine.links import CopyingLink, refused
from tests.mac_decoder.engine.replay import Replay
from tests.mac_decoder.reuse.made import emptied
from tests.ordinary import usual
from tests.tiny_models import WINDOW

KINDS = ("llama", "muse_glimmer", "deepseek_v3", "qwen3_next", "lfm2", "falcon_h1")
"""Full rows, rings, latents, two states, one state, and both in composite caches."""

QUICK = ("llama", "muse_glimmer", "qwen3_next", "lfm2")

FEW = (WINDOW, 257)
ALL = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW, 255, 256, 257)
STEP = 64
KEY = bytes(range(32))
RAM = 1 << 28
SETTINGS = EngineSettings(prefill_step=STEP, ram_bytes=RAM)

Tier = Literal["live", "resident", "durable", "restarted"]
TIERS: tuple[Tier, ...] = ("live", "resident", "durable", "restarted")
REPLAYED = (
    *(("muse_glimmer", tier) for tier in TIERS),
    *(("qwen3_next", tier) for tier in ("live", "durable")),
    *(("lfm2", tier) for tier in ("resident", "restarted")),
    ("llama", "durable"),
)
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
    assert answer.tokens == [replay.drawn[position] for position in range(first, live.position)]


@pytest.fixture
def loaded(checkpoint: Checkpoint, name: str) -> LoadedModel:
    return loaded_copy(checkpoint(name))


@pytest.mark.both_blas
@pytest.mark.parametrize(("name", "tier"), usual(itertools.product(KINDS, TIERS), REPLAYED))
@pytest.mark.parametrize(
    "positions", [pytest.param(FEW, id="few"), pytest.param(ALL, id="all", marks=pytest.mark.soak)]
)
def test_warm_is_a_replay_of_its_history(
    checkpoint: Checkpoint,
    loaded: LoadedModel,
    name: str,
    tier: Tier,
    positions: tuple[int, ...],
    tmp_path: Path,
) -> None:
    check_warm(checkpoint(name), loaded, tier, positions, tmp_path)


def check_warm(
    path: Path,
    loaded: LoadedModel,
    tier: Tier,
    positions: tuple[int, ...],
    directory: Path,
    count: int = 24,
) -> None:
    """At each position: cold, then from ``tier``; every byte and ``count`` tokens replayed."""

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path, directory)) as engine:
            for length in positions:
                await cold(engine, length)
            if tier != "restarted":
                for length in positions:
                    await warm(engine, length)
        if tier == "restarted":
            async with running(path, SETTINGS, keeper=keeper_for(path, directory)) as engine:
                for length in positions:
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
            held = length + 9
        elif tier == "durable":
            keeper = engine._worker._keeper
            assert keeper is not None
            await asyncio.to_thread(keeper.drain)
            emptied(keeper._resident)
        answer = await told(engine, ask(tokens, count))
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


# -- what is found, and what is not


@pytest.mark.parametrize("name", ["muse_glimmer"])
def test_in_company_restored_rows_are_the_saved_ones(
    checkpoint: Checkpoint, loaded: LoadedModel, name: str
) -> None:
    """Three others decode; what is restored is what was kept, and goes on as it did alone."""
    tokens = prompt(3 * WINDOW + 1, 5)

    async def main() -> None:
        async with running(checkpoint(name), SETTINGS, keeper=keeper_for(checkpoint(name))) as it:
            alone = await told(it, ask(tokens, 12))
            others = [asyncio.create_task(told(it, ask(prompt(40, n), 60))) for n in range(3)]
            await until(lambda: sum(it._worker._groups.sizes) == 3)
            warm = await told(it, ask(tokens, 12))
            assert warm.finished.report.source == "resident"
            await settled(it)
            live = last_live(it)
            await asyncio.gather(*others)
            replay = Replay(loaded, live.tokens[: len(tokens) - 1], live.history[:1])
            rows = extract(live.caches, loaded.layout, live.position)
            for index, layer in enumerate(loaded.layout.layers):
                if isinstance(layer, FullLayer):
                    for role in (0, 1):
                        kept = replay.rows[index, role]
                        assert bytes(rows[index, role][: kept.size]) == bytes(kept)
            assert warm.tokens == alone.tokens

    asyncio.run(main())


@pytest.mark.parametrize("name", usual(["llama", "muse_glimmer", "lfm2"], ["muse_glimmer", "lfm2"]))
def test_what_is_not_held_is_computed_and_the_reason_told(
    checkpoint: Checkpoint, name: str
) -> None:
    tokens = prompt(301, 1)
    early = (tokens[0] ^ 1, *tokens[1:])
    branch = (*tokens[:270], *prompt(31, 8))

    async def main() -> None:
        async with running(checkpoint(name), SETTINGS, keeper=keeper_for(checkpoint(name))) as it:
            cold = (await told(it, ask(tokens, 4))).finished.report
            assert (cold.source, cold.reused_tokens) == ("local", 0)
            assert "no_shared_prefix" in cold.reasons
            other = (await told(it, ask(prompt(301, 2), 4))).finished.report
            assert (other.source, other.reused_tokens, other.shared_tokens) == ("local", 0, 0)
            parted = (await told(it, ask(early, 4))).finished.report
            assert (parted.source, parted.reused_tokens) == ("local", 0)
            turned = (await told(it, ask(branch, 4))).finished.report
            if name == "llama":
                # Full rows alone: the last whole block before the branch serves.
                assert (turned.source, turned.reused_tokens) == ("resident", 256)
                assert "between_blocks" in turned.reasons
            else:
                assert (turned.source, turned.reused_tokens) == ("local", 0)
                assert {"window_wrapped", "state_not_captured"} & set(turned.reasons)
            assert (turned.shared_tokens, turned.parts_at) == (270, 270)
            assert "prompts_part" in turned.reasons
            off = (await told(it, ask(tokens, 4, reuse=False))).finished.report
            assert (off.source, off.reused_tokens, off.reasons) == ("local", 0, ("no_producer",))

    asyncio.run(main())


@pytest.mark.parametrize("name", usual(["llama", "muse_glimmer", "lfm2"], ["muse_glimmer", "lfm2"]))
def test_a_prefill_stops_where_others_will_share_it(checkpoint: Checkpoint, name: str) -> None:
    """A branch at the turn goes on exactly there, whatever the kind of cache."""
    tokens = prompt(301, 1)
    branch = (*tokens[:270], *prompt(31, 8))

    async def main() -> None:
        async with running(checkpoint(name), SETTINGS, keeper=keeper_for(checkpoint(name))) as it:
            await told(it, ask(tokens, 4, turns=(270,)))
            warm = await told(it, ask(branch, 12, turns=(270,)))
            report = warm.finished.report
            assert (report.source, report.reused_tokens) == ("resident", 270)
            cold = await told(it, ask(branch, 12, turns=(270,), reuse=False))
            assert warm.tokens == cold.tokens

    asyncio.run(main())


@pytest.mark.parametrize("name", usual(["llama", "muse_glimmer", "lfm2"], ["muse_glimmer", "lfm2"]))
def test_the_end_of_a_turn_is_kept(checkpoint: Checkpoint, name: str) -> None:
    """The next turn goes on there also when the sequence itself is gone."""
    tokens = prompt(100, 4)

    async def main() -> None:
        async with running(checkpoint(name), SETTINGS, keeper=keeper_for(checkpoint(name))) as it:
            await told(it, ask(tokens, 7))
            await settled(it)
            spoken = tuple(last_live(it).tokens.tolist())
            assert len(spoken) == 106
            it._worker._sequences.close()
            warm = await told(it, ask((*spoken, *prompt(20, 6)), 12))
            report = warm.finished.report
            assert (report.source, report.reused_tokens) == ("resident", 106)
            cold = await told(it, ask((*spoken, *prompt(20, 6)), 12, reuse=False))
            assert warm.tokens == cold.tokens

    asyncio.run(main())


@pytest.mark.both_blas
@pytest.mark.parametrize("name", ["muse_glimmer", "qwen3_next"])
@pytest.mark.parametrize("read", [1, 2, 6])
def test_a_client_that_leaves_leaves_tokens_and_rows_alike(
    checkpoint: Checkpoint, loaded: LoadedModel, name: str, read: int
) -> None:
    """A step is always under way when it leaves: its token is in both, or in neither."""
    path = checkpoint(name)

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path)) as engine:
            tokens = prompt(90)
            answer = Told()
            async with engine.submit(ask(tokens, 400)) as stream:
                async for event in stream:
                    answer.events.append(event)
                    if len(answer.tokens) == read:
                        break
            await settled(engine)
            live = last_live(engine)
            replay = Replay(loaded, live.tokens, live.history)
            assert replay.differences(extract(live.caches, loaded.layout, live.position)) == []
            spoken = live.tokens.tolist()[len(tokens) :]
            common = min(len(spoken), len(answer.tokens))
            assert spoken[:common] == answer.tokens[:common]
            going = await told(engine, ask((*live.tokens.tolist(), *prompt(9)), 5))
            assert going.finished.report.source == "live"

    asyncio.run(main())


@pytest.mark.both_blas
@pytest.mark.parametrize("name", usual(KINDS, QUICK))
def test_one_more_token_is_a_batch_of_its_own(
    checkpoint: Checkpoint, loaded: LoadedModel, name: str
) -> None:
    """Nothing is prefilled between two decoded spans: the joint stays visible all the same."""
    path = checkpoint(name)

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path)) as engine:
            answer = await told(engine, ask(prompt(100), 20))
            await settled(engine)
            spoken = tuple(last_live(engine).tokens.tolist())
            for source in ("live", "resident"):
                if source == "resident":
                    engine._worker._sequences.close()
                answer = await told(engine, ask((*spoken, 7), 20))
                report = answer.finished.report
                assert (report.source, report.prefilled_tokens) == (source, 0)
                await settled(engine)
                check_replay(loaded, last_live(engine), answer)

    asyncio.run(main())


def test_a_request_takes_back_what_its_live_sequence_has(checkpoint: Checkpoint) -> None:
    """Without reuse the old sequence is nobody's: it does not stay beside a new reservation."""
    path = checkpoint("llama")
    layout = read_checkpoint(path).layout
    budget = cache_bytes(layout, 512, STEP) + 1
    settings = EngineSettings(prefill_step=STEP, ram_bytes=RAM, cache_bytes=budget)

    async def main() -> None:
        async with running(path, settings, keeper=keeper_for(path)) as engine:
            await told(engine, ask(prompt(300), 8))
            await settled(engine)
            spoken = tuple(last_live(engine).tokens.tolist())
            async with engine.submit(ask((*spoken, 5), 150, reuse=False)) as stream:
                async for _event in stream:
                    worker = engine._worker
                    assert worker._reserved + worker._sequences.live.nbytes <= budget
            # And one that goes on from it finds it, though memory is tight.
            await told(engine, ask(prompt(300), 8))
            await settled(engine)
            going = await told(engine, ask((*last_live(engine).tokens.tolist(), 5), 3))
            assert going.finished.report.source == "live"

    asyncio.run(main())


def test_the_same_request_again_leaves_one_live_sequence(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path)) as engine:
            for _ in range(4):
                await told(engine, ask(prompt(100), 8))
            await settled(engine)
            assert engine.cache_status()["live"]["sequences"] == 1

    asyncio.run(main())


def test_a_prefill_that_broke_leaves_nothing(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number that is none would answer every prompt of that beginning, for ever."""
    path, tokens = checkpoint("llama"), prompt(600, 1)
    advance, broken = LocalPrefill.advance, [True]

    def breaking(prefill: LocalPrefill) -> Segment | None:
        if broken and prefill.position >= 64:
            broken.clear()
            cache = prefill.caches[1]
            cache.keys = cache.keys * float("nan")
        return advance(prefill)

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            monkeypatch.setattr(LocalPrefill, "advance", breaking)
            asked = ask(tokens, 4, turns=(300,))
            failed = await told(engine, asked)
            assert failed.failed.error.reason == "logits_not_finite"
            again = await told(engine, asked)
            assert (again.finished.report.source, again.finished.report.shared_tokens) == (
                "local",
                0,
            )
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            warm = await told(engine, asked)
            assert warm.finished.report.source == "durable"
            assert warm.tokens == again.tokens

    asyncio.run(main())


@pytest.mark.parametrize("bad", [1, 2, 4])
def test_an_answer_that_broke_is_no_turn(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, bad: int
) -> None:
    """At its first token, in the middle, and at its last."""
    path, read, count = checkpoint("llama"), Draw.read, [0]

    def reading(draw: Draw) -> Drawn:
        count[0] += 1
        found = read(draw)
        return replace(found, finite=False) if count[0] == bad else found

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path)) as engine:
            monkeypatch.setattr(Draw, "read", reading)
            failed = await told(engine, ask(prompt(100), 4))
            assert failed.failed.error.reason == "logits_not_finite"
            await settled(engine)
            status = engine.cache_status()
            assert status["live"]["sequences"] == 0
            assert status["resident"]["cuts"] == (0 if bad == 1 else 1)

    asyncio.run(main())


def test_a_restore_that_breaks_costs_a_rung(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it breaks by a fault of ours: the process and its other requests go on."""
    path, tokens = checkpoint("muse_glimmer"), prompt(300)

    def breaking(*_: object) -> None:
        raise MemoryError

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            cold = await told(engine, ask(tokens, 4))
            await settled(engine)
            monkeypatch.setattr(restores, "from_memory", breaking)
            monkeypatch.setattr(restores, "from_disk", breaking)
            warm = await told(engine, ask(tokens, 4))
            assert (warm.finished.report.source, warm.tokens) == ("local", cold.tokens)
            assert "restore_broke" in warm.finished.report.reasons
            monkeypatch.setattr(Lookups, "_look", breaking)
            again = await told(engine, ask(tokens, 4))
            assert (again.finished.report.source, again.tokens) == ("local", cold.tokens)
            assert "lookup_broke" in again.finished.report.reasons
            assert engine.ready()

    asyncio.run(main())


@pytest.mark.parametrize(("room", "stage"), [(Lookups, "_look"), (restores, "from_memory")])
def test_a_client_that_leaves_while_it_waits_for_a_tier_leaves_nothing(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, room: object, stage: str
) -> None:
    """No bytes stay reserved, no cut stays pinned, and the next request is served."""
    path, tokens = checkpoint("muse_glimmer"), prompt(300)
    work, entered, go = getattr(room, stage), threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        entered.set()
        go.wait(20)
        return work(*arguments)

    async def main() -> None:
        keeper = keeper_for(path)
        async with running(path, SETTINGS, keeper=keeper) as engine:
            cold = await told(engine, ask(tokens, 4))
            await settled(engine)
            engine._worker._sequences.close()
            await asyncio.to_thread(keeper.drain)
            monkeypatch.setattr(room, stage, slow)
            stream = engine.submit(ask(tokens, 4))
            await asyncio.to_thread(entered.wait, 20)
            stream.cancel()
            go.set()
            monkeypatch.undo()
            await until(lambda: engine._worker._reserved == 0)
            await settled(engine)
            warm = await told(engine, ask(tokens, 4))
            assert (warm.finished.report.source, warm.tokens) == ("resident", cold.tokens)
            engine._worker._sequences.close()
            await settled(engine)
            await asyncio.to_thread(keeper.drain)
            await until(lambda: keeper.status()["resident"]["pinned_bytes"] == 0)

    asyncio.run(main())


COMPONENTS = Identity.__struct_fields__


@pytest.mark.parametrize("component", usual(COMPONENTS, ["weights", "template", "engine"]))
@pytest.mark.parametrize("name", ["llama"])
def test_another_identity_sees_nothing_and_going_back_sees_all(
    checkpoint: Checkpoint, name: str, component: str, tmp_path: Path
) -> None:
    """Whichever component changes, everything is hidden at once, by that component's name."""
    ours = read_checkpoint(checkpoint(name))
    other = structs.replace(ours.identity, **{component: "f" * 64})
    tokens = prompt(258)

    async def main() -> None:
        for identity, source in (
            (ours.identity, "local"),
            (other, "local"),
            (ours.identity, "durable"),
        ):
            store = Store.open(tmp_path, KEY, 1 << 30, 0)
            assert [*store.hidden(other)] == (
                [] if source == "local" and identity is not other else [(component,)]
            )
            keeper = Keeper(identity, ours.layout, KEY, RAM)
            keeper.attach(store)
            async with running(checkpoint(name), SETTINGS, keeper=keeper) as engine:
                report = (await told(engine, ask(tokens, 3))).finished.report
                assert report.source == source
                assert report.shared_tokens == (257 if source == "durable" else 0)
                if identity is other:
                    # Its own cuts would hide the question.
                    await asyncio.to_thread(keeper.drain)
                    store.prune(stale=True, identity=ours.identity)

    asyncio.run(main())


def test_salts_do_not_see_each_others_prompts(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path)) as engine:
            asked = ask(prompt(300), 3)
            await told(engine, replace(asked, salt=b"one"))
            other = await told(engine, replace(asked, salt=b"two"))
            same = await told(engine, replace(asked, salt=b"one"))
            await settled(engine)
            # Nor does a conversation go on as another key's.
            spoken = tuple(last_live(engine).tokens.tolist())
            going = ask((*spoken, *prompt(9)), 3)
            stolen = await told(engine, replace(going, salt=b"three"))
            assert stolen.finished.report.reused_tokens == 0
            mine = await told(engine, replace(going, salt=b"one"))
            assert mine.finished.report.source == "live"
            assert [answer.finished.report.source for answer in (other, same)] == [
                "local",
                "resident",
            ]

    asyncio.run(main())


def test_the_alibi(checkpoint: Checkpoint) -> None:
    """One cold request, one warm-up, five warm ones: hits and their bytes move, nothing else."""
    path = checkpoint("muse_glimmer")
    tokens = prompt(2048, 3)
    layout = read_checkpoint(path).layout

    async def main() -> None:
        loaded = loaded_copy(path)
        link = CopyingLink(layout)
        link.prepare(loaded, tokens)
        settings = EngineSettings(prefill_step=STEP, ram_bytes=RAM, remote_threshold=100)
        async with running(path, settings, link, keeper_for(path)) as engine:
            cold = (await told(engine, ask(tokens, 2))).finished.report
            assert (cold.source, cold.transferred_bytes) == (
                "remote",
                payload_bytes(layout, 0, 2047),
            )
            before = engine.cache_status()["counters"]
            assert (before["cache_hits"], before["disagg_prefills"]) == (0, 1)
            for hits in range(1, 7):
                report = (await told(engine, ask(tokens, 2))).finished.report
                assert (report.source, report.reused_tokens) == ("resident", 2047)
                assert engine.cache_status()["counters"]["cache_hits"] == hits
            after = engine.cache_status()["counters"]
            moved = {name: after[name] - before.get(name, 0) for name in after}
            assert {name: count for name, count in moved.items() if count} == {
                "cache_hits": 6,
                "tier_resident": 6,
                "bytes_served_from_cache": 6 * payload_bytes(layout, 0, 2047),
            }

    asyncio.run(main())


# -- what goes wrong


def test_a_handoff_that_fails_goes_on_from_what_is_held(checkpoint: Checkpoint) -> None:
    """The producer would have been faster; without it the held part is not computed again."""
    path = checkpoint("llama")
    tokens = prompt(300, 1)
    longer = (*tokens, *prompt(300, 2))

    async def main() -> None:
        link = refused(TransferError("cut", reason="connection_lost"), read_checkpoint(path).layout)
        async with running(path, SETTINGS, link, keeper_for(path)) as engine:
            await told(engine, ask(tokens, 2, lane="local"))
            await settled(engine)
            engine._worker._sequences.close()
            link.rates = Rates(compute_tokens_per_s=1e9, wire_bytes_per_s=1e12)
            report = (await told(engine, ask(longer, 2))).finished.report
            assert (report.source, report.reused_tokens) == ("resident", 299)
            assert report.fallback
            assert report.reasons[0] == "above_threshold"
            assert report.reasons[-1] == "connection_lost"
            assert "failed_handoff" in report.phases

    asyncio.run(main())


@pytest.mark.parametrize(
    "name", usual(["llama", "muse_glimmer", "qwen3_next"], ["muse_glimmer", "qwen3_next"])
)
def test_a_damaged_file_costs_a_rung_and_no_answer(
    checkpoint: Checkpoint, name: str, tmp_path: Path
) -> None:
    path, tokens = checkpoint(name), prompt(300)

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            cold = await told(engine, ask(tokens, 12))
        for file in tmp_path.glob("cuts/**/*.safetensors"):
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1
            file.write_bytes(raw)
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            warm = await told(engine, ask(tokens, 12))
            report = warm.finished.report
            assert report.source == "local"
            assert "digest_differs" in report.reasons
            assert warm.tokens == cold.tokens
            counters = engine.cache_status()["counters"]
            assert (counters["cache_hits"], counters["fell_short_digest_differs"]) == (0, 1)
            again = await told(engine, ask(tokens, 12))
            assert again.finished.report.source == "resident"
            assert again.tokens == cold.tokens

    asyncio.run(main())


@pytest.mark.parametrize(
    "name", ["muse_glimmer", pytest.param("qwen3_next", marks=pytest.mark.soak)]
)
def test_mlx_failing_in_a_restore_is_an_engine_fault_and_the_cut_survives(
    checkpoint: Checkpoint, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of the restore fails: the place and its bytes are named."""
    path, tokens = checkpoint(name), prompt(150)
    places = len(list(regions(read_checkpoint(path).layout, 0, 149)))
    calls = {"left": -1}

    class Failing:
        """mlx as the shadow's memory sees it, whose n-th call fails."""

        def __getattr__(self, name: str) -> object:
            found = getattr(mx, name)
            return partial(self._called, found) if name in ("load", "eval") else found

        def _called(self, function: Callable[..., object], *args: object, **kwargs: object):
            calls["left"] -= 1
            if calls["left"] == 0:
                raise RuntimeError("[metal::malloc] Unable to allocate")
            return function(*args, **kwargs)

    async def main() -> None:
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            await told(engine, ask(tokens, 3))
        monkeypatch.setattr(memory, "mx", Failing())
        for failing_at in range(1, 2 * places + 1):
            keeper = keeper_for(path, tmp_path)
            async with running(path, SETTINGS, keeper=keeper) as engine:
                calls["left"] = failing_at
                answer = await told(engine, ask(tokens, 3))
                assert answer.failed.error.reason == "engine_fault"
                fault = await engine.failed()
                cause = fault.__cause__
                assert isinstance(cause, EngineFault)
                assert str(cause.field).startswith("layer ")
                assert str(cause.found).endswith(" bytes")
                calls["left"] = -1
        monkeypatch.undo()
        async with running(path, SETTINGS, keeper=keeper_for(path, tmp_path)) as engine:
            report = (await told(engine, ask(tokens, 3))).finished.report
            assert (report.source, report.reused_tokens) == ("durable", 149)

    asyncio.run(main())


@pytest.mark.parametrize("failing_at", [1, 2, 3])
def test_a_disk_that_fails_costs_no_answer(
    checkpoint: Checkpoint, tmp_path: Path, failing_at: int
) -> None:
    """Full from some write on: nothing is published, the reason is counted, memory serves."""
    path, tokens = checkpoint("muse_glimmer"), prompt(300)
    known = read_checkpoint(path)

    async def main() -> None:
        keeper = Keeper(known.identity, known.layout, KEY, RAM)
        disk = FullDisk(failing_at)
        keeper.attach(Store.open(tmp_path, KEY, 1 << 30, 0, disk=disk, listener=keeper.heard))
        disk.armed = True
        async with running(path, SETTINGS, keeper=keeper) as engine:
            cold = await told(engine, ask(tokens, 6))
            await settled(engine)
            await asyncio.to_thread(keeper.drain)
            warm = await told(engine, ask(tokens, 6))
            assert warm.finished.report.source == "resident"
            assert warm.tokens == cold.tokens
            assert engine.cache_status()["kept"]["disk_full"] >= 1
            # Its block, its cut, and only then the cut where the answer ended.
            unpublished = failing_at < 3
            assert ("durable_out_of_space" in warm.finished.report.reasons) == unpublished

    asyncio.run(main())


class FullDisk(RealDisk):
    """A disk that is full from its ``failing_at``-th write on, once armed."""

    def __init__(self, failing_at: int) -> None:
        super().__init__()
        self._left = failing_at
        self.armed = False

    def write(self, handle: int, parts: Sequence[memoryview]) -> int:
        self._left -= self.armed
        if self.armed and self._left <= 0:
            raise OSError(errno.ENOSPC, "no space left on device")
        return super().write(handle, parts)


def test_without_room_in_memory_the_disk_serves(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path, tokens = checkpoint("llama"), prompt(300)
    settings = EngineSettings(prefill_step=STEP, ram_bytes=0)

    async def main() -> None:
        async with running(path, settings, keeper=keeper_for(path, tmp_path)) as engine:
            cold = await told(engine, ask(tokens, 5))
            keeper = engine._worker._keeper
            assert keeper is not None
            await settled(engine)
            await asyncio.to_thread(keeper.drain)
            warm = await told(engine, ask(tokens, 5))
            assert warm.finished.report.source == "durable"
            assert warm.tokens == cold.tokens

    asyncio.run(main())


def test_live_sequences_give_way_to_requests(checkpoint: Checkpoint) -> None:
    """Memory for requests is taken back from the live tier, the oldest first."""
    path = checkpoint("llama")
    layout = read_checkpoint(path).layout
    # Room for two sequences of this length and no more.
    budget = 2 * cache_bytes(layout, 512, STEP) + 1
    settings = EngineSettings(prefill_step=STEP, ram_bytes=RAM, cache_bytes=budget)

    async def main() -> None:
        async with running(path, settings, keeper=keeper_for(path)) as engine:
            for salt in range(4):
                await told(engine, ask(prompt(300, salt), 8))
            await settled(engine)
            status = engine.cache_status()["live"]
            assert status["bytes"] <= budget
            assert status["sequences"] == 2
            assert status["evicted"] == 2
            # The latest is still live, the oldest is resident.
            tokens = tuple(last_live(engine).tokens.tolist())
            going = await told(engine, ask((*tokens, *prompt(5)), 3))
            assert going.finished.report.source == "live"
            old = await told(engine, ask(prompt(300, 0), 8))
            assert old.finished.report.source == "resident"

    asyncio.run(main())
