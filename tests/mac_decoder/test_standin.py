"""What clients are told while no decoder runs, however they ask."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from mac_decoder import standin
from mac_decoder.api import tls
from mac_decoder.standin import StandIn, Standing

Address = tuple[str, int]


@contextmanager
def standing_in(context: ssl.SSLContext | None = None) -> Iterator[Address]:
    """Where a stand-in listens that says the decoder is starting."""
    standing = Standing("starting", "decoder_starting", "the decoder is starting", 2)
    allowed = ("mine.example",), ("http://page.example",)
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        stand_in = StandIn(listening, lambda: standing, *allowed, context)
        stand_in.begin()
        yield listening.getsockname()[:2]
        stand_in.end()


@pytest.fixture
def address() -> Iterator[Address]:
    with standing_in() as found:
        yield found


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tls.Tls:
    return tls.own(tmp_path_factory.mktemp("state"), ("localhost",))


@pytest.fixture
def secured(shown: tls.Tls) -> Iterator[Address]:
    with standing_in(shown.context) as found:
        yield found


def asked(address: Address, raw: bytes) -> tuple[int, dict]:
    """Status and JSON of the answer to these bytes."""
    with socket.create_connection(address, 5.0) as client:
        client.sendall(raw)
        answer = b""
        while piece := client.recv(1 << 16):
            answer += piece
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)


def get(address: Address, *headers: str, path: str = "/health") -> tuple[int, dict]:
    lines = [f"GET {path} HTTP/1.1", *(headers or ("Host: localhost",)), "", ""]
    return asked(address, "\r\n".join(lines).encode())


def test_it_tells_the_truth(address):
    assert get(address)[0] == 200
    status, body = get(address, path="/v1/models")
    assert (status, body["error"]["code"]) == (503, "decoder_starting")


def test_slow_clients_hide_nothing(address):
    with ExitStack() as stack:
        for _ in range(standin._MAX_CONNECTIONS + 20):
            slow = stack.enter_context(socket.create_connection(address, 5.0))
            slow.sendall(b"GET /health HTTP/1.1\r\n")
        assert get(address)[0] == 200


def test_who_trickles_is_cut_off(address, monkeypatch):
    monkeypatch.setattr(standin, "_LIFE_S", 0.2)
    with socket.create_connection(address, 3.0) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\n")
        assert slow.recv(1) == b""


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        (("Host: evil.example",), "host_not_allowed"),
        (("Host: localhost", "Host: localhost"), "host_not_allowed"),
        (("Accept: */*",), "host_not_allowed"),
        (("Host: localhost", "Origin: http://evil.example"), "origin_not_allowed"),
        (("Host: mine.example:80", "Origin: http://mine.example:80"), None),
        (("Host: 127.0.0.1", "Origin: http://page.example"), None),
    ],
)
def test_hosts_and_origins_are_the_decoders(address, headers, code):
    status, body = get(address, *headers)
    assert status == (200 if code is None else 403)
    assert body.get("error", {}).get("code") == code


@pytest.mark.parametrize(
    ("length", "status", "code"),
    [
        ("9" * 5000, 413, "request_too_large"),
        ("-1", 400, "invalid_header"),
        ("x", 400, "invalid_header"),
    ],
)
def test_a_length_that_is_none_is_refused(address, length, status, code):
    found, body = get(address, "Host: localhost", f"Content-Length: {length}")
    assert (found, body["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    "raw",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n",
    ],
    ids=("line", "version", "method", "long", "headers"),
)
def test_what_is_malformed_is_answered_in_json(address, raw):
    status, body = asked(address, raw)
    assert 400 <= status <= 505
    assert body["error"]["code"] == "bad_request"


def over_tls(address: Address, shown: tls.Tls) -> httpx.Response:
    context = ssl.create_default_context(cafile=str(shown.path))
    with httpx.Client(verify=context, timeout=10) as client:
        return client.get(f"https://localhost:{address[1]}/v1/models")


def test_behind_tls_it_tells_the_same_and_says_goodbye(secured, shown):
    answer = over_tls(secured, shown)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert answer.json()["error"]["code"] == "decoder_starting"
    context = ssl.create_default_context(cafile=str(shown.path))
    raw = socket.create_connection(secured, 5.0)
    with context.wrap_socket(raw, server_hostname="localhost", suppress_ragged_eofs=False) as one:
        one.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        found = b""
        while piece := one.recv(1 << 16):  # an end without a goodbye would be an error
            found += piece
    assert found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "raw",
    [b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", b"\x16\x03\x01\x00\x04abcd", b""],
    ids=["in the clear", "no hello", "nothing"],
)
def test_behind_tls_nothing_is_said_in_the_clear(secured, shown, raw, monkeypatch):
    monkeypatch.setattr(standin, "_LIFE_S", 0.5)
    found = b""
    with socket.create_connection(secured, 5.0) as client:
        client.sendall(raw)
        try:
            while piece := client.recv(1 << 16):
                found += piece
        except ConnectionResetError:
            pass
    assert b"HTTP" not in found
    assert over_tls(secured, shown).status_code == 503


def test_handshakes_that_do_not_come_hide_nothing(secured, shown):
    with ExitStack() as stack:
        for number in range(standin._MAX_CONNECTIONS + 20):
            slow = stack.enter_context(socket.create_connection(secured, 5.0))
            slow.sendall(b"\x16\x03\x01\x02"[: number % 5])
        began = time.monotonic()
        assert over_tls(secured, shown).status_code == 503
        assert time.monotonic() - began < 4


def test_who_follows_the_status_is_told_why_there_is_none(address: Address) -> None:
    upgrade = ("Host: localhost", "Connection: Upgrade", "Upgrade: websocket")
    status, body = get(address, *upgrade, path="/status/stream")
    assert (status, body["error"]["code"]) == (503, "decoder_starting")


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def shown_by(standing: Standing, path: str = "/", **headers: str) -> httpx.Response:
    """What a browser gets while the decoder stands like this."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stand_in = StandIn(listening, lambda: standing)
        stand_in.begin()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}{path}"
        found = httpx.get(url, headers={**BROWSER, **headers})
        stand_in.end()
    return found


