"""The decoder's calls over real TLS: what comes back, and whom it does not talk to."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from msgspec import structs
from websockets.sync.server import ServerConnection

from protocol import control as machines
from protocol.control import Proven, RotateAsked, UnpairAsked
from protocol.control.messages import NO_MAC
from protocol.errors import BatonError, CapacityError
from protocol.pairing import Pairing
from protocol.pairing.record import PairingRecord
from protocol.reasons import refusal
from tests.protocol.control.joined import DESCRIPTION
from tests.trust.answering import Answering, answering, records
from trust import control as room
from trust import websocket
from trust.control import Control
from trust.peers import Address
from trust.tls import pinned, server_context

OURS, THEIRS = records()
_, STRANGER = records()


@pytest.fixture
def served() -> Iterator[tuple[Answering, Address]]:
    with answering(OURS) as found:
        yield found


def reason(call, *arguments: object) -> str:
    with pytest.raises(BatonError) as caught:
        call(*arguments)
    return caught.value.reason


def test_a_producer_is_described_as_often_as_it_is_asked(served) -> None:
    _, address = served
    with Control.open(address, THEIRS) as control:
        for _ in range(3):
            assert structs.replace(control.describe(), mac=NO_MAC) == DESCRIPTION


def test_unpairing_returns_once_it_is_done(served) -> None:
    producer, address = served
    with Control.open(address, THEIRS) as control:
        control.unpair()
    assert producer.events == [Proven(OURS.pairing), UnpairAsked()]


def test_a_rotation_gives_a_record_that_differs_in_key_and_epoch_alone(served) -> None:
    producer, address = served
    with Control.open(address, THEIRS) as control:
        rotated = control.rotate()
    asked = producer.events[-1]
    assert isinstance(asked, RotateAsked)
    assert rotated.pairing == asked.pairing
    assert (rotated.epoch, rotated.role) == (THEIRS.epoch + 1, "decoder")
    assert rotated.key != THEIRS.key
    assert structs.replace(rotated, key=THEIRS.key, epoch=THEIRS.epoch) == THEIRS
    with Control.open(address, rotated) as control:
        control.describe()


def test_closing_twice_is_nothing(served) -> None:
    control = Control.open(served[1], THEIRS)
    control.close()
    control.close()
    assert reason(control.describe) == "connection_lost"


# Whom it does not talk to


def test_another_producer_is_not_asked(served) -> None:
    producer, address = served
    swapped = structs.replace(THEIRS, peer_certificate=STRANGER.peer_certificate)
    assert reason(Control.open, address, swapped) == "certificate_differs"
    assert producer.events == []


def test_a_machine_that_is_not_paired_there_is_told_so(served) -> None:
    producer, address = served
    foreign = structs.replace(
        THEIRS, certificate=STRANGER.certificate, private_key=STRANGER.private_key
    )
    assert reason(Control.open, address, foreign) == "tls_failed"
    assert producer.events == []


def test_the_right_certificate_without_the_key_is_refused(served) -> None:
    producer, address = served
    assert reason(Control.open, address, structs.replace(THEIRS, key=b"k" * 32)) == "proof_differs"
    assert [error.reason for error in producer.errors] == ["proof_differs"]


def test_a_producer_without_the_key_is_refused(served) -> None:
    producer, address = served
    producer.pairings = [Pairing(b"k" * 32, OURS.epoch)]
    assert reason(Control.open, address, THEIRS) == "proof_differs"


def test_an_older_epoch_is_refused(served) -> None:
    producer, address = served
    producer.pairings = [Pairing(b"k" * 32, OURS.epoch + 1)]
    assert reason(Control.open, address, THEIRS) == "epoch_differs"


def test_tls_1_2_is_not_spoken() -> None:
    context = server_context(OURS.certificate, OURS.private_key, [OURS.peer_certificate])
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with answering(OURS, context) as (producer, address):
        assert reason(Control.open, address, THEIRS) == "tls_failed"
        assert producer.events == []


def test_a_record_that_is_none_is_told() -> None:
    broken = structs.replace(THEIRS, private_key=b"x")
    assert reason(Control.open, Address("127.0.0.1", 1), broken) == "pairing_unreadable"


# What the network does


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert reason(Control.open, Address("127.0.0.1", port), THEIRS) == "producer_down"


def test_a_host_without_an_address() -> None:
    assert reason(Control.open, Address("no.invalid", 1), THEIRS) == "producer_unreachable"


@pytest.mark.parametrize("stage", ["connected", "secured"])
def test_a_producer_that_says_nothing(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "CONNECT_S", 0.4)
    context = server_context(OURS.certificate, OURS.private_key, [OURS.peer_certificate])
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            sock, _ = listener.accept()
            if stage == "secured":
                sock = context.wrap_socket(sock, server_side=True)
            with sock:
                done.wait(20.0)

        thread = threading.Thread(target=accept)
        thread.start()
        began = time.monotonic()
        address = Address("127.0.0.1", listener.getsockname()[1])
        assert reason(Control.open, address, THEIRS) == "connect_timeout"
        assert time.monotonic() - began < 8.0
        done.set()
        thread.join()


@contextmanager
def ending(stage: str, how: str) -> Iterator[Address]:
    """A producer that goes away at this ``stage`` of a connection, by FIN or by RST."""
    context = server_context(OURS.certificate, OURS.private_key, [OURS.peer_certificate])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            sock, _ = listener.accept()
            if stage == "greeted":
                sock.recv(1 << 14)
            elif stage != "connected":
                sock = context.wrap_socket(sock, server_side=True)
            if stage in ("asked", "answering"):
                sock.recv(1 << 14)
            if stage == "answering":
                sock.sendall(b"HTTP/1.1 101 Switching")
            with sock:
                if how == "reset":
                    at_once = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)

        thread = threading.Thread(target=accept)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        thread.join()


@pytest.mark.parametrize("how", ["closed", "reset"])
@pytest.mark.parametrize("stage", ["connected", "greeted", "secured", "asked", "answering"])
def test_a_producer_that_goes_away_has_refused_nobody(stage: str, how: str) -> None:
    with ending(stage, how) as address, pytest.raises(BatonError) as caught:
        Control.open(address, THEIRS)
    assert caught.value.reason == "connection_lost"
    assert caught.value.hint is None, "whoever pairs again has lost a pairing for nothing"


def test_a_refusal_that_was_there_before_anything_was_asked_is_heard(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The question then breaks on a closed connection."""
    foreign = structs.replace(
        THEIRS, certificate=STRANGER.certificate, private_key=STRANGER.private_key
    )
    context = server_context(OURS.certificate, OURS.private_key, [OURS.peer_certificate])
    closed = threading.Event()

    def late(shown: bytes | None, pins: list[bytes]) -> bytes | None:
        assert closed.wait(10.0)
        return pinned(shown, pins)

    monkeypatch.setattr(room, "pinned", late)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with pytest.raises(ssl.SSLError):
                context.wrap_socket(listener.accept()[0], server_side=True)
            closed.set()

        thread = threading.Thread(target=accept)
        thread.start()
        address = Address("127.0.0.1", listener.getsockname()[1])
        assert reason(Control.open, address, foreign) == "tls_failed"
        thread.join()


