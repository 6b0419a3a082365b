"""``/v1/models``: the one model that this process serves, once it does.

Whoever lists models wants to use one, and many ask here to learn whether a server is up: a
model that cannot answer yet is not listed but refused, with the time to come again.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from mac_decoder.api.service import Service


def router(service: Service) -> APIRouter:
    """The routes of this page."""
    routes = APIRouter()

    def described() -> dict[str, Any]:
        if not service.engine.ready():
            raise service.absence
        return {
            "id": service.served_name,
            "object": "model",
            "created": service.created,
            "owned_by": "baton",
        }

    @routes.get("/v1/models")
    async def listed() -> Response:
        return _json({"object": "list", "data": [described()]})

    @routes.get("/v1/models/{name:path}")
    async def one(name: str) -> Response:
        service.require_model(name)
        return _json(described())

    return routes


def _json(payload: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(payload), media_type="application/json")
