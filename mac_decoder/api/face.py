"""What shows the decoder to people on its own port, seen from the decoder.

The decoder makes no pages and imports nothing that does. Whoever starts it may give it a face:
an ASGI app that answers at some paths which no route of the API has. Every request and every
WebSocket of it has passed the guards; a WebSocket ends when its session or key does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mac_decoder.api.door import Refusals
from mac_decoder.api.guard import WEBSOCKET_POLICY_VIOLATION, KeyGuard
from mac_decoder.api.inside import Inside
from mac_decoder.api.once import Once
from mac_decoder.api.sessions import Sessions
from mac_decoder.housekeeping.house import Housekeeping
from mac_decoder.status.board import Board
from trust.secrets import Choice

MOST_HEARD_BYTES: Final = 1 << 16
"""Of a message of a page's WebSocket: a click or a text that was typed."""

_ASK_EVERY_S: Final = 1.0


@dataclass(frozen=True)
class Facts:
    """What a page may tell of how this decoder was started."""

    model: Path
    served_name: str
    address: str
    """As this machine reaches it, ``http://127.0.0.1:8000``."""

    state: Path
    """The state directory of the decoder: producers, API keys."""

    cache: Path
    disk: bool
    """Whether caches are kept on disk."""

    keys_demanded: bool
    secured: bool
    """Whether there is TLS."""

    secrets: Choice
    """How the secrets of paired producers are kept."""


@dataclass(frozen=True)
class Facing:
    """What a face may use."""

    board: Board
    inside: Inside
    sessions: Sessions
    once: Once
    refusals: Refusals
    facts: Facts
    manage: Housekeeping | None = None
    """What looks after the caches; ``None`` where nobody does."""


class Face(Protocol):
    """What answers people."""

    def answers(self, path: str) -> bool:
        """Whether this path is its own. The API's paths are never asked for."""
        ...

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an HTTP or WebSocket scope of such a path."""
        ...

    async def close(self) -> None:
        """End; the server has stopped."""
        ...


MakeFace = Callable[[Facing], Face]


class Beside:
    """Has ``face`` answer at its paths, and ``routes`` at all others."""

    API: Final = ("/v1/", "/status", "/metrics", "/health", "/ready")
    """Beginnings of paths that are the API's, whether it has a route there or not."""

    def __init__(self, routes: ASGIApp, face: ASGIApp, answers: Callable[[str], bool]) -> None:
        self._routes = routes
        self._face = face
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = scope["type"] in ("http", "websocket")
        if known and not scope["path"].startswith(self.API) and self._answers(scope["path"]):
            await self._face(scope, receive, send)
        else:
            await self._routes(scope, receive, send)


class WhileAllowed:
    """Ends a WebSocket once its session or API key is not valid any more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        hearing: asyncio.Future[Message] | None = None
        over = False

        async def heard() -> Message:
            nonlocal hearing, over
            while not over:
                hearing = hearing or asyncio.ensure_future(receive())
                await asyncio.wait({hearing}, timeout=_ASK_EVERY_S)
                if not scope[KeyGuard.ALLOWED]():
                    over = True
                    why = {"code": WEBSOCKET_POLICY_VIOLATION, "reason": "the session has ended"}
                    await send({"type": "websocket.close", **why})
                elif hearing.done():
                    message, hearing = hearing.result(), None
                    return message
            return {"type": "websocket.disconnect", "code": WEBSOCKET_POLICY_VIOLATION}

        async def said(message: Message) -> None:
            if not over:
                await send(message)

        try:
            await self._app(scope, heard, said)
        finally:
            if hearing is not None:
                hearing.cancel()
