"""The engine as a whole, on real tiny models: what a client of ``Engine.submit`` may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from mac_decoder.engine.admission import PaddingRule
from mac_decoder.engine.events import Failed, Finished, Generation, Progress, Sampling, Token
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.settings import EngineSettings
from protocol.errors import CapacityError, ConfigError, EngineFault, RequestError
from tests.mac_decoder.engine.drive import (
    GREEDY,
    Told,
    all_told,
    ask,
    loaded_copy,
    logprobs_after,
    prompt,
    reference,
    running,
    told,
    until,
)
from tests.ordinary import usual
from tests.tiny_models import WINDOW

MODELS = ("llama", "muse_glimmer")
HYBRIDS = ("qwen3_next", "lfm2", "falcon_h1")
SLOW = ("qwen3_next", "falcon_h1")
"""Recurrent states beside attention: two arrays, one, and both in one composite cache."""
LENGTHS = (1, 2, WINDOW, WINDOW + 1, WINDOW + 2, 65, 130)

Checkpoint = Callable[..., Path]


@pytest.mark.both_blas
@pytest.mark.parametrize("name", usual(MODELS + HYBRIDS, ["muse_glimmer", "qwen3_next", "lfm2"]))
def test_greedy_tokens_are_those_of_generate_step(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint(name)
    loaded = loaded_copy(path)

    async def main() -> None:
        async with running(path, EngineSettings(prefill_step=64)) as engine:
            for length in LENGTHS if name in MODELS else (1, 2, 65, 130):
                tokens = prompt(length)
                found = await told(engine, ask(tokens, 32))
                assert found.tokens == reference(loaded, tokens, 32), length
                report = found.finished.report
                assert report.source == "local"
                assert report.prefilled_tokens == length - 1
                assert report.transferred_bytes == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "slack"),
    [
        ("llama", 0),
        *((name, 1 << 30) for name in ("muse_glimmer", "lfm2")),
        *(pytest.param(name, 1 << 30, marks=pytest.mark.soak) for name in ("llama", *SLOW)),
    ],
)
def test_eight_requests_of_very_different_length_give_the_tokens_they_give_alone(
    checkpoint: Checkpoint, name: str, slack: int
) -> None:
    """In groups of their own, and all in one batch that is padded to the longest."""
    settings = EngineSettings(padding=PaddingRule(ratio=1.0, slack=slack))
    lengths = (1, 3, 17, WINDOW, 70, 150, 301, 420)
    # The longest come last and answer least, so that at some time all eight decode.
    requests = [ask(prompt(n, n), 44 - 4 * place) for place, n in enumerate(lengths)]

    async def main() -> None:
        async with running(checkpoint(name), settings) as engine:
            alone = [await told(engine, request) for request in requests]
            seen: list[list[int]] = []

            async def watched(request: Generation) -> Told:
                found = Told()
                async with engine.submit(request) as stream:
                    async for event in stream:
                        found.events.append(event)
                        seen.append(engine.status()["groups"])
                return found

            together = await asyncio.gather(*(watched(request) for request in requests))
            assert [t.tokens for t in together] == [t.tokens for t in alone]
            if slack:
                assert max(max(groups, default=0) for groups in seen) >= 5
                assert max(len(groups) for groups in seen) == 1
            else:
                # Rows are reserved by 256: six requests take that, two take 512.
                assert max(len(groups) for groups in seen) == 2
            await until(lambda: engine.status()["cache_bytes_reserved"] == 0)
            assert not any(engine.status()["requests"].values())

    asyncio.run(main())


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens_ends_with_length(checkpoint: Checkpoint, count: int) -> None:
    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            found = await told(engine, ask(prompt(9), count))
            assert len(found.tokens) == count
            assert found.finished.reason == "length"

    asyncio.run(main())


def test_a_stop_token_ends_and_is_not_told(checkpoint: Checkpoint) -> None:
    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            free = await told(engine, ask(prompt(9), 30))
            # The first token that did not come before.
            index = next(i for i in range(3, 30) if free.tokens[i] not in free.tokens[:i])
            stopped = await told(engine, ask(prompt(9), 30, stops=[free.tokens[index], 511]))
            assert stopped.tokens == free.tokens[:index]
            assert stopped.finished.reason == "stop"
            at_once = await told(engine, ask(prompt(9), 30, stops=[free.tokens[0]]))
            assert at_once.tokens == []
            assert at_once.finished.reason == "stop"
            # Counted is what was told, as in the answers' own usage.
            answers = (free, stopped, at_once)
            counted = engine.status()["generated_tokens"]
            assert counted == sum(len(answer.tokens) for answer in answers)

    asyncio.run(main())


def test_a_seed_gives_the_same_tokens_alone_and_in_company(checkpoint: Checkpoint) -> None:
    seeded = ask(prompt(40), 30, Sampling(temperature=0.9, top_p=0.95, seed=4))
    other = ask(prompt(40), 30, Sampling(temperature=0.9, top_p=0.95, seed=5))

    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            alone = await told(engine, seeded)
            company = [ask(prompt(n, n), 40, Sampling(seed=n)) for n in (3, 41, 90)]
            together = await all_told(engine, [*company, seeded, other, seeded])
            assert together[3].tokens == alone.tokens
            assert together[5].tokens == alone.tokens
            assert together[4].tokens != alone.tokens

    asyncio.run(main())


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_are_the_models(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint(name)
    loaded = loaded_copy(path)
    tokens = prompt(20)

    async def main() -> None:
        async with running(path) as engine:
            company = [ask(prompt(n, n), 30) for n in (3, 80)]
            _a, _b, found = await all_told(engine, [*company, ask(tokens, 6, top_logprobs=4)])
            said = [event for event in found.events if isinstance(event, Token)]
            history = list(tokens)
            for event in said:
                exact = logprobs_after(loaded, history).tolist()
                assert event.logprob == pytest.approx(exact[event.id], abs=1e-4)
                best = sorted(range(len(exact)), key=lambda i: -exact[i])[:4]
                assert [i for i, _value in event.top] == best
                assert event.top[0][0] == event.id
                history.append(event.id)

    asyncio.run(main())


def test_penalties_and_bias_change_what_is_drawn(checkpoint: Checkpoint) -> None:
    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            plain = await told(engine, ask(prompt(9), 20))
            biased = Sampling(temperature=0.0, logit_bias={77: 1000.0})
            assert (await told(engine, ask(prompt(9), 5, biased))).tokens == [77] * 5
            strict = Sampling(temperature=0.0, presence_penalty=1e3, penalty_context=64)
            fresh = await told(engine, ask(prompt(9), 20, strict))
            assert len(set(fresh.tokens)) == 20
            assert not set(fresh.tokens) & set(prompt(9))
            # In company of others, who stay as they were.
            mixed = await all_told(
                engine, [ask(prompt(9), 20), ask(prompt(9), 20, strict), ask(prompt(9), 5, biased)]
            )
            assert [t.tokens for t in mixed] == [plain.tokens, fresh.tokens, [77] * 5]

    asyncio.run(main())


def test_a_client_that_leaves_frees_its_slot_at_the_next_step(checkpoint: Checkpoint) -> None:
    settings = EngineSettings(max_active=1, max_waiting=1)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            async with engine.submit(ask(prompt(20), 100_000)) as endless:
                async for event in endless:
                    if isinstance(event, Token):
                        break
                waiting = asyncio.ensure_future(told(engine, ask(prompt(5), 3)))
                await until(lambda: engine.status()["requests"]["waiting"] == 1)
                assert not waiting.done()
            assert [event async for event in endless if isinstance(event, Finished)] == []
            found = await asyncio.wait_for(waiting, 20)
            assert len(found.tokens) == 3
            assert engine.status()["ended"]["cancelled"] == 1

    asyncio.run(main())


def test_cancelled_while_waiting_and_while_prefilling(checkpoint: Checkpoint) -> None:
    settings = EngineSettings(max_active=1, prefill_step=16)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            long = engine.submit(ask(prompt(3000), 5))
            queued = engine.submit(ask(prompt(30), 5))
            async for event in long:
                if isinstance(event, Progress):
                    break
            queued.cancel()
            long.cancel()
            long.cancel()
            found = await asyncio.wait_for(told(engine, ask(prompt(4), 2)), 20)
            assert len(found.tokens) == 2
            assert engine.status()["ended"] == {"cancelled": 2, "length": 1}
            assert engine.status()["cache_bytes_reserved"] == 0

    asyncio.run(main())


def test_a_full_queue_is_a_capacity_error_with_a_time_to_come_back(checkpoint: Checkpoint) -> None:
    settings = EngineSettings(max_active=1, max_waiting=1)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            streams = [engine.submit(ask(prompt(5), 10_000)) for _ in range(2)]
            with pytest.raises(CapacityError) as caught:
                engine.submit(ask(prompt(5), 1))
            assert caught.value.reason == "queue_full"
            assert caught.value.retry_after_s >= 1
            for stream in streams:
                stream.cancel()
            assert len((await told(engine, ask(prompt(5), 1))).tokens) == 1

    asyncio.run(main())


def test_tokens_come_while_a_long_prompt_is_read(checkpoint: Checkpoint) -> None:
    settings = EngineSettings(prefill_step=64)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            seen: list[str] = []

            async def watch(name: str, length: int, count: int) -> None:
                async with engine.submit(ask(prompt(length), count)) as stream:
                    async for event in stream:
                        if isinstance(event, Token):
                            seen.append(name)

            await asyncio.gather(watch("short", 5, 60), watch("long", 2500, 2))
            before = seen[: seen.index("long")]
            assert before.count("short") > 10

    asyncio.run(main())


def test_progress_counts_up_to_the_boundary_token(checkpoint: Checkpoint) -> None:
    async def main() -> None:
        async with running(checkpoint("llama"), EngineSettings(prefill_step=64)) as engine:
            found = await told(engine, ask(prompt(2000), 1))
            counts = [event.processed for event in found.progress]
            assert counts == sorted(set(counts))
            assert counts[-1] == 1999
            assert {event.total for event in found.progress} == {1999}
            assert {event.tier for event in found.progress} == {"local"}

    asyncio.run(main())


def test_a_prompt_that_never_fits_is_refused_and_one_that_fits_later_waits(
    checkpoint: Checkpoint,
) -> None:
    # 8 layers of 2 heads of 16, keys and values, float32: 2 KiB a row, 256 rows at a time.
    settings = EngineSettings(cache_bytes=1024 * 2048, growth_rows=16)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            with pytest.raises(RequestError) as caught:
                engine.submit(ask(prompt(1020), 10))
            assert caught.value.reason == "memory_exceeded"
            holder = engine.submit(ask(prompt(700), 10_000))
            waiting = asyncio.ensure_future(told(engine, ask(prompt(500), 3)))
            async for event in holder:
                if isinstance(event, Token):
                    break
            await until(lambda: engine.status()["requests"]["waiting"] == 1)
            holder.cancel()
            assert len((await asyncio.wait_for(waiting, 20)).tokens) == 3

    asyncio.run(main())


def test_an_answer_that_outgrows_the_memory_fails_alone(checkpoint: Checkpoint) -> None:
    settings = EngineSettings(cache_bytes=512 * 2048, growth_rows=64)

    async def main() -> None:
        async with running(checkpoint("llama"), settings) as engine:
            big, small = await all_told(engine, [ask(prompt(100), 2000), ask(prompt(10), 30)])
            assert isinstance(big.failed.error, CapacityError)
            assert big.failed.error.reason == "cache_memory_exhausted"
            assert 128 < len(big.tokens) < 512
            assert len(small.tokens) == 30
            assert engine.ready()

    asyncio.run(main())


def test_what_the_loader_refuses_is_what_start_raises() -> None:
    def load():
        raise ConfigError("no such model", reason="model_missing")

    async def main() -> None:
        engine = Engine(load)
        with pytest.raises(ConfigError) as caught:
            await engine.start()
        assert caught.value.reason == "model_missing"
        assert not engine.ready()
        assert not engine.fault.done()
        with pytest.raises(EngineFault):
            engine.submit(ask((1,), 1))
        await engine.close()

    asyncio.run(main())


def test_closing_ends_every_stream(checkpoint: Checkpoint) -> None:
    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            streams = [engine.submit(ask(prompt(n), 10_000, GREEDY)) for n in (5, 2000)]
            await asyncio.sleep(0.1)
        for stream in streams:
            last = [event async for event in stream][-1]
            assert isinstance(last, Failed)
            assert last.error.reason == "engine_stopping"
        assert not engine.ready()

    asyncio.run(main())


def test_a_machine_that_cannot_be_kept_awake_serves_all_the_same(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is posted before anything that may go wrong; no stream is left behind."""
    monkeypatch.setattr("mac_decoder.engine.power.COMMAND", ("/no/such/command",))

    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            found = await asyncio.wait_for(told(engine, ask(prompt(9), 3)), 20)
            assert len(found.tokens) == 3
            assert engine.status()["open"] == 0
        assert "/no/such/command" in caplog.text

    asyncio.run(main())


def test_penalties_look_at_the_answer_alone(checkpoint: Checkpoint) -> None:
    """With the largest presence penalty no token comes twice; one of the prompt may come."""
    never_twice = Sampling(temperature=0.0, presence_penalty=1000.0)

    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            free = await told(engine, ask(prompt(9), 1))
            held = (*prompt(8), free.tokens[0], prompt(9)[-1])
            first = await told(engine, ask(held, 1))
            asked = (*held[:-2], first.tokens[0], held[-1])
            again = await told(engine, ask(asked, 1))
            penalised = await told(engine, ask(asked, 60, never_twice))
            assert penalised.tokens[0] == again.tokens[0]
            assert len(set(penalised.tokens)) == 60

    asyncio.run(main())
