"""For whoever runs the server: is it alive, is it ready, what is it doing, what has it done."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response
from starlette.websockets import WebSocket

from mac_decoder.api import status_stream
from mac_decoder.api.errors import error_headers
from mac_decoder.api.service import Service


def router(service: Service) -> APIRouter:
    """The routes of this page."""
    routes = APIRouter()

    @routes.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        """The process answers; nothing is said about the model."""
        return _json({"status": "alive"})

    @routes.api_route("/ready", methods=["GET", "HEAD"])
    async def ready() -> Response:
        """200 when a token can be generated, else 503."""
        if service.engine.ready():
            return _json({"status": "ready", "model": service.served_name})
        absence = service.absence
        told = {"status": "not_ready", "reason": absence.reason, "message": absence.message}
        return _json(told, 503, error_headers(absence))

    @routes.get("/status")
    async def status() -> Response:
        taken = await service.board.now()
        missed = 0 if service.custody is None else service.custody.missed
        return _json(
            {
                "model": service.served_name,
                "model_path": service.settings.model_path or None,
                "supervisor": {**service.past._asdict(), "connections_missed": missed},
                "door": _door(service),
                "engine": taken.engine,
                "cache": taken.cache,
                "snapshot": taken.snapshot,
            }
        )

    @routes.websocket("/status/stream")
    async def stream(websocket: WebSocket) -> None:
        await status_stream.answer(service, websocket)

    @routes.get("/metrics")
    async def metrics() -> Response:
        service.metrics.ready.set(service.engine.ready())
        # Figures of thousands of cuts take milliseconds: not on the event loop.
        text = await asyncio.to_thread(generate_latest, service.metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    return routes


def _door(service: Service) -> dict[str, Any]:
    """What the HTTP door lets in, and has refused so far."""
    refused = service.door.refusals.counts
    return {
        "certificate_sha256": service.certificate,
        "keys": len(service.keys),
        "keys_demanded": service.settings.keys_demanded,
        "connections": len(service.door.crowd),
        "connections_limit": service.door.crowd.most,
        "refused": {reason: count for reason, count in refused.items() if count},
    }


def _json(
    payload: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(payload), status, headers, media_type="application/json")
