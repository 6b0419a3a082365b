"""Server-sent events: one answer's stream on the wire."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from starlette.types import Send

from protocol.errors import Cancelled

MEDIA_TYPE = b"text/event-stream; charset=utf-8"

HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"content-type", MEDIA_TYPE),
    (b"cache-control", b"no-cache"),
    # Proxies of nginx's kind hold a stream back unless they are told not to.
    (b"x-accel-buffering", b"no"),
)

DONE = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


def event(payload: Any) -> bytes:
    """``payload`` as JSON in one event."""
    return b"data: " + _encode(payload) + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip; it says that the server is alive."""
    return b": " + text.encode() + b"\n\n"


class EventStream:
    """Writes one response of events; remembers when it last wrote.

    A client that takes nothing for ``stall_s`` ends in ``Cancelled`` (``client_stalled``).
    """

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send = send
        self._stall_s = stall_s
        self.opened = False
        self.written_at = time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since the last byte."""
        return time.monotonic() - self.written_at

    async def open(self, headers: Mapping[str, str]) -> None:
        """Send the status and the headers, and a first byte, so that proxies pass them on."""
        extra = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.opened = True
        await self._send(
            {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *extra]}
        )
        await self.write(comment("accepted"))

    async def write(self, data: bytes) -> None:
        """Send one or more whole events; returns once the socket's buffer has room again."""
        await self._put(data, more=True)

    async def close(self, data: bytes = b"") -> None:
        """Send the last events and end the response."""
        await self._put(data, more=False)

    async def _put(self, data: bytes, *, more: bool) -> None:
        async with patience(self._stall_s):
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
        self.written_at = time.monotonic()


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Wait ``seconds`` for a client to take bytes, then ``Cancelled`` (``client_stalled``)."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise Cancelled("the client takes nothing", reason="client_stalled") from None
