"""The proxy of the tests: what passes is counted exactly, and fails exactly where it is told to."""

from __future__ import annotations

import math
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect
from websockets.sync.server import ServerConnection, serve

from gb10_producer.synthetic import Synthetic
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import trust_of_key
from protocol.frames import HEADER_BYTES
from protocol.layout import payload_bytes
from protocol.layouts_named import stand_in_identity
from tests.gb10_producer.peer import KEY, MIXED
from tests.gb10_producer.producer import running, wait_until
from tests.mac_decoder.handoff.producer import Memory
from tests.proxy import Cut, End, Fault, Line, Offset, Passing, Proxy, Stall

SIZES = (0, 1, 20, 45, 46, 47, 65_455, 65_456, 70_000)
"""Payloads on both sides of where a WebSocket header (126 and 65,536 bytes) grows."""
DATA = bytes(range(256)) * 400


class Sender(socketserver.ThreadingTCPServer):
    """A plain TCP server: sends ``DATA`` to whoever connects, and says how that ended."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), socketserver.BaseRequestHandler)
        self.url = f"tcp://127.0.0.1:{self.server_address[1]}"
        self.endings: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def finish_request(self, request: Any, client_address: Any) -> None:
        try:
            request.sendall(DATA)
            self.endings.append("close" if request.recv(1) == b"" else "data")
        except OSError:
            self.endings.append("reset")

    def close(self) -> None:
        self.shutdown()
        self.server_close()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


def dialled(proxy: Proxy) -> socket.socket:
    port = int(proxy.url.rpartition(":")[2])
    return socket.create_connection(("127.0.0.1", port), 10.0)


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next ``count`` bytes."""
    found = bytearray()
    while len(found) < count:
        data = sock.recv(count - len(found))
        assert data
        found += data
    return bytes(found)


def received(proxy: Proxy) -> tuple[bytes, str]:
    """All that a client gets, and how its connection ended."""
    found = bytearray()
    with dialled(proxy) as sock:
        try:
            while data := sock.recv(1 << 16):
                found += data
        except ConnectionResetError:
            return bytes(found), "reset"
    return bytes(found), "close"


