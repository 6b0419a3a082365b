"""The dashboard as the decoder knows it, without NiceGUI: what is begun, and who gets a place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from app.dashboard.mount import Dashboard
from mac_decoder.api.door import Refusals

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Pages:
    """Stands where NiceGUI does: answers pages at once, and holds connections until let go."""

    def __init__(self) -> None:
        self.made = 0
        self.fails: list[Exception] = []
        self.let_go = asyncio.Event()
        self.app = self

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        yield

    def build(self) -> Pages:
        if self.fails:
            raise self.fails.pop()
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self.let_go.wait()
            return
        self.made += 1
        headers = [(b"content-type", b"text/html")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"made"})


@pytest.fixture
async def pages() -> Pages:
    return Pages()


@pytest.fixture
async def dashboard(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    monkeypatch.setattr(Dashboard, "_build", pages.build)
    sessions = SimpleNamespace(may_manage=lambda session: session == "manages")
    return Dashboard(cast(Any, SimpleNamespace(sessions=sessions, refusals=Refusals())))


async def told(dashboard: Dashboard, scope: Mapping[str, Any]) -> list[Any]:
    """What is answered to a scope."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    await dashboard({"headers": [], **scope}, receive, send)
    return sent


def page(accept: bytes = b"text/html,*/*", method: str = "GET") -> dict[str, Any]:
    headers = [(b"accept", accept)] if accept else []
    return {"type": "http", "method": method, "path": "/", "headers": headers}


async def test_what_failed_to_begin_is_begun_anew(dashboard: Dashboard, pages: Pages) -> None:
    pages.fails = [ModuleNotFoundError("no such module", name="nicegui")]
    first = await told(dashboard, page())
    assert first[0]["status"] == 400
    assert b"pip install" in first[1]["body"]
    assert (await told(dashboard, page()))[0]["status"] == 200
    assert pages.made == 1
    await dashboard.close()
