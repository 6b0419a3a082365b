"""uvicorn's connections with a deadline for what is no request yet, and a place in a crowd.

uvicorn bounds an idle connection between two requests, but not one that never began or never
ends its first lines; and each holds a file descriptor.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any, ClassVar, Final

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from mac_decoder.api.door import Door
from mac_decoder.api.errors import error_body
from protocol.errors import RequestError

_AT_ONCE: Final = 1 << 14
"""Bytes that are taken in one piece. h11's own bound has this size, so no head has twice it."""

_MOST_UNREAD: Final = 4 << 20
"""Bytes that may wait to be taken by a client that pings: more than any message has."""

_QUIET = logging.getLogger(f"{__name__}.uvicorn")
"""uvicorn has a line for every malformed request, of which anybody can send any number. They
are counted, and logged now and then."""
_QUIET.setLevel(logging.ERROR)

_SILENT = _QUIET.getChild("websockets")
_SILENT.setLevel(logging.CRITICAL)


class DeadlineProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not whole in ``head_timeout_s``
    seconds, counted from its opening or from the first byte after an answer, however the bytes
    trickle. So it does with what follows an answer that was given before the body was read.

    ``door`` counts what is refused; unless the connection has its place already (``placed``),
    it takes one among the door's.
    """

    head_timeout_s: ClassVar[float] = 10.0
    door: ClassVar[Door]
    placed: ClassVar[bool] = False

    _deadline: asyncio.TimerHandle | None = None
    _upgraded = False

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.logger = _QUIET

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.placed or self.door.crowd.enter(self):
            self._watch()

    def data_received(self, data: bytes) -> None:
        # h11 bounds a head that is not whole, but takes any that comes whole in one piece.
        for begin in range(0, len(data), _AT_ONCE):
            super().data_received(data[begin : begin + _AT_ONCE])
            if self.transport.is_closing() or self._upgraded:
                break
        self._watch()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Let a :class:`UpgradedProtocol` have the connection, which keeps its place here."""
        self._upgraded = True
        self.ws_protocol_class = partial(UpgradedProtocol, opened_by=self)  # type: ignore[assignment]
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self.door.crowd.leave(self)
        super().connection_lost(exc)

    def idle(self) -> bool:
        """Whether no request is in hand; so it is before the connection was made."""
        if self.transport is not None and self.transport.is_closing():
            return True
        if self._upgraded:
            return False
        answered = self.cycle is not None and self.cycle.response_complete
        return answered or self.conn.their_state is h11.IDLE

    def evict(self) -> None:
        """End the connection at once, whatever is left to be written."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP as everything is refused: with this API's error object."""
        refusal = RequestError("the request is no HTTP that is known here", reason="bad_request")
        self.door.refusals.count(refusal.reason)
        # In the middle of an answer nothing else can be said.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = msgspec.json.encode(error_body(refusal))
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch(self) -> None:
        if not self.idle():
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self._expired)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expired(self) -> None:
        self._deadline = None
        if self.idle():
            self.door.refusals.count("head_timeout")
            self.transport.close()


class UpgradedProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket connection on what began as one of HTTP.

    The latter keeps its place in the crowd, and is told of the end. Whatever a client has not
    taken in ``rest_s`` seconds after the route has ended is thrown away, and the connection
    with it.
    """

    rest_s: ClassVar[float] = 5.0

    def __init__(self, *, opened_by: DeadlineProtocol, **named: Any) -> None:
        super().__init__(**named)
        self._opened_by = opened_by
        # uvicorn has a line for each, with what the client sent, and one for every handshake that
        # was refused. What breaks in the application, the backstop tells.
        self.logger = _SILENT
        self.conn.logger = _SILENT

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not (self.handshake_initiated or self.transport.is_closing()):
            # The head came whole. What is no handshake after all would never be answered.
            self._opened_by.send_400_response("")

    async def send(self, message: Any) -> None:
        """A message of the application. Raises ``ClientDisconnected``, an ``OSError`` as ASGI wants
        it, where the connection is at its end.

        Between a close of its own (of bad UTF-8, a broken frame, a ping that nobody answers) and
        the loss of the connection uvicorn takes the application's next message for its mistake.
        """
        await self.writable.wait()
        if self.handshake_complete and self.transport.is_closing():
            raise ClientDisconnected
        await super().send(message)

    def handle_ping(self) -> None:
        super().handle_ping()
        if self.transport.get_write_buffer_size() > _MOST_UNREAD:
            self.transport.abort()  # it asks, and does not read what it is answered

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._opened_by.connection_lost(exc)

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        super().on_task_complete(task)
        self.loop.call_later(self.rest_s, self.transport.abort)
