"""One task feeds the pages that are looked at; without any there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from app.dashboard.pages.feed import Feed
from mac_decoder.status.board import BEAT_S, Board
from protocol.status.snapshot import Snapshot
from tests.app.view.snapshots import IDLE

pytestmark = pytest.mark.anyio


class Boarded(Board):
    """A board whose snapshots are counted."""

    def __init__(self) -> None:
        super().__init__(cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None))
        self.taken = 0

    @property
    def listeners(self) -> int:
        return len(self._listening)

    async def now(self, at_most_s: float = 0.0) -> Any:
        self.taken += 1
        snapshot = msgspec.structs.replace(IDLE, revision=self.taken)
        return type("Taken", (), {"snapshot": snapshot})


class Failing:
    def __init__(self) -> None:
        self.asked = 0

    def see(self, snapshot: Snapshot, now: float) -> None:
        self.asked += 1
        raise KeyError("typed by somebody")


class Watcher:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def see(self, snapshot: Snapshot, now: float) -> None:
        self.seen.append(snapshot.revision)


async def test_nobody_looks_and_nothing_is_taken() -> None:
    board = Boarded()
    feed, one, other = Feed(board), Watcher(), Watcher()
    await asyncio.sleep(0.05)
    assert (board.taken, board.listeners) == (0, 0)
    feed.join(one)
    feed.join(other)
    await asyncio.sleep(0.05)
    assert one.seen == other.seen == [1]
    assert board.listeners == 1
    feed.leave(one)
    feed.leave(other)
    await asyncio.sleep(0.05)
    assert board.listeners == 0
    feed.join(one)
    await asyncio.sleep(0.05)
    assert one.seen == [1, 2]
    feed.leave(one)


async def test_what_changes_often_is_shown_twice_a_second() -> None:
    board = Boarded()
    feed, one = Feed(board), Watcher()
    feed.join(one)
    began = time.monotonic()
    for _ in range(30):
        board.touch()
        await asyncio.sleep(0.04)
    feed.leave(one)
    # At most one at once, one at the next beat, and one for every other that fits.
    assert 2 <= len(one.seen) <= 2 + (time.monotonic() - began) / (2 * BEAT_S)


async def test_a_page_that_fails_is_dropped_alone_and_told_by_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    board = Boarded()
    feed, failing, other = Feed(board), Failing(), Watcher()
    feed.join(failing)
    feed.join(other)
    await seen_by(other, 2, board)
    assert failing.asked == 1
    assert "not fed any more: KeyError at see (" in caplog.text
    assert "typed by somebody" not in caplog.text
    feed.leave(other)
    # It is no reason to go on, either: alone it ends the task.
    feed.join(failing)
    await until(lambda: board.listeners == 0 and failing.asked == 2)


async def test_one_that_comes_while_the_last_leaves_is_fed() -> None:
    board = Boarded()
    feed, one, other = Feed(board), Watcher(), Watcher()
    feed.join(one)
    await asyncio.sleep(0.05)
    feed.leave(one)
    feed.join(other)
    await asyncio.sleep(0.1)
    assert other.seen == [2]
    feed.leave(other)


async def seen_by(one: Watcher, times: int, board: Boarded) -> None:
    def enough() -> bool:
        board.touch()
        return len(one.seen) >= times

    await until(enough)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.02)
