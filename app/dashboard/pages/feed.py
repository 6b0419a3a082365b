"""The board's snapshots for the pages that are open: one task for all of them, none for none."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol

from mac_decoder.reporting import traced
from mac_decoder.status.board import SHARED_S, Board, until_beat
from protocol.status.snapshot import Snapshot

log = logging.getLogger(__name__)

_BEATS: Final = 2
"""From one snapshot to the next, at least."""

LOOK_S: Final = 0.5
"""How much longer what touches nothing may stay unnoticed."""


class Watcher(Protocol):
    """A page that somebody looks at."""

    def see(self, snapshot: Snapshot, now: float) -> None:
        """Show it, if anything is different."""
        ...


class Feed:
    """Belongs to the event loop's thread."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._watchers: set[Watcher] = set()
        self._running: asyncio.Task[None] | None = None

    def join(self, watcher: Watcher) -> None:
        """Show it what is, and what changes from now on."""
        self._watchers.add(watcher)
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(self._ended)

    def leave(self, watcher: Watcher) -> None:
        """It is not looked at; the last one to leave ends the task."""
        self._watchers.discard(watcher)
        if not self._watchers and self._running is not None:
            self._running.cancel()

    async def now(self) -> Snapshot:
        """The snapshot as it is."""
        return (await self._board.now(SHARED_S)).snapshot

    async def _run(self) -> None:
        with self._board.listening() as changed:
            while True:
                changed.clear()
                snapshot = await self.now()
                await self._show(snapshot)
                await asyncio.sleep(until_beat(asyncio.get_running_loop().time(), _BEATS))
                try:
                    async with asyncio.timeout(LOOK_S):
                        await changed.wait()
                except TimeoutError:
                    pass

    async def _show(self, snapshot: Snapshot) -> None:
        """Show it to all. A page that fails is fed no more, and is the only one."""
        # Each in a task of its own, which holds whatever a page may fail of.
        showing = {
            asyncio.create_task(_shown(watcher, snapshot)): watcher for watcher in self._watchers
        }
        if showing:
            await asyncio.wait(showing)
        for task, watcher in showing.items():
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("a page of the dashboard is not fed any more: %s", traced(error))
                self.leave(watcher)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running = None
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the dashboard's pages are not fed any more: %s", traced(error))
            self._watchers.clear()
        elif self._watchers:
            # Somebody came while the task was ending.
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(self._ended)


async def _shown(watcher: Watcher, snapshot: Snapshot) -> None:
    watcher.see(snapshot, time.time())
