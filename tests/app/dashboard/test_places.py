"""The dashboard as the decoder knows it, without NiceGUI: what is begun, and who gets a place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from app.dashboard.mount import MOST_MANAGING, MOST_PAGES, Dashboard
from mac_decoder.api.door import Refusals
from mac_decoder.api.sessions import Sessions

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
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
async def dashboard(pages: Pages, refusals: Refusals, monkeypatch: pytest.MonkeyPatch) -> Dashboard:
    monkeypatch.setattr(Dashboard, "_build", pages.build)
    sessions = SimpleNamespace(may_manage=lambda session: session == "manages")
    return Dashboard(cast(Any, SimpleNamespace(sessions=sessions, refusals=refusals)))


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


@pytest.mark.parametrize("asked", [page(b"*/*"), page(b""), page(b"text/html", "HEAD")])
async def test_who_only_looks_whether_it_answers_is_made_no_page(
    dashboard: Dashboard, pages: Pages, asked: dict[str, Any]
) -> None:
    answered = await told(dashboard, asked)
    assert answered[0]["status"] == 200
    assert b"open it in a browser" in answered[1]["body"] or asked["method"] == "HEAD"
    assert pages.made == 0


def connection(session: object) -> dict[str, Any]:
    return {
        "type": "websocket",
        "path": "/_nicegui_ws/socket.io/",
        "extensions": {},
        Sessions.SCOPE: session,
    }


async def test_others_pages_keep_out_nobody_who_may_manage(
    dashboard: Dashboard, pages: Pages, refusals: Refusals
) -> None:
    open_ones = [
        asyncio.create_task(told(dashboard, connection(session)))
        for session in [None] * MOST_PAGES + ["manages"] * MOST_MANAGING
    ]
    await asyncio.sleep(0)
    for session in (None, "looks", "manages"):
        refused = await asyncio.wait_for(told(dashboard, connection(session)), 5)
        assert refused[0]["type"].startswith("websocket."), session
    assert refusals.counts["too_many_pages"] == 3
    assert not any(one.done() for one in open_ones)
    pages.let_go.set()
    await asyncio.gather(*open_ones)
    await dashboard.close()
