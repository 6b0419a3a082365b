"""One snapshot for all who ask at once; a new revision only where something differs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec
import pytest

from mac_decoder.status import board as module
from mac_decoder.status.board import BEAT_S, SHARED_S, Board, until_beat
from mac_decoder.status.journal import Journal
from protocol.status.snapshot import SECTIONS, Decoder, Door

DECODER = Decoder("p", "m", 1.0, None, {}, None, None, None, 0, "", 0)


class Told:
    """An engine that counts how often it was asked, and where."""

    def __init__(self) -> None:
        self.figures: dict[str, Any] = {"ready": True}
        self.kept: dict[str, Any] = {"counters": {"cache_hits": 0}}
        self.asked: list[str] = []
        self.slow_s = 0.0

    def status(self) -> dict[str, Any]:
        self.asked.append("status")
        return self.figures

    def cache_status(self) -> dict[str, Any]:
        self.asked.append(threading.current_thread().name)
        kept = self.kept
        time.sleep(self.slow_s)
        return kept

    def stages(self) -> Mapping[int, str]:
        return {}


def running(work: Callable[[Board, Told], Coroutine[Any, Any, None]]) -> None:
    """Run ``work`` with a board and the engine behind it."""
    told = Told()
    door = Door(
        None,
        0,
        keys_demanded=False,
        connections=0,
        connections_limit=1,
        streams=0,
        streams_limit=1,
        refused={},
    )

    async def main() -> None:
        await work(Board(told, Journal(), lambda: DECODER, lambda: door), told)

    asyncio.run(main())


def test_a_revision_is_new_only_where_something_differs() -> None:
    async def work(board: Board, told: Told) -> None:
        first = (await board.now()).snapshot
        assert (await board.now()).snapshot is first
        told.figures = {"ready": True, "open": 1}
        second = (await board.now()).snapshot
        assert second.revision == first.revision + 1
        same = [name for name in SECTIONS if getattr(first, name) is getattr(second, name)]
        assert same == [name for name in SECTIONS if name != "engine"]

    running(work)


def test_those_who_listen_share_one() -> None:
    async def work(board: Board, told: Told) -> None:
        taken = await asyncio.gather(*(board.now(SHARED_S) for _ in range(10)))
        assert len({id(one) for one in taken}) == 1
        assert told.asked.count("status") == 1

    running(work)


def test_what_was_touched_is_in_the_next_one_however_soon_that_is_asked_for() -> None:
    async def work(board: Board, told: Told) -> None:
        await board.now(SHARED_S)
        told.figures = {"ready": True, "open": 1}
        # Whoever was told of this touch has nothing else that would have them ask again.
        board.touch()
        assert (await board.now(SHARED_S)).snapshot.engine.open == 1

    running(work)


def test_who_asks_for_now_gets_now() -> None:
    async def work(board: Board, told: Told) -> None:
        await board.now(SHARED_S)
        told.kept = {"counters": {"cache_hits": 1}}
        assert (await board.now()).snapshot.cache.counters == {"cache_hits": 1}

    running(work)


def test_the_caches_figures_are_made_in_another_thread_and_seldom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CACHE_S", 0.3)

    async def work(board: Board, told: Told) -> None:
        until = time.monotonic() + 0.8
        while time.monotonic() < until:
            await board.now(1e-6)
            await asyncio.sleep(0.01)
        threads = [name for name in told.asked if name != "status"]
        assert 2 <= len(threads) <= 4
        assert threading.main_thread().name not in threads
        assert told.asked.count("status") > 10

    running(work)


def test_figures_that_take_long_hold_up_nobody_else_and_never_go_back() -> None:
    async def work(board: Board, told: Told) -> None:
        told.slow_s = 0.5
        asking = [asyncio.ensure_future(board.now()) for _ in range(2)]
        began = time.monotonic()
        await asyncio.sleep(0.01)
        assert time.monotonic() - began < 0.45
        told.kept = {"counters": {"cache_hits": 5}}
        one, two = await asyncio.gather(*asking)
        assert one.snapshot.cache.counters == {"cache_hits": 0}
        assert two.snapshot.cache.counters == {"cache_hits": 5}
        assert two.snapshot.revision == one.snapshot.revision + 1

    running(work)


def test_only_those_who_listen_are_told() -> None:
    async def work(board: Board, told: Told) -> None:
        board.touch()
        with board.listening() as one, board.listening() as other:
            assert not one.is_set()
            board.touch()
            assert one.is_set()
            assert other.is_set()
            one.clear()
            assert other.is_set()
        one.clear()
        board.touch()
        assert not one.is_set()
        assert not told.asked

    running(work)


def test_a_snapshot_is_what_its_schema_says() -> None:
    async def work(board: Board, told: Told) -> None:
        snapshot = (await board.now()).snapshot
        text = msgspec.json.encode(snapshot)
        assert msgspec.json.decode(text, type=type(snapshot)) == snapshot

    running(work)


@pytest.mark.parametrize("beats", [1, 2])
def test_all_wait_for_the_same_times(beats: int) -> None:
    for now in (0.0, 0.1, 7.2499, 7.25, 1e6 + 0.3):
        wait = until_beat(now, beats)
        assert 0 < wait <= beats * BEAT_S
        assert (now + wait) / (beats * BEAT_S) == pytest.approx(
            round((now + wait) / beats / BEAT_S)
        )
    # A slow one's time is one of a quick one's, whenever either began to wait.
    assert 3.1 + until_beat(3.1, 2) == pytest.approx(3.3 + until_beat(3.3)) == pytest.approx(3.5)
