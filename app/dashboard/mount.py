"""The dashboard as the decoder knows it: answers at its addresses, costs nothing before that.

NiceGUI takes a second of a processor and some 30 MB. It is imported in a thread when the first
page is asked for; a decoder that nobody looks at never has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.dashboard import addresses
from app.dashboard.login import Login
from app.dashboard.sealed import Sealed
from mac_decoder.api import plain
from mac_decoder.api.errors import error_response
from mac_decoder.api.face import Facing
from mac_decoder.api.guard import (
    header_values,
    is_led_by_others,
    is_navigation,
    onward,
    refuse,
    takes_html,
)
from mac_decoder.api.sessions import Sessions
from protocol.errors import BatonError, CapacityError, ConfigError, RequestError

log = logging.getLogger(__name__)

MOST_PAGES: Final = 16
"""Pages that are open at once, each with its WebSocket or a request that polls."""

MOST_MANAGING: Final = 4
"""Further ones, for sessions that may manage: nobody else's pages keep them out."""

_OTHERS: Final = ("cross-site", "same-site")
"""What Sec-Fetch-Site says of a page that is not ours: another port is the same site."""

_HERE: Final = "This is a page of Baton's dashboard: open it in a browser.\n"


class Dashboard:
    """``mac_decoder.api.face.Face``."""

    def __init__(self, facing: Facing) -> None:
        self._facing = facing
        self._login = Login(facing)
        self._starting: asyncio.Task[ASGIApp] | None = None
        self._running = contextlib.AsyncExitStack()
        self._connections = 0
        self._closed = False

    def answers(self, path: str) -> bool:
        """Whether the dashboard has this address."""
        return addresses.is_ours(path)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["type"] == "websocket":
            await self._connection(scope, receive, send)
        elif path == addresses.LOGIN:
            response = await self._login.login(Request(scope, receive))
            await response(scope, receive, send)
        elif path == addresses.LOGOUT:
            response = await self._login.logout(Request(scope, receive))
            await response(scope, receive, send)
        elif path.startswith(addresses.SOCKET):
            await self._connection(scope, receive, send)
        elif scope["method"] not in ("GET", "HEAD"):
            wrong = RequestError("not with this method", reason="method_not_allowed")
            await refuse(wrong, scope, receive, send)
        else:
            await self._page(scope, receive, send)

    async def close(self) -> None:
        """End NiceGUI, if it was ever begun."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting})
        await self._running.aclose()

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["path"] in addresses.PAGES
        if _is_for_others(scope) and not is_navigation(scope):
            await self._refuse_others(scope, receive, send)
            return
        if asks and (scope["method"] == "HEAD" or not takes_html(header_values(scope, b"accept"))):
            # Somebody who looks whether it answers: a page is held for those who look at it.
            await PlainTextResponse(_HERE, headers={"cache-control": "no-store"})(
                scope, receive, send
            )
            return
        if asks and is_led_by_others(scope):
            # Without its session, the page would not be of the one that its connection brings.
            await onward(scope["path"])(scope, receive, send)
            return
        try:
            pages = await self._started()
        except BatonError as error:
            await _apology(error)(scope, receive, send)
            return
        await Sealed(pages)(scope, receive, send)

    async def _connection(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A page's WebSocket, or a request of one that polls: there are browsers (Safari 26) whose
        WebSockets hang.
        """
        if not scope["path"].startswith(addresses.SOCKET):
            missing = RequestError("there is nothing at this address", reason="route_not_found")
            await refuse(missing, scope, receive, send)
            return
        if _is_for_others(scope):
            await self._refuse_others(scope, receive, send)
            return
        may_manage = self._facing.sessions.may_manage(scope.get(Sessions.SCOPE))
        if self._connections >= MOST_PAGES + (MOST_MANAGING if may_manage else 0):
            busy = CapacityError("too many pages are open", reason="too_many_pages")
            self._facing.refusals.count(busy.reason)
            await refuse(busy, scope, receive, send)
            return
        self._connections += 1
        try:
            # Also where no page was asked for yet: a page of the process before this one finds
            # out that it has to be loaded again.
            pages = await self._started()
            await pages(scope, receive, send)
        except BatonError as error:
            await refuse(error, scope, receive, send)
        finally:
            self._connections -= 1

    async def _refuse_others(self, scope: Scope, receive: Receive, send: Send) -> None:
        wrong = RequestError(
            "pages of another origin show nothing of this one", reason="origin_not_allowed"
        )
        self._facing.refusals.count(wrong.reason)
        await refuse(wrong, scope, receive, send)

    async def _started(self) -> ASGIApp:
        """NiceGUI with the pages. Raises ``ConfigError`` (``dashboard_not_installed``),
        ``CapacityError`` (``decoder_stopping``).
        """
        if self._closed:
            raise CapacityError("the decoder is stopping", reason="decoder_stopping")
        if self._starting is None or _failed(self._starting):
            self._starting = asyncio.create_task(self._start())
        # Whoever leaves does not end what others wait for.
        return await asyncio.shield(self._starting)

    async def _start(self) -> ASGIApp:
        try:
            built = await asyncio.to_thread(self._build)
        except ModuleNotFoundError as error:
            raise ConfigError(
                "the dashboard's part of Baton is not installed",
                reason="dashboard_not_installed",
                found=error.name,
                hint="pip install -c constraints.txt '.[decoder]'",
            ) from error
        await self._running.enter_async_context(built.running())
        log.info("the dashboard is up")
        return built.app

    def _build(self):
        from app.dashboard import nice

        return nice.build(self._facing)


def _failed(starting: asyncio.Task[ASGIApp]) -> bool:
    """Whether it is to be begun anew: what was missing may be there now."""
    return starting.done() and (starting.cancelled() or starting.exception() is not None)


def _is_for_others(scope: Scope) -> bool:
    return any(site in _OTHERS for site in header_values(scope, b"sec-fetch-site"))


def _apology(error: BatonError) -> Response:
    told = error_response(error)
    body = plain.page("The dashboard cannot be shown", plain.text(error.message, error.hint or ""))
    return Response(body, told.status_code, plain.HEADERS)