@pytest.mark.parametrize(
    ("state", "title", "again_s"),
    [
        ("starting", "Baton is starting", "2"),
        ("restarting", "Baton is starting again", "2"),
        ("stopping", "Baton is stopping", "2"),
        ("latched", "Baton has given up", "10"),
    ],
)
def test_a_browser_is_told_what_goes_on_and_looks_again_by_itself(state, title, again_s):
    helps = None if state == "latched" else 2
    standing = Standing(state, "code", "the reason <b>in words</b>", helps, 3, "signal SIGSEGV")
    page = shown_by(standing)
    assert page.status_code == 503
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["refresh"] == again_s
    assert page.headers.get("retry-after") == (None if helps is None else "2")
    assert f"<h1>{title}</h1>" in page.text
    assert "The reason &lt;b&gt;in words&lt;/b&gt;." in page.text
    assert "signal SIGSEGV" in page.text
    assert "color-scheme: light dark" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]


def test_a_browser_that_asks_for_the_state_gets_the_state():
    standing = Standing("starting", "decoder_starting", "the decoder is starting", 2)
    for path in ("/health", "/ready"):
        assert shown_by(standing, path).json()["state"] == "starting"


def test_other_clients_get_the_error_object_as_ever():
    standing = Standing("starting", "decoder_starting", "the decoder is starting", 2)
    for accept in ("*/*", "application/json", ""):
        assert shown_by(standing, accept=accept).json()["error"]["code"] == "decoder_starting"


def test_a_page_of_another_site_is_told_nothing():
    standing = Standing("starting", "decoder_starting", "the decoder is starting", 2)
    refused = shown_by(standing, origin="http://evil.example")
    assert refused.json()["error"]["code"] == "origin_not_allowed"
