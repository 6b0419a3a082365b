"""The remote lane through the engine: equal to the local one, and never worse than it."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mac_decoder.engine.events import Token
from mac_decoder.engine.rates import Probing
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.link import LinkState, Rates
from protocol.checkpoint import read_checkpoint
from protocol.errors import (
    BatonError,
    CapacityError,
    IdentityMismatch,
    RequestError,
    TransferError,
)
from protocol.layout import payload_bytes
from tests.mac_decoder.engine.drive import (
    all_told,
    ask,
    loaded_copy,
    prompt,
    running,
    told,
    until,
)
from tests.mac_decoder.engine.links import BrokenLink, CopyingLink, refused
from tests.mac_decoder.engine.test_reuse import keeper_for
from tests.ordinary import usual

MODELS = ("llama", "muse_glimmer")
ALWAYS = EngineSettings(prefill_step=64, remote_threshold=1)

Checkpoint = Callable[..., Path]


def link_for(path: Path, *prompts: tuple[int, ...], tile: int = 64) -> CopyingLink:
    """A link that knows the rows of ``prompts``."""
    loaded = loaded_copy(path)
    link = CopyingLink(loaded.layout, tile)
    for tokens in prompts:
        link.prepare(loaded, tokens)
    return link


@pytest.mark.both_blas
@pytest.mark.parametrize(
    "name",
    usual([*MODELS, "qwen3_next", "lfm2", "falcon_h1"], ["muse_glimmer", "qwen3_next", "lfm2"]),
)
def test_the_remote_lane_gives_what_the_local_one_gives(checkpoint: Checkpoint, name: str) -> None:
    """Same tiles, same rows: same tokens, also past the window and in company."""
    path = checkpoint(name)
    prompts = [prompt(length, length) for length in (2, 31, 33, 34, 64, 65, 129, 300)]
    link = link_for(path, *prompts)

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            for tokens in prompts:
                local = await told(engine, ask(tokens, 30, lane="local"))
                remote = await told(engine, ask(tokens, 30))
                assert remote.tokens == local.tokens, len(tokens)
                report = remote.finished.report
                assert report.source == "remote"
                assert report.reasons == ("above_threshold",)
                assert report.prefilled_tokens == report.computed_tokens == len(tokens) - 1
                assert local.finished.report.computed_tokens == len(tokens) - 1
                sent = payload_bytes(link.layout, 0, len(tokens) - 1)
                assert report.transferred_bytes == sent
                assert set(report.phases) == {
                    "queue",
                    "compute",
                    "wire",
                    "verify",
                    "install",
                    "boundary_decode",
                }
                # What the link itself does not account for is not in its phases.
                assert 0 < sum(report.phases.values()) <= report.ttft_ms + 1
            assert [handoff.ended for handoff in link.handoffs] == ["committed"] * len(prompts)
            assert engine.status()["handoffs"] == len(prompts)

    asyncio.run(main())


def test_many_at_once_share_the_lane(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    prompts = [prompt(40 + 30 * n, n) for n in range(6)]
    link = link_for(path, *prompts)

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            local = [await told(engine, ask(tokens, 15, lane="local")) for tokens in prompts]
            lanes = ("remote", "local", "auto", "remote", "local", "auto")
            mixed = await all_told(
                engine,
                [ask(tokens, 15, lane=lane) for tokens, lane in zip(prompts, lanes, strict=True)],
            )
            assert [t.tokens for t in mixed] == [t.tokens for t in local]
            sources = [t.finished.report.source for t in mixed]
            assert sources == ["remote", "local", "remote", "remote", "local", "remote"]

    asyncio.run(main())


def test_a_prompt_of_one_token_asks_nobody(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = link_for(path)

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            found = await told(engine, ask((7,), 5, lane="remote"))
            assert len(found.tokens) == 5
            report = found.finished.report
            assert (report.source, report.prefilled_tokens) == ("local", 0)
            assert report.reasons == ("nothing_to_prefill",)
            assert not link.handoffs

    asyncio.run(main())


@pytest.mark.parametrize(
    "error",
    [
        TransferError("gone", reason="connection_lost"),
        IdentityMismatch("other weights", reason="weights_differ"),
        CapacityError("full", reason="producer_full"),
    ],
    ids=lambda error: error.reason,
)
def test_a_failed_handoff_becomes_local_prefill_with_its_reason(
    checkpoint: Checkpoint, error: BatonError
) -> None:
    path = checkpoint("llama")
    link = refused(error, read_checkpoint(path).layout)

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            local = await told(engine, ask(prompt(80), 12, lane="local"))
            found = await told(engine, ask(prompt(80), 12))
            assert found.tokens == local.tokens
            assert not local.finished.report.fallback
            report = found.finished.report
            assert report.source == "local"
            assert report.fallback
            assert found.fallbacks == [report.reasons[-1]]
            assert local.fallbacks == []
            assert report.reasons[-1] == error.reason
            assert report.transferred_bytes == 0
            assert "failed_handoff" in report.phases
            assert engine.status()["fallbacks"] == {error.reason: 1}

    asyncio.run(main())


FAILURES = [
    TransferError("gone", reason="connection_lost"),
    IdentityMismatch("other weights", reason="weights_differ"),
    CapacityError("full", reason="producer_busy"),
    KeyError("a defect in the link"),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_remote_lane_fails_with_the_links_error(
    checkpoint: Checkpoint, error: Exception
) -> None:
    """Who insists on the producer is told why not, and never gets another prefill instead."""
    path = checkpoint("llama")
    link = CopyingLink(read_checkpoint(path).layout, raises=error)

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            found = await told(engine, ask(prompt(80), 3, lane="remote"))
            if isinstance(error, BatonError):
                assert found.failed.error is error
            else:
                assert isinstance(found.failed.error, TransferError)
                assert found.failed.error.reason == "handoff_broke"
            assert found.tokens == []
            assert engine.status()["fallbacks"] == {}
            assert engine.status()["cache_bytes_reserved"] == 0
            assert (await told(engine, ask(prompt(80), 3))).finished.report.fallback

    asyncio.run(main())


def test_the_remote_lane_fails_while_the_link_is_down(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = link_for(path)
    link.state = LinkState("down", "producer_unreachable")

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            found = await told(engine, ask(prompt(80), 3, lane="remote"))
            assert isinstance(found.failed.error, TransferError)
            assert found.failed.error.reason == "producer_unreachable"
        async with running(path, ALWAYS) as engine:
            alone = await told(engine, ask(prompt(80), 3, lane="remote"))
            assert isinstance(alone.failed.error, RequestError)
            assert alone.failed.error.reason == "no_producer"
            assert len((await told(engine, ask((7,), 3, lane="remote"))).tokens) == 3

    asyncio.run(main())


@pytest.mark.parametrize("how", ["raises", "corrupt", "installed"])
def test_a_handoff_that_ended_holds_no_memory(checkpoint: Checkpoint, how: str) -> None:
    """The next shadow is made, and the prompt computed here, when the last one is gone."""
    path = checkpoint("llama")
    link = link_for(path, prompt(80), prompt(90, 1))
    if how == "raises":
        # As the real link's, an error that somebody keeps.
        link.raises = TransferError("gone", reason="connection_lost")
    link.corrupt = how == "corrupt"
    held: list[int] = []

    class Watched(CopyingLink):
        def fetch(self, *args, **kwargs):
            held.append(sum(shadow() is not None for shadow in self.shadows))
            return super().fetch(*args, **kwargs)

    watched = Watched(**{f.name: getattr(link, f.name) for f in dataclasses.fields(link)})

    async def main() -> None:
        async with running(path, ALWAYS, watched) as engine:
            gc.disable()
            try:
                requests = [ask(prompt(80), 40), ask(prompt(90, 1), 40)]
                first, second = [engine.submit(request) for request in requests]
                async for event in second:
                    if isinstance(event, Token):
                        break
                assert held == [0, 0]
                await until(lambda: not any(shadow() for shadow in watched.shadows))
                first.cancel()
                second.cancel()
            finally:
                gc.enable()

    asyncio.run(main())


def test_a_producer_that_recovers_is_noticed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates that refuse the producer would never be measured again without a probe."""
    path = checkpoint("llama")
    prompts = [prompt(400, salt) for salt in range(4)]
    link = link_for(path, *prompts)
    link.rates = Rates(compute_tokens_per_s=1e-3, wire_bytes_per_s=1.0)
    monkeypatch.setattr("mac_decoder.engine.handoffs.Probing", partial(Probing, None, 0.0))

    async def main() -> None:
        async with running(path, EngineSettings(prefill_step=64), link) as engine:
            await told(engine, ask(prompts[0], 1, lane="local"))
            slow = await told(engine, ask(prompts[1], 1))
            assert slow.finished.report.reasons == ("rates_favour_local",)
            probe = await told(engine, ask(prompts[2], 1))
            assert probe.finished.report.reasons == ("producer_probe",)
            assert probe.finished.report.source == "remote"
            link.rates = Rates(compute_tokens_per_s=1e9, wire_bytes_per_s=1e12)
            again = await told(engine, ask(prompts[3], 1))
            assert again.finished.report.source == "remote"

    asyncio.run(main())


