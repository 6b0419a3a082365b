"""The decoder's end of one WebSocket connection: messages in, messages out, bulk in place.

The ``websockets`` library does the opening handshake, control frames, fragments and the
close. One thing is done here, since it is all that a handoff's speed depends on: a whole
data frame, that is an unfragmented unmasked BINARY message, is received straight from the
socket into the memory where its rows belong. This file finds the boundaries of WebSocket
frames and feeds everything else to the library, so that the two never share a byte.

Lengths are judged before anything is read or allocated for them. One thread at a time.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from websockets.client import ClientProtocol
from websockets.exceptions import (
    InvalidState,
    InvalidURI,
    PayloadTooBig,
    WebSocketException,
)
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import CONNECTING, OPEN
from websockets.uri import WebSocketURI, parse_uri

from mac_decoder.handoff.transport import POLL_S, Transport, connect
from protocol.errors import CapacityError, ConfigError, PeerProtocolError, TransferError
from protocol.frames import HEADER_BYTES, MAX_FRAME_BYTES
from protocol.reasons import LOADING, REASON_HEADER, WITHOUT_MODEL
from trust.tls import is_gone

_AHEAD_BYTES: Final = 4096
"""Read ahead of a frame's boundary; what belongs to a payload is copied, once."""

_MAX_RESPONSE_BYTES: Final = 16 * 1024
_WHOLE_BINARY: Final = 0x82
"""First byte of an unfragmented BINARY message without extensions."""

_CONTROL_BURST: Final = 256
_CONTROL_PER_S: Final = 32.0
"""Pings, pongs, fragments and the like that a peer may send; a flood ends the connection."""

_log = logging.getLogger("baton.websocket")
_log.setLevel(logging.WARNING)

Admit = Callable[[bytes, int], memoryview | None]
"""Given a data frame's header and its payload's length: where the payload goes, or ``None``
if it is to be read and dropped. Raises to refuse."""


class DataFrame(NamedTuple):
    """A data frame whose payload has arrived; ``payload`` is ``None`` if it was dropped."""

    header: bytes
    payload: memoryview | None


