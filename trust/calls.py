"""How a decoder reaches a producer: a TCP connection and TLS over it, both by a deadline.

Deadlines are in seconds of ``time.monotonic``. Whatever the network says becomes a
``TransferError`` here.
"""

from __future__ import annotations

import errno
import socket
import ssl
import time
from typing import Final

from protocol.errors import TransferError

_NO_ROUTE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def call(host: str, port: int, deadline: float, *, start: str) -> socket.socket:
    """A connection to ``host``; ``start`` is what a person types there if nobody listens.

    Raises ``TransferError``: ``producer_unreachable``, ``producer_down``, ``connect_timeout``.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unreachable(f"{host} has no address: {error.strerror}") from error
    except ValueError as error:  # UnicodeError among them
        raise _unreachable("the producer's address holds no host's name") from error
    failure: TransferError | None = None
    for family, kind, number, _, address in found:
        sock = socket.socket(family, kind, number)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
            return sock
        except ConnectionRefusedError:
            failure = TransferError(
                "nobody listens at the producer's address",
                reason="producer_down",
                hint=f"start it there with: {start}",
            )
        except TimeoutError:
            failure = TransferError("the producer does not answer", reason="connect_timeout")
        except OSError as error:
            failure = _unreachable(f"the producer cannot be reached: {error.strerror}", error.errno)
        sock.close()
    raise failure or _unreachable(f"{host} has no address")


def secure(
    sock: socket.socket, context: ssl.SSLContext, deadline: float, *, hint: str
) -> ssl.SSLSocket:
    """TLS over ``sock``, which then belongs to what is returned; ``hint`` helps if it fails.

    Raises ``TransferError``: ``tls_failed``, ``connect_timeout``.
    """
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return context.wrap_socket(sock)
    except TimeoutError as error:
        raise TransferError("the producer does not answer", reason="connect_timeout") from error
    except OSError as error:
        raise tls_failed(error, hint) from error


def tls_failed(error: OSError, hint: str) -> TransferError:
    """What TLS did not let pass; a server judges a client's certificate after the handshake."""
    detail = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return TransferError("the TLS handshake failed", reason="tls_failed", found=detail, hint=hint)


def _unreachable(text: str, number: int | None = None) -> TransferError:
    hint = None
    if number in _NO_ROUTE:
        hint = (
            "check the cable and the address; on macOS, whether this program may use the local "
            "network (System Settings, Privacy & Security)"
        )
    return TransferError(text, reason="producer_unreachable", hint=hint)
