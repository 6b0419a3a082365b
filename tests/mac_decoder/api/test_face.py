"""What a face of the decoder is asked and by whom, over HTTP and WebSockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from mac_decoder.api.face import MOST_HEARD_BYTES, Facing
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.sessions import Sessions
from mac_decoder.api.settings import ApiSettings
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving

KEY = "a-key-of-the-settings"
HTML = {"accept": "text/html,application/xhtml+xml"}


class Talk:
    """A face that says who it takes its caller for."""

    def __init__(self, facing: Facing) -> None:
        self.facing = facing
        self.closed = False

    def answers(self, path: str) -> bool:
        return path in ("/page", "/talk", "/login", "/v1/mine", "/status/mine")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = scope[Sessions.SCOPE]
        may = self.facing.sessions.may_manage(session)
        said = f"{'manager' if may else 'reader' if session else 'nobody'}"
        if scope["type"] == "http":
            if scope["method"] == "POST":
                await Request(scope, receive).body()
            await PlainTextResponse(said)(scope, receive, send)
            return
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        await socket.send_text(said)
        while (message := await socket.receive())["type"] != "websocket.disconnect":
            await socket.send_text(str(len(message.get("text") or "")))

    async def close(self) -> None:
        self.closed = True


async def nothing(_: Part) -> None: ...


def faced(recital: Recital, settings: ApiSettings, **more: Any) -> Any:
    checkpoint = read_checkpoint(recital.path)
    return serving(lambda: ScriptedEngine(checkpoint, nothing), settings, face=Talk, **more)


@pytest.fixture(scope="module")
def open_to_all(recital: Recital) -> Iterator[Server]:
    with faced(recital, ApiSettings(origins=("http://invited.example",))) as server:
        yield server


@pytest.fixture(scope="module")
def locked(recital: Recital, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = ApiSettings(api_keys=(KEY,), keys_demanded=True)
    stored = KeyFiles(tmp_path_factory.mktemp("state"))
    with faced(recital, settings, stored=stored) as server:
        yield server


async def _opened(sessions: Sessions, key: str | None) -> str:
    token = sessions.open_for_user() if key is None else sessions.open_for_key(key)
    assert token is not None
    return f"{sessions.cookie}={token}"


def cookie(server: Server, key: str | None = None) -> dict[str, str]:
    """The header of a browser that has logged in: by an API key, or as this user."""
    return {"cookie": server.run(_opened(server.sessions, key))}


def talk(server: Server, headers: dict[str, str] | None = None) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}/talk", additional_headers=headers, proxy=None)


def end_of(socket: ClientConnection) -> int | None:
    """The code that a connection is closed with, whatever is said before."""
    with suppress(ConnectionClosed):
        while True:
            socket.recv(5)
    return socket.close_code


# Whom it is asked by


def test_without_keys_anybody_may_look(open_to_all: Server) -> None:
    assert httpx.get(f"{open_to_all.url}/page").text == "nobody"
    with talk(open_to_all) as socket:
        assert socket.recv() == "nobody"


def test_a_session_says_what_it_may(open_to_all: Server, locked: Server) -> None:
    assert httpx.get(f"{open_to_all.url}/page", headers=cookie(open_to_all)).text == "manager"
    with talk(open_to_all, cookie(open_to_all)) as socket:
        assert socket.recv() == "manager"
    assert httpx.get(f"{locked.url}/page", headers=cookie(locked)).text == "manager"
    assert httpx.get(f"{locked.url}/page", headers=cookie(locked, KEY)).text == "reader"
    with talk(locked, cookie(locked, KEY)) as socket:
        assert socket.recv() == "reader"


def test_a_cookie_of_another_server_is_none(open_to_all: Server, locked: Server) -> None:
    assert httpx.get(f"{open_to_all.url}/page", headers=cookie(locked)).text == "nobody"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:1"])
def test_a_page_of_another_site_gets_nothing_with_or_without_a_cookie(
    open_to_all: Server, origin: str
) -> None:
    for headers in ({}, cookie(open_to_all)):
        sent = {**headers, "origin": origin}
        for method in ("GET", "POST"):
            refused = httpx.request(method, f"{open_to_all.url}/page", headers=sent)
            assert refused.status_code == 403
            assert refused.json()["error"]["code"] == "origin_not_allowed"
        with pytest.raises(InvalidStatus) as caught:
            talk(open_to_all, sent)
        assert caught.value.response.status_code == 403


def test_a_name_that_is_pointed_here_gets_nothing(open_to_all: Server) -> None:
    sent = {**cookie(open_to_all), "host": f"evil.example:{open_to_all.port}"}
    refused = httpx.get(f"{open_to_all.url}/page", headers=sent)
    assert refused.json()["error"]["code"] == "host_not_allowed"


def test_a_page_that_was_invited_has_no_session_here(open_to_all: Server) -> None:
    sent = {**cookie(open_to_all), "origin": "http://invited.example"}
    assert httpx.get(f"{open_to_all.url}/page", headers=sent).text == "nobody"
    with talk(open_to_all, sent) as socket:
        assert socket.recv() == "nobody"


def test_its_own_page_has(open_to_all: Server) -> None:
    with talk(open_to_all, {**cookie(open_to_all), "origin": open_to_all.url}) as socket:
        assert socket.recv() == "manager"


def test_where_keys_are_demanded_browsers_are_sent_to_the_login_and_others_refused(
    locked: Server,
) -> None:
    sent = httpx.get(f"{locked.url}/page", headers=HTML)
    assert (sent.status_code, sent.headers["location"]) == (303, "/login")
    for headers in ({}, {"accept": "*/*"}, {"accept": "application/json"}):
        refused = httpx.get(f"{locked.url}/page", headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert httpx.post(f"{locked.url}/page", headers=HTML).status_code == 401
    with pytest.raises(InvalidStatus) as caught:
        talk(locked)
    assert caught.value.response.status_code == 401


def test_the_login_is_open_to_whoever_gets_that_far(locked: Server) -> None:
    assert httpx.get(f"{locked.url}/login").text == "nobody"
    foreign = httpx.post(f"{locked.url}/login", headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403


def test_a_cookie_opens_pages_and_the_stream_and_nothing_else(locked: Server) -> None:
    headers = cookie(locked)
    for path in ("/status", "/metrics", "/v1/models"):
        assert httpx.get(locked.url + path, headers=headers).status_code == 401
        # ... nor does a browser that asks for them get anywhere else
        assert httpx.get(locked.url + path, headers={**headers, **HTML}).status_code == 401
    url = f"ws://127.0.0.1:{locked.port}/status/stream"
    with connect(url, additional_headers=headers, proxy=None) as socket:
        assert "hello" in str(socket.recv())


def test_a_bearer_key_goes_before_a_cookie(locked: Server) -> None:
    good = {"authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{locked.url}/page", headers=good).text == "nobody"
    wrong = {**cookie(locked), "authorization": "Bearer baton-revoked"}
    assert httpx.get(f"{locked.url}/page", headers=wrong).status_code == 401


# What it is asked


def test_the_api_stays_the_apis(open_to_all: Server) -> None:
    for path in ("/v1/mine", "/status/mine", "/nowhere"):
        missing = httpx.get(open_to_all.url + path, headers=HTML)
        assert missing.json()["error"]["code"] == "route_not_found"
    assert httpx.get(f"{open_to_all.url}/v1/models").status_code == 200


def test_without_a_face_there_is_no_page_and_no_cookie_counts(recital: Recital) -> None:
    checkpoint = read_checkpoint(recital.path)
    settings = ApiSettings(api_keys=(KEY,), keys_demanded=True)
    with serving(lambda: ScriptedEngine(checkpoint, nothing), settings) as server:
        for path in ("/page", "/login", "/"):
            assert httpx.get(server.url + path, headers=HTML).status_code == 401
        assert httpx.get(f"{server.url}/page", headers=cookie(server)).status_code == 401


def test_a_page_sends_little(open_to_all: Server) -> None:
    with talk(open_to_all) as socket:
        socket.recv()
        socket.send("x" * (MOST_HEARD_BYTES - 100))
        assert socket.recv() == str(MOST_HEARD_BYTES - 100)
        socket.send("x" * (MOST_HEARD_BYTES + 1))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(5)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1009
    body = b"x" * (MOST_HEARD_BYTES + 1)
    assert httpx.post(f"{open_to_all.url}/page", content=body).status_code == 413


def test_who_says_anything_on_the_status_stream_is_sent_away_all_the_same(
    open_to_all: Server,
) -> None:
    with connect(f"ws://127.0.0.1:{open_to_all.port}/status/stream", proxy=None) as socket:
        socket.send("hello")
        assert end_of(socket) == 1008


# Its end


def test_a_socket_ends_with_its_session(open_to_all: Server) -> None:
    headers = cookie(open_to_all)
    with talk(open_to_all, headers) as socket:
        assert socket.recv() == "manager"
        open_to_all.run(_ended(open_to_all.sessions, headers["cookie"].partition("=")[2]))
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(5)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1008


def test_a_socket_ends_with_the_key_of_its_session(locked: Server) -> None:
    files = locked.service.keys._files
    assert files is not None
    key = files.create("guest")
    with talk(locked, cookie(locked, key)) as socket:
        assert socket.recv() == "reader"
        files.revoke("guest")
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(10)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1008


def test_the_status_stream_of_a_page_ends_with_its_session(locked: Server) -> None:
    headers = cookie(locked)
    url = f"ws://127.0.0.1:{locked.port}/status/stream"
    with connect(url, additional_headers=headers, proxy=None) as socket:
        socket.recv()
        locked.run(_ended(locked.sessions, headers["cookie"].partition("=")[2]))
        assert end_of(socket) == 1008


def test_an_open_page_does_not_hold_up_the_end(recital: Recital, tmp_path: Path) -> None:
    with ExitStack() as stack:
        with faced(recital, ApiSettings(), state=tmp_path) as server:
            socket = stack.enter_context(talk(server))
            assert socket.recv() == "nobody"
            face = server.face
        assert isinstance(face, Talk)
        assert face.closed
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(5)
    assert caught.value.rcvd is not None
    assert caught.value.rcvd.code == 1012


async def _ended(sessions: Sessions, token: str) -> None:
    await asyncio.sleep(0)
    sessions.end(token)