def test_waiting_for_the_producers_other_jobs_is_no_overhead(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = link_for(path, prompt(80))

    class Queued(CopyingLink):
        def fetch(self, *args, **kwargs):
            time.sleep(0.6)
            handoff = super().fetch(*args, **kwargs)
            handoff.phases_ms = {**handoff.phases_ms, "queue": 600.0}
            return handoff

    queued = Queued(**{f.name: getattr(link, f.name) for f in dataclasses.fields(link)})

    async def main() -> None:
        async with running(path, ALWAYS, queued) as engine:
            await told(engine, ask(prompt(80), 1))
            assert engine.status()["rates"]["handoff_overhead_ms"] < 500

    asyncio.run(main())


def test_what_the_producer_should_hold_is_remembered(checkpoint: Checkpoint) -> None:
    """On its grid, until its manifests or its absence say that it does not."""
    path = checkpoint("llama")
    first = prompt(300, 1)
    second = (*first[:200], *prompt(100, 2))
    link = link_for(path, first, second)

    # a namespace, and nothing in memory that a prompt could go on from
    settings = dataclasses.replace(ALWAYS, ram_bytes=0)

    async def main() -> None:
        async with running(path, settings, link, keeper_for(path)) as engine:
            handoffs = engine._worker._filling.producers._each[0]
            known: list[int] = []
            ask_for = handoffs.facts

            def facts(*arguments):
                found = ask_for(*arguments)
                known.append(found.holds)
                return found

            handoffs.facts = facts  # type: ignore[method-assign]
            computed: list[int] = []
            for tokens, holds in ((first, 0), (second, 192), (second, 256), (first, 64)):
                link.holds = holds
                found = await told(engine, ask(tokens, 1))
                computed.append(found.finished.report.computed_tokens)
            assert computed == [299, 107, 43, 235]
            assert known == [0, 192, 256, 256]
            link.holds = 0
            link.state = LinkState("down", "producer_unreachable")
            await told(engine, ask(first, 1))
            link.state = LinkState("ready")
            await told(engine, ask(first, 1))
            assert known[4:] == [0, 0]
            await told(engine, ask(second, 1))
            assert known[6:] == [192]

    asyncio.run(main())


def test_a_link_that_is_down_is_not_asked(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = link_for(path)
    link.state = LinkState("down", "producer_down")

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            found = await told(engine, ask(prompt(80), 3))
            assert found.finished.report.reasons == ("producer_down",)
            assert engine.status()["fallbacks"] == {"producer_down": 1}
            told_of = engine.status()["links"][0]
            assert (told_of["state"], told_of["reason"]) == ("down", "producer_down")

    asyncio.run(main())


def test_a_defect_in_the_link_is_not_the_requests(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = BrokenLink(read_checkpoint(path).layout)

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            found = await told(engine, ask(prompt(80), 3))
            assert found.finished.report.reasons[-1] == "handoff_broke"
            assert engine.ready()

    asyncio.run(main())


@pytest.mark.parametrize("name", MODELS)
def test_a_shadow_that_is_not_full_installs_nothing(checkpoint: Checkpoint, name: str) -> None:
    path = checkpoint(name)
    link = link_for(path, prompt(80))
    link.corrupt = True

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            local = await told(engine, ask(prompt(80), 12, lane="local"))
            found = await told(engine, ask(prompt(80), 12))
            assert found.tokens == local.tokens
            assert found.finished.report.reasons[-1] == "shadow_incomplete"
            assert [handoff.ended for handoff in link.handoffs] == ["shadow_incomplete"]
            link.corrupt = False
            again = await told(engine, ask(prompt(80), 12))
            assert again.tokens == local.tokens
            assert again.finished.report.source == "remote"

    asyncio.run(main())


def test_a_client_that_leaves_during_a_handoff_withdraws_it(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = link_for(path, prompt(80), prompt(90, 1))
    link.hold = threading.Event()

    async def main() -> None:
        async with running(path, ALWAYS, link) as engine:
            stream = engine.submit(ask(prompt(80), 5))
            queued = engine.submit(ask(prompt(90, 1), 5))
            others = asyncio.ensure_future(told(engine, ask(prompt(30), 5, lane="local")))
            assert len((await asyncio.wait_for(others, 20)).tokens) == 5
            await until(lambda: engine.status()["fetching"])
            queued.cancel()
            stream.cancel()
            await until(lambda: link.cancellations == 1)
            link.hold = None
            found = await asyncio.wait_for(told(engine, ask(prompt(80), 5)), 20)
            assert found.finished.report.source == "remote"
            assert engine.status()["cache_bytes_reserved"] == 0
            assert len(link.handoffs) == 1

    asyncio.run(main())


def test_a_handoff_that_ends_after_its_client_left_is_discarded(checkpoint: Checkpoint) -> None:
    path = checkpoint("llama")
    link = link_for(path, prompt(80))
    gate = threading.Event()

    class Late(CopyingLink):
        def fetch(self, tokens, shadow, **_rest):
            gate.wait(20)
            return super().fetch(tokens, shadow)

    late = Late(**{f.name: getattr(link, f.name) for f in dataclasses.fields(link)})

    async def main() -> None:
        async with running(path, ALWAYS, late) as engine:
            stream = engine.submit(ask(prompt(80), 5))
            await told(engine, ask(prompt(5), 1, lane="local"))
            stream.cancel()
            gate.set()
            await told(engine, ask(prompt(80), 1))
            assert [handoff.ended for handoff in late.handoffs] == ["cancelled", "committed"]

    asyncio.run(main())


@pytest.mark.parametrize("how", ["silent", "down"])
def test_nothing_waits_behind_a_handoff_that_failed_for_all(
    checkpoint: Checkpoint, how: str
) -> None:
    """Who waits for a producer that fell silent is decided again, not made to wait as long."""
    path = checkpoint("llama")
    link = link_for(path)
    asked: list[str] = []
    silent = threading.Event()

    class Silent(CopyingLink):
        def fetch(self, tokens, shadow, *, request_id="", **rest):
            asked.append(request_id)
            silent.wait(10.0)
            if how == "down":
                self.state = LinkState("down", "producer_down")
                raise TransferError("gone", reason="connection_lost")
            raise TransferError("no answer", reason="peer_silent")

    lost = Silent(**{f.name: getattr(link, f.name) for f in dataclasses.fields(link)})

    async def main() -> None:
        async with running(path, ALWAYS, lost) as engine:
            lanes = ("auto", "auto", "auto", "remote")
            asking = asyncio.create_task(
                all_told(engine, [ask(prompt(80, n), 3, lane=lane) for n, lane in enumerate(lanes)])
            )
            await until(lambda: engine.status()["waiting_for_producer"] == 3)
            silent.set()
            *local, insisted = await asking
            reason = "peer_silent" if how == "silent" else "producer_down"
            assert len(asked) == 1
            for found in local[1:]:
                report = found.finished.report
                assert (report.source, report.fallback) == ("local", True)
                assert report.reasons == ("above_threshold", reason)
                assert "failed_handoff" not in report.phases
            assert insisted.failed.error.reason == reason
            assert engine.status()["cache_bytes_reserved"] == 0

    asyncio.run(main())
