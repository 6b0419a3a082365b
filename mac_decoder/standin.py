"""What clients are told while the decoder's process is down: the truth, on the same port.

The supervisor owns the listening socket and answers on it itself until its child does:
``/health`` 200 with the state, ``/ready`` 503, everything else OpenAI's error object with
status 503 and, where waiting helps, ``Retry-After``. A browser that wants something to show gets
a page that says it and asks again by itself. What the decoder would refuse whatever its state
(another host's name, a foreign page's origin, a malformed request) is refused here with the same
code.
"""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Final, Literal

from mac_decoder.api import plain
from mac_decoder.api.errors import SERVER_ERROR, error_body, status_of
from mac_decoder.api.guard import Callers, takes_html
from protocol.errors import RequestError

State = Literal["starting", "restarting", "latched", "stopping"]

_MAX_CONNECTIONS: Final = 64
"""At once; the oldest is cut off for a new one, so that slow clients hide nothing."""

_TIMEOUT_S: Final = 5.0
"""How long a client may send nothing."""

_LIFE_S: Final = 10.0
"""How long a connection may last, however it trickles."""

_LENGTH_DIGITS: Final = 18
_MAX_BODY_BYTES: Final = 16 << 20
_POLL_S: Final = 0.05

_REFRESH_S: Final = 10
"""When a page asks again where waiting alone does not help: a person may have."""

_TITLES: Final[Mapping[State, str]] = {
    "starting": "Baton is starting",
    "restarting": "Baton is starting again",
    "latched": "Baton has given up",
    "stopping": "Baton is stopping",
}


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


def error_object(standing: Standing) -> dict[str, object]:
    """OpenAI's error object that tells of ``standing``, ready for JSON."""
    return {
        "message": standing.message,
        "type": SERVER_ERROR,
        "param": None,
        "code": standing.code,
    }


