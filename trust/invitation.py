"""The producer's side of pairing: a listener for whoever was told the code.

One thread accepts, and each guest has its own for some seconds. Guests are few. Whoever is not
proving the code makes room for the next one, first of all where several are from one host, so
that idle connections keep nobody out. The first message of a guest spends the code, and nobody
else has it: so one exchange is served at a time.
"""

from __future__ import annotations

import logging
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Final

from protocol.errors import BatonError, ConfigError, TransferError
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.code import Code, Codes
from protocol.pairing.exchange import PATIENCE_S, Paired, ProducerPairing
from protocol.pairing.record import fingerprint
from protocol.reasons import refusal
from trust.frames import receive_frame, receive_opening, send_frame
from trust.peers import Peer, Peers
from trust.tls import NO_ROOM, is_gone, pinned, server_context

log = logging.getLogger(__name__)

GUESTS: Final = 8
"""Guests that are served at once."""

_THREADS: Final = 2 * GUESTS
_BACKLOG: Final = 1024
"""Where a burst of connections fills it, the next one has to wait a second and more."""
_FAREWELL_S: Final = 1.0
_GOING_S: Final = 0.5


@dataclass(eq=False)
class _Guest:
    """A connection. ``handle`` is a second handle of it, for ending it from elsewhere.

    ``tried``: it spent a code. ``busy``: and is proving it, or was just paired.
    """

    sock: socket.socket
    handle: socket.socket
    host: str
    thread: threading.Thread | None = None
    tried: bool = False
    busy: bool = False
    leaving: bool = False

    def end(self) -> None:
        """Wake its thread, which then finds the connection closed; while it is a guest."""
        self.leaving = True
        with suppress(OSError):
            self.handle.shutdown(socket.SHUT_RDWR)


