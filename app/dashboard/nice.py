"""NiceGUI, set up to serve this machine's user and nobody else. Imported at the first page.

Nothing of it is kept on disk, nothing is fetched from elsewhere, and none of its log lines,
which may hold what somebody typed, reaches the log: exceptions are told by their places.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from fastapi import FastAPI
from socketio.packet import BINARY_ACK, BINARY_EVENT, Packet
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from mac_decoder.api.errors import error_response
from mac_decoder.api.face import MOST_HEARD_BYTES, Facing
from mac_decoder.api.guard import refuse
from mac_decoder.api.sessions import Sessions
from mac_decoder.reporting import traced
from protocol.errors import CapacityError, RequestError

# Before NiceGUI is imported, which reads them once: a directory that is not there, instead of one
# in whatever directory this process was started in; and no server that keeps what pages keep.
os.environ["NICEGUI_STORAGE_PATH"] = os.devnull
os.environ.pop("NICEGUI_REDIS_URL", None)

from nicegui import Client, app, core, ui
from nicegui.client import templates

from app.dashboard import addresses, pages
from app.dashboard.belonging import Belonging
from app.dashboard.mount import MOST_MANAGING
from app.dashboard.sealed import Marked

log = logging.getLogger(__name__)

MOST_CLIENTS: Final = 64
"""Pages that are held in memory. One that no browser goes on with makes room for another, and
goes after a minute. Sessions that may manage have as many more as they may have open.
"""

_ICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32">'
    '<circle cx="16" cy="16" r="12" fill="none" stroke="#2f6fde" stroke-width="6"/></svg>'
)


class Built(NamedTuple):
    """What serves the pages, while it runs."""

    app: ASGIApp

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """NiceGUI's own tasks, on this event loop, for the time of a block."""
        # As a server with a lifespan would; ours has none.
        async with app.router.lifespan_context(app):
            yield


def build(facing: Facing) -> Built:
    """Set NiceGUI up, once in a process. Any thread."""
    for name in ("nicegui", "engineio", "socketio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    app.on_exception(_note)
    loader = templates.env.loader
    assert loader is not None
    if not isinstance(loader, Marked):
        templates.env.loader = Marked(loader)
    engine: Any = core.sio.eio
    # Who may connect was decided by ``HostGuard``. This adds no header that lets others read.
    engine.cors_allowed_origins = []
    engine.max_http_buffer_size = MOST_HEARD_BYTES
    # Both have loggers of their own, with handlers, for what clients send.
    for server in (core.sio, engine):
        server.logger.disabled = True
    # One message after the other: what a wrong one comes to ends in those loggers, and not in
    # asyncio's, as that of a task of its own would.
    core.sio.async_handlers = False
    core.sio.packet_class = _Textual
    belonging = Belonging(facing.refusals)
    belonging.watch()
    # NiceGUI's own answer is a page, which nobody goes on with and no bound counts.
    app.add_exception_handler(404, _missing)
    app.add_static_files(addresses.ASSETS, Path(__file__).parent / "assets")
    pages.register(facing)
    around = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    ui.run_with(
        around,
        title="Baton",
        favicon=_ICON,
        dark=None,
        language="en-US",
        # Pages are fed by the board; nothing is bound to what would have to be looked at.
        binding_refresh_interval=None,
        reconnect_timeout=5.0,
        message_history_length=100,
        gzip_middleware_factory=None,
        tailwind=False,
        show_welcome_message=False,
    )
    return Built(Bounded(around, facing, belonging.refusal))


class _Textual(Packet):
    """A message of a page. None of them is binary, and none is waited for that says it will be: it
    would be held until as many pieces have come as it says.
    """

    def decode(self, encoded_packet: Any) -> int:
        """Raises ``ValueError`` for a binary one."""
        pieces = super().decode(encoded_packet)
        if pieces or self.packet_type in (BINARY_EVENT, BINARY_ACK):
            raise ValueError("no page sends anything binary")
        return pieces


class Bounded:
    """Makes no more pages than memory is for, and goes on with no connection but for those whose
    it is: ``refusal`` says why not.
    """

    def __init__(
        self, app: ASGIApp, facing: Facing, refusal: Callable[[Scope], RequestError | None]
    ) -> None:
        self._app = app
        self._facing = facing
        self._refusal = refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        makes_one = scope["type"] == "http" and scope["path"] in addresses.PAGES
        if makes_one and not self._has_room(self._may_manage(scope)):
            busy = CapacityError("too many pages are open", reason="too_many_pages")
            self._facing.refusals.count(busy.reason)
            await refuse(busy, scope, receive, send)
            return
        if scope["path"].startswith(addresses.SOCKET):
            wrong = self._refusal(scope)
            if wrong is not None:
                await refuse(wrong, scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _has_room(self, may_manage: bool) -> bool:
        """Whether another page may be made, after one that no browser has gone on with has gone."""
        if len(Client.instances) < MOST_CLIENTS + (MOST_MANAGING if may_manage else 0):
            return True
        unused = [
            (self._may_manage(one.request.scope), one.created, one.id)
            for one in Client.instances.values()
            if one.environ is None
        ]
        # Not those of whoever may manage for somebody who may not; else the oldest.
        oldest = min(unused, default=None)
        if oldest is None or (oldest[0] and not may_manage):
            return False
        Client.instances[oldest[2]].delete()
        return True

    def _may_manage(self, scope: Any) -> bool:
        return self._facing.sessions.may_manage(scope.get(Sessions.SCOPE))


async def _missing(_: Request, __: Exception) -> Response:
    return error_response(
        RequestError("there is nothing at this address", reason="route_not_found")
    )


def _note(error: Exception) -> None:
    log.error("a page failed: %s", traced(error))
