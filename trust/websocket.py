"""A small WebSocket client over TLS, in one thread, by deadlines: short TEXT messages both ways,
BINARY ones to the producer alone.

Not the library's own client, which reads and writes the TLS socket from two threads at once:
OpenSSL does not allow that, and CPython guards against it from 3.13 on only.
"""

from __future__ import annotations

import contextlib
import logging
import select
import ssl
import time
from collections import deque
from collections.abc import Iterator
from typing import Final

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.uri import parse_uri

from protocol.errors import BatonError, CapacityError, PeerProtocolError, TransferError
from protocol.reasons import refusal
from trust.calls import not_secured

_RECEIVE_BYTES: Final = 1 << 14
_CLOSE_S: Final = 1.0


class WebSocket:
    """A connection over ``sock``, which it closes. Only :meth:`close` is left after an error.

    Deadlines are in seconds of ``time.monotonic``.
    """

    def __init__(self, sock: ssl.SSLSocket, url: str, longest: int) -> None:
        """``longest`` is the most bytes of a message that may come."""
        self._sock = sock
        self._protocol = ClientProtocol(parse_uri(url), max_size=longest, logger=_quiet)
        self._texts: deque[bytes] = deque()
        self._parts: list[bytes] = []

    def open(self, deadline: float, *, hint: str) -> None:
        """The opening handshake; ``hint`` helps where TLS had not let this side in.

        Raises ``TransferError`` (``tls_failed``, ``connect_timeout``, ``connection_lost``,
        ``handshake_refused``), ``CapacityError`` (``producer_busy``: HTTP 503).
        """
        try:
            self._protocol.send_request(self._protocol.connect())
            # Where the other side has closed already, its last words tell why.
            with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
                self._send(deadline)
            while self._protocol.state is not OPEN and self._protocol.handshake_exc is None:
                self._read(deadline)
        except TimeoutError as error:
            raise TransferError("the producer does not answer", reason="connect_timeout") from error
        except OSError as error:
            raise not_secured(error, hint) from error
        failure = self._protocol.handshake_exc
        if failure is not None and isinstance(failure.__cause__, EOFError):
            raise _lost() from failure
        if isinstance(failure, InvalidStatus):
            raise _refused(failure.response.status_code)
        if failure is not None:
            text = "what answered is no WebSocket"
            raise TransferError(text, reason="handshake_refused", hint=hint)

    def send(self, text: bytes, deadline: float) -> None:
        """Send one message. Raises ``TransferError``: ``connection_lost``, ``peer_silent``."""
        with _failures():
            if self._protocol.state is not OPEN:
                raise EOFError
            self._protocol.send_text(text)
            self._send(deadline)

    def send_binary(self, data: bytes | memoryview, deadline: float) -> None:
        """Send bulk. Raises like :meth:`send`."""
        with _failures():
            if self._protocol.state is not OPEN:
                raise EOFError
            self._protocol.send_binary(data)
            self._send(deadline)

    def arrived(self, deadline: float) -> bytes | None:
        """A message that is here already, if there is one. Raises like :meth:`receive`."""
        with _failures():
            while not self._texts and self._readable():
                self._sock.settimeout(0.0)
                try:
                    received = self._sock.recv(_RECEIVE_BYTES)
                except (BlockingIOError, ssl.SSLWantReadError):
                    break
                self._take(received, deadline)
            return self._texts.popleft() if self._texts else None

    def last_word(self) -> bytes | None:
        """What the producer had said before the connection was lost, if anything is unread.

        Whoever sends finds out first that nobody reads any more, and only here why.
        """
        with contextlib.suppress(OSError, EOFError, BatonError):
            deadline = time.monotonic() + _CLOSE_S
            while not self._texts:
                self._read(deadline)
        return self._texts.popleft() if self._texts else None

    def receive(self, deadline: float) -> bytes:
        """The next message.

        Raises ``TransferError`` (``connection_lost``, ``peer_silent``), ``PeerProtocolError``
        (``websocket_violation``).
        """
        with _failures():
            while not self._texts:
                self._read(deadline)
            return self._texts.popleft()

    def close(self) -> None:
        """Say good-bye, wait for it a moment, and free the socket. Idempotent."""
        with contextlib.suppress(OSError, EOFError, BatonError), contextlib.closing(self._sock):
            deadline = time.monotonic() + _CLOSE_S
            if self._protocol.state is OPEN:
                self._protocol.send_close(1000)
                self._send(deadline)
                while not self._protocol.close_expected():
                    self._read(deadline)

    def _send(self, deadline: float) -> None:
        for data in self._protocol.data_to_send():
            if data:
                self._wait_until(deadline)
                self._sock.sendall(data)

    def _read(self, deadline: float) -> None:
        self._wait_until(deadline)
        self._take(self._sock.recv(_RECEIVE_BYTES), deadline)

    def _readable(self) -> bool:
        poller = select.poll()
        poller.register(self._sock, select.POLLIN)
        return bool(self._sock.pending() or poller.poll(0))

    def _take(self, received: bytes, deadline: float) -> None:
        if received:
            self._protocol.receive_data(received)
        else:
            self._protocol.receive_eof()
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._frame(event)
            else:
                assert isinstance(event, Response)
        self._send(deadline)
        violation = self._protocol.parser_exc
        if violation is not None and not isinstance(violation, EOFError):
            raise PeerProtocolError(
                "the producer broke the WebSocket protocol",
                reason="websocket_violation",
                found=type(violation).__name__,
            ) from violation
        if not received and self._protocol.handshake_exc is None:
            raise EOFError

    def _frame(self, frame: Frame) -> None:
        if frame.opcode is Opcode.BINARY:
            raise PeerProtocolError(
                "no binary message belongs here", reason="websocket_violation", field="opcode"
            )
        if frame.opcode in (Opcode.TEXT, Opcode.CONT):
            self._parts.append(bytes(frame.data))
            if frame.fin:
                self._texts.append(b"".join(self._parts))
                self._parts.clear()

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)


@contextlib.contextmanager
def _failures() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise refusal("peer_silent", "the producer took too long") from error
    except (OSError, EOFError) as error:
        raise _lost() from error


def _lost() -> BatonError:
    return refusal("connection_lost", "the connection ended before the answer came")


def _refused(status: int) -> BatonError:
    if status == 503:
        return CapacityError("the producer has no room", reason="producer_busy", retry_after_s=2.0)
    return TransferError(
        "the producer refused the connection", reason="handshake_refused", found=status
    )


_quiet: Final = logging.getLogger("trust.websocket")
_quiet.setLevel(logging.WARNING)
