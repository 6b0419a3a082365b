"""Frames of one handoff between backlog and socket: cut from the rows and hashed, in order.

The connection's thread takes slots from the protocol machine and hands them over; a hashing
thread finds each slot's bytes and digests header and payload. While nothing is ready to send,
the connection's thread hashes the next frame itself instead of sleeping: two threads that wait
for each other cost more than the bytes they move. Nothing is copied: a payload is a view of the
rows.
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
from protocol.layout import KEY, STATE, VALUE, Layout, RecurrentLayer, Slot, row_bytes

_WAIT_S = 0.5
_NOTHING = memoryview(b"")


@dataclass
class Frame:
    """A slot with its payload and, once it is hashed, its digest.

    ``passed`` items of the backlog end before it, ``ended`` with it.
    """

    slot: Slot
    prefix: bytes
    payload: memoryview = _NOTHING
    digest: bytes | None = None
    passed: int = 0
    ended: int = 0


class Outflow:
    """One handoff's frames over one connection. All methods belong to the connection's thread."""

    def __init__(self, layout: Layout, reader: Reader, wake: Callable[[], None]) -> None:
        """Begin at the reader's position, at or before the item of the first slot to come."""
        self._layout = layout
        self._reader = reader
        self._wake = wake
        self._order: deque[Frame] = deque()
        self._unclaimed: deque[Frame] = deque()
        self._claiming = threading.Lock()
        self._item: Item | None = None
        self._index = reader.position - 1
        self._seeking = reader.position > 0
        """The first slot is searched for: a connection was lost, and its item is near."""
        self._calls: SimpleQueue[bool] = SimpleQueue()
        self._hungry = False
        self._closed = False
        self.fault: EngineFault | None = None
        """Set when the source's rows are in disorder; no frame is made any more."""
        self._thread = threading.Thread(target=self._run, name="hash", daemon=True)
        self._thread.start()

    @property
    def length(self) -> int:
        """Slots added and not yet taken."""
        return len(self._order)

    def add(self, slot: Slot, prefix: bytes) -> None:
        """Have the next slot's frame made; ``prefix`` is its header without the digest."""
        frame = Frame(slot, prefix)
        self._order.append(frame)
        self._unclaimed.append(frame)
        self._calls.put(True)

    def take(self) -> Frame | None:
        """The next frame, if it is hashed; else ``None``, and its digest will wake."""
        if not self._order:
            return None
        head = self._order[0]
        if head.digest is None:
            self._hungry = True
            if head.digest is None:  # it may have been finished just before
                return None
        self._hungry = False
        return self._order.popleft()

    def help(self) -> bool:
        """Hash one frame in this thread; false: there is none that nobody works on."""
        if not self._claiming.acquire(blocking=False):
            return False  # the hashing thread looks for the next frame's rows
        try:
            frame = self._claim(0.0)
        finally:
            self._claiming.release()
        if frame is None:
            return False
        frame.digest = frames.digest(frame.prefix, frame.payload)
        return True

    def close(self) -> None:
        """Stop, and wait for the thread: it reads no row afterwards. Idempotent."""
        self._closed = True
        self._calls.put(False)
        self._reader.stir()
        self._thread.join()
        self._order.clear()

    def _run(self) -> None:
        while self._calls.get() and not self._closed:
            with self._claiming:
                frame = self._claim(_WAIT_S)
            if frame is None:
                continue  # the connection's thread was faster
            frame.digest = frames.digest(frame.prefix, frame.payload)
            if self._hungry:  # else the connection has enough to send, and will look
                self._wake()

    def _claim(self, wait_s: float) -> Frame | None:
        """Take the next frame and find its payload; ``None``: there is none, or (without
        waiting) its rows are not there yet. Call with ``_claiming`` held.
        """
        if not self._unclaimed or self.fault is not None:
            return None
        frame = self._unclaimed[0]
        while self._item is None or not _holds(self._item, frame.slot):
            item = self._reader.wait_for(self._index + 1, wait_s)
            if self._closed or (item is None and not wait_s):
                return None
            if item is not None:
                self._index += 1
                self._item = item
                if _is_past(item, frame.slot) and not self._seeking:
                    return self._fail(frame.slot)
        self._seeking = False
        frame.payload = _payload(self._layout, self._item, frame.slot)
        frame.passed = self._index
        frame.ended = self._index + _ends(self._item, frame.slot)
        if frame.payload.nbytes != frame.slot.nbytes:
            return self._fail(frame.slot)
        return self._unclaimed.popleft()

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


def _ends(item: Item, slot: Slot) -> bool:
    """Whether the slot, one of ``item``'s, is its last."""
    if isinstance(item, Rows):
        return slot.last == item.last and (slot.role == VALUE or not item.value.nbytes)
    return slot.offset + slot.nbytes == item.data.nbytes


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
