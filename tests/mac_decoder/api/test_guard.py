"""The layers in front of the routes, over HTTP and WebSocket scopes alike."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st

from mac_decoder.api.door import Refusals
from mac_decoder.api.errors import error_response
from mac_decoder.api.guard import BodyLimit, HostGuard, KeyGuard, RequestLimit, host_name
from mac_decoder.api.keys import Keys
from mac_decoder.api.settings import ApiSettings
from protocol.errors import BatonError

Headers = list[tuple[bytes, bytes]]


async def _app(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    while True:
        message = await receive()
        if not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"in"})


def ask(
    app: Any,
    headers: Headers,
    kind: str = "http",
    path: str = "/v1/models",
    bodies: tuple[bytes, ...] = (b"",),
    method: str = "POST",
) -> int:
    """The status that ``app`` answers; 101 for an accepted WebSocket, 403 for a refused one."""
    sent: list[dict[str, Any]] = []
    waiting = [
        {"type": "http.request", "body": body, "more_body": index < len(bodies) - 1}
        for index, body in enumerate(bodies)
    ]

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "method": method, "path": path, "headers": headers}
    asyncio.run(app(scope, receive, send))
    if kind == "websocket":
        return 101 if sent[0]["type"] == "websocket.accept" else 403
    allowed = [name for name, _ in sent[0]["headers"] if name.startswith(b"access-control")]
    invited = any(value.lower() == b"https://chat.example" for _, value in headers)
    assert bool(allowed) == (invited and sent[0]["status"] < 300)
    return int(sent[0]["status"])


def told(*pairs: tuple[str, str]) -> Headers:
    return [(name.encode(), value.encode("latin-1")) for name, value in pairs]


REFUSALS = Refusals()

GUARD = HostGuard(
    _app, REFUSALS, hosts=("desk.local", "10.0.0.7"), origins=("https://chat.example",)
)


def keyed(*keys: str, demanded: bool = True) -> KeyGuard:
    return KeyGuard(_app, REFUSALS, Keys(keys), demanded=demanded)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:8000",
        "127.0.0.1:1",
        "[::1]:8000",
        "[::1]",
        "LOCALHOST",
        "desk.local",
        "10.0.0.7:80",
    ],
)
def test_own_names_are_let_in(kind: str, host: str) -> None:
    assert ask(GUARD, told(("host", host)), kind) in (200, 101)


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "127.0.0.2",
        "localhost@evil.example",
        "evil.example/localhost",
        "localhost:port",
        "[::1",
        "",
        "localhost, evil.example",
    ],
)
def test_other_names_are_refused(kind: str, host: str) -> None:
    assert ask(GUARD, told(("host", host)), kind) == 403


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_no_host_or_two_are_refused(kind: str) -> None:
    assert ask(GUARD, [], kind) == 403
    assert ask(GUARD, told(("host", "localhost"), ("host", "localhost")), kind) == 403


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:8000", True),
        ("https://localhost:8000", True),
        ("https://chat.example", True),
        ("https://CHAT.example", True),
        ("http://localhost:3000", False),
        ("http://localhost", False),
        ("https://chat.example.evil", False),
        ("http://evil.example", False),
        ("null", False),
        ("", False),
        ("file://", False),
        ("chrome-extension://localhost:8000", False),
    ],
)
def test_a_foreign_origin_is_refused(kind: str, origin: str, allowed: bool) -> None:
    headers = told(("host", "localhost:8000"), ("origin", origin))
    assert ask(GUARD, headers, kind) == (403 if not allowed else 200 if kind == "http" else 101)


def test_a_page_of_an_allowed_origin_may_ask_what_it_may_send() -> None:
    headers = told(("host", "localhost"), ("origin", "https://chat.example"))
    assert ask(GUARD, headers, method="OPTIONS") == 204
    foreign = told(("host", "localhost"), ("origin", "https://other.example"))
    assert ask(GUARD, foreign, method="OPTIONS") == 403


@given(st.text())
def test_any_authority_gives_a_name_or_none(authority: str) -> None:
    name = host_name(authority)
    assert name is None or name == name.lower()


def test_one_of_the_keys_is_asked_for() -> None:
    app = keyed("first", "second")
    assert ask(app, told(("authorization", "Bearer first"))) == 200
    assert ask(app, told(("authorization", "bearer second"))) == 200
    assert ask(app, told(("authorization", "Bearer third"))) == 401
    assert ask(app, told(("authorization", "Basic first"))) == 401
    assert ask(app, told(("authorization", "Bearer "))) == 401
    assert ask(app, []) == 401
    twice = told(("authorization", "Bearer first"), ("authorization", "Bearer first"))
    assert ask(app, twice) == 401
    assert ask(app, [], path="/health") == 200
    assert ask(app, [], path="/ready") == 200
    assert ask(app, [], path="/status") == 401
    assert ask(app, [], kind="websocket") == 403


def test_where_keys_are_demanded_and_there_is_none_nobody_gets_in() -> None:
    app = keyed()
    assert ask(app, []) == 401
    assert ask(app, told(("authorization", "Bearer any"))) == 401
    assert ask(app, told(("authorization", "Bearer "))) == 401


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ((), 200),
        (("Bearer first",), 200),
        (("Bearer none",), 200),
        (("Basic Zmlyc3Q6",), 200),
        (("Bearer baton-revoked",), 401),
        (("bearer   baton-revoked",), 401),
        (("Bearer none", "Bearer baton-revoked"), 401),
    ],
)
def test_where_none_is_demanded_a_key_of_ours_must_be_one(
    given: tuple[str, ...], status: int
) -> None:
    """OpenAI's client cannot send no key at all; a revoked key must not go on as nobody's."""
    headers = told(*(("authorization", value) for value in given))
    assert ask(keyed("first", demanded=False), headers) == status


@pytest.mark.parametrize("demanded", [True, False])
def test_the_salt_is_that_of_the_key(demanded: bool) -> None:
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope[KeyGuard.SALT])
        await _app(scope, receive, send)

    guard = KeyGuard(app, REFUSALS, Keys(("first", "second")), demanded=demanded)
    for key in ("first", "second", "first"):
        assert ask(guard, told(("authorization", f"Bearer {key}"))) == 200
    assert seen[0] == seen[2]
    assert len({*seen, b""}) == 3
    ask(guard, told(("authorization", "Bearer none")))
    assert seen[3:] == ([] if demanded else [b""])


def test_keys_are_not_shown_with_the_settings() -> None:
    assert "hidden" not in repr(ApiSettings(api_keys=("hidden",)))


@pytest.mark.parametrize(
    ("length", "status"),
    [("10", 200), ("11", 413), ("9" * 30, 413), ("-1", 400), ("ten", 400), ("١", 400)],
)
def test_a_declared_length_is_believed(length: str, status: int) -> None:
    headers = [(b"content-length", length.encode())]
    assert ask(BodyLimit(_app, REFUSALS, 10), headers) == status


def test_a_body_without_a_length_is_counted() -> None:
    app = FastAPI()

    @app.exception_handler(BatonError)
    async def _(_: Request, error: BatonError) -> Any:
        return error_response(error)

    @app.post("/v1/models")
    async def _(request: Request) -> int:
        return len(await request.body())

    limited = BodyLimit(app, REFUSALS, 10)

    async def post(*pieces: bytes) -> int:
        async def body() -> Any:
            for piece in pieces:
                yield piece

        transport = httpx.ASGITransport(app=limited)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return (await client.post("/v1/models", content=body())).status_code

    assert asyncio.run(post(b"12345", b"12345")) == 200
    assert asyncio.run(post(b"12345", b"123456")) == 413


def test_above_the_limit_a_request_is_told_to_come_back() -> None:
    async def run() -> list[int]:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def slow(scope: Any, receive: Any, send: Any) -> None:
            entered.set()
            await leave.wait()
            await _app(scope, receive, send)

        app = RequestLimit(slow, REFUSALS, 1)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            first = asyncio.create_task(client.post("/a"))
            await entered.wait()
            second = await client.post("/a")
            assert second.headers["retry-after"] == "1"
            leave.set()
            return [
                (await first).status_code,
                second.status_code,
                (await client.post("/a")).status_code,
            ]

    assert asyncio.run(run()) == [200, 503, 200]


def preflight(guard: HostGuard, *headers: tuple[str, str]) -> dict[str, str]:
    """The headers of the answer to a browser's question."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    pairs = told(("host", "localhost"), ("origin", "https://chat.example"), *headers)
    scope = {"type": "http", "method": "OPTIONS", "path": "/", "headers": pairs}
    asyncio.run(guard(scope, receive, send))
    assert sent[0]["status"] == 204
    return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def test_a_page_of_an_allowed_origin_may_send_what_openais_client_sends() -> None:
    asked = "Authorization,content-type, x-stainless-lang,X-Stainless-Retry-Count"
    answer = preflight(GUARD, ("access-control-request-headers", asked))
    allowed = set(answer["access-control-allow-headers"].split(", "))
    assert allowed == {
        "authorization",
        "content-type",
        "x-stainless-lang",
        "x-stainless-retry-count",
    }


def test_a_question_without_names_or_with_bad_ones_is_answered_with_the_usual_ones() -> None:
    usual = "authorization, content-type"
    assert preflight(GUARD)["access-control-allow-headers"] == usual
    asked = ("access-control-request-headers", "a b, *, \u00e9,\r\nset-cookie: x, " + "y" * 65)
    assert preflight(GUARD, asked)["access-control-allow-headers"] == usual
