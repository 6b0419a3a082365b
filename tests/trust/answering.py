"""A producer's end of the control channel, reduced to its machine, over real TLS."""

from __future__ import annotations

import datetime
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from websockets.exceptions import ConnectionClosed
from websockets.sync.server import ServerConnection, serve

from protocol.control import (
    DescribeAsked,
    Event,
    ModelOffered,
    ProducerControl,
    Proven,
    RotateAsked,
    Step,
    UnpairAsked,
)
from protocol.control.messages import Description, Serving
from protocol.errors import BatonError
from protocol.pairing import Pairing
from protocol.pairing.certificates import make_certificate
from protocol.pairing.record import PairingRecord
from tests.protocol.control.joined import DESCRIPTION
from trust.peers import Address
from trust.tls import server_context


def records(epoch: int = 3) -> tuple[PairingRecord, PairingRecord]:
    """Both halves of one pairing, the producer's first."""
    now = datetime.datetime.now(datetime.UTC)
    ours, theirs = make_certificate("producer", now), make_certificate("decoder", now)
    key = bytes(range(32))
    return (
        PairingRecord(
            1, "producer", epoch, key, ours.certificate, ours.private_key, theirs.certificate
        ),
        PairingRecord(
            1, "decoder", epoch, key, theirs.certificate, theirs.private_key, ours.certificate
        ),
    )


class Answering:
    """Serves the decoder of ``record``; what it was asked is in ``events``.

    ``answer`` replaces what it does with an event, and may raise; ``after`` messages it says
    nothing more.
    """

    def __init__(self, record: PairingRecord) -> None:
        self.record = record
        self.pairings: list[Pairing] = [record.pairing]
        self.events: list[Event] = []
        self.errors: list[BatonError] = []
        self.answer: Callable[[ProducerControl, Event], None] = self._answer
        self.descriptions: list[Description] = [DESCRIPTION]
        """What it says of itself, one after the other; the last one stays."""
        self.have = 0
        """How much of a model it has; ``received`` is what came of it."""
        self.received = bytearray()
        self.serving: Serving = "now"
        self.raw: Callable[[ServerConnection], None] | None = None
        self.connections: list[ServerConnection] = []

    def _answer(self, machine: ProducerControl, event: Event) -> None:
        now = time.monotonic()
        match event:
            case DescribeAsked():
                said, *others = self.descriptions
                self.descriptions = others or [said]
                machine.described(said, now)
            case UnpairAsked():
                machine.unpaired(now)
            case RotateAsked(pairing=pairing):
                self.pairings.insert(0, pairing)
                machine.rotated(now)
            case ModelOffered():
                machine.wanted(self.have, now)
                self._look(machine)
            case Proven():
                pass

    def _look(self, machine: ProducerControl) -> None:
        """Keep the model once all of it is here."""
        if machine.step is Step.SENDING and not machine.left:
            machine.all_received(time.monotonic())
            machine.kept("kept-model", self.serving, time.monotonic())

    def handle(self, connection: ServerConnection) -> None:
        self.connections.append(connection)
        if self.raw is not None:
            self.raw(connection)
            return
        machine = ProducerControl(self.pairings, self.record.fingerprints)
        machine.start(time.monotonic())
        with suppress(ConnectionClosed):
            try:
                while True:
                    raw = connection.recv(decode=False)
                    assert isinstance(raw, bytes)
                    if machine.step is Step.SENDING:
                        machine.data(len(raw), time.monotonic())
                        self.received += raw
                        self._look(machine)
                        event = None
                    else:
                        event = machine.receive(raw, time.monotonic())
                    if event is not None:
                        self.events.append(event)
                        self.answer(machine, event)
                    for message in machine.outgoing():
                        connection.send(message, text=True)
            except BatonError as error:
                self.errors.append(error)
                machine.shut(error)
                for message in machine.outgoing():
                    connection.send(message, text=True)


@contextmanager
def answering(
    record: PairingRecord, context: ssl.SSLContext | None = None
) -> Iterator[tuple[Answering, Address]]:
    """While the block runs."""
    made = context or server_context(
        record.certificate, record.private_key, [record.peer_certificate]
    )
    found = Answering(record)
    with serve(found.handle, "127.0.0.1", 0, ssl=made, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield found, Address("127.0.0.1", server.socket.getsockname()[1])
        finally:
            server.shutdown()
            thread.join()
