"""The decoder's side of the control channel: what it asks a producer that it is paired with.

One connection for some questions, blocking, every call with a deadline. Nothing is kept here:
whoever asks for a rotation keeps the record that comes back, at once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

import msgspec

from protocol.control import PATH, STALL_S, DecoderControl, Event, Proven, Rekeyed
from protocol.control.messages import (
    MAX_MESSAGE,
    Description,
    ModelKept,
    ModelWanted,
    SendModel,
    Unpaired,
)
from protocol.errors import BatonError, IntegrityError, TransferError
from protocol.pairing.record import PairingRecord
from trust.calls import call, secure
from trust.peers import Address
from trust.tls import client_context, pinned
from trust.websocket import WebSocket

CONNECT_S: Final = 10.0
"""How long a producer may take to answer the connection, TLS and WebSocket, in seconds."""

_FAREWELL_S: Final = 1.0
_HINT: Final = "if this machine was removed there, pair again: baton produce --pair"
_Answer = TypeVar("_Answer")


class Control:
    """An open channel, for one thread. Close it; it is a context manager.

    Every question raises ``TransferError`` (``connection_lost``, ``peer_silent``,
    ``pairing_revoked``, ``control_refused``), ``IntegrityError`` (``proof_differs``),
    ``PeerProtocolError``, and ``ConfigError`` (``trust_not_kept``); only :meth:`close` is then
    left. That nothing came back does not mean that nothing was done.
    """

    def __init__(self, socket: WebSocket, record: PairingRecord) -> None:
        """``socket`` is connected to the producer of ``record``; see :meth:`open`."""
        self._socket = socket
        self._record = record
        self._machine = DecoderControl(record.pairing, record.fingerprints)

    @classmethod
    def open(cls, address: Address, record: PairingRecord) -> Control:
        """Connect to the producer at ``address``, and prove the key of ``record`` to each other.

        Raises like every question, and ``TransferError``: ``producer_unreachable``,
        ``producer_down`` (nobody listens), ``connect_timeout``, ``tls_failed`` (for one, this
        machine is not paired there any more), ``handshake_refused``; ``IntegrityError``
        (``certificate_differs``); ``CapacityError`` (``producer_busy``); ``ConfigError``
        (``epoch_differs``, ``pairing_unreadable``).
        """
        control = cls(_connect(address, record), record)
        try:
            control._machine.start(time.monotonic())
            control._expect(Proven)
        except BatonError:
            control.close()
            raise
        return control

    def describe(self) -> Description:
        """What the producer is, and what it does at the moment."""
        self._machine.describe(time.monotonic())
        return self._expect(Description)

    def unpair(self) -> None:
        """Have the producer forget this machine; it has, once this returns."""
        self._machine.unpair(time.monotonic())
        self._expect(Unpaired)

    def rotate(self) -> PairingRecord:
        """A record with a new key, one epoch later. Keep it in the old one's place.

        The producer has kept it. It goes on taking the old one until it has met the new one,
        so that nothing is lost where the caller is interrupted before it has kept the record.
        """
        self._machine.rotate(time.monotonic())
        pairing = self._expect(Rekeyed).pairing
        return msgspec.structs.replace(self._record, key=pairing.key, epoch=pairing.epoch)

    def send_model(
        self,
        offer: SendModel,
        pieces: Callable[[int], Iterator[bytes]],
        sent: Callable[[int], None] = lambda nbytes: None,
    ) -> ModelKept:
        """Have the producer keep the checkpoint of ``offer``; it has, once this returns.

        ``pieces`` gives the stream from a byte on, each of at most ``PIECE_BYTES``; ``sent`` is
        called with how many of its bytes the producer has, or are on their way. What was sent
        before anything is raised stays there, and the next time begins behind it.

        Raises also what ``pieces`` does, and the reasons of models in
        :data:`protocol.reasons.CONTROL_REASONS`.
        """
        machine = self._machine
        machine.send_model(offer, time.monotonic())
        offset = self._expect(ModelWanted).offset
        sent(offset)
        with self._telling():
            for piece in pieces(offset):
                self._send_piece(piece)
                sent(offer.nbytes - machine.left)
            machine.all_sent(time.monotonic())
        return self._expect(ModelKept)

    def _send_piece(self, piece: bytes) -> None:
        """Send bulk, unless the producer wants no more of it."""
        deadline = time.monotonic() + STALL_S
        if (said := self._socket.arrived(deadline)) is not None:
            self._machine.receive(said, time.monotonic())
        self._machine.data(len(piece), time.monotonic())
        try:
            self._socket.send_binary(piece, deadline)
        except TransferError as error:
            if error.reason == "connection_lost":
                self._hear_why()
            raise

    def _hear_why(self) -> None:
        """Raise what the producer refused, if it had said so before the connection was lost."""
        if (said := self._socket.last_word()) is not None:
            self._machine.receive(said, time.monotonic())

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _expect(self, kind: type[_Answer]) -> _Answer:
        """Send what is queued, and receive until there is an event."""
        event: Event | None = None
        with self._telling():
            while event is None:
                due = self._machine.deadline()
                assert due is not None
                self._flush(due)
                event = self._machine.receive(self._socket.receive(due), time.monotonic())
        assert isinstance(event, kind)
        return event

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """What goes wrong inside ends the channel, and the producer is told if it still can be."""
        try:
            yield
        except BatonError as error:
            self._machine.shut(error)
            with contextlib.suppress(TransferError):
                self._flush(time.monotonic() + _FAREWELL_S)
            raise

    def _flush(self, deadline: float) -> None:
        for raw in self._machine.outgoing():
            self._socket.send(raw, deadline)


def _connect(address: Address, record: PairingRecord) -> WebSocket:
    context = client_context(record.certificate, record.private_key)
    deadline = time.monotonic() + CONNECT_S
    sock = call(address.host, address.port, deadline, start="baton produce")
    with contextlib.ExitStack() as undo:
        undo.callback(sock.close)
        wrapped = secure(sock, context, deadline, hint=_HINT)
        undo.callback(wrapped.close)
        shown = wrapped.getpeercert(binary_form=True)
        if pinned(shown, [record.fingerprints.producer]) is None:
            raise IntegrityError(
                "The producer's certificate is not the paired one.",
                reason="certificate_differs",
                field="certificate",
                hint="check the address; if the producer was set up anew, pair again",
            )
        socket = WebSocket(wrapped, f"wss://producer{PATH}", MAX_MESSAGE)
        socket.open(deadline, hint=_HINT)
        undo.pop_all()
    return socket
