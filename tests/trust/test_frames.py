"""The opening and the frames of pairing: exact, bounded, and never longer than their deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import hypothesis.strategies as st
import pytest
from hypothesis import given

from protocol.errors import BatonError
from protocol.pairing.certificates import MAX_CERTIFICATE
from protocol.pairing.messages import MAX_MESSAGE
from tests.trust.machines import certificate
from trust.frames import OPENING, receive_frame, receive_opening, send_frame, send_opening

LEAF = certificate(0).certificate


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def soon() -> float:
    return time.monotonic() + 5.0


def reason(call: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(BatonError) as caught:
        call(*arguments)
    return caught.value.reason


@given(messages=st.lists(st.binary(max_size=MAX_MESSAGE), max_size=5))
def test_what_is_sent_arrives_one_by_one_and_nothing_more_is_read(messages: list[bytes]) -> None:
    one, other = socket.socketpair()
    with one, other:
        send_opening(one, LEAF, soon())
        for message in messages:
            send_frame(one, message, soon())
        one.sendall(b"what follows")
        assert receive_opening(other, soon()) == LEAF
        assert [receive_frame(other, soon()) for _ in messages] == messages
        assert other.recv(100) == b"what follows"


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 1 << 31, (1 << 32) - 1])
def test_a_frame_that_is_too_long_is_refused_unread(pair, length: int) -> None:
    pair[0].sendall(length.to_bytes(4, "big"))
    assert reason(receive_frame, pair[1], soon()) == "message_too_long"


@pytest.mark.parametrize("length", [0, MAX_CERTIFICATE + 1, (1 << 32) - 1])
def test_an_announced_certificate_is_bounded(pair, length: int) -> None:
    pair[0].sendall(OPENING + length.to_bytes(4, "big"))
    assert reason(receive_opening, pair[1], soon()) == "certificate_unusable"


@pytest.mark.parametrize("content", [b"no DER", LEAF + b"x", LEAF[:-1], LEAF + LEAF])
def test_what_is_announced_is_one_certificate(pair, content: bytes) -> None:
    send_opening(pair[0], content, soon())
    assert reason(receive_opening, pair[1], soon()) == "certificate_unusable"


@pytest.mark.parametrize(
    "opening", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01" + b"\0" * 20, b"baton pairing 2\n"]
)
def test_what_opens_otherwise_is_another_protocol(pair, opening: bytes) -> None:
    pair[0].sendall(opening)
    assert reason(receive_opening, pair[1], soon()) == "version_unsupported"


@pytest.mark.parametrize("cut", [0, 1, len(OPENING), len(OPENING) + 3, len(OPENING) + 4 + 50])
def test_an_end_in_between_is_a_loss(pair, cut: int) -> None:
    whole = OPENING + len(LEAF).to_bytes(4, "big") + LEAF
    pair[0].sendall(whole[:cut])
    pair[0].close()
    assert reason(receive_opening, pair[1], soon()) == "connection_lost"
    assert reason(send_frame, pair[1], b"message", soon()) == "connection_lost"


def test_bytes_that_trickle_in_move_no_deadline(pair) -> None:
    stop = threading.Event()

    def trickle() -> None:
        pair[0].sendall((100).to_bytes(4, "big"))
        while not stop.wait(0.02):
            pair[0].sendall(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    began = time.monotonic()
    assert reason(receive_frame, pair[1], began + 0.3) == "peer_silent"
    assert 0.25 < time.monotonic() - began < 10.0
    stop.set()
    thread.join()


def test_who_reads_nothing_moves_no_deadline_either(pair) -> None:
    began = time.monotonic()

    def flood() -> None:
        while True:
            send_frame(pair[0], b"x" * 60000, began + 0.3)

    assert reason(flood) == "peer_silent"
    assert time.monotonic() - began < 10.0


def test_a_deadline_that_has_passed_is_one(pair) -> None:
    send_frame(pair[0], b"message", soon())
    assert reason(receive_frame, pair[1], time.monotonic()) == "peer_silent"
