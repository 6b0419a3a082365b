"""The listening side: accepts connections, bounds them, ends them.

One thread accepts, each connection has its own. Those that have not yet proven the key are
counted apart, so that strangers take no place of a decoder that is connected. They are few:
a handshake ends after some seconds whatever is sent, and the oldest makes room for another.
"""

from __future__ import annotations

import errno
import logging
import select
import socket
import threading
import time

from gb10_producer.connection import HANDOFF_PATH, Connection, Refusals
from gb10_producer.control import Desk
from gb10_producer.device import Device
from gb10_producer.serving import Offer, Stock
from gb10_producer.transfers import Patience, Transfers
from gb10_producer.trust import Admitted, Trust
from gb10_producer.wire import Rejection, Wire
from protocol.control import PATH as CONTROL_PATH
from protocol.deadlines import Timing
from protocol.errors import CapacityError, ConfigError, TransferError
from protocol.reasons import LOADING, WITHOUT_MODEL

log = logging.getLogger(__name__)

_BACKLOG = 16
_SWEEP_S = 1.0
_STRANGERS = 16
"""Most connections that are still shaking hands; the oldest makes room for another."""
_VISITORS = 4
"""Most control connections."""


def bind(host: str, port: int, option: str = "--port") -> socket.socket:
    """A bound socket that does not listen yet; nobody can connect before the model is loaded.

    ``option`` is what sets the port. Raises ``ConfigError``: ``port_taken``,
    ``address_unusable``.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except ValueError as error:  # what is not even a name
        failure = OSError(errno.EINVAL, "it is no host's name")
        raise _unusable(host, port, failure, option) from error
    except OSError as error:
        raise _unusable(host, port, error, option) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error, option) from error
    return listener


def url_of(listener: socket.socket, scheme: str) -> str:
    """``ws://host:port`` of a bound socket, IPv6 hosts in brackets."""
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class Server:
    """Serves whom ``trust`` lets in, on a bound socket. :meth:`start` once, :meth:`stop` once.

    Handoffs are served once :meth:`offer` was called, and told to come back before.
    """

    def __init__(
        self,
        listener: socket.socket,
        trust: Trust,
        *,
        connections: int,
        desk: Desk | None = None,
        timing: Timing | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.trust = trust
        self.timing = timing or Timing(heartbeat_s=1.0)
        self.refusals = Refusals()
        self.stock: Stock | None = None
        self._listener = listener
        self._desk = desk
        self._limit = connections
        self._patience = patience
        self._lock = threading.Lock()
        self._strangers: dict[Connection, threading.Thread] = {}
        self._visiting: dict[Connection, threading.Thread] = {}
        self._proven: dict[Connection, threading.Thread] = {}
        self._stop, self._stopped = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)
        trust.watch(self.reconsider)

    def offer(self, offer: Offer, device: Device) -> None:
        """From now on serve handoffs of ``offer``, computed by ``device``."""
        self.stock = Stock(offer, device, Transfers(device, self._patience))

    def start(self) -> None:
        """Listen. Raises ``ConfigError`` (``port_taken``) when another program was faster."""
        host, port = self._listener.getsockname()[:2]
        try:
            self._listener.listen(_BACKLOG)
        except OSError as error:
            raise _unusable(host, port, error, "--port") from error
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
        if self.refused:
            log.info("refused in all", extra=self.refused)
        with self._lock:
            serving = {**self._strangers, **self._visiting, **self._proven}
        for connection in serving:
            connection.stop()
        for thread in serving.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        if self.stock is not None:
            self.stock.transfers.close()
        self._stop.close()
        self._stopped.close()
        return not any(thread.is_alive() for thread in serving.values())

    @property
    def refused(self) -> dict[str, int]:
        """How many connections were refused before their peer had proven anything, by reason."""
        return self.refusals.counts

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stopped, select.POLLIN)
        while True:
            ready = dict(poller.poll(_SWEEP_S * 1e3))
            self._look_around()
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

    def _look_around(self) -> None:
        """What time and other processes have changed; before every connection, too."""
        if self.stock is not None:
            self.stock.transfers.sweep(time.monotonic())
        self.trust.refresh()

    def reconsider(self) -> None:
        """Whom this producer trusts has changed: end what others have begun. Any thread."""
        if self.stock is not None:
            self.stock.transfers.revoke(self.trust.stands)
        with self._lock:
            serving = [*self._strangers, *self._visiting, *self._proven]
        for connection in serving:
            connection.reconsider()

    def _serve(self, sock: socket.socket, peer: str) -> None:
        oldest = None
        with self._lock:
            crowd = [one for one in self._strangers if not one.stopping.is_set()]
            flooded = len(self._strangers) >= 2 * _STRANGERS
            if len(crowd) >= _STRANGERS:
                # Who knows the key proves it within milliseconds; the oldest does not. It is
                # told under the lock: nobody can be let in any more then.
                oldest = crowd[0]
                oldest.stopping.set()
        if oldest is not None:
            log.warning("handshake ended: there are too many", extra={"peer": oldest.peer})
            oldest.make_room()
        if flooded:
            log.warning("connection refused: too many handshakes", extra={"peer": peer})
            sock.close()
            return
        sock.setblocking(True)
        connection = Connection(sock, peer, self)
        thread = threading.Thread(
            target=self._run, args=(connection,), name=f"peer {peer}", daemon=True
        )
        with self._lock:
            self._strangers[connection] = thread
        try:
            thread.start()
        except RuntimeError:
            # No more threads: connections that end give some back.
            with self._lock:
                self._strangers.pop(connection)
            log.warning("connection refused: no threads", extra={"peer": peer})
            sock.close()

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._visiting.pop(connection, None)
                self._proven.pop(connection, None)

    def reject(self, path: str) -> Rejection | None:
        """See ``House``."""
        if path == CONTROL_PATH and self._desk is not None:
            busy = len(self._visiting) >= _VISITORS
            return Rejection(503, "Come back later.\n", retry_after_s=2) if busy else None
        if path != HANDOFF_PATH:
            return Rejection(404, "There is nothing here.\n")
        if self.stock is None and self._desk is not None and self._desk.profile.waiting:
            text = "There is no model yet: a paired decoder can send one.\n"
            return Rejection(503, text, retry_after_s=10, reason=WITHOUT_MODEL)
        if self.stock is None:
            text = "The model is being loaded.\n"
            return Rejection(503, text, retry_after_s=2, reason=LOADING)
        if len(self._proven) >= self._limit:
            return Rejection(503, "Too many decoders are connected.\n", retry_after_s=10)
        return None

    def promote(self, connection: Connection) -> None:
        """See ``House``."""
        self._move(connection, self._proven, self._limit)

    def control(self, connection: Connection, wire: Wire, admitted: Admitted) -> None:
        """See ``House``."""
        assert self._desk is not None, "nobody is let in at the path without one"
        self._desk.visit(
            wire,
            admitted,
            peer=connection.peer,
            opened_until=connection.handshake_until,
            stock=lambda: self.stock,
            proven=lambda: self._move(connection, self._visiting, _VISITORS),
            stopping=connection.stopping,
        )

    def _move(
        self, connection: Connection, to: dict[Connection, threading.Thread], most: int
    ) -> None:
        """It is no stranger any more."""
        with self._lock:
            if connection.stopping.is_set():
                raise TransferError("The handshake was ended.", reason="handshake_refused")
            if len(to) >= most:
                raise CapacityError(
                    "Too many decoders are connected.",
                    reason="capacity_exceeded",
                    retry_after_s=10.0,
                    expected=most,
                )
            to[connection] = self._strangers.pop(connection)


def _unusable(host: str, port: int, error: OSError, option: str) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"Port {port} on {host} is taken by another program.",
            reason="port_taken",
            field="port",
            found=port,
            hint=f"Stop the other program, or choose another {option} (0: any free one).",
        )
    return ConfigError(
        f"{host}:{port} cannot be bound: {error.strerror or error}.",
        reason="address_unusable",
        field="host",
        found=host,
    )
