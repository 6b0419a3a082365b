"""A slower link for benchmarks: bulk frames of all connections share one rate."""

from __future__ import annotations

import threading


class Throttle:
    """Paces sends to ``mbps`` megabits per second (10**6 bits); ``None`` paces nothing.

    A token bucket of one frame: a frame may go when the time that earlier ones take on the
    link is over. ``now`` is in seconds of the monotonic clock.
    """

    def __init__(self, mbps: float | None) -> None:
        self._seconds_per_byte = 0.0 if mbps is None else 8e-6 / mbps
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait_s(self, now: float) -> float:
        """Seconds until the next frame may go; 0 for at once."""
        return max(0.0, self._free_at - now)

    def sent(self, nbytes: int, now: float) -> None:
        """Account for a frame of ``nbytes`` that goes now."""
        if self._seconds_per_byte:
            with self._lock:
                self._free_at = max(self._free_at, now) + nbytes * self._seconds_per_byte
