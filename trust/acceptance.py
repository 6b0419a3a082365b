"""The decoder's side of pairing: it calls a producer, and tries the code that was typed."""

from __future__ import annotations

import errno
import socket
import ssl
import time
from contextlib import closing
from typing import Final

from protocol.errors import BatonError, TransferError
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.code import Code
from protocol.pairing.exchange import PATIENCE_S, DecoderPairing, Paired
from trust.frames import receive_frame, send_frame, send_opening
from trust.tls import client_context

_NO_ROUTE: Final = (errno.EHOSTUNREACH, errno.ENETUNREACH)


def accept(
    host: str, port: int, code: Code, *, own: OwnCertificate, name: str, earlier_epoch: int = 0
) -> Paired:
    """Pair with the producer at ``host`` and ``port``, which has ``code`` open.

    ``own``: this machine's certificate; ``name``: what it is called; ``earlier_epoch``: the
    largest epoch that it has had. Returns what is to be kept. Raises ``TransferError``:
    ``producer_unreachable``, ``producer_down`` (nobody listens), ``connect_timeout``,
    ``tls_failed``, ``connection_lost``, ``peer_silent``; ``ConfigError``
    (``pairing_unreadable``) for a certificate of ours that is none; and what
    ``DecoderPairing`` raises.
    """
    context = client_context(own.certificate, own.private_key)
    deadline = time.monotonic() + PATIENCE_S
    with closing(_connect(host, port, deadline)) as sock:
        send_opening(sock, own.certificate, deadline)
        with closing(_secure(sock, context, deadline)) as wrapped:
            machine = DecoderPairing(
                code=code,
                name=name,
                own=own,
                peer_certificate=wrapped.getpeercert(binary_form=True) or b"",
                earlier_epoch=earlier_epoch,
            )
            return _exchange(wrapped, machine)


def _exchange(sock: ssl.SSLSocket, machine: DecoderPairing) -> Paired:
    machine.start(time.monotonic())
    paired: Paired | None = None
    while paired is None:
        deadline = machine.deadline()
        assert deadline is not None
        try:
            for message in machine.outgoing():
                send_frame(sock, message, deadline)
            paired = machine.receive(receive_frame(sock, deadline), time.monotonic())
        except BatonError as error:
            machine.shut(error)
            _tell(sock, machine.outgoing())
            raise
    return paired


def _tell(sock: ssl.SSLSocket, messages: list[bytes]) -> None:
    """Say why; whether it arrives changes nothing."""
    try:
        for message in messages:
            send_frame(sock, message, time.monotonic() + 1.0)
    except TransferError:
        return


def _connect(host: str, port: int, deadline: float) -> socket.socket:
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
                hint="start it there with: baton produce --pair",
            )
        except TimeoutError:
            failure = TransferError("the producer does not answer", reason="connect_timeout")
        except OSError as error:
            failure = _unreachable(f"the producer cannot be reached: {error.strerror}", error.errno)
        sock.close()
    raise failure or _unreachable(f"{host} has no address")


def _secure(sock: socket.socket, context: ssl.SSLContext, deadline: float) -> ssl.SSLSocket:
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        return context.wrap_socket(sock)
    except TimeoutError as error:
        raise TransferError("the producer does not answer", reason="connect_timeout") from error
    except OSError as error:
        detail = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise TransferError(
            "the TLS handshake failed: what listens there is no producer that pairs",
            reason="tls_failed",
            found=detail,
            hint="check the port; pairing has one of its own",
        ) from error


def _unreachable(text: str, number: int | None = None) -> TransferError:
    hint = None
    if number in _NO_ROUTE:
        hint = (
            "check the cable and the address; on macOS, whether this program may use the local "
            "network (System Settings, Privacy & Security)"
        )
    return TransferError(text, reason="producer_unreachable", hint=hint)
