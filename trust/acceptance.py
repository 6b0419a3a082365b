"""The decoder's side of pairing: it calls a producer, and tries the code that was typed."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from protocol.errors import BatonError, TransferError
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.code import Code
from protocol.pairing.exchange import PATIENCE_S, DecoderPairing, Paired
from protocol.pairing.record import fingerprint
from trust.calls import call, secure
from trust.frames import receive_frame, send_frame, send_opening
from trust.tls import client_context

_PORT: Final = "check the port: pairing has one of its own"
_HINT: Final = f"what listens there is no producer that pairs; {_PORT}"


def accept(
    host: str,
    port: int,
    code: Code,
    *,
    own: OwnCertificate,
    name: str,
    earlier_epoch: Callable[[bytes], int] = lambda fingerprint: 0,
) -> Paired:
    """Pair with the producer at ``host`` and ``port``, which has ``code`` open.

    ``own``: this machine's certificate; ``name``: what it is called; ``earlier_epoch``: the
    epoch of its pairing with whose certificate has a SHA-256, 0 without one. Returns what is to
    be kept. Raises ``TransferError``: ``producer_unreachable``, ``producer_down`` (nobody
    listens), ``connect_timeout``, ``tls_failed``, ``connection_lost``, ``peer_silent``;
    ``ConfigError`` (``pairing_unreadable``) for a certificate of ours that is none; and what
    ``DecoderPairing`` raises.
    """
    context = client_context(own.certificate, own.private_key)
    deadline = time.monotonic() + PATIENCE_S
    with closing(call(host, port, deadline, start="baton produce --pair")) as sock:
        send_opening(sock, own.certificate, deadline)
        with closing(secure(sock, context, deadline, hint=_HINT, lost_hint=_PORT)) as wrapped:
            shown = wrapped.getpeercert(binary_form=True) or b""
            machine = DecoderPairing(
                code=code,
                name=name,
                own=own,
                peer_certificate=shown,
                earlier_epoch=earlier_epoch(fingerprint(shown)),
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
