"""What is counted at the HTTP door: who was refused and why, and how many connections are open.

Labels are a fixed set of codes, so that nobody outside can make more of them; nothing that a
client sent is kept or logged.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

log = logging.getLogger(__name__)

REASONS: Final[tuple[str, ...]] = (
    "host_not_allowed",
    "origin_not_allowed",
    "invalid_api_key",
    "bad_request",
    "invalid_header",
    "request_too_large",
    "too_many_requests",
    "too_many_streams",
    "too_many_pages",
    "page_of_another_session",
    "login_refused",
    "head_timeout",
    "connection_limit",
    "tls_handshake_failed",
)
"""Every reason that is counted here: the errors' own, and three of connections that brought no
request: it did not come in time, its place was needed, or its TLS handshake failed."""

MOST_CONNECTIONS: Final = 1024
"""How many a server has open at once unless it is told otherwise."""

_SAY_EVERY_S: Final = 60.0


class Refusals:
    """Counts refusals by reason, and logs each reason at most once a minute.

    Whoever can be refused can be refused a thousand times a second: the count is in the line.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, int] = dict.fromkeys(REASONS, 0)
        self._said_at: dict[str, float] = {}

    def count(self, reason: str) -> None:
        """Count one refusal; raises ``KeyError`` for a reason that is none of ``REASONS``."""
        self._counts[reason] += 1
        now = self._clock()
        said_at = self._said_at.get(reason)
        if said_at is None or now - said_at >= _SAY_EVERY_S:
            self._said_at[reason] = now
            log.warning("refused at the door (%s), %d so far", reason, self._counts[reason])

    @property
    def counts(self) -> Mapping[str, int]:
        """How many there were of each reason since the process started."""
        return self._counts


class Occupant(Protocol):
    """A connection, as the crowd sees it."""

    def idle(self) -> bool:
        """Whether no request of it is in hand."""
        ...

    def evict(self) -> None:
        """End it at once, whatever is left to be written."""
        ...


class Crowd:
    """The open connections, at most ``most``: for one more, the oldest idle one has to go.

    Connections that say nothing cost a descriptor each, and can be had for nothing. With this
    they keep nobody out; only a client that is idle between two requests may find its
    connection closed, which every client has to expect anyway.
    """

    def __init__(self, most: int, refusals: Refusals) -> None:
        self.most = most
        self._refusals = refusals
        self._open: dict[Occupant, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, one: Occupant) -> bool:
        """Take in a new connection; false if it was evicted, since all others are at work."""
        if len(self._open) >= self.most:
            self._refusals.count("connection_limit")
            leaving = next((other for other in self._open if other.idle()), one)
            self._open.pop(leaving, None)
            leaving.evict()
            if leaving is one:
                return False
        self._open[one] = None
        return True

    def leave(self, one: Occupant) -> bool:
        """Forget a connection; false if it was evicted, or has left already."""
        present = one in self._open
        self._open.pop(one, None)
        return present


class Door:
    """One per server: its refusals and its connections."""

    def __init__(self, most_connections: int = MOST_CONNECTIONS) -> None:
        self.refusals = Refusals()
        self.crowd = Crowd(most_connections, self.refusals)