class Wire:
    """An open connection. Errors are ``TransferError`` and ``PeerProtocolError``.

    After an error only :meth:`close` is left to call.
    """

    def __init__(self, transport: Transport, protocol: ClientProtocol) -> None:
        self._transport = transport
        self._protocol = protocol
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = self._stop = 0
        self._unfed = 0
        """Bytes of the library's current frame that were not fed to it yet."""
        self._rest: memoryview | None = None
        self._dropping = 0
        self._arriving: DataFrame | None = None
        self._fragments: list[bytes] | None = None
        self._fragment_bytes = 0
        self._texts: list[bytes] = []
        self._outbox = bytearray()
        self._deaf = False
        """Whether the peer takes nothing more; it may have said why before."""
        self._allowance = float(_CONTROL_BURST)
        self._allowance_at = time.monotonic()
        self._ping_sent_at: float | None = None
        self._pings = 0
        self._until = 0.0
        self.round_trip_s: float | None = None
        self.last_heard = time.monotonic()
        """Monotonic time at which the last bytes came."""

    @classmethod
    def open(
        cls,
        url: str,
        *,
        tls: ssl.SSLContext | None,
        verify: Callable[[bytes | None], None] = lambda certificate: None,
        timeout_s: float,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Wire:
        """Connect to ``ws://`` or ``wss://``, within ``timeout_s`` seconds.

        ``verify`` is given the peer's certificate before anything is sent to it. Raises
        ``TransferError`` (see ``transport.connect``; ``handshake_refused``,
        ``handshake_invalid``, ``producer_without_model``, ``producer_loading``),
        ``CapacityError`` (``producer_busy``: any other HTTP 503) and whatever ``verify`` raises.
        """
        deadline = time.monotonic() + timeout_s
        uri = parse_url(url)
        transport = connect(
            uri.host,
            uri.port,
            tls=tls if uri.secure else None,
            deadline=deadline,
            stopped=stopped,
        )
        try:
            verify(transport.certificate())
            wire = cls(transport, ClientProtocol(uri, max_size=None, logger=_log))
            wire._shake_hands(deadline, stopped)
        except BaseException:
            transport.close()
            raise
        return wire

    def fileno(self) -> int:
        """For ``select``; see also :attr:`buffered`."""
        return self._transport.fileno()

    @property
    def buffered(self) -> bool:
        """Whether :meth:`receive` may return something without the socket being readable."""
        return bool(self._texts) or self._stop > self._start or self._transport.readable(0.0)

    def send_text(self, raw: bytes) -> None:
        """Queue one TEXT message and send what the socket takes without waiting."""
        try:
            self._protocol.send_text(raw)
        except (InvalidState, WebSocketException) as error:
            raise _lost("the connection is closing") from error
        self._flush()

    @property
    def ping_pending(self) -> bool:
        """Whether a ping was not answered yet."""
        return self._ping_sent_at is not None

    def ping(self) -> None:
        """Send a ping; its answer sets ``round_trip_s``."""
        if self._protocol.state is OPEN:
            self._ping_sent_at = time.monotonic()
            self._pings += 1
            self._protocol.send_ping(b"%d" % self._pings)
            self._flush()

    def receive(self, admit: Admit, text_limit: int) -> bytes | DataFrame | None:
        """The next TEXT message or data frame, or ``None`` if none was whole within 0.1 s.

        ``text_limit`` is the longest TEXT message accepted, in bytes. Where a frame is cut
        off by ``None``, the next call goes on with it.
        """
        if self._outbox:
            self._send_waiting()
            if self._outbox and not self.buffered:
                return None
        # A peer that sends byte by byte is always readable: the clock decides, not the socket.
        self._until = time.monotonic() + POLL_S
        while True:
            if self._texts:
                return self._texts.pop(0)
            if self._arriving is not None:
                if not self._receive_payload():
                    return None
                arrived, self._arriving = self._arriving, None
                return arrived
            if self._unfed:
                if self._late() or not self._feed_frame():
                    return None
            elif self._late() or not self._next_frame(admit, text_limit):
                return None

    def abandon_payload(self) -> None:
        """Drop what is still to come of a data frame instead of placing it.

        Afterwards no memory that ``admit`` returned is written any more.
        """
        if self._arriving is not None and self._rest is not None:
            self._dropping = len(self._rest)
            self._rest = None
            self._arriving = DataFrame(self._arriving.header, None)

    def close(self, code: int = 1000, reason: str = "") -> None:
        """Send a close frame if there is room for it, and free the socket. Idempotent."""
        try:
            if self._protocol.state is OPEN:
                self._protocol.send_close(code, reason)
                self._flush()
        except (TransferError, OSError):
            _log.debug("the connection was gone before its close frame")
        finally:
            self._transport.close()

    # Reading

    def _shake_hands(self, deadline: float, stopped: Callable[[], bool]) -> None:
        self._protocol.send_request(self._protocol.connect())
        self._flush()
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            if stopped():
                raise TransferError("the link is closing", reason="link_closed")
            if time.monotonic() >= deadline:
                raise TransferError("no answer to the handshake", reason="connect_timeout")
            if len(received) >= _MAX_RESPONSE_BYTES:
                raise TransferError("the handshake is too long", reason="handshake_invalid")
            if self._outbox:
                self._send_waiting()
            count = self._receive_some(self._ahead)
            if count is not None:
                received += self._ahead[:count]
        head, tail = received[: end + 4], received[end + 4 :]
        _require_upgrade(head)
        self._protocol.receive_data(head)
        response = next(iter(self._protocol.events_received()), None)
        if self._protocol.handshake_exc is not None or not isinstance(response, Response):
            raise TransferError(
                "what answered is no Baton producer", reason="handshake_invalid"
            ) from self._protocol.handshake_exc
        if len(tail) > _AHEAD_BYTES:
            raise TransferError("the handshake is too long", reason="handshake_invalid")
        self._ahead[: len(tail)] = tail
        self._start, self._stop = 0, len(tail)

    def _next_frame(self, admit: Admit, text_limit: int) -> bool:
        """Read up to the payload of the next frame; false: not enough came in time."""
        if not self._have(2):
            return False
        first, second = self._ahead[self._start], self._ahead[self._start + 1]
        short = second & 0x7F
        extended = 2 if short == 126 else 8 if short == 127 else 0
        if not self._have(2 + extended):
            return False
        at = self._start + 2
        length = int.from_bytes(self._ahead[at : at + extended], "big") if extended else short
        if first == _WHOLE_BINARY and second < 0x80 and self._fragments is None:
            return self._begin_data_frame(2 + extended, length, admit)
        self._judge(first, length, text_limit)
        self._unfed = 2 + extended + length
        return True

    def _begin_data_frame(self, head: int, length: int, admit: Admit) -> bool:
        if not HEADER_BYTES <= length <= MAX_FRAME_BYTES:
            raise PeerProtocolError(
                "a data frame has an impossible length",
                reason="frame_malformed" if length < HEADER_BYTES else "frame_too_long",
                field="length",
                found=length,
                expected=f"{HEADER_BYTES} to {MAX_FRAME_BYTES}",
            )
        if not self._have(head + HEADER_BYTES):
            return False
        at = self._start + head
        header = bytes(self._ahead[at : at + HEADER_BYTES])
        self._start = at + HEADER_BYTES
        wanted = length - HEADER_BYTES
        place = admit(header, wanted)
        self._arriving = DataFrame(header, place)
        here = min(self._stop - self._start, wanted)
        if place is None:
            self._dropping = wanted - here
        else:
            place[:here] = self._ahead[self._start : self._start + here]
            self._rest = place[here:]
        self._start += here
        return True

    def _receive_payload(self) -> bool:
        """Receive the rest of the arriving payload; false: not all of it came in time."""
        while self._rest:
            count = self._heard(self._transport.fill, self._rest)
            if count is None:
                return False
            self._rest = self._rest[count:]
            if self._rest and self._late():
                return False
        while self._dropping:
            count = self._receive_some(self._ahead[: min(self._dropping, _AHEAD_BYTES)])
            if count is None:
                return False
            self._dropping -= count
            if self._dropping and self._late():
                return False
        self._rest = None
        return True

    def _judge(self, first: int, length: int, text_limit: int) -> None:
        """Refuse a frame of the library by its kind and length, before it is read."""
        opcode = first & 0x0F
        if opcode >= Opcode.CLOSE:
            if length > 125:
                raise _violation("a control frame is too long")
            self._spend_allowance()
            return
        if opcode == Opcode.BINARY and self._fragments is None:
            raise PeerProtocolError(
                "a data frame came in fragments, masked or compressed",
                reason="frame_malformed",
                field="websocket",
            )
        expected = Opcode.TEXT if self._fragments is None else Opcode.CONT
        if opcode != expected:
            raise _violation("a message starts or goes on where it must not")
        if self._fragment_bytes + length > text_limit:
            raise PeerProtocolError(
                "a control message is longer than this state allows",
                reason="message_too_long",
                field="length",
                found=self._fragment_bytes + length,
                expected=f"at most {text_limit}",
            )
        if opcode == Opcode.CONT:
            self._spend_allowance()

    def _spend_allowance(self) -> None:
        now = time.monotonic()
        refill = (now - self._allowance_at) * _CONTROL_PER_S
        self._allowance = min(float(_CONTROL_BURST), self._allowance + refill) - 1.0
        self._allowance_at = now
        if self._allowance < 0.0:
            raise PeerProtocolError("the peer floods the connection", reason="control_flood")

    def _feed_frame(self) -> bool:
        """Give the library more of its current frame; false: nothing came in time."""
        if not self._have(1):
            return False
        count = min(self._unfed, self._stop - self._start)
        piece = bytes(self._ahead[self._start : self._start + count])
        self._start += count
        self._unfed -= count
        self._protocol.receive_data(piece)
        self._events()
        self._flush()
        return True

    def _events(self) -> None:
        for event in self._protocol.events_received():
            if isinstance(event, Frame):
                self._library_frame(event)
        fault = self._protocol.parser_exc
        if isinstance(fault, PayloadTooBig | WebSocketException | UnicodeDecodeError):
            raise _violation("the peer broke the WebSocket protocol") from fault
        closed = self._protocol.close_rcvd
        if closed is not None:
            raise TransferError(
                "the producer closed the connection",
                reason="producer_stopping" if closed.code in (1001, 1012) else "connection_lost",
                found=closed.code,
            )

    def _library_frame(self, frame: Frame) -> None:
        match frame.opcode:
            case Opcode.TEXT if frame.fin:
                self._texts.append(bytes(frame.data))
            case Opcode.TEXT:
                self._fragments = [bytes(frame.data)]
                self._fragment_bytes = len(frame.data)
            case Opcode.CONT if self._fragments is not None:
                self._fragments.append(bytes(frame.data))
                self._fragment_bytes += len(frame.data)
                if frame.fin:
                    self._texts.append(b"".join(self._fragments))
                    self._fragments = None
                    self._fragment_bytes = 0
            case Opcode.PONG if self._ping_sent_at and frame.data == b"%d" % self._pings:
                self.round_trip_s = time.monotonic() - self._ping_sent_at
                self._ping_sent_at = None
            case _:
                pass  # the library has answered pings and closes already

    def _have(self, count: int) -> bool:
        """Whether ``count`` bytes lie ahead, after receiving once or more if need be."""
        while self._stop - self._start < count:
            if self._start and self._start == self._stop:
                self._start = self._stop = 0
            elif self._start + count > _AHEAD_BYTES:
                left = bytes(self._ahead[self._start : self._stop])
                self._ahead[: len(left)] = left
                self._start, self._stop = 0, len(left)
            got = self._receive_some(self._ahead[self._stop :])
            if got is None:
                return False
            self._stop += got
            if self._late() and self._stop - self._start < count:
                return False
        return True

    def _late(self) -> bool:
        return time.monotonic() >= self._until

    def _receive_some(self, into: memoryview) -> int | None:
        return self._heard(self._transport.receive, into)

    def _heard(self, receive: Callable[[memoryview], int | None], into: memoryview) -> int | None:
        try:
            count = receive(into)
        except OSError as error:
            raise self._broken(error) from error
        if count == 0 or (count is None and self._deaf):
            self._protocol.receive_eof()
            raise _lost("the producer closed the connection")
        if count is not None:
            self.last_heard = time.monotonic()
        return count

    def _broken(self, error: OSError) -> TransferError:
        # A producer refuses our certificate only after the handshake (TLS 1.3): its first word.
        if self._protocol.state is CONNECTING and not is_gone(error):
            return TransferError(
                "the producer refused this machine's certificate",
                reason="tls_failed",
                found=error.reason if isinstance(error, ssl.SSLError) else error.strerror,
                hint="pair the two machines again if their certificates were replaced",
            )
        return _lost("the connection broke")

    # Writing

    def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            self._outbox += data
        try:
            while self._outbox:
                with memoryview(self._outbox) as view:
                    sent = self._transport.send(view)
                if not sent:
                    return
                del self._outbox[:sent]
        except OSError:
            self._deaf = True
            self._outbox.clear()

    def _send_waiting(self) -> None:
        """Go on with what the socket had no room for, unless there is something to read."""
        self._transport.readable(POLL_S, or_writable=True)
        self._flush()


def parse_url(url: str) -> WebSocketURI:
    """The parts of a producer's address.

    Raises ``ConfigError`` (``producer_url_invalid``).
    """
    try:
        return parse_uri(url)
    except (InvalidURI, ValueError) as error:
        raise ConfigError(
            "the producer's address is no ws:// or wss:// URL",
            reason="producer_url_invalid",
            field="producer",
            expected="wss://HOST:PORT, or ws://127.0.0.1:PORT",
        ) from error


def _require_upgrade(head: bytearray) -> None:
    """Judge the status line here, since the library would wait for the body of an error."""
    words = bytes(head.split(b"\r\n", 1)[0]).split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1].isdigit():
        raise TransferError("what answered speaks no HTTP", reason="handshake_invalid")
    status = int(words[1])
    if status == 503 and _reason_in(head) == WITHOUT_MODEL:
        raise TransferError(
            "the producer has no model yet",
            reason=WITHOUT_MODEL,
            hint="send it this decoder's: baton node send NAME",
        )
    if status == 503 and _reason_in(head) == LOADING:
        raise TransferError("the producer loads its model", reason=LOADING)
    if status == 503:
        raise CapacityError("the producer has no room", reason="producer_busy", retry_after_s=2.0)
    if status != 101:
        raise TransferError(
            "the producer refused the connection", reason="handshake_refused", found=status
        )


def _reason_in(head: bytearray) -> str | None:
    """Why a producer says that it does not let anybody in, if it does."""
    for line in bytes(head).split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == REASON_HEADER.lower().encode():
            return value.strip().decode("ascii", "replace")
    return None


def _violation(message: str) -> PeerProtocolError:
    return PeerProtocolError(message, reason="websocket_violation")


def _lost(message: str) -> TransferError:
    return TransferError(message, reason="connection_lost")
