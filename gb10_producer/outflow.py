"""Frames of one handoff between backlog and socket: cut from the rows, hashed in a thread.

The connection's thread takes slots from the protocol machine and hands them over in order; the
hashing thread finds each slot's bytes and digests header and payload, while the connection's
thread sends what was digested before. Nothing is copied: a payload is a view of the rows.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from gb10_producer.backlog import Item, Reader
from gb10_producer.prefill import Rows
from protocol import frames
from protocol.errors import EngineFault
from protocol.layout import KEY, STATE, Layout, RecurrentLayer, Slot, row_bytes

_WAIT_S = 0.5


@dataclass(frozen=True)
class Frame:
    """A slot, its payload and digest; ``passed`` items of the backlog end before or with it."""

    slot: Slot
    payload: memoryview
    digest: bytes
    passed: int


class Outflow:
    """The hashing side of one handoff. ``add`` and ``take`` belong to the connection's thread."""

    def __init__(self, layout: Layout, reader: Reader, wake: Callable[[], None]) -> None:
        self._layout = layout
        self._reader = reader
        self._wake = wake
        self._todo: SimpleQueue[tuple[Slot, bytes] | None] = SimpleQueue()
        self._ready: deque[Frame] = deque()
        self._hungry = False
        self._closed = False
        self.fault: EngineFault | None = None
        """Set when the source's rows are in disorder; no frame is made any more."""
        self.length = 0
        """Slots added and not yet taken."""
        self._thread = threading.Thread(target=self._run, name="hash", daemon=True)
        self._thread.start()

    def add(self, slot: Slot, prefix: bytes) -> None:
        """Have the next slot's frame made; ``prefix`` is its header without the digest."""
        self.length += 1
        self._todo.put((slot, prefix))

    def take(self) -> Frame | None:
        """The next finished frame, in order; ``None``: none yet, the next one will wake."""
        if not self._ready:
            self._hungry = True
            if not self._ready:  # it may have been finished just before
                return None
        self._hungry = False
        self.length -= 1
        return self._ready.popleft()

    def close(self) -> None:
        """Stop, leave the backlog, and wait for the thread: no row is read afterwards."""
        self._closed = True
        self._todo.put(None)
        self._reader.close()
        self._thread.join()
        self._ready.clear()

    def _run(self) -> None:
        item: Item | None = None
        index = -1
        while (work := self._next_slot()) is not None:
            slot, prefix = work
            while item is None or not _holds(item, slot):
                index += 1
                item = self._next_item(index)
                if item is None:
                    return
                if _is_past(item, slot):
                    self._fail(slot)
                    return
            payload = _payload(self._layout, item, slot)
            if payload.nbytes != slot.nbytes:
                self._fail(slot)
                return
            frame = Frame(slot, payload, frames.digest(prefix, payload), index)
            self._ready.append(frame)
            if self._hungry:  # else the connection has enough to send, and will look
                self._wake()

    def _next_slot(self) -> tuple[Slot, bytes] | None:
        work = self._todo.get()
        return None if self._closed else work

    def _next_item(self, index: int) -> Item | None:
        while not self._closed:
            item = self._reader.wait_for(index, _WAIT_S)
            if item is not None:
                return item
        return None

    def _fail(self, slot: Slot) -> None:
        self.fault = EngineFault(
            "The prefill emitted rows that the schedule does not have here.",
            field="slot",
            expected=f"layer {slot.index}, role {slot.role}, rows {slot.first} to {slot.last}",
        )
        self._wake()


def _holds(item: Item, slot: Slot) -> bool:
    """Whether the slot's bytes lie in ``item``."""
    if item.index != slot.index:
        return False
    if isinstance(item, Rows):
        return slot.role < STATE and item.first <= slot.first and slot.last <= item.last
    return slot.role == STATE + item.number and item.position == slot.last


def _is_past(item: Item, slot: Slot) -> bool:
    """Whether ``item`` neither holds the slot nor is one of rows that nobody ships (width 0)."""
    if _holds(item, slot):
        return False
    return not (isinstance(item, Rows) and item.key.nbytes + item.value.nbytes == 0)


def _payload(layout: Layout, item: Item, slot: Slot) -> memoryview:
    if not isinstance(item, Rows):
        return item.data[slot.offset : slot.offset + slot.nbytes]
    layer = layout.layers[slot.index]
    assert not isinstance(layer, RecurrentLayer)
    width = row_bytes(layer, slot.role)
    source = item.key if slot.role == KEY else item.value
    return source[(slot.first - item.first) * width : (slot.last - item.first) * width]
