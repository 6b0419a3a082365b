"""Several producers: the best one is asked, and the next where it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.link import LinkState, Rates
from protocol.errors import TransferError
from tests.mac_decoder.engine.drive import ask, loaded_copy, prompt, running, told, until
from tests.mac_decoder.engine.links import CopyingLink

ALWAYS = EngineSettings(prefill_step=64, remote_threshold=1)
TOKENS = prompt(200, 5)


def links_for(path: Path, count: int, *prompts: tuple[int, ...]) -> list[CopyingLink]:
    """Producers that know the rows of ``prompts``."""
    loaded = loaded_copy(path)
    first = CopyingLink(loaded.layout)
    for tokens in prompts:
        first.prepare(loaded, tokens)
    return [first, *(CopyingLink(loaded.layout, made=first.made) for _ in range(count - 1))]


def test_one_that_fails_makes_room_for_the_next(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    links = links_for(path, 3, TOKENS)
    links[0].raises = TransferError("it died", reason="connection_lost")
    links[1].raises = TransferError("it died too", reason="peer_silent")

    async def main() -> None:
        async with running(path, ALWAYS, links) as engine:
            local = await told(engine, ask(TOKENS, 20, lane="local"))
            for lane in ("auto", "remote"):
                found = await told(engine, ask(TOKENS, 20, lane=lane))
                assert found.tokens == local.tokens
                assert found.finished.report.source == "remote"
                assert set(found.finished.report.reasons) >= {"connection_lost", "peer_silent"}
                assert found.fallbacks == []
            assert [len(link.handoffs) for link in links] == [0, 0, 2]
            assert engine.status()["handoffs"] == 2
            assert [each["handoffs"] for each in engine.status()["producers"]] == [0, 0, 2]

    asyncio.run(main())


def test_where_all_fail_the_last_error_is_told(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    links = links_for(path, 2, TOKENS)
    links[0].raises = TransferError("it died", reason="connection_lost")
    links[1].raises = TransferError("it died too", reason="peer_silent")

    async def main() -> None:
        async with running(path, ALWAYS, links) as engine:
            local = await told(engine, ask(TOKENS, 20, lane="local"))
            found = await told(engine, ask(TOKENS, 20))
            assert found.tokens == local.tokens
            assert found.finished.report.source == "local"
            assert found.fallbacks == ["peer_silent"]
            insisting = await told(engine, ask(TOKENS, 20, lane="remote"))
            assert insisting.failed is not None
            assert insisting.failed.error.reason == "peer_silent"
            assert all(len(link.shadows) == 2 for link in links)

    asyncio.run(main())


def test_why_one_failed_is_told_where_the_other_is_away(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    links = links_for(path, 2, TOKENS)
    links[0].raises = TransferError("too slow", reason="deadline_exceeded")
    links[1].state = LinkState("down", "producer_unreachable")

    async def main() -> None:
        async with running(path, ALWAYS, links) as engine:
            found = await told(engine, ask(TOKENS, 5))
            assert found.finished.report.source == "local"
            assert found.finished.report.reasons[-1] == "deadline_exceeded"
            assert found.fallbacks == ["deadline_exceeded"]
            assert engine.status()["fallbacks"] == {"deadline_exceeded": 1}

    asyncio.run(main())


def test_one_that_is_away_is_passed_over(checkpoint: Callable[..., Path]) -> None:
    path = checkpoint("llama")
    links = links_for(path, 2, TOKENS)
    links[0].state = LinkState("down", "producer_down")

    async def main() -> None:
        async with running(path, ALWAYS, links) as engine:
            found = await told(engine, ask(TOKENS, 5, lane="remote"))
            assert found.finished.report.source == "remote"
            assert found.finished.report.reasons == ("lane_remote",)
            links[1].state = LinkState("down", "producer_down")
            refused = await told(engine, ask(TOKENS, 5, lane="remote"))
            assert refused.failed is not None
            assert refused.failed.error.reason == "producer_down"

    asyncio.run(main())


def test_the_faster_one_is_asked_and_the_other_where_it_is_busy(
    checkpoint: Callable[..., Path],
) -> None:
    path = checkpoint("llama")
    prompts = [prompt(200, seed) for seed in range(3)]
    links = links_for(path, 2, *prompts)
    links[0].rates = Rates(compute_tokens_per_s=1000.0, wire_bytes_per_s=1e9)
    links[1].rates = Rates(compute_tokens_per_s=1500.0, wire_bytes_per_s=1e9)
    links[1].hold = threading.Event()

    async def main() -> None:
        async with running(path, ALWAYS, links) as engine:
            one, two, three = (engine.submit(ask(tokens, 5)) for tokens in prompts[:3])
            streams = [one, two, three]
            await until(lambda: len(links[0].handoffs) == 1)
            assert len(links[1].shadows) == 1
            links[1].hold.set()
            for stream in streams:
                async for _ in stream:
                    pass
            assert len(links[0].handoffs) + len(links[1].handoffs) == 3
            assert links[0].handoffs
            assert links[1].handoffs

    asyncio.run(main())


def test_one_that_comes_later_is_asked_and_one_that_goes_is_not(
    checkpoint: Callable[..., Path],
) -> None:
    path = checkpoint("llama")
    first, second = links_for(path, 2, TOKENS)

    async def main() -> None:
        async with running(path, ALWAYS) as engine:
            nobody = await told(engine, ask(TOKENS, 5, lane="remote"))
            assert nobody.failed is not None
            assert nobody.failed.error.reason == "no_producer"
            first.name, second.name = "first", "second"
            for link in (first, second):
                engine.add_producer(link)
            assert [each["name"] for each in engine.status()["links"]] == ["first", "second"]
            await until(lambda: len(engine.status()["producers"]) == 2)
            found = await told(engine, ask(TOKENS, 5, lane="remote"))
            assert found.finished.report.source == "remote"
            assert (len(first.handoffs), len(second.handoffs)) == (1, 0)
            first.state = LinkState("off", "link_closed")
            assert [each["name"] for each in engine.status()["links"]] == ["second"]
            again = await told(engine, ask(TOKENS, 5, lane="remote"))
            assert again.tokens == found.tokens
            assert (len(first.handoffs), len(second.handoffs)) == (1, 1)
            assert [each["name"] for each in engine.status()["producers"]] == ["second"]
            second.state = LinkState("off", "link_closed")
            refused = await told(engine, ask(TOKENS, 5, lane="remote"))
            assert refused.failed is not None
            assert refused.failed.error.reason == "no_producer"
            alone = await told(engine, ask(TOKENS, 5))
            assert alone.tokens == found.tokens
            assert alone.fallbacks == []

    asyncio.run(main())


def test_a_failed_one_is_not_asked_again_where_one_comes_meanwhile(
    checkpoint: Callable[..., Path],
) -> None:
    """Numbers are the producers' own: one that goes does not pass its number on."""
    path = checkpoint("llama")
    gone, failing, coming = links_for(path, 3, TOKENS)
    failing.hold, failing.corrupt = threading.Event(), True

    async def main() -> None:
        async with running(path, ALWAYS, [gone, failing]) as engine:
            gone.state = LinkState("off", "link_closed")
            stream = engine.submit(ask(TOKENS, 5, lane="remote"))
            await until(lambda: len(failing.shadows) == 1)
            engine.add_producer(coming)
            assert failing.hold is not None
            failing.hold.set()
            async for _ in stream:
                pass
            assert stream.report is not None
            assert stream.report.source == "remote"
            assert (len(gone.shadows), len(failing.shadows), len(coming.handoffs)) == (0, 1, 1)

    asyncio.run(main())
