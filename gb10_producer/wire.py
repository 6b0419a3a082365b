"""One WebSocket connection, server side: a socket that exactly one thread touches.

The protocol is websockets' sans-I/O ``ServerProtocol``; this file moves bytes. It is not
``websockets.sync`` for two reasons: that reads and writes a TLS socket from two threads at
once, which OpenSSL does not allow (CPython guards against it from 3.13 on only), and it holds
its lock while a bulk write blocks, so that an ABORT behind a slow reader would go unread.

Bulk frames go from the rows' own memory to the kernel: the WebSocket header is written here,
unmasked as RFC 6455 wants it from a server, and no byte of payload is copied.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from websockets.exceptions import InvalidState
from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import CONNECTING, OPEN
from websockets.server import ServerProtocol

from protocol.errors import PeerProtocolError, TransferError
from protocol.reasons import REASON_HEADER

log = logging.getLogger(__name__)

_RECEIVE_BYTES = 1 << 16
_READS_PER_POLL = 64
_MOST_REPLIES = 1 << 20
_BUFFERS_PER_CALL = 64
_SOCKET_BUFFER = 4 << 20
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


class Rejection(NamedTuple):
    """An answer by HTTP to who is not let in."""

    status: int
    text: str
    retry_after_s: int | None = None
    reason: str | None = None
    """A code for a decoder, in the header :data:`REASON_HEADER`."""


class _Protocol(ServerProtocol):
    """Bounds a message by its kind before any of it is held."""

    binary_most: int | None = None
    """Most bytes of a BINARY message, if another number than of the others."""

    @property
    def max_message_size(self) -> int | None:
        """Asked for when the first byte of a message has come, which has its opcode."""
        begun = self.reader.buffer[:1]
        if self.binary_most is not None and begun and begun[0] & 0x0F == Opcode.BINARY:
            return self.binary_most
        return self._other_most

    @max_message_size.setter
    def max_message_size(self, most: int | None) -> None:
        self._other_most = most


class Wire:
    """A connection after :meth:`secure` and :meth:`open`.

    Only :meth:`wake` may be called from other threads.

    Any method may raise ``TransferError`` (``connection_lost``, ``peer_stalled``) and
    ``PeerProtocolError`` (``websocket_violation``); afterwards only :meth:`abandon` is left.
    """

    def __init__(self, sock: socket.socket, *, stall_s: float) -> None:
        self._socket = sock
        self._stall_s = stall_s
        self._protocol = _Protocol(origins=[None], max_size=1 << 16, logger=_quiet)
        self._out: deque[memoryview] = deque()
        self._text: list[bytes] = []
        self._fragments: list[bytes] = []
        self._bulk: deque[bytes] = deque()
        self._bulk_most = 0
        self._bulk_held = 0
        self._write_after_read = False
        self._woken = False
        self._replies = 0
        """Bytes that were queued as answers of the WebSocket's own since nothing was queued."""
        self._eof_queued = False
        self._reject: Callable[[str], Rejection | None] = lambda path: None
        self._last_write = time.monotonic()
        self._waker, self._wake_end = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_end.setblocking(False)
        self._poller = select.poll()
        self._poller.register(self._wake_end, select.POLLIN)
        self._interest = 0
        self.closed = False
        self.path = ""
        """What was asked for, once :meth:`open` returns."""
        self.pending = 0
        self.written = 0

    def secure(self, context: ssl.SSLContext | None, deadline: float) -> None:
        """The TLS handshake, unless there is no context; before :meth:`open`.

        Deadlines are in monotonic seconds.
        """
        _tune(self._socket)
        try:
            if context is not None:
                self._socket.settimeout(max(0.001, deadline - time.monotonic()))
                # First the socket, then the handshake: :meth:`cut` then finds it.
                secured = context.wrap_socket(
                    self._socket, server_side=True, do_handshake_on_connect=False
                )
                self._socket = secured
                secured.do_handshake()
            self._socket.setblocking(False)
        except (OSError, ValueError) as error:
            self.closed = True  # wrapping took the descriptor and has closed it
            raise _lost("The TLS handshake failed.", "tls_handshake_failed") from error

    def open(
        self, deadline: float, reject: Callable[[str], Rejection | None] = lambda path: None
    ) -> None:
        """The WebSocket handshake.

        A request with an ``Origin`` is a web page's and is refused; so is plain HTTP, and what
        ``reject`` says of its path.
        """
        self._reject = reject
        while self._protocol.state is not OPEN:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError("The handshake took too long.", reason="handshake_timeout")
            self.poll(left)
            if self.closed:
                raise TransferError("The handshake was refused.", reason="handshake_refused")

    def peer_certificate(self) -> bytes | None:
        """The client's leaf certificate (DER); ``None`` without TLS."""
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.getpeercert(binary_form=True)
        return None

    @property
    def closing(self) -> bool:
        """Whether either side began the closing handshake, or the connection is gone."""
        return self.closed or self._protocol.state is not OPEN

    @property
    def left(self) -> bool:
        """Whether the peer said that it leaves, in its own words: it will not come back."""
        return self._protocol.close_rcvd is not None

    def limit_text(self, nbytes: int) -> None:
        """Bound the next incoming message, but for BINARY ones that are taken."""
        self._protocol.max_message_size = nbytes

    def take_binary(self, most: int, longest: int = 0) -> None:
        """Take BINARY messages too, each of at most ``longest`` bytes.

        No more is read while ``most`` bytes of them are held here. 0: none belongs here, and
        those that were held are gone.
        """
        self._bulk_most = most
        self._protocol.binary_most = longest if most else None
        if not most:
            self._bulk.clear()
            self._bulk_held = 0

    def binary(self) -> bytes | None:
        """The next BINARY message that has come."""
        if not self._bulk:
            return None
        data = self._bulk.popleft()
        self._bulk_held -= len(data)
        return data

    def send_text(self, raw: bytes) -> None:
        """Queue one TEXT message."""
        try:
            self._protocol.send_text(raw)
        except InvalidState as error:
            raise _lost("The connection is closing.", "connection_lost") from error
        self._take_protocol_bytes()

    def send_binary(self, header: bytes, payload: memoryview) -> None:
        """Queue one BINARY message, ``header`` then ``payload`` (bytes, C order), uncopied.

        ``payload`` must not change until :attr:`pending` has gone below what it was before.
        """
        if self._protocol.state is not OPEN:
            raise _lost("The connection is closing.", "connection_lost")
        self._queue(memoryview(_binary_head(len(header) + payload.nbytes) + header))
        if payload.nbytes:
            self._queue(payload)

    def poll(self, timeout_s: float) -> list[bytes]:
        """Move bytes, wait at most ``timeout_s`` for something to do; return TEXT messages.

        Returns early when :meth:`wake` is called or queued bytes were written.
        """
        before = self.written
        self._write()
        if self._text or self.closed or self.written != before:
            timeout_s = 0.0
        readable = self._wait(timeout_s)
        if readable:
            self._read()
        self._write()
        stalled = bool(self._out) and time.monotonic() - self._last_write > self._stall_s
        if stalled:
            raise TransferError("The decoder stopped reading.", reason="peer_stalled")
        text, self._text = self._text, []
        return text

    def cut(self) -> None:
        """End the connection in the middle of whatever the owner does. Any thread."""
        with contextlib.suppress(OSError):
            # Not the TLS socket's own, which changes what the owner is using.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def wake(self) -> None:
        """Make the owner's :meth:`poll` return. Any thread, never blocks."""
        if not self._woken:
            self._woken = True
            try:
                self._waker.send(b"w")
            except OSError:
                return  # the wire is gone, or its owner has plenty of wake-ups to read

    def close(self, code: int, reason: str, timeout_s: float) -> None:
        """Send what is queued, then the closing handshake; give both ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        # What was on its way is read, so that the peer gets to read why this ends.
        self.take_binary(0)
        try:
            if self._protocol.state is OPEN:
                self._protocol.send_close(code, reason)
                self._take_protocol_bytes()
            if self._protocol.state is CONNECTING and not self._out:
                return  # nothing was said, and nothing more is answered
            while not self.closed and (left := deadline - time.monotonic()) > 0:
                self.poll(left)
        except (TransferError, PeerProtocolError):
            pass  # it is being closed anyway
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Free the socket at once. Idempotent."""
        self.closed = True
        self._out.clear()
        self.pending = 0
        for end in (self._socket, self._waker, self._wake_end):
            end.close()

    def _queue(self, view: memoryview) -> None:
        if not self._out:
            self._last_write = time.monotonic()
        self._out.append(view)
        self.pending += view.nbytes

    def _take_protocol_bytes(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._queue(memoryview(data))
            else:
                self._eof_queued = True

    def _wait(self, timeout_s: float) -> bool:
        """Wait for the socket or a wake-up; say whether there is something to read."""
        reading = not self._full
        if reading and isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        interest = select.POLLIN if reading else 0
        if self._out:
            timeout_s = min(timeout_s, self._stall_s)
            if not self._write_after_read:
                interest |= select.POLLOUT
        if interest != self._interest:
            self._interest = interest
            if interest:
                self._poller.register(self._socket, interest)
            else:
                # A peer that is gone would be reported at once, each time, and not looked at:
                # what it sent is read first, when there is room.
                self._poller.unregister(self._socket)
        found = dict(self._poller.poll(max(0.0, timeout_s) * 1000))
        if self._wake_end.fileno() in found:
            self._wake_end.recv(64)
            self._woken = False  # only now: a wake-up in between is seen after poll returns
        return bool(found.get(self._socket.fileno(), 0) & ~select.POLLOUT)

    @property
    def _full(self) -> bool:
        return 0 < self._bulk_most <= self._bulk_held

    def _read(self) -> None:
        self._write_after_read = False
        # Not for as long as there is something: the owner has deadlines to look at.
        for _ in range(_READS_PER_POLL):
            if self.closed or self._full:
                return
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                raise _lost("The connection broke.", "connection_lost") from error
            self._received(data)
            if len(data) < _RECEIVE_BYTES and not isinstance(self._socket, ssl.SSLSocket):
                return

    def _received(self, data: bytes) -> None:
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
            self.closed = True
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._protocol.send_response(self._response(event))
            elif isinstance(event, Frame):
                self._frame(event)
        before = self.pending
        self._take_protocol_bytes()
        self._replies += self.pending - before
        if self._replies > _MOST_REPLIES:
            raise PeerProtocolError(
                "The peer pings and does not read.", reason="websocket_violation", field="ping"
            )
        violation = self._protocol.parser_exc
        if violation is not None and not isinstance(violation, EOFError):
            raise PeerProtocolError(
                "The peer broke the WebSocket protocol.",
                reason="websocket_violation",
                found=type(violation).__name__,
            ) from violation

    def _response(self, request: Request) -> Response:
        rejection = self._reject(request.path)
        if rejection is not None:
            response = self._protocol.reject(rejection.status, rejection.text)
            if rejection.retry_after_s is not None:
                response.headers["Retry-After"] = str(rejection.retry_after_s)
            if rejection.reason is not None:
                response.headers[REASON_HEADER] = rejection.reason
            return response
        self.path = request.path
        return self._protocol.accept(request)

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            self._binary(frame)
        if frame.opcode in (Opcode.TEXT, Opcode.CONT):
            self._fragments.append(bytes(frame.data))
            if frame.fin:
                self._text.append(b"".join(self._fragments))
                self._fragments.clear()

    def _binary(self, frame: Frame) -> None:
        if self._protocol.state is not OPEN:
            return  # it was on its way when this side had begun to close
        if not self._bulk_most or not frame.fin:
            raise PeerProtocolError(
                "No binary message of this kind belongs here.",
                reason="websocket_violation",
                field="opcode",
            )
        data = bytes(frame.data)
        self._bulk.append(data)
        self._bulk_held += len(data)

    def _write(self) -> None:
        while self._out and not self.closed:
            try:
                sent = self._send_some()
            except (BlockingIOError, ssl.SSLWantWriteError):
                return
            except ssl.SSLWantReadError:
                self._write_after_read = True
                return
            except OSError as error:
                raise _lost("The connection broke.", "connection_lost") from error
            self._last_write = time.monotonic()
            self._written(sent)
        if not self._out:
            self._replies = 0
        if self._eof_queued and not self._out and not self.closed:
            self._half_close()

    def _send_some(self) -> int:
        if isinstance(self._socket, ssl.SSLSocket):
            return self._socket.send(self._out[0])
        if len(self._out) == 1:
            return self._socket.send(self._out[0])
        count = min(len(self._out), _BUFFERS_PER_CALL)
        return self._socket.sendmsg([self._out[index] for index in range(count)])

    def _written(self, sent: int) -> None:
        self.pending -= sent
        self.written += sent
        while sent:
            head = self._out[0]
            if sent < head.nbytes:
                self._out[0] = head[sent:]
                return
            sent -= head.nbytes
            self._out.popleft()

    def _half_close(self) -> None:
        self._eof_queued = False
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self.closed = True  # the peer was faster


def _binary_head(length: int) -> bytes:
    """The header of an unfragmented, unmasked BINARY message (RFC 6455, section 5.2)."""
    if length < 126:
        return struct.pack("!BB", 0x82, length)
    if length < 1 << 16:
        return struct.pack("!BBH", 0x82, 126, length)
    return struct.pack("!BBQ", 0x82, 127, length)


def _tune(sock: socket.socket) -> None:
    """No Nagle delay, large send buffer, and probes that find a peer that vanished."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)


def _lost(message: str, reason: str) -> TransferError:
    return TransferError(message, reason=reason)


_quiet = logging.getLogger("gb10_producer.websocket")
_quiet.setLevel(logging.WARNING)