class StandIn:
    """Answers on a listening socket between :meth:`begin` and :meth:`end`."""

    def __init__(
        self,
        listening: socket.socket,
        standing: Callable[[], Standing],
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``hosts`` and ``origins`` are allowed beside loopback's, as in ``guard.HostGuard``.

        With ``tls`` nothing is answered in the clear.
        """
        self._listening = listening
        self._standing = standing
        self._callers = Callers(hosts, origins)
        self._tls = tls
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Accept connections from now on; does nothing if that is so already."""
        if self._server is not None:
            return
        self._server = _Server(self._listening, self._standing, self._callers, self._tls)
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

    def __init__(
        self,
        listening: socket.socket,
        standing: Callable[[], Standing],
        callers: Callers,
        tls: ssl.SSLContext | None,
    ) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening.dup()
        self.standing = standing
        self.callers = callers
        self._tls = tls
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        """Connections that are served, oldest first, and when each came."""

    def get_request(self) -> tuple[socket.socket, object]:
        """A new connection. The handshake comes in its own thread, with its own patience."""
        opened, address = super().get_request()
        if self._tls is None:
            return opened, address
        try:
            secured = self._tls.wrap_socket(opened, server_side=True, do_handshake_on_connect=False)
        except OSError:
            opened.close()
            raise
        return secured, address

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            if len(self._open) >= _MAX_CONNECTIONS:
                self._cut(next(iter(self._open)))
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)  # type: ignore[arg-type]

    def service_actions(self) -> None:
        """Called every ``_POLL_S``: cut off what trickles."""
        too_old = time.monotonic() - _LIFE_S
        with self._lock:
            for request in [one for one, since in self._open.items() if since < too_old]:
                self._cut(request)

    def shutdown_request(self, request: object) -> None:
        """The handler is done; its socket may not be cut any more once it is closed."""
        assert isinstance(request, socket.socket)
        with self._lock:
            self._open.pop(request, None)
        if isinstance(request, ssl.SSLSocket):
            # Says goodbye, so that the client can tell an end from a cut; waits for none.
            with contextlib.suppress(OSError, ValueError):
                request.settimeout(0)
                request.unwrap()
        super().shutdown_request(request)

    def _cut(self, request: socket.socket) -> None:
        """Have the thread of ``request`` find it ended; the lock is held."""
        self._open.pop(request)
        with contextlib.suppress(OSError):  # the client has left already
            # Not that of a TLS socket, which first lets go of its session: what its thread
            # writes in that moment would be in the clear.
            socket.socket.shutdown(request, socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left in the middle of its request; nothing to tell anybody."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    """What a malformed request is answered as: HTTP/0.9 has no status line."""

    timeout = _TIMEOUT_S

    def setup(self) -> None:
        super().setup()
        if isinstance(self.connection, ssl.SSLSocket):
            self.connection.do_handshake()

    def version_string(self) -> str:
        return "baton"

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not logged: a path may hold what a client should not have put there."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What ``http.server`` refuses by itself, as this API's error object."""
        refusal = RequestError("the request is no HTTP that is known here", reason="bad_request")
        self._send(code, error_body(refusal))

    def _answer(self) -> None:
        assert isinstance(self.server, _Server)
        standing = self.server.standing()
        refusal = self._refusal(self.server.callers)
        if refusal is not None:
            self._send(status_of(refusal), error_body(refusal))
            return
        self._drop_body()
        path = self.path.partition("?")[0]
        shown = {
            "state": standing.state,
            "reason": standing.code,
            "restarts": standing.restarts,
            "last_fault": standing.last_fault,
        }
        if path == "/health":
            self._send(200, {"status": "alive", **shown})
        elif path == "/ready":
            self._send(503, {"status": "not_ready", **shown}, standing.retry_after_s)
        elif self.command in ("GET", "HEAD") and takes_html(self.headers.get_all("Accept", [])):
            self._show(standing)
        else:
            self._send(503, {"error": error_object(standing)}, standing.retry_after_s)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = _answer

    def _refusal(self, callers: Callers) -> RequestError | None:
        """What the decoder would refuse in whatever state it is."""
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        refusal = callers.refusal(hosts, origins)
        if refusal is not None:
            return refusal
        for length in self.headers.get_all("Content-Length", []):
            if not (length.isascii() and length.isdigit()):
                return RequestError("Content-Length is not a number", reason="invalid_header")
            if len(length) > _LENGTH_DIGITS:
                return RequestError("the request body is too long", reason="request_too_large")
        return None

    def _drop_body(self) -> None:
        # A body that is left unread resets the connection, and the answer with it.
        left = min(int(self.headers.get("Content-Length", "0")), _MAX_BODY_BYTES)
        while left > 0:
            piece = self.rfile.read(min(left, 1 << 16))
            if not piece:
                return
            left -= len(piece)

    def _send(
        self, status: int, content: dict[str, object], retry_after_s: int | None = None
    ) -> None:
        headers = {"Content-Type": "application/json"}
        if retry_after_s is not None:
            headers["Retry-After"] = str(retry_after_s)
        self._write(status, json.dumps(content).encode(), headers)

    def _show(self, standing: Standing) -> None:
        """The same for a person. By itself the page then finds whoever answers next."""
        sentence = f"{standing.message[:1].upper()}{standing.message[1:]}."
        ended = f"How its process last ended: {standing.last_fault}." if standing.last_fault else ""
        times = f"Restarts so far: {standing.restarts}." if standing.restarts else ""
        said = plain.text(sentence, ended, times, "This page looks again by itself.")
        again_s = standing.retry_after_s or _REFRESH_S
        headers = {**plain.HEADERS, "refresh": str(again_s)}
        if standing.retry_after_s is not None:
            headers["retry-after"] = str(standing.retry_after_s)
        self._write(503, plain.page(_TITLES[standing.state], said), headers)

    def _write(self, status: int, raw: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)
        self.close_connection = True
