"""The ASGI application: routes, and the layers in front of them."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from mac_decoder.api import chat, completions, models, ops
from mac_decoder.api.connections import protocol_for
from mac_decoder.api.door import Door
from mac_decoder.api.errors import Backstop, error_response, internal_error
from mac_decoder.api.face import MOST_HEARD_BYTES, Beside, Face, WhileAllowed
from mac_decoder.api.guard import BodyLimit, HostGuard, KeyGuard, RequestLimit
from mac_decoder.api.service import Record, Service
from mac_decoder.api.sessions import Sessions
from mac_decoder.custody import Custody
from protocol.errors import BatonError, Cancelled, RequestError

_MOST_HEARD_BYTES = 1024
"""Of a message over a WebSocket: there is none that a client has to send."""

_MOST_FACED_BYTES = 1 << 16
"""Of a body that a page sends: a login's."""

_MOST_FACED = 16

Answering = Callable[[Service, Record, bytes], Awaitable[Response]]


def create_app(service: Service) -> ASGIApp:
    """The endpoint of ``service``, whose engine need not have started: until it is ready,
    requests are a 503 and ``/ready`` says so.
    """
    return guarded(service, create_routes(service))


def guarded(
    service: Service, routes: ASGIApp, face: Face | None = None, sessions: Sessions | None = None
) -> ASGIApp:
    """``routes`` of ``service`` behind what keeps others out, beside ``face`` with its sessions.

    The layers, outermost first: backstop (bugs), host and origin, API keys and sessions; then
    the routes' own.
    """
    settings, refusals = service.settings, service.door.refusals
    if face is not None:
        shown = BodyLimit(WhileAllowed(face), refusals, _MOST_FACED_BYTES)
        shown = RequestLimit(shown, refusals, _MOST_FACED)
        routes = Beside(routes, shown, face.answers)
    demanded = settings.keys_demanded
    keyed = KeyGuard(routes, refusals, service.keys, demanded=demanded, sessions=sessions)
    return Backstop(HostGuard(keyed, refusals, settings.hosts, settings.origins))


def create_routes(service: Service) -> ASGIApp:
    """The routes of ``service``, behind the limits of requests in hand and of a body's length."""
    settings, refusals = service.settings, service.door.refusals
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.include_router(_generating(service))
    app.include_router(models.router(service))
    app.include_router(ops.router(service))
    app.add_exception_handler(BatonError, _told)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _bug)
    bodies = BodyLimit(app, refusals, settings.max_body_bytes)
    return RequestLimit(bodies, refusals, settings.max_requests)


def server_config(
    app: ASGIApp,
    door: Door,
    drain_s: int = 3,
    custody: Custody | None = None,
    tls: ssl.SSLContext | None = None,
    *,
    faced: bool = False,
) -> uvicorn.Config:
    """How ``app`` is served behind ``door``, its service's; answers may go on for ``drain_s``
    once the server is to stop.

    ``custody`` is told of every connection that is not behind ``tls``. ``faced``: there is a
    face, whose pages send something. There is no lifespan: whoever starts the engine also warms
    the service.
    """
    return uvicorn.Config(
        app,
        http=protocol_for(door, custody, tls),
        loop="asyncio",  # whatever else is installed: the protocols are written for it
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws="websockets-sansio",  # ``DeadlineProtocol`` makes a class of ours out of it
        ws_max_size=MOST_HEARD_BYTES if faced else _MOST_HEARD_BYTES,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=drain_s,
    )


def _generating(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, request, "chat", "chatcmpl", chat.answer)

    @routes.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await _answer(service, request, "completions", "cmpl", completions.answer)

    return routes


async def _answer(
    service: Service, request: Request, route: str, prefix: str, answering: Answering
) -> Response:
    """Read the body and prepare the answer; whatever ends here is recorded here."""
    salt = b"" if service.settings.share_caches else request.scope[KeyGuard.SALT]
    record = Record(service, route, prefix, salt)
    prepared = False
    try:
        body = await service.body(request)
        response = await _unless_left(request, answering(service, record, body))
        prepared = True
        return response
    except BatonError as error:
        record.broken(error)
        raise
    finally:
        if not prepared:
            record.abandoned()


async def _unless_left(request: Request, preparing: Awaitable[Response]) -> Response:
    """What ``preparing`` returns; it is cancelled when the client leaves before."""
    working = asyncio.ensure_future(preparing)
    leaving = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Cancelled("the client left", reason="client_left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _told(_: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, BatonError) else internal_error())


async def _no_route(_: Request, error: Exception) -> Response:
    missing = not isinstance(error, HTTPException) or error.status_code != 405
    if missing:
        refusal = RequestError("there is nothing at this address", reason="route_not_found")
    else:
        refusal = RequestError("not with this method", reason="method_not_allowed")
    return error_response(refusal)


async def _bug(_: Request, __: Exception) -> Response:
    return error_response(internal_error())
