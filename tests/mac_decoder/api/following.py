"""A client of ``/status/stream`` that does what any client should: it keeps one snapshot."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from protocol.errors import TransferError
from protocol.status.snapshot import Snapshot
from protocol.status.stream import Change, Full, Hello, Message, apply, decode
from trust.websocket import WebSocket


class Follower:
    """``messages`` are all that came, ``snapshot`` is what they come to."""

    def __init__(self, connection: ClientConnection | _OneThread) -> None:
        self.connection = connection
        self.messages: list[Message] = []
        self.texts: list[str] = []
        self.hello = self.take()
        assert isinstance(self.hello, Hello)
        first = self.take()
        assert isinstance(first, Full)
        self.snapshot: Snapshot = first.snapshot

    def take(self, timeout_s: float = 10.0) -> Message:
        """The next message; raises ``TimeoutError``."""
        text = self.connection.recv(timeout=timeout_s)
        assert isinstance(text, str)
        self.texts.append(text)
        self.messages.append(decode(text))
        return self.messages[-1]

    def follow(self, timeout_s: float = 10.0) -> Snapshot:
        """Take one message in."""
        match self.take(timeout_s):
            case Full(snapshot=snapshot):
                self.snapshot = snapshot
            case Change() as change:
                self.snapshot = apply(change, self.snapshot)
            case Hello():
                raise AssertionError("only the first message is a hello")
        return self.snapshot

    def ended(self, within_s: float = 5.0) -> int:
        """Follow to the end of the connection; its close code."""
        deadline = time.monotonic() + within_s
        with suppress(ConnectionClosed):
            while True:
                self.follow(max(0.0, deadline - time.monotonic()))
        code = self.connection.close_code
        assert code is not None
        return code

    def settle(self, quiet_s: float = 1.6) -> None:
        """Follow until nothing has come for so long: the cache's figures are a second late."""
        with suppress(TimeoutError):
            while True:
                self.follow(quiet_s)

    def until(self, condition: Callable[[Snapshot], Any], within_s: float) -> float:
        """Follow until it holds; the seconds that it took."""
        began = time.monotonic()
        while not condition(self.snapshot):
            self.follow(max(0.0, began + within_s - time.monotonic()))
        return time.monotonic() - began


@contextmanager
def following(url: str, **more: Any) -> Iterator[Follower]:
    """A follower of the server at an HTTP ``url``."""
    address = "ws" + url.removeprefix("http") + "/status/stream"
    with connect(address, proxy=None, open_timeout=10, **more) as connection:
        yield Follower(connection)


class _OneThread:
    """A connection over TLS, which the library's client uses from two threads at once: OpenSSL
    does not allow that.
    """

    def __init__(self, sock: WebSocket) -> None:
        self._socket = sock

    def recv(self, timeout: float) -> str:
        try:
            return self._socket.receive(time.monotonic() + timeout).decode()
        except TransferError as error:
            raise TimeoutError from error


@contextmanager
def following_over_tls(port: int, trusting: ssl.SSLContext) -> Iterator[Follower]:
    """A follower of the server at a port of this machine, which shows a trusted certificate."""
    raw = socket.create_connection(("127.0.0.1", port), timeout=10)
    wrapped = trusting.wrap_socket(raw, server_hostname="localhost")
    client = WebSocket(wrapped, f"wss://localhost:{port}/status/stream", 1 << 24)
    with closing(client):
        client.open(time.monotonic() + 10.0, hint="")
        yield Follower(_OneThread(client))
