"""The socket's side alone: partial writes, violations, silence, garbage."""

from __future__ import annotations

import base64
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gb10_producer.synthetic import Synthetic
from gb10_producer.wire import Wire
from protocol.deadlines import Timing
from protocol.errors import PeerProtocolError, TransferError
from tests.gb10_producer.peer import MIXED, Peer
from tests.gb10_producer.producer import running, wait_until

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
    + base64.b64encode(b"0123456789abcdef")
    + b"\r\n\r\n"
)


@contextmanager
def connected(stall_s: float = 5.0) -> Iterator[tuple[Wire, socket.socket]]:
    """A wire after its handshake, and the raw client end of its socket."""
    server, client = socket.socketpair()
    client.settimeout(5.0)
    wire = Wire(server, stall_s=stall_s)
    try:
        client.sendall(UPGRADE)
        wire.secure(None, time.monotonic() + 5.0)
        wire.open(time.monotonic() + 5.0)
        answer = b""
        while not answer.endswith(b"\r\n\r\n"):
            answer += client.recv(1)
        assert answer.startswith(b"HTTP/1.1 101")
        yield wire, client
    finally:
        wire.abandon()
        client.close()


def masked(first: int, payload: bytes) -> bytes:
    """A client's frame with the mask 0, so that the payload is readable."""
    length = len(payload)
    if length < 126:
        head = bytes([first, 0x80 | length])
    elif length < 1 << 16:
        head = bytes([first, 0x80 | 126]) + length.to_bytes(2, "big")
    else:
        head = bytes([first, 0x80 | 127]) + length.to_bytes(8, "big")
    return head + bytes(4) + payload


