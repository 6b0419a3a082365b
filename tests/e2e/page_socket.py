"""What a browser says and hears for a page of the dashboard, without one: engine.io 4, Socket.IO
5 and NiceGUI's own events, over a WebSocket.
"""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

HTML = {"accept": "text/html,application/xhtml+xml"}


def page_of(url: str, path: str = "/", **headers: str) -> httpx.Response:
    """A page of the decoder at ``url``, as a browser asks for it."""
    return httpx.get(url + path, headers={**HTML, **headers}, timeout=30)


def query_of(shown: httpx.Response) -> str:
    """What a browser asks for a page's connection with."""
    found = re.search(r"'client_id': '([0-9a-f-]{36})'", shown.text)
    assert found is not None
    return "&".join(
        (
            "EIO=4&transport=websocket&implicit_handshake=true",
            f"client_id={found[1]}&tab_id=tab&document_id=document&next_message_id=0",
        )
    )


def client_of(shown: httpx.Response) -> str:
    """The name of a page, which its connection gives."""
    return query_of(shown).partition("client_id=")[2].partition("&")[0]


def socket_of(url: str, shown: httpx.Response, **headers: str) -> ClientConnection:
    """The WebSocket that a browser opens for a page."""
    address = f"{url.replace('http', 'ws', 1)}/_nicegui_ws/socket.io/?{query_of(shown)}"
    return connect(address, additional_headers=headers, proxy=None)


def greeted(opened: ClientConnection) -> str:
    """What is answered to the first message: that the page is known, or why not."""
    assert str(opened.recv(10)).startswith("0{")  # engine.io is open
    opened.send("40")
    return str(opened.recv(10))


def act(shown: httpx.Response, **said: Any) -> str:
    """The message that somebody does something on a page (``live.js``)."""
    found = re.search(r"parseElements\(String\.raw`(.*?)`\)", shown.text, re.DOTALL)
    assert found is not None
    ((number, listener),) = (
        (number, event["listener_id"])
        for number, element in json.loads(found[1]).items()
        for event in element.get("events", ())
        if event["type"] == "act"
    )
    done = {"id": int(number), "listener_id": listener, "args": [json.dumps(said)]}
    return "42" + json.dumps(["event", {"client_id": client_of(shown), **done}])


def hears(opened: ClientConnection, timeout_s: float | None = 60) -> str:
    """The next message that is not about the connection itself."""
    while (said := str(opened.recv(timeout_s))) == "2":
        opened.send("3")
    return said
