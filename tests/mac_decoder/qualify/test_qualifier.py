"""An honest producer is qualified; each that computes something else is taken out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gb10_producer.prefill import Prefiller
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.qualify.gate import Gate
from mac_decoder.qualify.qualifier import DAY_S, Qualifier, Subject
from mac_decoder.qualify.received import Received
from mac_decoder.qualify.verdicts import Verdict, Verdicts
from protocol.architectures import text_config
from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.errors import BatonError, ConfigError, TransferError
from tests import crossing
from tests.gb10_producer.producer import wait_until
from tests.mac_decoder.engine.drive import ask, prompt, running, told
from tests.mac_decoder.qualify.lying import (
    FINGERPRINT,
    LIES,
    MOST,
    TILE,
    bytes_of_another_format,
    gated,
    honest,
    no_numbers,
    prefiller_of,
)

Checkpoints = Callable[..., Path]
SETTINGS = EngineSettings(prefill_step=TILE, remote_threshold=1)


def subject(known: Checkpoint, most: int = MOST) -> Subject:
    return Subject(known.identity, known.layout, int(text_config(known.config)["vocab_size"]), most)


async def judged(
    engine: Engine,
    known: Checkpoint,
    gates: Sequence[Gate],
    verdicts: Verdicts,
    now: Callable[[], float] = lambda: 1e9,
    most: int = MOST,
) -> None:
    """Run a qualifier until every gate is judged, and a little longer."""
    qualifier = Qualifier(engine, subject(known, most), lambda: gates, verdicts, now=now)
    task = asyncio.create_task(qualifier.run())
    try:
        async with asyncio.timeout(120):
            while not all(gate.state.name in ("ready", "unfit") for gate in gates):
                await asyncio.sleep(0.01)
                if task.done():
                    task.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def verdict_on(path: Path, source: Prefiller, state: Path, most: int = MOST) -> Verdict:
    """What an engine with the checkpoint says of ``source``."""
    known, verdicts = read_checkpoint(path), Verdicts(state)

    async def main(gate: Gate) -> Verdict:
        async with running(path, SETTINGS, gate) as engine:
            assert gate.state.name == "qualifying"
            refused = await told(engine, ask(prompt(80), 2, lane="remote"))
            assert refused.failed.error.reason == "producer_qualifying"
            await judged(engine, known, [gate], verdicts, most=most)
            answer = await told(engine, ask(prompt(90), 2, lane="remote"))
            verdict = gate.standing.verdict
            assert verdict is not None
            if verdict.fit:
                assert answer.finished.report.source == "remote"
            else:
                assert answer.failed.error.reason == "producer_unfit"
            assert engine.status()["requests"] == dict.fromkeys(engine.status()["requests"], 0)
            return verdict

    with gated(known, source, state) as gate:
        found = asyncio.run(main(gate))
    assert verdicts.of(FINGERPRINT) == found
    return found


@pytest.mark.both_blas
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", "float32"),
        ("muse_glimmer", "float32"),
        ("muse_glimmer", "bfloat16"),
        ("lfm2", "bfloat16"),
        ("qwen3_next", "float32"),
    ],
)
def test_an_honest_producer_is_qualified(
    name: str, dtype: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint(name, dtype=dtype)
    verdict = verdict_on(path, honest(prefiller_of(path)), tmp_path)
    assert verdict.fit
    assert verdict.recipe.tile == TILE
    assert min(verdict.tokens_per_s, verdict.link_bytes_per_s) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lie", LIES)
def test_a_producer_that_computes_something_else_is_taken_out(
    lie: str, dtype: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint("muse_glimmer", dtype=dtype)
    verdict = verdict_on(path, LIES[lie](prefiller_of(path)), tmp_path)
    assert not verdict.fit
    assert verdict.past[-1].apart > verdict.past[-1].allowed


def test_rows_in_another_format_are_noticed(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = checkpoint("llama", dtype="bfloat16")
    verdict = verdict_on(path, bytes_of_another_format(prefiller_of(path)), tmp_path)
    assert not verdict.fit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_are_noticed(dtype: str, checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Another revision; and the original weights behind a 4-bit decoder."""
    path = checkpoint("llama", dtype=dtype)
    other = prefiller_of(checkpoint("llama", dtype=dtype, seed=1))
    assert not verdict_on(path, other, tmp_path / "revision").fit
    quantised = crossing.save_as_mlx(path, tmp_path / "q4", bits=4)
    assert not verdict_on(quantised, prefiller_of(path), tmp_path / "original").fit
    assert verdict_on(quantised, prefiller_of(quantised), tmp_path / "same").fit


