"""The guards before a real WebSocket route: ordinary HTTP middleware would not see it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect
from websockets.typing import Origin

from mac_decoder.api.door import Refusals
from mac_decoder.api.guard import HostGuard, KeyGuard
from mac_decoder.api.keys import Keys

KEY = "the-key-of-all-keys"


class Echo:
    """A WebSocket route, and what reached it."""

    def __init__(self) -> None:
        self.reached = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "websocket"
        self.reached += 1
        await receive()
        await send({"type": "websocket.accept"})
        while (message := await receive())["type"] == "websocket.receive":
            await send({"type": "websocket.send", "text": message["text"]})


class Served:
    """An address, the route behind it, and what was refused before it."""

    def __init__(self, *, demanded: bool) -> None:
        self.refusals = Refusals()
        self.route = Echo()
        keyed = KeyGuard(self.route, self.refusals, Keys((KEY,)), demanded=demanded)
        guarded = HostGuard(keyed, self.refusals, ("desk.local",), ("https://chat.example",))
        config = uvicorn.Config(
            guarded, ws="websockets-sansio", lifespan="off", log_config=None, log_level="critical"
        )
        self.server = uvicorn.Server(config)
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = self.listening.getsockname()

    def connect(self, url: str, **more: Any) -> ClientConnection:
        """A client that was led here under the name in ``url``, as DNS rebinding does."""
        opened = socket.create_connection(self.address, 10)
        return connect(url, sock=opened, proxy=None, open_timeout=10, **more)


@contextlib.contextmanager
def served(*, demanded: bool) -> Iterator[Served]:
    made = Served(demanded=demanded)
    arguments = {"sockets": [made.listening]}
    thread = threading.Thread(target=made.server.run, kwargs=arguments, daemon=True)
    thread.start()
    while not made.server.started:
        time.sleep(0.01)
    yield made
    made.server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def open_to_all() -> Iterator[Served]:
    with served(demanded=False) as made:
        yield made


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(demanded=True) as made:
        yield made


def echoes(connection: ClientConnection) -> bool:
    with connection:
        connection.send("hello")
        return connection.recv(timeout=10) == "hello"


def refusal_of(error: InvalidStatus) -> tuple[int, str]:
    """The status and the code: the same that HTTP gives."""
    return error.response.status_code, json.loads(error.response.body)["error"]["code"]


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("localhost", None),
        ("localhost:8000", "http://localhost:8000"),
        ("127.0.0.1", "https://chat.example"),
        ("desk.local", "http://desk.local"),
    ],
)
def test_who_may_gets_in(open_to_all: Served, name: str, origin: str | None) -> None:
    own = None if origin is None else Origin(origin)
    assert echoes(open_to_all.connect(f"ws://{name}/any", origin=own))


@pytest.mark.parametrize(
    ("name", "origin", "reason"),
    [
        ("evil.example", None, "host_not_allowed"),
        ("evil.example", "http://evil.example", "host_not_allowed"),
        ("127.0.0.1.evil.example", "http://127.0.0.1.evil.example", "host_not_allowed"),
        ("localhost", "http://evil.example", "origin_not_allowed"),
        ("localhost", "null", "origin_not_allowed"),
        ("localhost", "file://", "origin_not_allowed"),
        ("localhost:8000", "http://localhost:3000", "origin_not_allowed"),
        ("desk.local", "https://chat.example.evil.example", "origin_not_allowed"),
    ],
)
def test_a_page_of_another_site_gets_no_websocket(
    open_to_all: Served, name: str, origin: str | None, reason: str
) -> None:
    """Browsers send no preflight for these: the refusal is all there is."""
    before, reached = open_to_all.refusals.counts[reason], open_to_all.route.reached
    own = None if origin is None else Origin(origin)
    with pytest.raises(InvalidStatus) as caught:
        open_to_all.connect(f"ws://{name}/any", origin=own)
    assert refusal_of(caught.value) == (403, reason)
    assert open_to_all.refusals.counts[reason] == before + 1
    assert open_to_all.route.reached == reached


@pytest.mark.parametrize(
    "target", ["/any", "/health/", "//health", "/health%2f..%2fany", "/any?/health", "/HEALTH"]
)
@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer baton-revoked", f"Basic {KEY}"])
def test_a_websocket_without_a_key_is_refused(
    locked: Served, target: str, given: str | None
) -> None:
    before, reached = locked.refusals.counts["invalid_api_key"], locked.route.reached
    headers = {} if given is None else {"Authorization": given}
    with pytest.raises(InvalidStatus) as caught:
        locked.connect(f"ws://localhost{target}", additional_headers=headers)
    assert refusal_of(caught.value) == (401, "invalid_api_key")
    assert locked.refusals.counts["invalid_api_key"] == before + 1
    assert locked.route.reached == reached


def test_a_websocket_with_a_key_gets_in(locked: Served) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert echoes(locked.connect("ws://localhost/any", additional_headers=headers))
