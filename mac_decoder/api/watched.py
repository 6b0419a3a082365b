"""HTTP connections that the supervisor knows of, and can finish when this process is dead.

Before and after each piece of an answer it is noted what the client is owed
(``custody.Owed``): in between, and while a piece of it waits for a slow client in this
process, nobody else could go on with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import ClassVar

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mac_decoder.api import sse
from mac_decoder.api.deadlines import DeadlineProtocol
from mac_decoder.custody import Custody, Entry, Owed


class WatchedProtocol(DeadlineProtocol):
    """A connection that ``custody`` is told of."""

    custody: ClassVar[Custody]

    _entry: Entry | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if transport.is_closing():
            return
        self._entry = self.custody.opened(transport.get_extra_info("socket").fileno())
        if self._entry is not None:
            self.app = _Noted(self.app, self, self._entry)  # type: ignore[assignment]

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """From here on nobody else could say where the connection stands."""
        if self._entry is not None:
            self._entry.owe(Owed.UNKNOWN)
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._entry is None:
            return
        # Closing is not enough where another process has the socket too.
        with contextlib.suppress(OSError):  # the client closed it first
            self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self.custody.closed(self._entry)


class _Noted:
    """The application of one connection, with a note of each step of its answers."""

    def __init__(self, app: ASGIApp, protocol: DeadlineProtocol, entry: Entry) -> None:
        self._app = app
        self._protocol = protocol
        self._entry = entry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle = self._protocol.cycle
        between, over = Owed.UNKNOWN, False

        async def noted(message: Message) -> None:
            nonlocal between, over
            self._entry.owe(Owed.UNKNOWN)
            await send(message)
            if message["type"] == "http.response.start":
                between = Owed.END if _streams_events(scope, message) else Owed.UNKNOWN
            elif not message.get("more_body", False):
                over = True
                # What follows an answer that was given before the body was read is no request.
                between = Owed.UNKNOWN if cycle.more_body else Owed.NOTHING
            self._owe(between)

        self._owe(Owed.HEAD if scope["method"] == "HEAD" else Owed.ANSWER)
        try:
            await self._app(scope, receive, noted)
        finally:
            if not over:
                # uvicorn writes a last answer of its own, or closes.
                self._entry.owe(Owed.UNKNOWN)

    def _owe(self, owed: Owed) -> None:
        """Note what is owed, if the kernel has all that was written."""
        waiting = self._protocol.transport.get_write_buffer_size()
        self._entry.owe(Owed.UNKNOWN if waiting else owed)


def _streams_events(scope: Scope, start: Message) -> bool:
    """Whether these are the first lines of a stream of events in chunks (``sse.EventStream``)."""
    kinds = [value for name, value in start["headers"] if name == b"content-type"]
    return scope["http_version"] == "1.1" and kinds == [sse.MEDIA_TYPE]