def test_a_verdict_outlives_a_restart_and_is_renewed_every_day(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """A producer that drifts is taken out, and comes back only once it is qualified anew."""
    path = checkpoint("llama")
    known, verdicts, source = read_checkpoint(path), Verdicts(tmp_path), prefiller_of(path)
    clock = [1e9]

    async def life(gate: Gate) -> Verdict:
        async with running(path, SETTINGS, gate) as engine:
            await judged(engine, known, [gate], verdicts, now=lambda: clock[0])
            verdict = gate.standing.verdict
            assert verdict is not None
            return verdict

    async def a_day_later(gate: Gate) -> Verdict:
        clock[0] += DAY_S
        async with running(path, SETTINGS, gate) as engine:
            qualifier = Qualifier(
                engine, subject(known), lambda: [gate], verdicts, now=lambda: clock[0]
            )
            task = asyncio.create_task(qualifier.run())
            async with asyncio.timeout(60):
                while gate.standing.verdict is None or gate.standing.verdict.at < clock[0]:
                    await asyncio.sleep(0.01)
            task.cancel()
            return gate.standing.verdict

    with gated(known, source, tmp_path) as gate:
        first = asyncio.run(life(gate))
    with gated(known, source, tmp_path) as gate:
        gate.link.fetch = None  # type: ignore[assignment,method-assign]
        assert asyncio.run(life(gate)) == first
    with gated(known, source, tmp_path) as gate:
        second = asyncio.run(a_day_later(gate))
        assert second.fit
        assert [past.at for past in second.past] == [10**9, 10**9 + int(DAY_S)]
        assert (first.turn, second.turn) == (0, 1)
    with gated(known, LIES["another_rope_base"](source), tmp_path) as gate:
        third = asyncio.run(a_day_later(gate))
        assert (third.fit, gate.state.name) == (False, "unfit")
        assert len(third.past) == 3
    with gated(known, prefiller_of(path), tmp_path) as gate:
        assert not asyncio.run(life(gate)).fit
        assert verdicts.forget(FINGERPRINT)
        assert not verdicts.forget(FINGERPRINT)
    with gated(known, prefiller_of(path), tmp_path) as gate:
        assert asyncio.run(life(gate)).fit


def test_each_probe_has_its_turn_and_none_is_longer_than_the_producer_takes(
    checkpoint: Checkpoints, tmp_path: Path, quick: None
) -> None:
    path = checkpoint("llama")
    known, verdicts, clock = read_checkpoint(path), Verdicts(tmp_path), [1e9]
    asked: list[int] = []

    async def main(gate: Gate) -> None:
        fetch = gate.link.fetch

        def counting(tokens: Sequence[int], *given: Any, **more: Any) -> Any:
            asked.append(len(tokens))
            return fetch(tokens, *given, **more)

        gate.link.fetch = counting  # type: ignore[assignment,method-assign]
        async with (
            running(path, SETTINGS, gate) as engine,
            looked_after(engine, known, [gate], verdicts, now=lambda: clock[0]),
        ):
            await becomes(gate, "ready")
            for _ in range(4):
                clock[0] += 3 * DAY_S
                async with asyncio.timeout(60):
                    while gate.standing.verdict.at < clock[0]:  # type: ignore[union-attr]
                        await asyncio.sleep(0.01)

    with gated(known, prefiller_of(path), tmp_path, max_tokens=300) as gate:
        asyncio.run(main(gate))
    short, middle, deep = asked[:3]
    assert (short, deep) == (97, 300)
    assert asked[3:] == [short, middle, deep, short]


def test_another_tile_or_model_is_qualified_anew(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = checkpoint("llama")
    verdict = verdict_on(path, prefiller_of(path), tmp_path)
    assert verdict.holds_for(read_checkpoint(path).identity.digest(), "", verdict.recipe)
    again = verdict_on(path, prefiller_of(path, 128), tmp_path)
    assert again.recipe.tile == 128
    assert len(again.past) == 1


def test_a_lost_producer_is_no_unfit_one(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama")
    known, verdicts = read_checkpoint(path), Verdicts(tmp_path)
    monkeypatch.setattr("mac_decoder.qualify.qualifier._RETRY_S", 0.2)

    async def main(gate: Gate) -> None:
        fetch, failed = gate.link.fetch, []

        def lost(*given: object, **more: object) -> object:
            if not failed:
                failed.append(gate.link.error())
                raise BatonError("lost", reason="connection_lost")
            assert "connection_lost" in gate.state.detail or "probe" in gate.state.detail
            return fetch(*given, **more)  # type: ignore[arg-type]

        gate.link.fetch = lost  # type: ignore[assignment,method-assign]
        async with running(path, SETTINGS, gate) as engine:
            await judged(engine, known, [gate], verdicts)
        assert failed
        assert gate.state.ready

    with gated(known, prefiller_of(path), tmp_path) as gate:
        asyncio.run(main(gate))


def test_a_verdict_that_cannot_be_kept_counts_until_the_end(
    checkpoint: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama")
    known, verdicts, fetches = read_checkpoint(path), Verdicts(tmp_path), [0]
    (tmp_path / "qualified").mkdir(mode=0o700)
    put = verdicts.put

    def full(fingerprint: bytes, verdict: Verdict) -> None:
        fetches[0] += 1
        raise ConfigError("no room", reason="trust_not_durable")

    async def main(gate: Gate) -> None:
        async with running(path, SETTINGS, gate) as engine:
            monkeypatch.setattr(verdicts, "put", full)
            monkeypatch.setattr("mac_decoder.qualify.qualifier._LOOK_S", 0.01)
            qualifier = Qualifier(engine, subject(known), lambda: [gate], verdicts)
            task = asyncio.create_task(qualifier.run())
            async with asyncio.timeout(60):
                while not gate.state.ready:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert gate.state.ready
            assert fetches == [1]
            monkeypatch.setattr(verdicts, "put", put)
            task.cancel()

    with gated(known, prefiller_of(path), tmp_path) as gate:
        asyncio.run(main(gate))
    assert verdicts.of(FINGERPRINT) is None


def test_a_producer_without_a_certificate_needs_no_verdict(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    known = read_checkpoint(checkpoint("llama"))
    with gated(known, prefiller_of(checkpoint("llama")), tmp_path) as gate:
        free = Gate(gate.link, None)
        assert free.state.ready
        assert free.error() is None
        wait_until(lambda: gate.error() is not None)


@contextlib.asynccontextmanager
async def looked_after(
    engine: Engine, known: Checkpoint, gates: Sequence[Gate], verdicts: Verdicts, **more: Any
) -> AsyncIterator[asyncio.Task[None]]:
    """A qualifier at work; it has not ended by itself."""
    qualifier = Qualifier(engine, subject(known), lambda: gates, verdicts, **more)
    task = asyncio.create_task(qualifier.run())
    try:
        yield task
        assert not task.done()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def becomes(gate: Gate, name: str) -> None:
    async with asyncio.timeout(60):
        while gate.state.name != name:
            await asyncio.sleep(0.005)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_decoder.qualify.qualifier._LOOK_S", 0.01)


def test_a_producer_of_no_numbers_is_unfit_once(
    checkpoint: Checkpoints, tmp_path: Path, quick: None
) -> None:
    path = checkpoint("llama")
    known, verdicts = read_checkpoint(path), Verdicts(tmp_path)

    async def main(gate: Gate) -> None:
        async with (
            running(path, SETTINGS, gate) as engine,
            looked_after(engine, known, [gate], verdicts),
        ):
            await becomes(gate, "unfit")
            asked = gate.link.rates.handoffs
            for _ in range(30):
                await asyncio.sleep(0.01)
                assert gate.state.name == "unfit"
            assert gate.link.rates.handoffs == asked

    with gated(known, no_numbers(prefiller_of(path)), tmp_path) as gate:
        asyncio.run(main(gate))
    found = verdicts.of(FINGERPRINT)
    assert found is not None
    assert not found.fit


def test_an_older_verdict_does_not_answer_for_one_that_cannot_be_kept(
    checkpoint: Checkpoints, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint("llama")
    known, verdicts, clock = read_checkpoint(path), Verdicts(tmp_path), [1e9]
    source = prefiller_of(path)

    def full(fingerprint: bytes, verdict: Verdict) -> None:
        raise ConfigError("no room", reason="trust_not_durable")

    async def main(gate: Gate) -> None:
        async with (
            running(path, SETTINGS, gate) as engine,
            looked_after(engine, known, [gate], verdicts, now=lambda: clock[0]),
        ):
            await becomes(gate, "ready")
            LIES["another_rope_base"](source)
            monkeypatch.setattr(verdicts, "put", full)
            clock[0] += DAY_S
            await becomes(gate, "unfit")
            for _ in range(30):
                await asyncio.sleep(0.01)
                assert gate.state.name == "unfit"

    with gated(known, source, tmp_path) as gate:
        asyncio.run(main(gate))
    assert verdicts.of(FINGERPRINT).fit  # type: ignore[union-attr]


def test_neither_a_bug_nor_silence_with_one_keeps_another_out(
    checkpoint: Checkpoints, tmp_path: Path, quick: None
) -> None:
    path = checkpoint("llama")
    known = read_checkpoint(path)
    silent = threading.Event()

    async def main(gates: list[Gate]) -> None:
        broken, stuck, good = gates
        broken.fingerprint, stuck.fingerprint = b"b" * 32, b"s" * 32

        def bug(*given: object, **more: object) -> object:
            raise KeyError("a defect")

        def nothing(*given: object, **more: object) -> object:
            silent.wait(60)
            raise BatonError("at last", reason="connection_lost")

        broken.link.fetch = bug  # type: ignore[assignment,method-assign]
        stuck.link.fetch = nothing  # type: ignore[assignment,method-assign]
        async with (
            running(path, SETTINGS, gates) as engine,
            looked_after(engine, known, gates, Verdicts(tmp_path)),
        ):
            await becomes(good, "ready")
            async with asyncio.timeout(60):
                while "qualification_broke" not in broken.state.detail:
                    await asyncio.sleep(0.01)
            assert stuck.state.name == "qualifying"
            silent.set()

    with contextlib.ExitStack() as opened:
        source = prefiller_of(path)
        gates = [
            opened.enter_context(gated(known, source, tmp_path / str(number)))
            for number in range(3)
        ]
        asyncio.run(main(gates))


def test_whoever_computes_otherwise_on_the_connection_that_is_used_is_not_asked(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """The verdict is about a recipe; another producer may have taken the address since."""
    path = checkpoint("llama")
    known = read_checkpoint(path)

    async def main(gate: Gate) -> None:
        async with running(path, SETTINGS, gate) as engine:
            await judged(engine, known, [gate], Verdicts(tmp_path))
            verdict = gate.standing.verdict
            assert verdict is not None
            other = structs.replace(verdict, recipe=structs.replace(verdict.recipe, tile=128))
            gate.judge(other)
            assert gate.state.name == "qualifying"
            with pytest.raises(TransferError) as caught:
                gate.fetch(prompt(40), Received(known.layout, 39))
            assert caught.value.reason == "producer_qualifying"
            with pytest.raises(TransferError) as caught:
                gate.link.fetch(prompt(40), Received(known.layout, 39), recipe=other.recipe)
            assert caught.value.reason == "producer_changed"
            gate.judge(verdict)
            gate.fetch(prompt(40), Received(known.layout, 39)).discarded("done")
            # It may change between the gate's look and the connection.
            fetch, asked = gate.link.fetch, []
            gate.link.fetch = lambda *given, **more: (  # type: ignore[assignment,method-assign]
                asked.append(more["recipe"]) or fetch(*given, **more)
            )
            gate.fetch(prompt(40), Received(known.layout, 39)).discarded("done")
            assert asked == [verdict.recipe]

    with gated(known, prefiller_of(path), tmp_path) as gate:
        asyncio.run(main(gate))


def test_what_an_unfit_producer_was_just_sending_is_not_installed(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = checkpoint("llama")
    known = read_checkpoint(path)

    async def main(gate: Gate) -> None:
        async with running(path, SETTINGS, gate) as engine:
            await judged(engine, known, [gate], Verdicts(tmp_path))
            verdict, fetch = gate.standing.verdict, gate.link.fetch
            assert verdict is not None
            unfit = structs.replace(verdict.past[-1], fit=False)

            def judged_meanwhile(*given: Any, **more: Any) -> Any:
                handoff = fetch(*given, **more)
                gate.judge(structs.replace(verdict, past=(unfit,)))
                return handoff

            gate.link.fetch = judged_meanwhile  # type: ignore[assignment,method-assign]
            answer = await told(engine, ask(prompt(80), 3, lane="remote"))
            assert answer.failed.error.reason == "producer_unfit"
            answer = await told(engine, ask(prompt(80), 3))
            assert answer.finished.report.source == "local"

    with gated(known, prefiller_of(path), tmp_path) as gate:
        asyncio.run(main(gate))