def read_exactly(client: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = client.recv(count - len(found))
        assert piece
        found += piece
    return found


def drain(wire: Wire) -> threading.Thread:
    def run() -> None:
        while wire.pending:
            wire.poll(1.0)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("nbytes", [0, 1, 45, 46, 65_455, 65_456, 1 << 20])
def test_a_binary_message_is_header_and_payload_unmasked(nbytes: int) -> None:
    header, payload = bytes(range(80)), os.urandom(nbytes)
    with connected() as (wire, client):
        wire.send_binary(header, memoryview(payload))
        thread = drain(wire)
        first, second = read_exactly(client, 2)
        assert (first, second & 0x80) == (0x82, 0)
        extended = {126: 2, 127: 8}.get(second, 0)
        length = int.from_bytes(read_exactly(client, extended), "big") if extended else second
        assert length == 80 + nbytes
        assert read_exactly(client, length) == header + payload
        thread.join()


def test_messages_keep_their_order_through_partial_writes() -> None:
    payloads = [os.urandom(300_000) for _ in range(20)]
    with connected() as (wire, client):
        for payload in payloads:
            wire.send_binary(b"h" * 80, memoryview(payload))
            wire.send_text(b"{}")
        total = wire.pending
        thread = drain(wire)
        stream = read_exactly(client, total)
        thread.join()
    at = 0
    for payload in payloads:
        body = at + 10
        assert stream[body + 80 : body + 80 + len(payload)] == payload
        at = body + 80 + len(payload)
        assert stream[at : at + 4] == b"\x81\x02{}"
        at += 4
    assert at == total


def test_text_comes_whole_however_it_was_cut() -> None:
    with connected() as (wire, client):
        client.sendall(masked(0x01, b"ab") + masked(0x00, b"cd"))
        client.sendall(masked(0x80, b"ef") + masked(0x81, b"next"))
        assert collect(wire, 2) == [b"abcdef", b"next"]


def test_what_is_sent_in_single_bytes_is_one_message() -> None:
    with connected() as (wire, client):
        for byte in masked(0x81, b"hello"):
            client.sendall(bytes([byte]))
            time.sleep(0.001)
        assert collect(wire, 1) == [b"hello"]


def collect(wire: Wire, count: int) -> list[bytes]:
    found: list[bytes] = []
    deadline = time.monotonic() + 5.0
    while len(found) < count and time.monotonic() < deadline:
        found += wire.poll(0.2)
    return found


def poll_on(wire: Wire) -> None:
    """Poll until the wire refuses, or has ended without a word."""
    while not wire.closed:
        wire.poll(5.0)


@pytest.mark.parametrize(
    "raw",
    [
        masked(0x82, b"bulk from a decoder"),
        b"\x81\x02hi",  # unmasked
        masked(0x83, b"an opcode that does not exist"),
        masked(0x80, b"a continuation of nothing"),
        bytes([0x81, 0xFF]) + (1 << 63).to_bytes(8, "big") + bytes(4),
        bytes([0x81, 0xFF]) + ((1 << 63) - 1).to_bytes(8, "big") + bytes(4),
        masked(0x81, b"x" * (70 << 10)),  # above the limit before the proof
        masked(0xC1, b"reserved bit"),
    ],
)
def test_a_violation_ends_the_connection(raw: bytes) -> None:
    with connected() as (wire, client):
        client.sendall(raw)
        with pytest.raises((PeerProtocolError, TransferError)):
            poll_on(wire)


def test_a_reader_that_stops_is_noticed() -> None:
    with connected(stall_s=0.2) as (wire, _client):
        for _ in range(16):
            wire.send_binary(b"h" * 80, memoryview(bytes(1 << 20)))
        began = time.monotonic()
        with pytest.raises(TransferError) as stalled:
            poll_on(wire)
        assert stalled.value.reason == "peer_stalled"
        assert time.monotonic() - began < 10.0


def test_a_wake_from_another_thread_is_never_lost() -> None:
    with connected() as (wire, _client):
        for _ in range(200):
            threading.Thread(target=wire.wake).start()
            began = time.monotonic()
            wire.poll(5.0)
            assert time.monotonic() - began < 4.5


def test_an_abort_is_read_while_a_bulk_write_blocks() -> None:
    with connected() as (wire, client):
        for _ in range(16):
            wire.send_binary(b"h" * 80, memoryview(bytes(1 << 20)))
        wire.poll(0.05)
        client.sendall(masked(0x81, b"abort"))
        assert collect(wire, 1) == [b"abort"]
        assert wire.pending > 0


def test_the_end_of_the_stream_is_no_error_of_the_wire() -> None:
    with connected() as (wire, client):
        client.close()
        wire.poll(1.0)
        assert wire.closed


# Against a whole producer: whatever comes, the next request is fine


@settings(max_examples=25, deadline=None)
@given(
    garbage=st.one_of(
        st.binary(min_size=1, max_size=400),
        st.binary(max_size=300).map(lambda tail: UPGRADE + tail),
        st.binary(max_size=300).map(lambda text: UPGRADE + masked(0x81, text)),
    )
)
def test_garbage_never_disturbs_the_producer(garbage: bytes, producer_url: str) -> None:
    host, port = producer_url.split("//")[1].split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(garbage)


@pytest.fixture(scope="module")
def producer_url() -> Iterator[str]:
    timing = Timing(handshake_s=0.5, heartbeat_s=0.3)
    with running(Synthetic(MIXED, 16), timing=timing) as producer:
        yield producer.url
        wait_until(lambda: producer.connections == (0, 0))
        with Peer(producer.url) as peer:
            peer.handshake().fetch(range(20))


@pytest.mark.parametrize("where", range(0, 400, 37))
def test_a_stream_that_ends_anywhere_in_the_handshake_is_let_go(
    where: int, producer_url: str
) -> None:
    host, port = producer_url.split("//")[1].split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall((UPGRADE + masked(0x81, b'{"type":"hello"}'))[:where])


class Counting:
    """A poller that counts how often it was asked."""

    def __init__(self, wire: Wire) -> None:
        self._poller = wire._poller
        self.polls = 0

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        self.polls += 1
        return self._poller.poll(timeout_ms)

    def __getattr__(self, name: str) -> object:
        return getattr(self._poller, name)


@pytest.mark.parametrize("gone", [False, True])
def test_a_wire_that_holds_enough_is_not_asked_about_again_and_again(gone: bool) -> None:
    with connected() as (wire, client):
        wire.take_binary(10, 20)
        for _ in range(3):
            client.sendall(masked(0x82, b"x" * 20))
        wire.poll(1.0)
        if gone:
            client.close()
        counting = Counting(wire)
        wire._poller = counting  # type: ignore[assignment]
        until = time.monotonic() + 0.3
        while (left := until - time.monotonic()) > 0:
            wire.poll(left)
        assert counting.polls <= 3
        # What was sent is there, and then the end.
        came = 0
        for _ in range(10):
            wire.poll(0.05)
            while wire.binary() is not None:
                came += 1
        assert came == 3
        assert wire.closing is gone


def test_the_bound_of_a_text_is_not_that_of_bytes() -> None:
    """Long messages are refused by their header, before any of it is held."""
    with connected() as (wire, client):
        wire.limit_text(100)
        wire.take_binary(1 << 20, 1000)
        client.sendall(masked(0x82, b"x" * 1000) + masked(0x81, b"y" * 100))
        assert wire.poll(1.0) == [b"y" * 100]
        assert wire.binary() == b"x" * 1000
        client.sendall(masked(0x81, b"y" * 101)[:8])
        with pytest.raises(PeerProtocolError) as caught:
            wire.poll(1.0)
        assert caught.value.reason == "websocket_violation"


def test_bytes_beyond_their_bound_are_refused() -> None:
    with connected() as (wire, client):
        wire.limit_text(2000)
        wire.take_binary(1 << 20, 1000)
        client.sendall(masked(0x82, b"x" * 1001)[:8])
        with pytest.raises(PeerProtocolError):
            wire.poll(1.0)


def test_who_pings_and_does_not_read_is_let_go() -> None:
    """What answers hold in memory is bounded."""
    with connected() as (wire, client):
        client.setblocking(False)
        pings = masked(0x89, b"p" * 100) * 1000

        def flood() -> None:
            sent = 0
            while sent < 64 << 20:
                with contextlib.suppress(BlockingIOError):
                    sent += client.send(pings[sent % len(pings) :])
                wire.poll(0.0)
                assert wire.pending < 2 << 20

        with pytest.raises(PeerProtocolError) as caught:
            flood()
        assert caught.value.field == "ping"


def test_a_flood_does_not_keep_a_wire_from_its_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (wire, client):
        taken = [0]
        more = [masked(0x8A, b"p" * 100) * 500] * 1000

        class Endless:
            """A socket that always has more."""

            def recv(self, size: int) -> bytes:
                taken[0] += 1
                assert taken[0] < 1000, "it reads for as long as there is something"
                return more.pop()

            def __getattr__(self, name: str) -> object:
                return getattr(client, name)

        monkeypatch.setattr("gb10_producer.wire._RECEIVE_BYTES", 1)
        with monkeypatch.context() as instead:
            instead.setattr(wire, "_socket", Endless())
            wire._read()
        assert 1 < taken[0] < 100
