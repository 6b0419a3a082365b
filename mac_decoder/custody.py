"""The child's client connections, as the supervisor must know them to finish them.

What Metal aborts takes the child with it, in the middle of answers. So the child passes a
duplicate of every client's socket to the supervisor (SCM_RIGHTS over a socket pair), and both
map one page of memory in which the child keeps, in one byte for each connection, what its
client is owed. A store into memory costs nothing beside a token, needs no peer that listens,
and is there when the process that made it is dead: the supervisor then finds exactly what
may still be written to whom (``farewell``).

The records on the pair have four bytes, and a descriptor beside the first kind::

    child           supervisor
    opened N   ->             the connection in slot N, with its socket
    closed N   ->             the child has closed it

A pair that is full or broken costs only this: connections that the supervisor does not know
end with the child, as they would without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import resource
import socket
import struct
import tempfile
from collections import deque
from enum import IntEnum
from typing import Final

log = logging.getLogger(__name__)

_MOST: Final = 512
"""Connections that are known at once."""

_SPARED: Final = 64
"""Descriptors that the supervisor needs beside those of two children's connections."""

_RECORD: Final = struct.Struct(">BxH")
_OPENED: Final = 1
_CLOSED: Final = 2

_AT_ONCE: Final = 256
"""Records that are read before something else has its turn."""


class Owed(IntEnum):
    """What the client of a connection is owed, should the child be dead."""

    NOTHING = 0
    """No request is in hand."""
    ANSWER = 1
    """A request is, and no byte of its answer was written."""
    HEAD = 2
    """The same, and it asked for the head alone."""
    END = 3
    """A chunked stream of events was begun, and the kernel has all of it up to an event's end."""
    UNKNOWN = 4
    """Anything else: nothing may be written any more."""


class Entry:
    """One connection, for the child: says what its client is owed, until it is closed."""

    def __init__(self, page: mmap.mmap, slot: int) -> None:
        self._page = page
        self.slot = slot
        self.open = True

    def owe(self, owed: Owed) -> None:
        """Note what the client is owed from now on."""
        if self.open:  # the slot may be another connection's by now
            self._page[self.slot] = owed


class Custody:
    """The child's side. Belongs to the event loop's thread; nothing here waits or raises."""

    def __init__(self, channel: socket.socket, page: mmap.mmap) -> None:
        channel.setblocking(False)
        self._channel: socket.socket | None = channel
        self._page = page
        self._free = deque(range(len(page)))
        self._unsent: deque[int] = deque()
        self.missed = 0
        """Connections that the supervisor was not given."""

    def opened(self, descriptor: int) -> Entry | None:
        """Pass on a new connection's socket; ``None`` if the supervisor will not know it."""
        if self._channel is None or self._unsent or not self._free:
            return self._miss()
        slot = self._free.popleft()
        try:
            sent = socket.send_fds(self._channel, [_RECORD.pack(_OPENED, slot)], [descriptor])
        except ConnectionError:
            sent = 0
        except OSError:  # no room in the pair, or too many descriptors on their way
            self._free.append(slot)
            return self._miss()
        if sent < _RECORD.size:
            self._leave()
            return self._miss()
        return Entry(self._page, slot)

    def closed(self, entry: Entry) -> None:
        """Tell that a connection is closed; its slot is free once that was told."""
        entry.owe(Owed.NOTHING)
        entry.open = False
        self._unsent.append(entry.slot)
        self._tell()

    def _tell(self) -> None:
        while self._channel is not None and self._unsent:
            try:
                sent = self._channel.send(_RECORD.pack(_CLOSED, self._unsent[0]))
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._channel, self._tell)
                return
            except OSError:
                sent = 0
            if sent < _RECORD.size:
                self._leave()
                return
            self._free.append(self._unsent.popleft())
        if self._channel is not None:
            asyncio.get_running_loop().remove_writer(self._channel)

    def _miss(self) -> None:
        if not self.missed:
            log.warning("the supervisor does not know every connection: a fault may reset some")
        self.missed += 1

    def _leave(self) -> None:
        """The supervisor does not listen any more."""
        if self._channel is not None:
            asyncio.get_running_loop().remove_writer(self._channel)
            self._channel.close()
            self._channel = None


