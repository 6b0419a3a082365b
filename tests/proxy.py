"""A TCP proxy between a decoder and a producer that counts what passes and makes it fail.

    with Proxy(producer.url, Cut(Offset(70_000)), Cut(Passing("seal"), how="reset")) as proxy:
        link = ProducerLink(replace(target, url=proxy.url), numbers)
        ...
        assert proxy.payload_bytes == payload_bytes(layout, cut, end)

Faults happen once each, in the order given, on whatever connection gets there first: several
``Cut`` end several connections one after another. *Down* is from the producer to the decoder,
*up* the other way. Of each ``ws://`` connection the frame headers are read, so that payload is
told from everything else: the bytes of BINARY messages less the 80 of Baton's own header are the
*payload bytes on the wire*. Of ``wss://`` only bytes can be counted.

Real sockets and threads; nothing is changed on the way, only delayed, held or cut off.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import sys
import termios
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal
from urllib.parse import urlsplit

from tests.proxy_frames import Frames, Piece

End = Literal["close", "reset"]
Direction = Literal["down", "up"]

_CHUNK: Final = 1 << 18
_HELD_BYTES: Final = 1 << 19
"""Read ahead of what was passed on, without a delay; a delayed line holds what is under way."""
_DELAYED_BYTES: Final = 32 << 20
_LINGER_S: Final = 3.0


@dataclass(frozen=True)
class Offset:
    """After ``count`` bytes down, exactly: all of them pass, and nothing more.

    ``unit``: every ``"byte"`` of the TCP stream, or ``"payload"`` bytes alone. ``since``:
    counted over this ``"connection"``, or over all connections since the ``"proxy"`` began.
    """

    count: int
    unit: Literal["byte", "payload"] = "byte"
    since: Literal["connection", "proxy"] = "connection"


@dataclass(frozen=True)
class Passing:
    """When a control message of this type passes: just before it, or just after it.

    ``direction`` is the one in which it travels: ``Passing("committed", "up")``.
    """

    message: str
    direction: Direction = "down"
    delivered: bool = False


@dataclass(frozen=True)
class Cut:
    """End the connection towards both sides: an orderly close (FIN), or a reset (RST)."""

    at: Offset | Passing
    how: End = "close"


@dataclass(frozen=True)
class Stall:
    """Let nothing pass in the direction of ``at`` for so long; the connection stays open."""

    at: Offset | Passing
    seconds: float


Fault = Cut | Stall


@dataclass(frozen=True)
class Line:
    """One direction: what comes in leaves ``delay_ms`` later, at most at ``bytes_per_s``."""

    delay_ms: float = 0.0
    bytes_per_s: float | None = None


@dataclass
class Traffic:
    """What was passed on in one direction.

    ``messages`` are the types of the control messages that were passed on whole, in order.
    ``frames`` counts BINARY messages passed on whole; ``payload_bytes`` also those of a frame
    that was cut short.
    """

    bytes: int = 0
    payload_bytes: int = 0
    frames: int = 0
    messages: list[str] = field(default_factory=list)


class _CutShort(Exception):
    """A cut was reached: nothing more is passed on."""

    def __init__(self, how: End) -> None:
        self.how: End = how


class Proxy:
    """Listens on loopback and passes on to the host and port of ``url``.

    ``down`` and ``up`` shape the two directions of connections that are made from then on.
    Safe to read and to call from any thread.
    """

    def __init__(
        self, url: str, *faults: Fault, down: Line | None = None, up: Line | None = None
    ) -> None:
        self.lines: dict[Direction, Line] = {"down": down or Line(), "up": up or Line()}
        scheme, path = urlsplit(url).scheme, urlsplit(url).path
        self.framed = scheme == "ws"
        """Whether frames can be told apart."""
        self.refusing = False
        """Whether new connections are closed at once, as where nobody listens."""
        self.connections: list[Connection] = []
        """In the order in which they were accepted; ended ones stay."""
        self._faults: deque[Fault] = deque()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self.retarget(url)
        self.inject(*faults)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"{scheme}://127.0.0.1:{self._listener.getsockname()[1]}{path}"
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def payload_bytes(self) -> int:
        """Payload bytes passed down, over all connections. Raises ``ValueError`` for ``wss``."""
        if not self.framed:
            raise ValueError("nobody can count what is encrypted")
        return self._total("payload")

    @property
    def down_bytes(self) -> int:
        """Bytes passed down, over all connections."""
        return self._total("byte")

    @property
    def pending(self) -> tuple[Fault, ...]:
        """Faults that did not happen yet."""
        with self._lock:
            return tuple(self._faults)

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing.is_set()

    def inject(self, *faults: Fault) -> None:
        """Have these faults happen too, after those that are pending."""
        for fault in faults:
            counts_bytes = isinstance(fault.at, Offset) and fault.at.unit == "byte"
            if not (self.framed or counts_bytes):
                raise ValueError(f"nobody can see when this happens: {fault}")
        with self._lock:
            self._faults.extend(faults)

    def cut(self, how: End = "close") -> None:
        """End every open connection now."""
        for connection in tuple(self.connections):
            connection.end(how)

    def retarget(self, url: str) -> None:
        """Pass new connections on to here: the producer came back on another port."""
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self._target = parts.hostname, parts.port

    def close(self) -> None:
        """Stop listening and end everything. Idempotent."""
        self._closing.set()
        with contextlib.suppress(OSError):  # it was closed before
            # Wakes accept() everywhere; shutdown of a listener does not on macOS.
            socket.create_connection(self._listener.getsockname(), 1.0).close()
        self._thread.join(5.0)
        self._listener.close()
        self.cut("reset")
        for connection in self.connections:
            connection.join()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            if self._closing.is_set():
                near.close()
                return
            if self.refusing:
                near.close()
                continue
            try:
                far = socket.create_connection(self._target, 5.0)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            connection = Connection(self, near, far)
            self.connections.append(connection)
            connection.start()

    # What its connections ask

    def _total(self, unit: Literal["byte", "payload"]) -> int:
        return sum(_counted(connection.down, unit) for connection in tuple(self.connections))

    def _room(self, connection: Connection, payload: bool) -> int | None:
        """How many bytes may go down until the next fault is due; ``None``: it is no matter."""
        with self._lock:
            at = self._faults[0].at if self._faults else None
            if not isinstance(at, Offset) or (at.unit == "payload" and not payload):
                return None
            if at.since == "proxy":
                return max(0, at.count - self._total(at.unit))
            return max(0, at.count - _counted(connection.down, at.unit))

    def _take(self, connection: Connection) -> Fault | None:
        """The next fault, if its offset is reached."""
        with self._lock:
            at = self._faults[0].at if self._faults else None
            if isinstance(at, Offset) and self._room(connection, True) == 0:
                return self._faults.popleft()
            return None

    def _take_passing(self, message: str, direction: Direction, delivered: bool) -> Fault | None:
        with self._lock:
            at = self._faults[0].at if self._faults else None
            return self._faults.popleft() if at == Passing(message, direction, delivered) else None


def _counted(traffic: Traffic, unit: Literal["byte", "payload"]) -> int:
    return traffic.bytes if unit == "byte" else traffic.payload_bytes


class Connection:
    """One connection through the proxy, and what passed over it."""

    def __init__(self, proxy: Proxy, near: socket.socket, far: socket.socket) -> None:
        self.down = Traffic()
        self.up = Traffic()
        self.open = True
        """Whether it may still pass anything on."""
        self._proxy = proxy
        self._sockets = near, far
        self._ended = threading.Event()
        self._ending = threading.Lock()
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pumps = [
            _Pump(self, proxy, "down", far, near, self.down),
            _Pump(self, proxy, "up", near, far, self.up),
        ]

    def start(self) -> None:
        """Begin to pass on."""
        for pump in self._pumps:
            pump.start()

    def end(self, how: End) -> None:
        """Close or reset both sides. Idempotent."""
        with self._ending:
            if not self.open:
                return
            self.open = False
            self._ended.set()
            for each in self._sockets:
                if how == "reset":
                    _drain(each)
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    # A thread in recv() holds the socket: only shutdown wakes it.
                    _shut(each, socket.SHUT_RD)
                else:
                    # Bytes that nobody read would make it a reset: the pumps read on.
                    _shut(each, socket.SHUT_WR)

    def join(self) -> None:
        """Wait until its threads have ended."""
        for pump in self._pumps:
            pump.join()

    def done(self) -> None:
        """A pump has ended; the last one frees both sockets."""
        with self._ending:
            if any(not pump.finished for pump in self._pumps):
                return
            self.open = False
        for each in self._sockets:
            _shut(each, socket.SHUT_RD)  # a thread may still be in recv()
            each.close()

    def wait(self, seconds: float) -> None:
        """Let time pass, unless the connection ends. Raises :class:`_CutShort` if it does."""
        if self._ended.wait(min(max(0.0, seconds), threading.TIMEOUT_MAX)):
            raise _CutShort("close")


class _Pump:
    """One direction of a connection: a thread that reads, and one that passes on."""

    def __init__(
        self,
        connection: Connection,
        proxy: Proxy,
        direction: Direction,
        source: socket.socket,
        sink: socket.socket,
        traffic: Traffic,
    ) -> None:
        self.finished = False
        self._connection, self._proxy = connection, proxy
        self._direction: Direction = direction
        self._source, self._sink, self._traffic = source, sink, traffic
        self._line = proxy.lines[direction]
        self._limit = _DELAYED_BYTES if self._line.delay_ms else _HELD_BYTES
        self._queue: deque[tuple[float, bytes | None]] = deque()
        self._held = 0
        self._changed = threading.Condition()
        self._free_at = 0.0
        self._threads = [
            threading.Thread(target=target, name=f"proxy {direction}", daemon=True)
            for target in (self._read, self._pass_on)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(2 * _LINGER_S)

    def _read(self) -> None:
        data: bytes | None = b"first"
        while data:
            try:
                data = self._source.recv(_CHUNK)
            except OSError:
                data = None
            due = time.monotonic() + self._line.delay_ms / 1000
            with self._changed:
                while self._held >= self._limit and self._connection.open:
                    self._changed.wait(0.1)
                if self._connection.open:
                    self._queue.append((due, data))
                    self._held += len(data or b"")
                    self._changed.notify_all()

    def _pass_on(self) -> None:
        reader = Frames() if self._proxy.framed else None
        try:
            while data := self._next():
                for piece in (Piece(data),) if reader is None else reader.read(data):
                    self._pass(piece)
            _shut(self._sink, socket.SHUT_WR)
        except _CutShort as cut:
            self._connection.end(cut.how)
        except OSError:
            self._connection.end("reset")
        # Read on until the source has closed: see Connection.end.
        linger_until = time.monotonic() + _LINGER_S
        while self._threads[0].is_alive() and time.monotonic() < linger_until:
            self._threads[0].join(0.02)
            if self._proxy.closing:
                break
        self.finished = True
        self._connection.done()

    def _next(self) -> bytes:
        """What is due next; empty at the end of the stream. A reset is passed on as one."""
        with self._changed:
            while not self._queue:
                if not self._connection.open:
                    raise _CutShort("close")
                self._changed.wait(0.1)
            due, data = self._queue.popleft()
            self._held -= len(data or b"")
            self._changed.notify_all()
        if (pause := due - time.monotonic()) > 0:
            self._connection.wait(pause)
        if data is None:
            raise _CutShort("reset")
        return data

    def _pass(self, piece: Piece) -> None:
        if piece.opens:
            self._suffer(self._proxy._take_passing(piece.opens, self._direction, False))
        rest = memoryview(piece.data)
        while rest:
            room = len(rest)
            if self._direction == "down":
                self._suffer(self._proxy._take(self._connection))
                until = self._proxy._room(self._connection, piece.payload)
                room = room if until is None else min(room, until)
            self._send(rest[:room], piece, ends=room == len(rest))
            rest = rest[room:]
        if self._direction == "down":
            self._suffer(self._proxy._take(self._connection))
        if piece.closes:
            self._suffer(self._proxy._take_passing(piece.closes, self._direction, True))

    def _send(self, data: memoryview, piece: Piece, ends: bool) -> None:
        """Pass on some bytes of ``piece``; ``ends``: up to its end."""
        traffic = self._traffic
        rate = self._line.bytes_per_s
        step = len(data) if rate is None else max(1, int(rate / 100))
        for start in range(0, len(data), step):
            part = data[start : start + step]
            if rate is not None:
                self._connection.wait(self._free_at - time.monotonic())
                self._free_at = max(self._free_at, time.monotonic()) + len(part) / rate
            if not self._connection.open:
                raise _CutShort("close")
            # Counted before: whoever has read the bytes finds them counted.
            with self._proxy._lock:
                traffic.bytes += len(part)
                traffic.payload_bytes += len(part) if piece.payload else 0
                if ends and start + step >= len(data):
                    traffic.frames += piece.closes_frame
                    traffic.messages += [piece.closes] if piece.closes else []
            self._sink.sendall(part)

    def _suffer(self, fault: Fault | None) -> None:
        match fault:
            case Cut(how=how):
                raise _CutShort(how)
            case Stall(seconds=seconds):
                self._connection.wait(seconds)


def _shut(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):  # the other side was faster
        sock.shutdown(how)


def _drain(sock: socket.socket) -> None:
    """Wait until the peer's machine has what was sent: a reset throws away what has not left."""
    if sys.platform != "linux":
        time.sleep(0.05)
        return
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        try:
            waiting = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return
        if not int.from_bytes(waiting, sys.byteorder):
            return
        time.sleep(0.001)
