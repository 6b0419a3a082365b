"""The current snapshot, and who waits for the next one. Belongs to the event loop's thread.

A snapshot is made when somebody asks. Nobody is told what changed: each listener compares with
what it was told last, so that one who is slow skips what lies between, and holds nothing but
one snapshot, which the others hold too.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from mac_decoder.status import sections
from mac_decoder.status.journal import Journal
from protocol.status.snapshot import SECTIONS, VERSION, Decoder, Door, Snapshot

SHARED_S: Final = 0.09
"""How old a snapshot may be that a listener is given: those who listen share it, unless something
was touched since.
"""

BEAT_S: Final = 0.25
"""Listeners who were told something wait for the next time that this divides, or for one that so
many divide; who has waited for longer is told at once.
"""

_CACHE_S: Final = 0.9
"""How old the cache's figures in it may be: with thousands of cuts they take milliseconds. A bit
less than the second after which every page looks at them where nothing is touched.
"""


def until_beat(now: float, beats: int = 1) -> float:
    """Seconds from ``now``, of the event loop's clock, to the next time that so many beats divide.

    All who listen wait for the same times, so that one snapshot does for all.
    """
    every = beats * BEAT_S
    return every - now % every


class Told(Protocol):
    """What is asked of the engine (``facade.Engine``)."""

    def status(self) -> dict[str, Any]: ...

    def cache_status(self) -> dict[str, Any]: ...

    def stages(self) -> Mapping[int, str]: ...


class Taken(NamedTuple):
    """A snapshot, and what the engine said of itself for it, in plain types."""

    snapshot: Snapshot
    engine: Mapping[str, Any]
    cache: Mapping[str, Any]


class Board:
    """One per service."""

    def __init__(
        self,
        engine: Told,
        journal: Journal,
        decoder: Callable[[], Decoder],
        door: Callable[[], Door],
    ) -> None:
        """``decoder`` and ``door`` make their sections."""
        self._engine = engine
        self._journal = journal
        self._decoder = decoder
        self._door = door
        self._listening: set[asyncio.Event] = set()
        self._taking = asyncio.Lock()
        self._taken: Taken | None = None
        self._taken_at = self._cache_at = -math.inf
        self._loaded = False

    def touch(self) -> None:
        """Something may have changed; costs nothing where nobody listens."""
        self._taken_at = -math.inf
        for waiting in self._listening:
            waiting.set()

    @contextmanager
    def listening(self) -> Iterator[asyncio.Event]:
        """An event that is set by every touch, for the time of a block."""
        waiting = asyncio.Event()
        self._listening.add(waiting)
        try:
            yield waiting
        finally:
            self._listening.discard(waiting)

    async def now(self, at_most_s: float = 0.0) -> Taken:
        """The snapshot as it is, or as it was at most so many seconds ago."""
        async with self._taking:  # one after the other, so that no count ever goes back
            began = time.monotonic()
            if self._taken is not None and began - self._taken_at < at_most_s:
                return self._taken
            if self._taken is None or not at_most_s or began - self._cache_at >= _CACHE_S:
                cache: Mapping[str, Any] = await asyncio.to_thread(self._engine.cache_status)
                self._cache_at = began
            else:
                cache = self._taken.cache
            engine = self._engine.status()
            self._taken = Taken(self._snapshot(engine, cache), engine, cache)
            self._taken_at = time.monotonic()
            return self._taken

    def _snapshot(self, engine: Mapping[str, Any], cache: Mapping[str, Any]) -> Snapshot:
        """The next revision, or the last one where nothing differs."""
        self._loaded = self._loaded or bool(engine.get("ready"))
        last = None if self._taken is None else self._taken.snapshot
        found = Snapshot(
            version=VERSION,
            revision=0 if last is None else last.revision,
            decoder=self._decoder(),
            engine=sections.engine(engine, loaded=self._loaded),
            requests=self._journal.requests(self._engine.stages()),
            recent=self._journal.recent(),
            nodes=sections.nodes(engine),
            cache=sections.cache(cache),
            door=self._door(),
        )
        if last is None:
            return found
        # What is equal stays the same object: to compare it again then takes no time.
        changed = {
            name: section
            for name in SECTIONS
            if (section := getattr(found, name)) != getattr(last, name)
        }
        if not changed:
            return last
        return msgspec.structs.replace(last, revision=last.revision + 1, **changed)
