"""One connected socket, plain or TLS, with bounded waits. Bytes only, no framing.

Every wait ends within :data:`POLL_S`, so that the thread which owns the socket can look at
its deadline and at a cancellation.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from protocol.errors import TransferError
from trust.tls import is_gone

POLL_S: Final = 0.1
"""Longest wait of one call in seconds."""

# A wait for all bytes costs one system call a frame. macOS restarts the receive time-out with
# every packet, so that a slow drip could hold a call for ever: there, take what is there.
_ALL: Final = socket.MSG_WAITALL if sys.platform == "linux" else 0

_LOCAL_NETWORK_HINT: Final = (
    "on macOS, allow Baton under System Settings, Privacy & Security, Local Network"
)


class Transport(Protocol):
    """What the framing above needs of a socket. Used by one thread at a time."""

    def receive(self, into: memoryview) -> int | None:
        """Bytes received into ``into`` (0: end of stream), or ``None``: none in time."""
        ...

    def fill(self, into: memoryview) -> int | None:
        """Like :meth:`receive`, but wait for all of ``into`` as long as one wait may last."""
        ...

    def send(self, data: memoryview) -> int:
        """Bytes taken, 0 where there is no room now."""
        ...

    def readable(self, timeout_s: float, *, or_writable: bool = False) -> bool:
        """Whether bytes (or room for bytes) are there within ``timeout_s``."""
        ...

    def fileno(self) -> int: ...

    def certificate(self) -> bytes | None:
        """The peer's leaf certificate in DER, ``None`` without TLS."""
        ...

    def close(self) -> None: ...


class PlainTransport:
    """A blocking TCP socket whose time-outs are the kernel's, which saves a poll per call."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.setblocking(True)
        timeval = struct.pack("ll", 0, int(POLL_S * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)

    def receive(self, into: memoryview) -> int | None:
        try:
            return self._socket.recv_into(into)
        except BlockingIOError:
            return None

    def fill(self, into: memoryview) -> int | None:
        try:
            return self._socket.recv_into(into, 0, _ALL)
        except BlockingIOError:
            return None

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def readable(self, timeout_s: float, *, or_writable: bool = False) -> bool:
        return _poll(self._socket, timeout_s, select.POLLOUT if or_writable else 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def certificate(self) -> bytes | None:
        return None

    def close(self) -> None:
        self._socket.close()


class TlsTransport:
    """A TLS socket. Its records are at most 16 KiB, which bounds what one call returns."""

    def __init__(self, connected: ssl.SSLSocket) -> None:
        self._socket = connected
        connected.settimeout(POLL_S)

    def receive(self, into: memoryview) -> int | None:
        try:
            return self._socket.recv_into(into)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    fill = receive

    def send(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except (TimeoutError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return 0

    def readable(self, timeout_s: float, *, or_writable: bool = False) -> bool:
        if self._socket.pending() > 0:
            return True
        return _poll(self._socket, timeout_s, select.POLLOUT if or_writable else 0)

    def fileno(self) -> int:
        return self._socket.fileno()

    def certificate(self) -> bytes | None:
        return self._socket.getpeercert(binary_form=True)

    def close(self) -> None:
        self._socket.close()


def connect(
    host: str,
    port: int,
    *,
    tls: ssl.SSLContext | None,
    deadline: float,
    stopped: Callable[[], bool],
) -> Transport:
    """Connect, and shake hands with TLS if ``tls`` is given, before monotonic ``deadline``.

    Raises ``TransferError``: ``producer_unreachable`` (name, route), ``producer_down``
    (nobody listens), ``connect_timeout``, ``tls_failed``, ``connection_lost``, ``link_closed``
    (``stopped``).
    """
    found = _addresses(host, port, deadline, stopped)
    failure: TransferError | None = None
    for family, kind, number, _, address in found:
        opened = socket.socket(family, kind, number)
        try:
            _connect(opened, address, deadline, stopped)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if tls is None:
                return PlainTransport(opened)
            return _shake_hands(opened, tls, host, deadline, stopped)
        except TransferError as error:
            opened.close()
            failure = error
        except BaseException:
            opened.close()
            raise
    raise failure or _unreachable(f"{host} has no address")


def _addresses(host: str, port: int, deadline: float, stopped: Callable[[], bool]) -> list[Any]:
    """What ``getaddrinfo`` finds; the resolver's own time-outs are half a minute and more."""
    with contextlib.suppress(OSError, ValueError):
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    answers: SimpleQueue[list[Any] | TransferError] = SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answers.put(_unreachable(f"{host} has no address: {error.strerror}"))
        except ValueError:  # UnicodeError among them
            answers.put(_unreachable("the producer's address holds no host's name"))

    # Nothing can stop a resolver; one that comes too late speaks to nobody.
    threading.Thread(target=ask, name="baton-resolve", daemon=True).start()
    while True:
        left = deadline - time.monotonic()
        try:
            answer = answers.get(timeout=max(0.0, min(POLL_S, left)))
        except Empty:
            if stopped():
                raise TransferError("the link is closing", reason="link_closed") from None
            if left <= 0:
                raise _late() from None
            continue
        if isinstance(answer, TransferError):
            raise answer
        return answer