def inherited(channel_fd: int, page_fd: int) -> Custody:
    """The child's side, from the descriptors that it was started with."""
    channel = socket.socket(fileno=channel_fd)
    os.set_inheritable(channel_fd, False)
    try:
        return Custody(channel, mmap.mmap(page_fd, 0))
    finally:
        os.close(page_fd)


class Duplicates:
    """The supervisor's side, for one child: duplicates of its connections' sockets."""

    def __init__(self, most: int | None = None) -> None:
        """At most ``most`` of them; by default as many as descriptors allow.

        Raises ``OSError`` where a machine has no descriptor or no page left.
        """
        size = _affordable() if most is None else most
        self.page_fd = _blank(size)
        """For the child, as ``theirs``; see :meth:`passed_on`."""
        try:
            self._page = mmap.mmap(self.page_fd, 0)
            self.channel, self.theirs = socket.socketpair()
        except OSError:
            os.close(self.page_fd)
            raise
        self.channel.setblocking(False)
        self._held: dict[int, int] = {}
        self._lost = 0

    def passed_on(self) -> None:
        """The child has its ends; they are closed here."""
        self.theirs.close()
        os.close(self.page_fd)

    def hear(self) -> bool:
        """Take what the child has told by now; false once nothing more will come.

        What is held then does no harm: the child shuts down what it closes, told or not.
        """
        for _ in range(_AT_ONCE):
            try:
                record, descriptors, _, _ = socket.recv_fds(self.channel, _RECORD.size, 1)
            except BlockingIOError:
                return True
            except OSError as error:
                log.warning("the decoder's connections are not heard of: %s", error.strerror)
                return False
            if not self._take(record, descriptors):
                return False
        return True

    def taken(self) -> list[tuple[socket.socket, Owed]]:
        """What the child, which must be dead, left behind; it is the caller's from now on."""
        while self.hear() and self._more():
            pass
        held, self._held = self._held, {}
        return [(_socket(descriptor), self._owed(slot)) for slot, descriptor in held.items()]

    def close(self) -> None:
        """Let go of everything."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held = {}
        self.channel.close()
        self._page.close()

    def _more(self) -> bool:
        """Whether something is left to be read, its end included."""
        try:
            self.channel.recv(1, socket.MSG_PEEK)
        except OSError:
            return False
        return True

    def _owed(self, slot: int) -> Owed:
        try:
            return Owed(self._page[slot])
        except ValueError:
            return Owed.UNKNOWN

    def _take(self, record: bytes, descriptors: list[int]) -> bool:
        """Go by one record; false if it is none."""
        if len(record) < _RECORD.size:
            kind, slot = 0, 0
        else:
            kind, slot = _RECORD.unpack(record)
        if kind not in (_OPENED, _CLOSED) or slot >= len(self._page):
            for descriptor in descriptors:
                os.close(descriptor)
            return False
        before = self._held.pop(slot, None)
        if before is not None:
            os.close(before)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            self._held[slot] = descriptor
        if kind == _OPENED and not descriptors:
            # The kernel drops it where a process may have no more.
            if not self._lost:
                log.warning("no descriptor is left for the decoder's connections")
            self._lost += 1
        return True


def _affordable() -> int:
    """How many connections may be known, beside those of a child that has just ended."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST
    return max(1, min(_MOST, soft // 2 - _SPARED))


def _blank(size: int) -> int:
    """A descriptor of ``size`` zeros that processes can map; nothing of it has a name."""
    if hasattr(os, "memfd_create"):
        # Not a file: its pages are never written to a disk, which stores could wait for.
        descriptor = os.memfd_create("baton-connections")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, descriptor)
        os.write(descriptor, bytes(size))
        on_failure.pop_all()
    return descriptor


def _socket(descriptor: int) -> socket.socket:
    # With everything given nothing is asked of the kernel, which knows no more of a socket
    # whose client has left.
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=descriptor)
