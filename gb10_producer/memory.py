"""Bytes that prefills may take, reserved before they are allocated.

On a machine where CPU and GPU share one pool (GB10) the device's own figures say nothing, and
asking for too much can hang the machine; so the budget comes from MemAvailable, under a cap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from protocol.errors import CapacityError, ConfigError
from protocol.layout import KEY, VALUE, Layout, RecurrentLayer, payload_bytes, row_bytes

_LEAST_FLOOR = 512 << 20


def floor_bytes() -> int:
    """What stays free for activations and everybody else: a twentieth of the machine."""
    return max(_LEAST_FLOOR, int(psutil.virtual_memory().total) // 20)


def available_bytes() -> int:
    """Bytes that can be had without swapping."""
    return int(psutil.virtual_memory().available)


def prefill_bytes(layout: Layout, end: int, tile: int) -> int:
    """Device bytes of the cache of ``end`` positions, one tile of rows per layer on top.

    Sliding layers are counted at their window, recurrent ones at two copies of their state.
    """
    total = payload_bytes(layout, 0, end)
    for layer in layout.layers:
        if isinstance(layer, RecurrentLayer):
            total += sum(state.nbytes for state in layer.states)
        else:
            total += min(tile, end) * (row_bytes(layer, KEY) + row_bytes(layer, VALUE))
    return total


class Ledger:
    """Reserved bytes against a limit fixed at start, and against what is free. Thread-safe, but
    for :meth:`reserve` and :meth:`relieve`, which may call ``reclaim`` in their thread.
    """

    def __init__(self, limit: int, free: Callable[[], int] = available_bytes) -> None:
        self.limit = limit
        self.reserved = 0
        self.reclaim: Callable[[int], int] = lambda nbytes: 0
        """Gives back about so many bytes that were taken just in case; returns how many."""
        self._free = free
        self._lock = threading.Lock()

    def check(self, nbytes: int) -> None:
        """Raise ``CapacityError`` (``memory_exceeded``) when ``nbytes`` can never be had."""
        if nbytes > self.limit:
            raise CapacityError(
                "This prompt's cache does not fit into the producer's memory.",
                reason="memory_exceeded",
                field="bytes",
                found=nbytes,
                expected=self.limit,
                retry_after_s=60.0,
            )

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Hold ``nbytes``, at the cost of what is only kept in case it helps.

        Raises ``CapacityError`` (``memory_exceeded``) when they are not to be had now.
        """
        self.check(nbytes)
        while lacking := self._lacking(nbytes):
            if not self.reclaim(lacking):
                raise CapacityError(
                    "The producer's memory is taken at the moment.",
                    reason="memory_exceeded",
                    field="bytes",
                    found=nbytes,
                    expected=max(0, nbytes - lacking),
                    retry_after_s=5.0,
                )
        try:
            yield
        finally:
            self.give(nbytes)

    def take(self, nbytes: int) -> bool:
        """Hold ``nbytes`` until they are given back, if they are free."""
        return not self._lacking(nbytes)

    def give(self, nbytes: int) -> None:
        """Return what was taken."""
        with self._lock:
            self.reserved -= nbytes

    def relieve(self) -> None:
        """Give memory back that is only kept in case it helps, if the machine runs short of it."""
        if (lacking := floor_bytes() // 2 - self._free()) > 0:
            self.reclaim(lacking)

    def _lacking(self, nbytes: int) -> int:
        """Hold ``nbytes`` and return 0, or hold nothing and return how many are not free."""
        with self._lock:
            free = min(self.limit - self.reserved, self._free() - floor_bytes() // 2)
            if nbytes <= free:
                self.reserved += nbytes
            return max(0, nbytes - free)


def require_room(needed: int, free: int, cap: int | None, what: str) -> int:
    """The bytes of ``free`` that may be used, less a floor and under the cap.

    Raises ``ConfigError`` (``not_enough_memory``) when ``what`` needs more.
    """
    limit = free - floor_bytes()
    if cap is not None:
        limit = min(limit, cap)
    if needed > limit:
        raise ConfigError(
            f"Not enough memory for {what}: {_gib(needed)} needed, {_gib(max(0, limit))} free.",
            reason="not_enough_memory",
            field="memory",
            found=limit,
            expected=needed,
            hint="Close other programs, raise --memory-limit, or use a smaller model.",
        )
    return limit


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
