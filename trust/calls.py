"""How a decoder reaches a producer: a TCP connection and TLS over it, both by a deadline.

Deadlines are in seconds of ``time.monotonic``. Whatever the network says becomes a
``TransferError`` here.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from typing import Final

from protocol.errors import TransferError
from trust.tls import is_gone

_NO_ROUTE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def call(host: str, port: int, deadline: float, *, start: str) -> socket.socket:
    """A connection to ``host``; ``start`` is what a person types there if nobody listens.

    Raises ``TransferError``: ``producer_unreachable``, ``producer_down``, ``connect_timeout``,
    ``connection_lost``.
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
        except ConnectionResetError:
            failure = _gone()  # somebody listened
        except OSError as error:
            failure = _unreachable(f"the producer cannot be reached: {error.strerror}", error.errno)
        sock.close()
    raise failure or _unreachable(f"{host} has no address")


def secure(
    sock: socket.socket,
    context: ssl.SSLContext,
    deadline: float,
    *,
    hint: str,
    lost_hint: str | None = None,
) -> ssl.SSLSocket:
    """TLS over ``sock``, which then belongs to what is returned.

    ``hint`` helps where a side refuses, ``lost_hint`` where the other one went away.

    Raises ``TransferError``: ``tls_failed``, ``connect_timeout``, ``connection_lost``.
    """
    with contextlib.ExitStack() as undo:
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            # Asked for, the handshake tells also of a socket that has been closed already.
            wrapped = context.wrap_socket(sock, do_handshake_on_connect=False)
            undo.callback(wrapped.close)
            wrapped.do_handshake()
        except TimeoutError as error:
            raise TransferError("the producer does not answer", reason="connect_timeout") from error
        except OSError as error:
            raise not_secured(error, hint, lost_hint) from error
        undo.pop_all()
    return wrapped


def not_secured(error: OSError, hint: str, lost_hint: str | None = None) -> TransferError:
    """What is told where TLS ended before anything was said; the hints are those of `secure`.

    A server judges a client's certificate after the handshake.
    """
    if is_gone(error):
        return _gone(lost_hint)
    detail = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return TransferError("the TLS handshake failed", reason="tls_failed", found=detail, hint=hint)


def _gone(hint: str | None = None) -> TransferError:
    text = "the producer ended the connection before it answered"
    return TransferError(text, reason="connection_lost", hint=hint)


def _unreachable(text: str, number: int | None = None) -> TransferError:
    hint = None
    if number in _NO_ROUTE:
        hint = (
            "check the cable and the address; on macOS, whether this program may use the local "
            "network (System Settings, Privacy & Security)"
        )
    return TransferError(text, reason="producer_unreachable", hint=hint)
