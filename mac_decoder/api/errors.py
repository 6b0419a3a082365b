"""One table: error -> HTTP status and OpenAI error object.

A client decides by ``code``, which is the stable reason of the error. The sentences are for
people; none of them holds prompt text, tokens or secrets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.utils import ClientDisconnected

from mac_decoder.engine.events import GenerationFault
from mac_decoder.reporting import traced
from protocol.errors import (
    BatonError,
    Cancelled,
    CapacityError,
    ConfigError,
    EngineFault,
    IdentityMismatch,
    IntegrityError,
    ProtocolError,
    RequestError,
    TransferError,
)

log = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

STATUS_BY_TYPE: tuple[tuple[type[BatonError], int], ...] = (
    (RequestError, 400),
    (ConfigError, 400),
    (CapacityError, 503),
    (GenerationFault, 500),
    (EngineFault, 503),
    (IdentityMismatch, 502),
    (IntegrityError, 502),
    (ProtocolError, 502),
    (TransferError, 502),
    (Cancelled, 499),
    (BatonError, 500),
)
"""First match decides. An engine fault is a 503: the process restarts, trying again helps.
502 and ``PRODUCER_AWAY`` are the producer's part, seen only where a request insists on the
remote lane."""

PRODUCER_AWAY = frozenset(
    {
        "producer_connecting",
        "producer_down",
        "producer_off",
        "producer_qualifying",
        "producer_stopping",
        "producer_unfit",
        "producer_unreachable",
        "connect_timeout",
        "peer_silent",
        "link_closed",
    }
)
"""Reasons of a ``TransferError`` that is no failed transfer: the producer is not there now."""

STATUS_BY_REASON: Mapping[str, int] = {
    "invalid_api_key": 401,
    "model_not_found": 404,
    "route_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "host_not_allowed": 403,
    "origin_not_allowed": 403,
    "page_of_another_session": 403,
    **dict.fromkeys(PRODUCER_AWAY, 503),
}
"""Reasons with a status of their own, whatever the error's type."""

RETRY_AFTER_FAULT_S = 5.0
"""How long a restart takes, roughly; told to clients after an engine fault, and while the
producer is away."""


def status_of(error: BatonError) -> int:
    """The HTTP status of ``error``."""
    status = STATUS_BY_REASON.get(error.reason)
    if status is not None:
        return status
    return next(status for kind, status in STATUS_BY_TYPE if isinstance(error, kind))


def error_body(error: BatonError) -> dict[str, Any]:
    """OpenAI's error object for ``error``, ready for JSON."""
    message = error.message if error.hint is None else f"{error.message}; {error.hint}"
    return {
        "error": {
            "message": message,
            "type": INVALID_REQUEST if status_of(error) < 500 else SERVER_ERROR,
            "param": error.field,
            "code": error.reason,
        }
    }


def error_headers(error: BatonError) -> dict[str, str]:
    """``Retry-After`` where trying again later can help; the end of a connection too slow."""
    if error.reason == "request_timeout":
        # The rest of the body would have to be read before another request.
        return {"connection": "close"}
    seconds: float | None = None
    if isinstance(error, CapacityError):
        seconds = error.retry_after_s
    elif isinstance(error, EngineFault) or error.reason in PRODUCER_AWAY:
        seconds = RETRY_AFTER_FAULT_S
    return {} if seconds is None else {"retry-after": str(max(1, math.ceil(seconds)))}


def error_response(error: BatonError) -> Response:
    """The HTTP response that tells a client of ``error``."""
    return Response(
        msgspec.json.encode(error_body(error)),
        status_code=status_of(error),
        headers=error_headers(error),
        media_type="application/json",
    )


def internal_error() -> BatonError:
    """The error that a client sees where a bug of ours ended its request."""
    return BatonError("the server failed; its log has the place")


class Backstop:
    """Outermost ASGI layer: a bug becomes a 500, and its place is logged without values."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnected:
            # Whoever it was for has left, which the server knows: it has said so.
            raise
        except Exception as error:  # noqa: BLE001 - the last frame before the server
            log.error("unexpected %s", traced(error))
            if scope["type"] == "http" and not started:
                await error_response(internal_error())(scope, receive, send)
