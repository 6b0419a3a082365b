"""Connections that hold a place and say nothing, or next to nothing."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from mac_decoder.api.deadlines import DeadlineProtocol
from mac_decoder.api.settings import ApiSettings
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving

PATIENCE_S = 1.0

HOST = b"Host: localhost\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n{"
UNREAD = b"POST /nowhere HTTP/1.1\r\n" + HOST + b"Content-Length: 100000\r\n\r\n{"


@pytest.fixture(scope="module")
def server(recital: Recital) -> Iterator[Server]:
    checkpoint = read_checkpoint(recital.path)

    async def play(part: Part) -> None:
        part.end()

    settings = ApiSettings(max_requests=4, body_stall_s=PATIENCE_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeadlineProtocol, "head_timeout_s", PATIENCE_S)
        with serving(lambda: ScriptedEngine(checkpoint, play), settings) as running:
            yield running


def heard(server: Server, begin: bytes, drip: bytes) -> bytes:
    """All that comes until the server closes, while one byte after another is sent."""
    found, limit = b"", time.monotonic() + 15 * PATIENCE_S
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(0.1)
        client.sendall(begin)
        while time.monotonic() < limit:
            try:
                if drip:
                    client.send(drip)
                if not (data := client.recv(4096)):
                    return found
                found += data
            except TimeoutError:
                continue
            except OSError:
                return found
    raise AssertionError("the connection is still open")


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "trickle"])
@pytest.mark.parametrize(
    "begin",
    [b"", b"GET /health HTTP/1.1\r\nX-Slow: ", HEALTH + b"GET /health HTTP/1.1\r\nX-Slow: "],
    ids=["nothing", "half a head", "half a second head"],
)
def test_a_head_that_does_not_end_is_not_waited_for(
    server: Server, begin: bytes, drip: bytes
) -> None:
    if not begin and drip:
        drip = b"G"
    assert heard(server, begin, drip).count(b"200 OK") == begin.count(HEALTH)


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "trickle"])
def test_a_body_that_does_not_come_on_is_refused(server: Server, drip: bytes) -> None:
    found = heard(server, POST, drip)
    assert found.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in found


def test_a_body_that_trickles_on_after_its_refusal_is_not_read(server: Server) -> None:
    assert heard(server, UNREAD, b"x").startswith(b"HTTP/1.1 404")


def test_stalled_bodies_give_their_places_back(server: Server) -> None:
    threads = [threading.Thread(target=heard, args=(server, POST, b"")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    body = b'{"model": "tiny", "prompt": [1]}'
    length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
    assert b"200 OK" in heard(
        server, b"POST /v1/completions HTTP/1.1\r\n" + HOST + length + body, b""
    )


def test_a_long_body_that_comes_steadily_is_read(server: Server) -> None:
    """For longer than the patience with one that stalls."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
        client.sendall(POST)
        for _ in range(12):
            client.sendall(b" " * 8332)
            time.sleep(PATIENCE_S / 8)
        client.sendall(b" " * (100_000 - 1 - 12 * 8332))
        assert client.recv(4096).startswith(b"HTTP/1.1 400")
