"""What clients are told while the decoder's process is down: the truth, on the same port.

The supervisor owns the listening socket and answers on it itself until its child does:
``/health`` 200 with the state, ``/ready`` 503, everything else OpenAI's error object with
status 503 and, where waiting helps, ``Retry-After``.
"""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Final, Literal

State = Literal["starting", "restarting", "latched", "stopping"]

_MAX_CONNECTIONS: Final = 32
_TIMEOUT_S: Final = 5.0
_MAX_BODY_BYTES: Final = 16 << 20
_POLL_S: Final = 0.05


@dataclass(frozen=True)
class Standing:
    """Where the decoder stands while nobody else can say so.

    ``code`` is a stable reason, ``message`` a sentence; ``retry_after_s`` is ``None`` where
    only a person can help.
    """

    state: State
    code: str
    message: str
    retry_after_s: int | None
    restarts: int = 0
    last_fault: str = ""


class StandIn:
    """Answers on a listening socket between :meth:`begin` and :meth:`end`."""

    def __init__(self, listening: socket.socket, standing: Callable[[], Standing]) -> None:
        self._listening = listening
        self._standing = standing
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Accept connections from now on; does nothing if that is so already."""
        if self._server is not None:
            return
        self._server = _Server(self._listening, self._standing)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="baton-standin"
        )
        self._thread.start()

    def end(self) -> None:
        """Accept no more; connections that were accepted are still answered."""
        if self._server is None or self._thread is None:
            return
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._server = self._thread = None


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, standing: Callable[[], Standing]) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening.dup()
        self.standing = standing
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)

    def process_request(self, request: object, client_address: object) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)  # type: ignore[arg-type]
            return
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._room.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left in the middle of its request; nothing to tell anybody."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def version_string(self) -> str:
        return "baton"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a path may hold what a client should not have put there."""

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        standing = self.server.standing()
        self._drop_body()
        path = self.path.partition("?")[0]
        shown = {
            "state": standing.state,
            "reason": standing.code,
            "restarts": standing.restarts,
            "last_fault": standing.last_fault,
        }
        if path == "/health":
            self._send(200, {"status": "alive", **shown}, standing)
        elif path == "/ready":
            self._send(503, {"status": "not_ready", **shown}, standing)
        else:
            error = {
                "message": standing.message,
                "type": "server_error",
                "param": None,
                "code": standing.code,
            }
            self._send(503, {"error": error}, standing)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _answer

    def _drop_body(self) -> None:
        # A body that is left unread resets the connection, and the answer with it.
        length = self.headers.get("Content-Length", "0")
        left = min(int(length), _MAX_BODY_BYTES) if length.isdecimal() else 0
        while left > 0:
            piece = self.rfile.read(min(left, 1 << 16))
            if not piece:
                return
            left -= len(piece)

    def _send(self, status: int, content: dict[str, object], standing: Standing) -> None:
        raw = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Connection", "close")
        if status == 503 and standing.retry_after_s is not None:
            self.send_header("Retry-After", str(standing.retry_after_s))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)
        self.close_connection = True
