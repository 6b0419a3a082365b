"""The durable tier's latest events, for people to see. Names and paths are not kept."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from mac_decoder.store.events import Deleting, Event, Invalid

MOST: Final = 50


class Noted:
    """At most ``MOST`` entries; a thousand files deleted for one reason are one. Any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: deque[dict[str, Any]] = deque(maxlen=MOST)

    def note(self, event: Event) -> None:
        """Take note of ``event``; does not wait for anything."""
        kind, reason, files, cuts, nbytes = _told(event)
        with self._lock:
            last = self._entries[0] if self._entries else None
            if last is not None and (last["kind"], last["reason"]) == (kind, reason):
                files, cuts, nbytes = (
                    last["files"] + files,
                    last["cuts"] + cuts,
                    last["bytes"] + nbytes,
                )
                self._entries.popleft()
            self._entries.appendleft(
                {
                    "at": round(self._clock(), 3),
                    "kind": kind,
                    "reason": reason,
                    "files": files,
                    "cuts": cuts,
                    "bytes": nbytes,
                }
            )

    def latest(self) -> list[dict[str, Any]]:
        """The entries, the newest first."""
        with self._lock:
            return [*self._entries]


def _told(event: Event) -> tuple[str, str, int, int, int]:
    """Kind, reason, files, cuts, bytes."""
    if isinstance(event, Deleting):
        return "deleted", event.reason, 1, int(bool(event.cut)), event.nbytes
    if isinstance(event, Invalid):
        return "invalid", event.reason, 1, len(event.cuts), 0
    return "index_rebuilt", "index_rebuilt", 0, event.cuts, 0
