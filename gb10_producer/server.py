"""The listening side: accepts connections, bounds them, ends them.

One thread accepts, each connection has its own. Those that have not yet proven the key are
counted apart, so that strangers take no place of a decoder that is connected. They are few, and
a handshake ends after some seconds whatever is sent; while they last, nobody new gets in.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time

from gb10_producer.connection import Connection, Offer, Refusals
from gb10_producer.device import Device
from gb10_producer.transfers import Patience, Transfers
from protocol.errors import CapacityError, ConfigError

log = logging.getLogger(__name__)

_BACKLOG = 16
_SWEEP_S = 1.0
_STRANGERS = 16
"""Most connections that are still shaking hands."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; nobody can connect before the model is loaded.

    Raises ``ConfigError``: ``port_taken``, ``address_unusable``.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except ValueError as error:  # what is not even a name
        raise _unusable(host, port, OSError(errno.EINVAL, "it is no host's name")) from error
    except OSError as error:
        raise _unusable(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def url_of(listener: socket.socket, scheme: str) -> str:
    """``ws://host:port`` of a bound socket, IPv6 hosts in brackets."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server:
    """Serves ``offer`` on a bound socket. :meth:`start` once, :meth:`stop` once."""

    def __init__(
        self,
        listener: socket.socket,
        offer: Offer,
        device: Device,
        *,
        connections: int,
        patience: Patience | None = None,
    ) -> None:
        self._listener = listener
        self._offer = offer
        self._device = device
        self._limit = connections
        self.transfers = Transfers(device, patience)
        self._refusals = Refusals()
        self._lock = threading.Lock()
        self._strangers: dict[Connection, threading.Thread] = {}
        self._proven: dict[Connection, threading.Thread] = {}
        self._stop, self._stopped = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    def start(self) -> None:
        """Listen. Raises ``ConfigError`` (``port_taken``) when another program was faster."""
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise _unusable(host, port, error) from error
        self._listener.setblocking(False)
        self._acceptor.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Accept no more, abort what runs, close all; return whether all ended in time."""
        deadline = time.monotonic() + timeout_s
        if self._stop.fileno() < 0:
            return True
        self._stop.send(b"s")
        self._acceptor.join(timeout_s)
        self._listener.close()
        with self._lock:
            serving = {**self._strangers, **self._proven}
        for connection in serving:
            connection.stop()
        for thread in serving.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        self.transfers.close()
        self._stop.close()
        self._stopped.close()
        return not any(thread.is_alive() for thread in serving.values())

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stopped, select.POLLIN)
        while True:
            ready = dict(poller.poll(_SWEEP_S * 1e3))
            self.transfers.sweep(time.monotonic())
            if self._stopped.fileno() in ready:
                return
            if not ready:
                continue
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                continue  # the peer was gone before it was accepted
            except OSError as error:
                # No descriptors or memory: connections that end give some back.
                log.warning("cannot accept", extra={"error": error.strerror})
                time.sleep(0.2)
                continue
            self._serve(sock, f"{address[0]}:{address[1]}")

    def _serve(self, sock: socket.socket, peer: str) -> None:
        with self._lock:
            flooded = len(self._strangers) >= _STRANGERS
        if flooded:
            log.warning("connection refused: too many handshakes", extra={"peer": peer})
            sock.close()
            return
        sock.setblocking(True)
        connection = Connection(
            sock,
            peer,
            self._offer,
            self._device,
            self.transfers,
            refusals=self._refusals,
            proven=lambda: self._promote(connection),
            crowded=lambda: len(self._proven) >= self._limit,
        )
        thread = threading.Thread(
            target=self._run, args=(connection,), name=f"peer {peer}", daemon=True
        )
        with self._lock:
            self._strangers[connection] = thread
        thread.start()

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._proven.pop(connection, None)

    def _promote(self, connection: Connection) -> None:
        with self._lock:
            if len(self._proven) >= self._limit:
                raise CapacityError(
                    "Too many decoders are connected.",
                    reason="capacity_exceeded",
                    retry_after_s=10.0,
                    expected=self._limit,
                )
            self._proven[connection] = self._strangers.pop(connection)


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} on {host} is taken by another program.",
            reason="port_taken",
            field="port",
            found=port,
            hint="Stop the other program, or choose another --port (0: any free one).",
        )
    return ConfigError(
        f"{host}:{port} cannot be bound: {error.strerror or error}.",
        reason="address_unusable",
        field="host",
        found=host,
    )
