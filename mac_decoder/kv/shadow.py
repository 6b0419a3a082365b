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
from typing import NamedTuple

import mlx.core as mx

from mac_decoder.kv.elements import carrier, mlx_dtype
from mac_decoder.kv.memory import unwritten
from protocol.errors import EngineFault, IntegrityError, LocalProtocolError
from protocol.layout import STATE, Layout, Region, Slot, regions

PAGE = 4096
_PREFAULT_CHUNK = 512 * PAGE


class Gap(NamedTuple):
    """Rows ``[first, last)`` of ``(index, role)`` that no frame carries; the decoder holds them."""

    index: int
    role: int
    first: int
    last: int


class _Memory:
    """One region's memory.

    ``runs`` is where the bytes that were handed out begin and end, in turn. Received rows are
    the first run, which the decoder's own rows, once they are placed, begin.
    """

    def __init__(self, region: Region, received_from: int) -> None:
        self.region = region
        try:
            self.array, self.pages = unwritten(region.shape, carrier(region.dtype))
        except RuntimeError as error:
            raise _failed(region) from error
        self.view: memoryview = self.pages.data
        rows = region.last - region.first
        self.row_bytes = region.nbytes // rows if rows else 0
        self.received_at = (received_from - region.first) * self.row_bytes
        self.runs = [self.received_at, self.received_at]
        self.lock = threading.Lock()

    def claim(self, first: int, last: int) -> bool:
        """Hand out ``[first, last)``; false if it is empty, out of bounds or handed out before."""
        at = bisect.bisect_right(self.runs, first)
        behind = self.runs[at] if at < len(self.runs) else self.region.nbytes
        if at % 2 or at == 0 or not first < last <= behind:
            return False
        left, right = self.runs[:at], self.runs[at:]
        # Runs that touch become one.
        if left[-1] == first:
            left.pop()
        else:
            left.append(first)
        if right[:1] == [last]:
            right.pop(0)
        else:
            right.insert(0, last)
        self.runs = left + right
        return True

    def check_complete(self) -> None:
        """Raise ``IntegrityError`` unless every byte was handed out."""
        if self.runs != [0, self.region.nbytes]:
            raise IntegrityError(
                "a region of the cut was not filled",
                reason="shadow_incomplete",
                field=f"layer {self.region.index} role {self.region.role}",
                found=sum(self.runs[1::2]) - sum(self.runs[::2]),
                expected=self.region.nbytes,
            )


class Shadow:
    """Memory for a cut at ``end``, of which a handoff brings ``[cut, end)``, or a tier all.

    Made and consumed on the MLX thread; ``place``, ``place_held``, ``place_piece`` and
    ``prefault`` make no MLX call and may run on other threads. Rows below ``cut`` that the cut
    still needs (see ``gaps``) are placed by the decoder from what it holds.
    """

    def __init__(self, layout: Layout, cut: int, end: int) -> None:
        """Reserve the memory of all regions; its pages are touched when written.

        Raises ``ValueError`` unless ``0 <= cut < end``, ``EngineFault`` where mlx fails.
        """
        if not 0 <= cut < end:
            raise ValueError(f"need 0 <= cut < end, got cut={cut}, end={end}")
        self.layout = layout
        self.cut = cut
        self.end = end
        received = {(r.index, r.role): r.first for r in regions(layout, cut, end)}
        self._memory = {
            (r.index, r.role): _Memory(r, received[r.index, r.role])
            for r in regions(layout, 0, end)
        }
        self.nbytes = sum(memory.region.nbytes for memory in self._memory.values())

    def gaps(self) -> tuple[Gap, ...]:
        """What the decoder itself must place with ``place_held``; empty for a full handoff."""
        found: list[Gap] = []
        for (index, role), memory in self._memory.items():
            if memory.received_at:
                first = memory.region.first
                found.append(
                    Gap(index, role, first, first + memory.received_at // memory.row_bytes)
                )
        return tuple(found)

    def place(self, slot: Slot) -> memoryview:
        """The writable bytes of ``slot``, to be filled by the caller.

        Slots of one region come in the order of the schedule. Raises ``LocalProtocolError``
        (``shadow_misplaced``) for a slot that is out of order, repeated or beyond the region.
        """
        memory = self._memory.get((slot.index, slot.role))
        if memory is None:
            raise _misplaced("no such region", slot, None)
        start = memory.received_at + slot.offset
        with memory.lock:
            filled = memory.runs[1]
            if start != filled or not memory.claim(start, start + slot.nbytes):
                raise _misplaced("out of order or too long", slot, filled)
        return memory.view[start : start + slot.nbytes]

    def place_held(self, gap: Gap) -> memoryview:
        """The writable bytes of one of ``gaps``, each to be filled once.

        Raises ``LocalProtocolError`` (``shadow_misplaced``) for anything else.
        """
        memory = self._memory.get((gap.index, gap.role))
        if memory is None or gap not in self.gaps() or memory.runs[0] == 0:
            raise LocalProtocolError(
                "these rows are not the decoder's to place", reason="shadow_misplaced"
            )
        with memory.lock:
            memory.runs[0] = 0
        return memory.view[: memory.received_at]

    def place_piece(self, index: int, role: int, offset: int, nbytes: int) -> memoryview:
        """The writable bytes of a piece of the region ``(index, role)``, in any order.

        For a restore, whose pieces cover a region exactly once. Raises ``LocalProtocolError``
        (``shadow_misplaced``) for a piece that lies outside or has bytes of another.
        """
        memory = self._memory.get((index, role))
        if memory is None:
            raise _misplaced("no such region", Slot(0, index, role, 0, 0, offset, nbytes), None)
        with memory.lock:
            if not memory.claim(offset, offset + nbytes):
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
                    offset = max(offset, memory.runs[-1])
                    stop = min(offset + _PREFAULT_CHUNK, nbytes)
                    memory.pages[offset:stop:PAGE] = 0
                offset = stop

    def check_complete(self) -> None:
        """Raise ``IntegrityError`` (``shadow_incomplete``) unless every byte was handed out."""
        for memory in self._memory.values():
            memory.check_complete()

    def take(self, index: int, role: int) -> mx.array:
        """Give up a region: ``(1, heads, rows, dim)``, or a state with a batch axis of one.

        A view of the same memory, which lives on in the array alone. Raises ``IntegrityError``
        (``shadow_incomplete``) for one that is not full, ``EngineFault`` where mlx fails.
        """
        self._memory[index, role].check_complete()
        memory = self._memory.pop((index, role))
        memory.view.release()
        try:
            array = memory.array.view(mlx_dtype(memory.region.dtype))
            return array[None] if role >= STATE else array.transpose(1, 0, 2)[None]
        except RuntimeError as error:
            raise _failed(memory.region) from error


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