class Invitation:
    """Pairs whoever proves the open code, and keeps it among ``peers``.

    :meth:`start` once, :meth:`stop` once; codes may be opened in between, from any thread.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Peers,
        *,
        own: OwnCertificate,
        name: str,
        port: int,
        paired: Callable[[Peer], None] = lambda peer: None,
        burned: Callable[[str], None] = lambda reason: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """``listener`` is bound, and closed by :meth:`stop`; ``peers`` are a producer's.

        ``port``: where this producer serves handoffs. ``paired`` is called once a peer is
        kept and told, ``burned`` when a code was tried in vain, for a reason; neither may stop the
        invitation. ``patience_s``: from the connection to a guest's first message. Raises
        ``ConfigError`` (``pairing_unreadable``) if ``own`` is no certificate and key.
        """
        server_context(own.certificate, own.private_key, [])  # what fails later is a guest's
        self._listener = listener
        self._peers = peers
        self._own = own
        self._name = name
        self._port = port
        self._paired = paired
        self._burned = burned
        self._patience_s = patience_s
        self._codes = Codes()
        self._lock = threading.Condition()
        self._guests: list[_Guest] = []
        self._refused: Counter[str] = Counter()
        self._stop, self._stopped = socket.socketpair()
        self._acceptor = threading.Thread(target=self._accept, name="invitation", daemon=True)

    def start(self) -> None:
        """Listen. Raises ``OSError`` if another program was faster."""
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._acceptor.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Withdraw the code, end all guests; return whether all threads ended in time."""
        deadline = time.monotonic() + timeout_s
        if self._stop.fileno() < 0:
            return True
        self.withdraw()
        self._stop.send(b"s")
        if self._acceptor.ident is not None:
            self._acceptor.join(timeout_s)
        self._listener.close()
        with self._lock:
            guests = list(self._guests)
            for guest in guests:
                guest.end()
        for guest in guests:
            assert guest.thread is not None
            guest.thread.join(max(0.0, deadline - time.monotonic()))
        self._stop.close()
        self._stopped.close()
        return not any(guest.thread and guest.thread.is_alive() for guest in guests)

    def open(self) -> Code:
        """A new code, in the place of an open one.

        Raises CapacityError ``pairing_paused``, and what ``Peers.require_usable`` raises:
        nobody is invited who could not be kept.
        """
        self._peers.require_usable()
        with self._lock:
            return self._codes.open(time.monotonic())

    def withdraw(self) -> None:
        """Close the open code, if there is one."""
        with self._lock:
            self._codes.close()

    def left_s(self) -> float:
        """How long the open code may still be tried, in seconds; 0 if none is open."""
        with self._lock:
            return self._codes.left_s(time.monotonic())

    @property
    def refused(self) -> dict[str, int]:
        """How many guests were refused, by reason."""
        with self._lock:
            return dict(self._refused)

    def _accept(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stopped, select.POLLIN)
        while True:
            if self._stopped.fileno() in dict(poller.poll()):
                return
            try:
                self._let_in(*self._listener.accept())
            except (BlockingIOError, ConnectionError):
                continue  # the guest was gone before it was let in
            except (OSError, RuntimeError) as error:
                # No descriptors, memory or threads: guests that leave give some back.
                log.warning("cannot accept", extra={"error": str(error)})
                time.sleep(0.2)

    def _let_in(self, sock: socket.socket, address: tuple[str, int]) -> None:
        with ExitStack() as undo:
            undo.callback(sock.close)
            sock.setblocking(True)
            guest = _Guest(sock, sock.dup(), address[0])
            undo.callback(guest.handle.close)
            guest.thread = threading.Thread(
                target=self._serve, args=(guest,), name="guest", daemon=True
            )
            with self._lock:
                if not self._has_room():
                    self._refused["capacity_exceeded"] += 1
                    return
                guest.thread.start()
                self._guests.append(guest)
            undo.pop_all()

    def _has_room(self) -> bool:
        """Whether there is room for one more; somebody may have been sent away for it."""
        # Those that were sent away take a moment to go, longer on a busy machine.
        if not self._lock.wait_for(lambda: len(self._guests) < _THREADS, _GOING_S):
            return False
        present = [guest for guest in self._guests if not guest.leaving]
        if len(present) < GUESTS:
            return True
        leaving = _who_leaves(present)
        if leaving is not None:
            leaving.end()
        return leaving is not None

    def _serve(self, guest: _Guest) -> None:
        try:
            with closing(guest.sock):
                self._receive(guest)
        except BatonError as error:
            with self._lock:
                self._refused["capacity_exceeded" if guest.leaving else error.reason] += 1
            # A code was burned; the others are anybody, as often as they like.
            level = logging.WARNING if guest.tried else logging.DEBUG
            log.log(level, "pairing refused", extra={"peer": guest.host, "reason": error.reason})
            if guest.tried:
                self._burned(error.reason)
        finally:
            with self._lock:
                self._guests.remove(guest)
                guest.handle.close()
                self._lock.notify_all()

    def _receive(self, guest: _Guest) -> None:
        deadline = time.monotonic() + self._patience_s
        announced = receive_opening(guest.sock, deadline)
        context = self._context(announced)
        with closing(_secure(guest.sock, context, deadline)) as wrapped:
            shown = wrapped.getpeercert(binary_form=True)
            if pinned(shown, [fingerprint(announced)]) is None:
                text = "another certificate was announced than TLS showed"
                raise refusal("certificate_unusable", text, field="certificate")
            machine = ProducerPairing(
                codes=self._codes,
                name=self._name,
                own=self._own,
                peer_certificate=announced,
                epoch=self._peers.epoch_with(fingerprint(announced)) + 1,
                port=self._port,
            )
            machine.start(time.monotonic())
            try:
                self._converse(guest, wrapped, machine, deadline)
            except BatonError as error:
                guest.busy = False
                machine.shut(error)
                with suppress(TransferError):
                    _send(wrapped, machine.outgoing())
                raise
            finally:
                # Else the kernel may throw away what was sent last.
                wrapped.settimeout(_FAREWELL_S)
                with suppress(OSError):
                    wrapped.unwrap()

    def _context(self, announced: bytes) -> ssl.SSLContext:
        try:
            return server_context(self._own.certificate, self._own.private_key, [announced])
        except ConfigError as error:
            if error.reason == NO_ROOM:
                raise
            text = "the announced certificate is none that TLS can use"
            raise refusal("certificate_unusable", text, field="certificate") from error

    def _converse(
        self, guest: _Guest, sock: ssl.SSLSocket, machine: ProducerPairing, deadline: float
    ) -> None:
        paired: Paired | None = None
        while paired is None:
            message = receive_frame(sock, deadline)
            now = time.monotonic()
            with self._lock:
                if self._codes.left_s(now) > 0 and not guest.tried:
                    guest.tried = guest.busy = True
                paired = machine.receive(message, now)
            messages = machine.outgoing()
            peer = None if paired is None else self._keep(paired, guest.host)
            try:
                deadline = _send(sock, messages)
            finally:
                if peer is not None:
                    self._paired(peer)

    def _keep(self, paired: Paired, host: str) -> Peer:
        """Durably, before the other side is told: it never has a pairing that this one lacks."""
        peer = Peer(paired.name, paired.record, int(time.time()))
        self._peers.add(peer)
        log.info("paired", extra={"peer": host, "peer_name": peer.name, "epoch": peer.record.epoch})
        return peer


def _who_leaves(guests: list[_Guest]) -> _Guest | None:
    """Of those that are not busy, the longest here of the host that has most."""
    idle = [guest for guest in guests if not guest.busy]
    of_host = Counter(guest.host for guest in idle)
    return max(idle, key=lambda guest: of_host[guest.host], default=None)


def _send(sock: ssl.SSLSocket, messages: list[bytes]) -> float:
    """Send them; returns by when the answer must be here."""
    deadline = time.monotonic() + PATIENCE_S
    for message in messages:
        send_frame(sock, message, deadline)
    return deadline


def _secure(sock: socket.socket, context: ssl.SSLContext, deadline: float) -> ssl.SSLSocket:
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return context.wrap_socket(sock, server_side=True)
    except TimeoutError as error:
        raise refusal("peer_silent", "the TLS handshake took too long") from error
    except OSError as error:
        if is_gone(error):
            text = "the connection ended during the TLS handshake"
            raise refusal("connection_lost", text) from error
        raise TransferError("the TLS handshake failed", reason="tls_failed") from error
