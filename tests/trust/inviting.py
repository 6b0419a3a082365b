"""A producer that invites, over real sockets on loopback, and somebody who calls it."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.code import Code
from protocol.pairing.exchange import DecoderPairing, Paired
from tests.trust.machines import NOW, own
from trust.acceptance import accept
from trust.frames import receive_frame, send_frame, send_opening
from trust.invitation import Invitation
from trust.peers import Peers
from trust.tls import client_context

DECODER = make_certificate("decoder", NOW)
STRANGER = make_certificate("decoder", NOW)
PORT = 7777
"""Where the producer says that it serves handoffs."""


class Inviting:
    """A producer's invitation, its peers and where it listens."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.peers = Peers(directory, "producer")
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.invitation = Invitation(
            listener, self.peers, own=own(), name="gb10", port=PORT, **options
        )
        self.invitation.start()

    def call(self, code: Code, own: OwnCertificate = DECODER, **options: Any) -> Paired:
        """Pair with it, as a decoder."""
        return accept("127.0.0.1", self.port, code, own=own, name="macbook", **options)

    def refused(self, reason: str, count: int = 1) -> None:
        """Wait until so many were refused for that reason."""
        wait_until(lambda: self.invitation.refused.get(reason, 0) >= count)
        assert self.invitation.refused[reason] == count

    def wait_for_guests(self, count: int) -> None:
        """Wait until there are so many guests."""
        wait_until(lambda: len(self.invitation._guests) == count)


@contextmanager
def inviting(directory: Path, **options: Any) -> Iterator[Inviting]:
    """While the block runs; it must end at once with it."""
    found = Inviting(directory, **options)
    try:
        yield found
    finally:
        assert found.invitation.stop(5.0)


class Caller:
    """A decoder by hand: every step of the connection is its own call."""

    def __init__(self, port: int) -> None:
        self.sock: Any = socket.create_connection(("127.0.0.1", port))

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def announce(self, certificate: bytes) -> Caller:
        send_opening(self.sock, certificate, soon())
        return self

    def secure(self, shown: OwnCertificate | None = DECODER, **options: Any) -> Caller:
        """The TLS handshake, showing this certificate."""
        if shown is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        else:
            context = client_context(shown.certificate, shown.private_key)
        for name, value in options.items():
            setattr(context, name, value)
        self.sock.settimeout(5.0)
        self.sock = context.wrap_socket(self.sock)
        return self

    def machine(self, code: Code, own: OwnCertificate = DECODER) -> DecoderPairing:
        """The decoder's side of the exchange, started."""
        seen = self.sock.getpeercert(binary_form=True)
        machine = DecoderPairing(code=code, name="by hand", own=own, peer_certificate=seen)
        machine.start(time.monotonic())
        return machine

    def send(self, *messages: bytes) -> None:
        for message in messages:
            send_frame(self.sock, message, soon())

    def receive(self) -> bytes:
        return receive_frame(self.sock, soon())

    def ended(self) -> bool:
        """Whether the other side ends the connection, within some seconds."""
        self.sock.settimeout(5.0)
        try:
            while self.sock.recv(4096):
                pass
        except TimeoutError:
            return False
        except OSError:
            return True
        return True


def soon() -> float:
    return time.monotonic() + 5.0


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
