"""The rows of one job between the tap and the sockets: bounded by bytes, read by several.

The device thread puts, each handoff of the job reads with its own cursor. Items that every
reader passed are kept while there is room, so that an identical request which arrives early in
the job can still read from the start; they go first when room is needed. Items that are sent
and not yet acknowledged are kept for a lost connection, and go where nothing else is left to
make room. A put blocks while the slowest reader is too far behind.

All jobs share one :class:`Pool`; what it does not hold is not allocated for sending.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice

from gb10_producer.prefill import Rows, State
from protocol.errors import Cancelled, LocalProtocolError

Item = Rows | State

_LOOK_AROUND_S = 0.2
"""How often a blocked put asks whether its job was abandoned."""


def item_bytes(item: Item) -> int:
    """Bytes of host memory that ``item`` keeps alive."""
    if isinstance(item, Rows):
        return item.key.nbytes + item.value.nbytes
    return item.data.nbytes


class Pool:
    """The bytes that may lie between taps and sockets, over all jobs.

    An item larger than the limit passes alone: it exists already, and its layer must go out.
    ``changed`` is the one lock of device, jobs and backlogs (reentrant).
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self.blocked = 0
        """Puts that wait for room."""
        self.ended: list[Backlog] = []
        """Backlogs of jobs that are over and still hold rows, in order of their ends."""
        self.changed = threading.Condition()

    def fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` more may be taken. Call with ``changed`` held."""
        return self.used == 0 or self.used + nbytes <= self.limit

    def take(self, nbytes: int) -> None:
        """Account for ``nbytes`` more. Call with ``changed`` held."""
        self.used += nbytes
        self.peak = max(self.peak, self.used)

    def give(self, nbytes: int) -> None:
        """Return ``nbytes``. Call with ``changed`` held."""
        self.used -= nbytes
        self.changed.notify_all()


class Backlog:
    """The items of one job, in order.

    ``abandoned`` is asked while a put waits; ``rows_are_gone`` is called once, when the first
    item is dropped, under the pool's lock.
    """

    def __init__(
        self,
        pool: Pool,
        abandoned: Callable[[], bool],
        rows_are_gone: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._abandoned = abandoned
        self._rows_are_gone = rows_are_gone
        self._items: deque[Item] = deque()
        self._first = 0
        self._readers: list[Reader] = []
        self._ended = False
        self.blocked_s = 0.0
        """Seconds that puts have waited for room: the wire's time, not the device's."""

    def put(self, item: Item) -> None:
        """Append ``item``, waiting for room. Raises ``Cancelled`` when nobody reads any more."""
        nbytes = item_bytes(item)
        with self._pool.changed:
            while True:
                if self._abandoned():
                    raise Cancelled("Nobody waits for this prefill.", reason="job_abandoned")
                self._drop_read(nbytes)
                for backlog in [self, *self._pool.ended]:
                    backlog.drop_sent(nbytes)
                if self._pool.fits(nbytes):
                    break
                began = time.monotonic()
                self._pool.blocked += 1
                self._pool.changed.wait(_LOOK_AROUND_S)
                self._pool.blocked -= 1
                self.blocked_s += time.monotonic() - began
            self._pool.take(nbytes)
            self._items.append(item)
            self._wake()

    def end(self) -> None:
        """Say that nothing more comes; what all readers passed is dropped from now on."""
        with self._pool.changed:
            self._ended = True
            self._drop_read(self._pool.limit)
            if self._items:
                self._pool.ended.append(self)
            self._wake()

    def discard(self) -> None:
        """Drop everything: the job failed, or nobody is left."""
        with self._pool.changed:
            self._ended = True
            while self._items:
                self._drop_first()
            self._wake()

    def reader(self, wake: Callable[[], None]) -> Reader:
        """A cursor at the first item; ``wake`` is called when there is something to look at.

        Raises ``LocalProtocolError`` when items were dropped already.
        """
        with self._pool.changed:
            if self._first:
                raise LocalProtocolError("The first rows of this job are gone.", field="job")
            reader = Reader(self, wake)
            self._readers.append(reader)
            return reader

    def _drop_read(self, needed: int) -> None:
        while self._items and not self._pool.fits(needed):
            if any(reader.position <= self._first for reader in self._readers):
                return
            self._drop_first()

    def drop_sent(self, needed: int) -> None:
        """Make room for ``needed`` bytes out of what only a lost connection could ask for again.

        While anything is left to send, that goes on making room by itself. Call with the
        pool's lock held.
        """
        left = min((reader.sent for reader in self._readers), default=self._first) - self._first
        # An item of no bytes is never sent, and in nobody's way.
        if not self._readers or any(map(item_bytes, islice(self._items, left, None))):
            return
        while self._items and not self._pool.fits(needed):
            self._drop_first()

    def _drop_first(self) -> None:
        if self._first == 0:
            self._rows_are_gone()
        self._first += 1
        self._pool.give(item_bytes(self._items.popleft()))
        if not self._items and self in self._pool.ended:
            self._pool.ended.remove(self)

    def _wake(self) -> None:
        self._pool.changed.notify_all()
        for reader in self._readers:
            reader.wake()

    def item_at(self, position: int) -> Item | None:
        """The item at ``position``, or ``None`` when it is not there (yet)."""
        index = position - self._first
        return self._items[index] if 0 <= index < len(self._items) else None

    def forget(self, reader: Reader) -> None:
        """Take ``reader`` out; the last one to leave takes the items with it."""
        with self._pool.changed:
            if reader in self._readers:
                self._readers.remove(reader)
            if not self._readers:
                while self._items:
                    self._drop_first()
            self._pool.changed.notify_all()

    def passed(self) -> None:
        """A reader moved on: drop what is in the way of others."""
        if self._ended:
            self._drop_read(self._pool.limit)
        self._pool.changed.notify_all()

    @property
    def first(self) -> int:
        """The first item that is still here. Call with the pool's lock held."""
        return self._first

    @property
    def lock(self) -> threading.Condition:
        """The lock that every method of this file holds."""
        return self._pool.changed


class Reader:
    """One handoff's place in a backlog.

    ``position`` is the first item that is still needed, ``sent`` the first that is not with the
    kernel. ``wake`` is called, from any thread, when the job changed.
    """

    def __init__(self, backlog: Backlog, wake: Callable[[], None]) -> None:
        self._backlog = backlog
        self.wake = wake
        self.position = self.sent = 0

    def wait_for(self, index: int, wait_s: float = 0.0) -> Item | None:
        """Item ``index`` of the job, from 0; ``None`` when it is not there within ``wait_s``."""
        lock = self._backlog.lock
        with lock:
            item = self._backlog.item_at(index)
            if item is None and wait_s > 0:
                lock.wait(wait_s)
                item = self._backlog.item_at(index)
            return item

    def sent_to(self, index: int) -> None:
        """The items before ``index`` are with the kernel."""
        if index > self.sent:
            with self._backlog.lock:
                self.sent = index
                self._backlog.lock.notify_all()

    def pass_to(self, index: int) -> None:
        """Be done with the items before ``index``: their bytes have arrived."""
        if index > self.position:
            with self._backlog.lock:
                self.position = index
                self.sent = max(self.sent, index)
                self._backlog.passed()

    def rewind(self, index: int, *, or_later: bool = False) -> bool:
        """Read again from ``index`` on; false where that item made room for others.

        ``or_later``: nothing of those that did is needed, and what comes next is fine.
        """
        with self._backlog.lock:
            first = self._backlog.first
            if index < first and not or_later:
                return False
            self.position = self.sent = max(index, first)
            self._backlog.passed()
            return True

    def first(self) -> int:
        """The first item that can still be read."""
        with self._backlog.lock:
            return self._backlog.first

    def stir(self) -> None:
        """Have whoever waits for an item look around."""
        with self._backlog.lock:
            self._backlog.lock.notify_all()

    def close(self) -> None:
        """Leave."""
        self._backlog.forget(self)