def _connect(
    opened: socket.socket, address: object, deadline: float, stopped: Callable[[], bool]
) -> None:
    opened.setblocking(False)
    code = opened.connect_ex(address)  # type: ignore[arg-type]
    if code == errno.EINPROGRESS:
        _wait(opened, select.POLLOUT, deadline, stopped)
        code = opened.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code == 0:
        return
    text = errno.errorcode.get(code, str(code))
    if code == errno.ECONNREFUSED:
        raise TransferError("nobody listens at the producer's address", reason="producer_down")
    if code == errno.ECONNRESET:
        raise TransferError("the producer ended the connection", reason="connection_lost")
    if code == errno.ETIMEDOUT:
        raise _late()
    raise _unreachable(f"the producer's address cannot be reached: {text}")


def _shake_hands(
    opened: socket.socket,
    tls: ssl.SSLContext,
    host: str,
    deadline: float,
    stopped: Callable[[], bool],
) -> TlsTransport:
    try:
        wrapped = tls.wrap_socket(opened, server_hostname=host, do_handshake_on_connect=False)
    except OSError as error:
        raise _not_secured(error) from error
    try:
        while True:
            try:
                wrapped.do_handshake()
                return TlsTransport(wrapped)
            except ssl.SSLWantReadError:
                _wait(wrapped, select.POLLIN, deadline, stopped)
            except ssl.SSLWantWriteError:
                _wait(wrapped, select.POLLOUT, deadline, stopped)
    except OSError as error:
        wrapped.close()
        raise _not_secured(error) from error
    except BaseException:
        wrapped.close()
        raise


def _not_secured(error: OSError) -> TransferError:
    if is_gone(error):
        text = "the producer ended the connection during the TLS handshake"
        return TransferError(text, reason="connection_lost")
    return TransferError(
        "the producer's TLS handshake failed",
        reason="tls_failed",
        found=error.reason if isinstance(error, ssl.SSLError) else error.strerror,
        hint="pair the two machines again if their certificates were replaced",
    )


def _wait(opened: socket.socket, event: int, deadline: float, stopped: Callable[[], bool]) -> None:
    while not _poll(opened, POLL_S, event, reading=False):
        if stopped():
            raise TransferError("the link is closing", reason="link_closed")
        if time.monotonic() >= deadline:
            raise _late()


def _poll(opened: socket.socket, timeout_s: float, more: int, *, reading: bool = True) -> bool:
    poll = select.poll()
    poll.register(opened, more | (select.POLLIN if reading else 0))
    return bool(poll.poll(timeout_s * 1000))


def _late() -> TransferError:
    return TransferError("the producer did not answer in time", reason="connect_timeout")


def _unreachable(message: str) -> TransferError:
    hint = _LOCAL_NETWORK_HINT if sys.platform == "darwin" else None
    return TransferError(message, reason="producer_unreachable", hint=hint)
