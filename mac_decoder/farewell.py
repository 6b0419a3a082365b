"""The end of a dead child's connections: what their clients are told, and by whom.

A request that has no byte of its answer gets a whole one, a 503 as the stand-in would give;
a stream of events that stands between two events gets one with the error, and its end. All
others are closed: whoever writes into an answer that stands nobody knows where, writes
something wrong. A thread does it, in its own short time, so that no client holds up the
supervisor; a client that takes nothing gets nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from typing import Final

from mac_decoder.api import sse
from mac_decoder.custody import Owed
from mac_decoder.standin import Standing, error_object

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 2.0
"""How long all clients of one child may take together."""

_PEEKED: Final = 5


class Farewells:
    """Finishes connections, each child's in a thread of its own."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def begin(self, left: list[tuple[socket.socket, Owed]], standing: Standing) -> None:
        """Finish what a child ``left``, by what its clients are owed; does not wait.

        ``standing`` is what they are told. The sockets are closed in the end.
        """
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        told: list[tuple[socket.socket, bytes]] = []
        for opened, owed in left:
            opened.setblocking(False)
            text = last_words(_asked_by_now(opened) if owed is Owed.NOTHING else owed, standing)
            if text:
                told.append((opened, text))
            else:
                opened.close()
        if not told:
            return
        streams = sum(owed is Owed.END for _, owed in left)
        log.info("telling %d clients of it, %d of them in mid-stream", len(told), streams)
        thread = threading.Thread(target=_tell, args=(told,), name="baton-farewell", daemon=True)
        self._threads.append(thread)
        thread.start()

    def end(self) -> None:
        """Wait until everybody was told or had the time to be."""
        for thread in self._threads:
            thread.join()


def last_words(owed: Owed, standing: Standing) -> bytes:
    """The bytes that end an answer; none where nothing may be written."""
    error = {"error": error_object(standing)}
    if owed is Owed.END:
        event = sse.event(error)
        return b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
    if owed not in (Owed.ANSWER, Owed.HEAD):
        return b""
    body = json.dumps(error).encode()
    lines = [
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if standing.retry_after_s is not None:
        lines.append(f"Retry-After: {standing.retry_after_s}")
    head = "\r\n".join([*lines, "", ""]).encode()
    return head if owed is Owed.HEAD else head + body


def _asked_by_now(opened: socket.socket) -> Owed:
    """What is owed on a connection that was idle: a request may have come that nobody read."""
    try:
        begun = opened.recv(_PEEKED, socket.MSG_PEEK)
    except OSError:
        return Owed.NOTHING
    if not begun:
        return Owed.NOTHING
    return Owed.HEAD if begun == b"HEAD " else Owed.ANSWER


def _tell(told: list[tuple[socket.socket, bytes]]) -> None:
    limit = time.monotonic() + _PATIENCE_S
    with contextlib.ExitStack() as closing, selectors.DefaultSelector() as selector:
        for opened, text in told:
            closing.callback(opened.close)
            selector.register(opened, selectors.EVENT_WRITE, text)
        while selector.get_map() and (left_s := limit - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                _go_on(selector, key.fileobj, key.data)


def _go_on(selector: selectors.BaseSelector, opened: socket.socket, text: bytes) -> None:
    """Write what is left of ``text``; then read, for what is left unread takes the answer
    with it when the socket is closed.
    """
    try:
        if text:
            text = text[opened.send(text) :]
            if not text:
                opened.shutdown(socket.SHUT_WR)
            event = selectors.EVENT_WRITE if text else selectors.EVENT_READ
            selector.modify(opened, event, text)
            return
        if opened.recv(1 << 16):
            return
    except BlockingIOError:
        return
    except OSError:
        log.debug("a client left before it was told everything")
    selector.unregister(opened)
    opened.close()
