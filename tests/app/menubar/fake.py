"""A decoder of the test's own: what it says of its status is what the test says."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from queue import Queue

from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.sync.server import Server, ServerConnection, serve

from protocol.status.snapshot import VERSION, Snapshot
from protocol.status.stream import Full, Hello, Message, diff, encode


class Fake:
    """Serves ``/status/stream``. ``refusal`` is a status and a code while it refuses, ``None`` for
    one without an error object, and ``sends_to`` an address that it names then; with
    ``demands_a_key`` it refuses whoever gives none. ``goes_on`` is said without end once the
    beginning is; with ``drips`` that comes in many small pieces, and with ``leaves`` nothing comes
    behind it but the end.
    """

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.refusal: tuple[int, object] | None = None
        self.sends_to = ""
        self.goes_on: bytes | None = None
        self.drips = False
        self.leaves = False
        self.demands_a_key = False
        self.asked: list[Headers] = []
        self._connections: list[tuple[ServerConnection, Queue[bytes | None]]] = []
        self._snapshot: Snapshot | None = None
        self._hello: bytes | None = encode(
            Hello(at=0.0, version=VERSION, process="ab", full_every_s=10.0)
        )
        self._server: Server = serve(
            self._serve,
            "127.0.0.1",
            port,
            ssl=tls,
            process_request=self._let_in,
            close_timeout=1.0,
        )
        self.port: int = self._server.socket.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def followers(self) -> int:
        return sum(one.state is State.OPEN for one, _ in self._connections)

    def begins_with(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def says_hello(self, text: bytes | None) -> None:
        """This in its place, or nothing."""
        self._hello = text

    def says(self, snapshot: Snapshot) -> None:
        """A change to this, as the decoder would tell it."""
        before = self._snapshot
        assert before is not None
        self._snapshot = snapshot
        self._send(diff(before, snapshot, 0.0))

    def says_raw(self, text: bytes) -> None:
        for _, queue in self._connections:
            queue.put(text)

    def hangs_up(self) -> None:
        for _, queue in self._connections:
            queue.put(None)

    def close(self) -> None:
        self.hangs_up()
        self._server.shutdown()

    def _send(self, message: Message) -> None:
        self.says_raw(encode(message))

    def _let_in(self, _: ServerConnection, request: Request) -> Response | None:
        self.asked.append(request.headers)
        refusal: tuple[int, object] | None = self.refusal
        if self.demands_a_key and "Authorization" not in request.headers:
            refusal = (401, "invalid_api_key")
        if refusal is None:
            return None
        status, code = refusal
        error = {"error": {"message": "no", "code": code}}
        body = json.dumps({} if code is None else error).encode()
        headers = Headers({"Content-Type": "application/json", "Content-Length": str(len(body))})
        if self.sends_to:
            headers["Location"] = self.sends_to
        return Response(status, HTTPStatus(status).phrase, headers, body)

    def _begin(self, connection: ServerConnection) -> None:
        if self._hello is not None:
            connection.send(self._hello.decode())
        if self._snapshot is None:
            return
        text = encode(Full(at=0.0, snapshot=self._snapshot)).decode()
        connection.send(self._pieces(text) if self.drips else text)

    def _pieces(self, text: str) -> Iterator[str]:
        for one in text:
            yield one
            time.sleep(0.1)

    def _serve(self, connection: ServerConnection) -> None:
        queue: Queue[bytes | None] = Queue()
        mine = (connection, queue)
        self._connections.append(mine)
        try:
            with suppress(ConnectionClosed):
                self._begin(connection)
                if self.leaves:
                    return
                while self.goes_on is not None:
                    connection.send(self.goes_on.decode())
                while (text := queue.get()) is not None:
                    connection.send(text.decode())
        finally:
            self._connections.remove(mine)


@contextmanager
def fake(port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Fake]:
    made = Fake(port, tls)
    try:
        yield made
    finally:
        made.close()
