"""The endpoints of ``/v1``, called from within the process as a client calls them.

The same routes answer, behind the same limits: what a page asks is in the journal, is counted
and is bounded like what comes over a socket. Only the guards are left out, whose work has been
done for whoever asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from starlette.types import ASGIApp, Message, Scope

from mac_decoder.api.guard import KeyGuard

_DONE: Final = b"[DONE]"


class Reply:
    """An answer that has begun: its status is known, its body comes."""

    def __init__(self, status: int, pieces: AsyncIterator[bytes]) -> None:
        self.status = status
        self._pieces = pieces

    async def json(self) -> dict[str, Any]:
        """The whole body of an answer that is one JSON object: also every refusal's."""
        return msgspec.json.decode(b"".join([piece async for piece in self._pieces]), type=dict)

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The objects of an answer that streams, until ``[DONE]``; an error is one of them
        (``{"error": ...}``), and ends it. A stream that ends without either is not whole.
        """
        held = b""
        async for piece in self._pieces:
            *events, held = (held + piece).split(b"\n\n")
            for event in events:
                for line in event.splitlines():
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == _DONE:
                        return
                    yield msgspec.json.decode(data, type=dict)


class Inside:
    """What calls ``routes`` in this process."""

    def __init__(self, routes: ASGIApp) -> None:
        self._routes = routes

    @asynccontextmanager
    async def post(
        self,
        path: str,
        payload: Mapping[str, Any],
        *,
        salt: bytes = b"",
        allowed: Callable[[], bool] = lambda: True,
    ) -> AsyncIterator[Reply]:
        """The answer to a POST, for the time of a block: whoever leaves the block early has left
        as a client leaves, and the work ends.

        ``salt`` is that of the asking session (``Sessions.salt``), ``allowed`` says whether it
        would still be let in.
        """
        body = msgspec.json.encode(payload)
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
            "state": {},
            KeyGuard.SALT: salt,
            KeyGuard.ALLOWED: allowed,
        }
        call = _Call(body)
        working = asyncio.ensure_future(self._routes(scope, call.receive, call.send))
        working.add_done_callback(call.ended)
        try:
            yield Reply(await call.status(working), call.pieces(working))
        finally:
            call.leave()
            if not working.done():
                # It notices by itself, as with a client; whatever does not is not waited for.
                await asyncio.wait({working}, timeout=1.0)
                working.cancel()
            await asyncio.wait({working})
            if not working.cancelled():
                working.exception()  # seen by whoever waited for the status or the body


class _Call:
    """Both directions of one request. At most a few messages wait for a slow reader."""

    def __init__(self, body: bytes) -> None:
        self.left = asyncio.Event()
        self._body: bytes | None = body
        self._messages: asyncio.Queue[Message] = asyncio.Queue(16)
        self._over = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if not self.left.is_set():
            await self._messages.put(message)

    def leave(self) -> None:
        """Nobody reads any more; what waits to be read makes room for whoever says it."""
        self.left.set()
        while not self._messages.empty():
            self._messages.get_nowait()

    def ended(self, _: object) -> None:
        self._over.set()

    async def status(self, working: asyncio.Future[None]) -> int:
        message = await self._next(working)
        if message is None:
            raise EOFError("the route ended without an answer")
        return message["status"]

    async def pieces(self, working: asyncio.Future[None]) -> AsyncIterator[bytes]:
        while (message := await self._next(working)) is not None:
            if message["type"] != "http.response.body":
                continue
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                return

    async def _next(self, working: asyncio.Future[None]) -> Message | None:
        """The next message; ``None`` once the route has ended. Raises what the route raises."""
        getting = asyncio.ensure_future(self._messages.get())
        over = asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait({getting, over}, return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
            if self._messages.empty():
                working.result()
                return None
            return self._messages.get_nowait()
        finally:
            getting.cancel()
            over.cancel()