def test_a_machine_that_says_nothing(served, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, address = served
    monkeypatch.setattr(machines, "ANSWER_S", 0.3)
    producer.answer = lambda machine, event: None
    with Control.open(address, THEIRS) as control:
        assert reason(control.describe) == "peer_silent"


def test_a_last_word_is_not_waited_for_as_long_as_anything_comes(
    served, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, address = served
    monkeypatch.setattr(websocket, "_CLOSE_S", 0.3)
    over, pings = threading.Event(), 0

    def pinging(connection: ServerConnection) -> None:
        nonlocal pings
        while not over.wait(0.01) and pings < 2000:
            connection.ping()
            pings += 1

    with Control.open(address, THEIRS) as control:
        (connection,) = producer.connections
        thread = threading.Thread(target=pinging, args=[connection])
        thread.start()
        assert control._socket.last_word() is None
        assert pings < 2000, "it listened until there was no ping any more"
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("says", "expected"),
    [
        (lambda connection: connection.close(), "connection_lost"),
        (lambda connection: connection.send(b"{}", text=True), "message_malformed"),
        (lambda connection: connection.send(b"{}"), "websocket_violation"),
        (lambda connection: connection.send(b"x" * 5000, text=True), "websocket_violation"),
    ],
)
def test_nonsense_is_refused(served, says, expected: str) -> None:
    producer, address = served

    def raw(connection: ServerConnection) -> None:
        connection.recv()
        says(connection)
        time.sleep(0.1)

    producer.raw = raw
    assert reason(Control.open, address, THEIRS) == expected


def test_a_refusal_is_told_by_its_reason(served) -> None:
    producer, address = served

    def fail(machine, event) -> None:
        if isinstance(event, UnpairAsked):
            raise refusal("trust_not_kept", "the disk is full")

    producer.answer = fail
    with Control.open(address, THEIRS) as control:
        assert reason(control.unpair) == "trust_not_kept"


def test_a_producer_without_room_says_when_to_try_again() -> None:
    context = server_context(OURS.certificate, OURS.private_key, [OURS.peer_certificate])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with context.wrap_socket(listener.accept()[0], server_side=True) as sock:
                sock.recv(4096)
                sock.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(CapacityError) as caught:
            Control.open(Address("127.0.0.1", listener.getsockname()[1]), THEIRS)
        assert caught.value.reason == "producer_busy"
        thread.join()


def test_nothing_shows_a_key(served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), Control.open(served[1], THEIRS) as control:
        rotated: PairingRecord = control.rotate()
        said = repr(control) + repr(vars(control)) + caplog.text
    for record in (THEIRS, rotated):
        assert record.key.hex() not in said
        assert repr(record.key)[2:-1] not in said