@contextmanager
def serving(handler: Callable[[ServerConnection], None]) -> Iterator[str]:
    """A WebSocket server that calls ``handler`` for each connection; its URL."""
    with serve(handler, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(5)


def to_the_end(side: ClientConnection | ServerConnection) -> list[str | bytes]:
    """All messages that come before the connection ends."""
    found: list[str | bytes] = []
    try:
        while True:
            found.append(side.recv(5))
    except ConnectionClosed:
        return found


@contextmanager
def joined(
    handler: Callable[[ServerConnection], None], *faults: Fault, **lines: Line
) -> Iterator[tuple[Proxy, ClientConnection]]:
    with (
        serving(handler) as url,
        Proxy(url, *faults, **lines) as proxy,
        connect(proxy.url, compression=None, max_size=None, close_timeout=1) as client,
    ):
        yield proxy, client


def a_handoff(server: ServerConnection) -> None:
    """Something like a handoff, with a ping in between and a message in fragments."""
    server.send('{"type":"begin","generation":1}')
    for size in SIZES:
        server.send(bytes(HEADER_BYTES) + bytes(size))
        server.ping()
    server.send([bytes(50), bytes(29), bytes(1000)])
    server.send('{"type":"seal","frames":9}')
    server.recv(5)
    server.send("something else")


# -- counting


def test_payload_is_told_from_everything_else() -> None:
    with joined(a_handoff) as (proxy, client):
        assert client.recv() == '{"type":"begin","generation":1}'
        for size in SIZES:
            assert client.recv() == bytes(HEADER_BYTES + size)
        assert client.recv() == bytes(1079)
        assert client.recv() == '{"type":"seal","frames":9}'
        client.send('{"type":"committed","transfer":"AAAA"}')
        assert client.recv() == "something else"
        connection = proxy.connections[0]
        assert proxy.payload_bytes == sum(SIZES) + 1079 - HEADER_BYTES
        assert connection.down.frames == len(SIZES) + 1
        assert connection.down.messages == ["begin", "seal", "text"]
        assert connection.up.messages == ["committed"]
        assert connection.up.payload_bytes == 0
        assert proxy.down_bytes > proxy.payload_bytes + HEADER_BYTES * (len(SIZES) + 1)


def test_every_byte_of_a_stream_is_counted(sender: Sender) -> None:
    with Proxy(sender.url) as proxy:
        with dialled(proxy) as sock:
            assert exactly(sock, len(DATA)) == DATA
        wait_until(lambda: sender.endings == ["close"])
        wait_until(lambda: not proxy.connections[0].open)
        assert proxy.down_bytes == len(DATA)
        with pytest.raises(ValueError):
            assert proxy.payload_bytes


def test_what_cannot_be_seen_cannot_be_waited_for(sender: Sender) -> None:
    for at in (Passing("seal"), Offset(5, "payload")):
        with pytest.raises(ValueError):
            Proxy(sender.url.replace("tcp", "wss"), Cut(at))


# -- cuts


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("count", [1, 1000, 99_999, len(DATA)])
def test_exactly_so_many_bytes_pass(sender: Sender, count: int, how: End) -> None:
    with Proxy(sender.url, Cut(Offset(count), how)) as proxy:
        assert received(proxy) == (DATA[:count], how)
        wait_until(lambda: sender.endings == [how])
        assert proxy.down_bytes == count
        assert proxy.pending == ()


def test_one_cut_after_another(sender: Sender) -> None:
    """Over connections, and over all that ever passed."""
    each = (Cut(Offset(500)), Cut(Offset(700)))
    ever = (Cut(Offset(1500, since="proxy")), Cut(Offset(4000, since="proxy"), "reset"))
    with Proxy(sender.url, *each, *ever) as proxy:
        lengths = [len(received(proxy)[0]) for _ in range(4)]
    assert lengths == [500, 700, 300, 2500]


@pytest.mark.parametrize("count", [1, 20, 66, 65_600])
def test_a_cut_counts_payload_alone(count: int) -> None:
    with joined(a_handoff, Cut(Offset(count, "payload"))) as (proxy, client):
        to_the_end(client)
        assert proxy.payload_bytes == count


@pytest.mark.parametrize("delivered", [False, True])
def test_a_cut_when_the_producer_says_something(delivered: bool) -> None:
    with joined(a_handoff, Cut(Passing("seal", delivered=delivered))) as (proxy, client):
        assert len(to_the_end(client)) == len(SIZES) + 2 + delivered
        assert ("seal" in proxy.connections[0].down.messages) is delivered


@pytest.mark.parametrize("delivered", [False, True])
def test_a_cut_when_the_decoder_says_something(delivered: bool) -> None:
    heard: list[list[str | bytes]] = []

    def listen(server: ServerConnection) -> None:
        heard.append(to_the_end(server))

    credit, committed = '{"type":"credit","frames":1}', '{"type":"committed","transfer":"AAAA"}'
    with joined(listen, Cut(Passing("committed", "up", delivered))) as (_, client):
        client.send(credit)
        client.send(committed)
        assert to_the_end(client) == []
        wait_until(lambda: heard)
    assert heard == [[credit, committed] if delivered else [credit]]


def test_a_cut_at_once(sender: Sender) -> None:
    with Proxy(sender.url, Stall(Offset(10), math.inf)) as proxy, dialled(proxy) as sock:
        assert exactly(sock, 10) == DATA[:10]
        wait_until(lambda: not proxy.pending)
        started = time.monotonic()
        proxy.cut()
        assert sock.recv(100) == b""
        assert time.monotonic() - started < 10.0


# -- time


def test_a_delay_holds_nothing_up() -> None:
    """Each way by its own delay; what is sent together arrives together."""

    def echo(server: ServerConnection) -> None:
        for message in server:
            server.send(message)

    with joined(echo, down=Line(delay_ms=120), up=Line(delay_ms=80)) as (_, client):
        started = time.monotonic()
        for number in range(20):
            client.send(str(number))
        assert [client.recv() for _ in range(20)] == [str(number) for number in range(20)]
        assert 0.2 <= time.monotonic() - started < 3.0


def test_a_rate_is_kept(sender: Sender) -> None:
    with Proxy(sender.url, Cut(Offset(60_000)), down=Line(bytes_per_s=200_000)) as proxy:
        started = time.monotonic()
        assert len(received(proxy)[0]) == 60_000
        assert 0.28 <= time.monotonic() - started < 5.0


def test_a_stall_passes(sender: Sender) -> None:
    with Proxy(sender.url, Stall(Offset(1000), 0.3)) as proxy, dialled(proxy) as sock:
        assert exactly(sock, 1000) == DATA[:1000]
        started = time.monotonic()
        assert sock.recv(1) == DATA[1000:1001]
        assert time.monotonic() - started > 0.25
        assert exactly(sock, len(DATA) - 1001) == DATA[1001:]


# -- where nobody is


def test_nobody_listens_and_then_somebody_else_does(sender: Sender) -> None:
    with Proxy(sender.url, Cut(Offset(5)), Cut(Offset(7))) as proxy:
        proxy.refusing = True
        assert received(proxy)[0] == b""
        assert proxy.connections == []
        proxy.refusing = False
        assert received(proxy)[0] == DATA[:5]
        sender.close()
        assert received(proxy)[0] == b""
        another = Sender()
        proxy.retarget(another.url)
        assert received(proxy)[0] == DATA[:7]
        another.close()


# -- a real handoff


def test_a_handoff_through_it(tmp_path: Path) -> None:
    tokens, end = list(range(301)), 300
    whole = payload_bytes(MIXED, 0, end)
    with running(Synthetic(MIXED, 16)) as producer, Proxy(producer.url) as proxy:
        target = Producer(proxy.url, trust_of_key(KEY.key), stand_in_identity(MIXED), MIXED)
        with ProducerLink(target, Generations(tmp_path / "generations.json", KEY.key, 0)) as link:
            wait_until(lambda: link.state.ready)
            assert proxy.payload_bytes == 0
            with link.fetch(tokens, Memory(MIXED, 0, end)) as handoff:
                handoff.committed()
            assert proxy.payload_bytes == handoff.transferred_bytes == whole
            wait_until(lambda: "committed" in proxy.connections[0].up.messages)
            assert proxy.connections[0].down.messages[-1] == "seal"

            proxy.inject(Cut(Offset(whole + 1000, "payload", "proxy")))
            with link.fetch(tokens, Memory(MIXED, 0, end)) as handoff:
                handoff.committed()
            assert proxy.pending == ()
            first, second = proxy.connections
            assert first.down.payload_bytes == whole + 1000
            # The rest went over another connection, with what was cut short of a frame.
            assert handoff.resumed == 1
            assert whole - 1000 <= second.down.payload_bytes <= whole
