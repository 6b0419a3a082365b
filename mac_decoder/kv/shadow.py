"""The shadow: where a handoff is assembled before any request can see it.

It owns one piece of mlx memory per region of the whole cut ``[0, end)``. Rows and states are
received straight into it from another thread; nothing is copied until the caches are used.
The memory comes with anything in it, so that a region is given up only when its bytes were all
handed out for writing, each once; that each was written is what the seal or a digest says.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable

import mlx.core as mx

from mac_decoder.kv.elements import carrier, mlx_dtype
from mac_decoder.kv.memory import unwritten
from protocol.errors import EngineFault, IntegrityError, LocalProtocolError
from protocol.layout import STATE, Layout, Region, Slot, regions

PAGE = 4096
_PREFAULT_CHUNK = 512 * PAGE


class _Memory:
    """One region's memory.

    ``runs`` is where the bytes that were handed out begin and end, in turn; received rows are
    handed out in order, up to ``received``.
    """

    def __init__(self, region: Region, received_from: int) -> None:
        self.region = region
        try:
            self.array, self.pages = unwritten(region.shape, carrier(region.dtype))
        except RuntimeError as error:
            raise _failed(region) from error
        self.view: memoryview = self.pages.data
        rows = region.last - region.first
        width = region.nbytes // rows if rows else 0
        self.received_at = (received_from - region.first) * width
        self.received = self.received_at
        self.runs: list[int] = []
        self.lock = threading.Lock()

    def claim(self, first: int, last: int) -> bool:
        """Hand out ``[first, last)``; false if it is empty, out of bounds or handed out before."""
        at = bisect.bisect_right(self.runs, first)
        behind = self.runs[at] if at < len(self.runs) else self.region.nbytes
        if at % 2 or not 0 <= first < last <= behind:
            return False
        left, right = self.runs[:at], self.runs[at:]
        # Runs that touch become one.
        if left[-1:] == [first]:
            left.pop()
        else:
            left.append(first)
        if right[:1] == [last]:
            right.pop(0)
        else:
            right.insert(0, last)
        self.runs = left + right
        return True

    def restart(self) -> None:
        """Everything is received after all."""
        with self.lock:
            self.runs = []
            self.received_at = self.received = 0

    def check_complete(self) -> None:
        """Raise ``IntegrityError`` unless every byte was handed out."""
        if self.runs != ([0, self.region.nbytes] if self.region.nbytes else []):
            raise IntegrityError(
                "a region of the cut was not filled",
                reason="shadow_incomplete",
                field=f"layer {self.region.index} role {self.region.role}",
                found=sum(self.runs[1::2]) - sum(self.runs[::2]),
                expected=self.region.nbytes,
            )


class Shadow:
    """Memory for a cut at ``end``, of which a handoff brings ``[cut, end)``, or a tier all; with
    it for those at ``extra``, which have the same rows, and states of their own.

    Made and consumed on the MLX thread; ``begin``, ``place``, ``place_piece`` and ``prefault``
    make no MLX call and may run on other threads. Rows below ``cut`` that a cache at ``end``
    still needs are placed by the decoder, from what it holds.
    """

    def __init__(self, layout: Layout, cut: int, end: int, extra: tuple[int, ...] = ()) -> None:
        """Reserve the memory of all regions; its pages are touched when written.

        Raises ``ValueError`` unless ``0 <= cut < extra < end``, ``EngineFault`` where mlx fails.
        """
        if not 0 <= cut < end:
            raise ValueError(f"need 0 <= cut < end, got cut={cut}, end={end}")
        self.layout = layout
        self.cut = cut
        self.end = end
        self.extra = extra
        received = {_place(r): r.first for r in regions(layout, cut, end, extra)}
        self._memory = {
            _place(r): _Memory(r, received[_place(r)]) for r in regions(layout, 0, end, extra)
        }
        self.nbytes = sum(memory.region.nbytes for memory in self._memory.values())

    def begin(self, cut: int) -> None:
        """The handoff brings ``[cut, end)``: what was asked for, or all of it with ``cut`` 0.

        Then everything that was placed is void, and nobody may be placing any more.
        """
        if cut == self.cut:
            return
        if cut:
            raise LocalProtocolError("a handoff brings all or a delta", reason="shadow_misplaced")
        self.cut = 0
        for memory in self._memory.values():
            memory.restart()

    def place(self, slot: Slot) -> memoryview:
        """The writable bytes of ``slot``, to be filled by the caller.

        Slots of one region come in the order of the schedule. Raises ``LocalProtocolError``
        (``shadow_misplaced``) for a slot that is out of order, repeated or beyond the region.
        """
        at = slot.last if slot.role >= STATE else self.end
        memory = self._memory.get((slot.index, slot.role, at))
        if memory is None:
            raise _misplaced("no such region", slot, None)
        start = memory.received_at + slot.offset
        with memory.lock:
            if start != memory.received or not memory.claim(start, start + slot.nbytes):
                raise _misplaced("out of order or too long", slot, memory.received)
            memory.received = start + slot.nbytes
        return memory.view[start : start + slot.nbytes]

    def place_piece(self, index: int, role: int, offset: int, nbytes: int) -> memoryview:
        """The writable bytes of a piece of the region ``(index, role)`` at ``end``, in any order.

        For what the decoder holds: a whole cut, or what lies below a delta. Raises
        ``LocalProtocolError`` (``shadow_misplaced``) for a piece that lies outside of that or has
        bytes of another.
        """
        memory = self._memory.get((index, role, self.end))
        if memory is None:
            raise _misplaced("no such region", Slot(0, index, role, 0, 0, offset, nbytes), None)
        with memory.lock:
            received = self.cut > 0 and offset + nbytes > memory.received_at
            if received or not memory.claim(offset, offset + nbytes):
                slot = Slot(0, index, role, 0, 0, offset, nbytes)
                raise _misplaced("outside of the region, or repeated", slot, None)
        return memory.view[offset : offset + nbytes]

    def prefault(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Touch every page that nothing was placed into yet, so that receiving need not wait.

        For another thread, while the producer computes. A region's lock is held for one chunk
        of pages at a time, and only bytes beyond those handed out are written.
        """
        for memory in self._memory.values():
            offset, nbytes = 0, memory.region.nbytes
            while offset < nbytes:
                if cancelled():
                    return
                with memory.lock:
                    # Held rows lie below, received ones above: skip both as they fill.
                    offset = max(offset, memory.runs[-1] if memory.runs else 0)
                    stop = min(offset + _PREFAULT_CHUNK, nbytes)
                    memory.pages[offset:stop:PAGE] = 0
                offset = stop

    def check_complete(self) -> None:
        """Raise ``IntegrityError`` (``shadow_incomplete``) unless every byte was handed out."""
        for memory in self._memory.values():
            memory.check_complete()

    def take(self, index: int, role: int, position: int | None = None) -> mx.array:
        """Give up a region: ``(1, heads, rows, dim)``, or a state at ``position`` (by default at
        ``end``) with a batch axis of one. Its rows begin where the lowest cut's do.

        A view of the same memory, which lives on in the array alone. Raises ``IntegrityError``
        (``shadow_incomplete``) for one that is not full, ``EngineFault`` where mlx fails.
        """
        place = index, role, self.end if position is None else position
        self._memory[place].check_complete()
        memory = self._memory.pop(place)
        memory.view.release()
        try:
            array = memory.array.view(mlx_dtype(memory.region.dtype))
            return array[None] if role >= STATE else array.transpose(1, 0, 2)[None]
        except RuntimeError as error:
            raise _failed(memory.region) from error


def _place(region: Region) -> tuple[int, int, int]:
    return region.index, region.role, region.last


def _failed(region: Region) -> EngineFault:
    """mlx could not give or use the memory of ``region``: the machine's fault, not the cut's."""
    return EngineFault(
        "mlx failed while a cut was restored",
        field=f"layer {region.index} role {region.role}",
        found=f"{region.nbytes} bytes",
    )


def _misplaced(what: str, slot: Slot, filled: int | None) -> LocalProtocolError:
    return LocalProtocolError(
        f"a frame cannot be placed: {what}",
        reason="shadow_misplaced",
        field=f"layer {slot.index} role {slot.role}",
        found=slot.offset,
        expected=filled,
    )
