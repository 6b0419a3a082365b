"""What travels between two machines that pair: an opening in the clear, then frames in TLS.

::

    decoder -> producer   "baton pairing 1\\n", 4 bytes of length, its certificate (DER)
    both                  the TLS 1.3 handshake on the same connection
    both                  4 bytes of length (big-endian), a message, and so on

A TLS server has to name the roots of a client's certificate before it sees one, and nothing
is pinned yet. So the decoder announces its certificate, and the producer takes this very one
for the connection's only root. Nothing depends on the opening: what TLS then shows has to be
the same, and the proofs of the exchange are over what TLS showed.

Sockets are blocking; every call here has a deadline, in seconds of ``time.monotonic``.
"""

from __future__ import annotations

import socket
import time
from typing import Final

from protocol.errors import BatonError
from protocol.pairing.certificates import MAX_CERTIFICATE, require_certificate
from protocol.pairing.messages import MAX_MESSAGE
from protocol.reasons import differs, refusal

OPENING: Final = b"baton pairing 1\n"

_LENGTH_BYTES: Final = 4


def send_opening(sock: socket.socket, certificate: bytes, deadline: float) -> None:
    """Announce the certificate (DER). Raises like :func:`send_frame`."""
    _send(sock, OPENING + _length(certificate) + certificate, deadline)


def receive_opening(sock: socket.socket, deadline: float) -> bytes:
    """The certificate (DER) that the other side announces; exactly the opening is read.

    Raises PeerProtocolError ``version_unsupported``, ``certificate_unusable``, and like
    :func:`receive_frame`.
    """
    opening = _receive(sock, len(OPENING), deadline)
    if opening != OPENING:
        text = "the connection does not open like a pairing of this version"
        raise refusal("version_unsupported", text, field="opening")
    length = int.from_bytes(_receive(sock, _LENGTH_BYTES, deadline), "big")
    if not 0 < length <= MAX_CERTIFICATE:
        raise differs("certificate_unusable", "length", length, f"1 to {MAX_CERTIFICATE}")
    certificate = _receive(sock, length, deadline)
    require_certificate(certificate)
    return certificate


def send_frame(sock: socket.socket, message: bytes, deadline: float) -> None:
    """Send one message. Raises TransferError ``connection_lost``, ``peer_silent``."""
    _send(sock, _length(message) + message, deadline)


def receive_frame(sock: socket.socket, deadline: float) -> bytes:
    """The next message.

    Raises TransferError ``connection_lost``, ``peer_silent`` (it is not whole by the
    deadline), PeerProtocolError ``message_too_long``.
    """
    length = int.from_bytes(_receive(sock, _LENGTH_BYTES, deadline), "big")
    if length > MAX_MESSAGE:
        raise differs("message_too_long", "length", length, f"at most {MAX_MESSAGE}")
    return _receive(sock, length, deadline)


def _length(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "big")


def _send(sock: socket.socket, content: bytes, deadline: float) -> None:
    try:
        _wait_until(sock, deadline)
        sock.sendall(content)
    except TimeoutError as error:
        raise _silent() from error
    except OSError as error:
        raise _lost() from error


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    received = bytearray()
    while len(received) < count:
        try:
            _wait_until(sock, deadline)
            part = sock.recv(count - len(received))
        except TimeoutError as error:
            raise _silent() from error
        except OSError as error:
            raise _lost() from error
        if not part:
            raise _lost()
        received += part
    return bytes(received)


def _wait_until(sock: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    sock.settimeout(left)


def _silent() -> BatonError:
    return refusal("peer_silent", "the other side took too long")


def _lost() -> BatonError:
    return refusal("connection_lost", "the connection ended before the pairing did")
