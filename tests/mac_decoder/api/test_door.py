"""The HTTP door under attack: real sockets, a real server, and what it counts.

Each attack is refused, counted under its reason, logged without what was sent, and leaves the
service answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mac_decoder.api import tls
from mac_decoder.api.deadlines import DeadlineProtocol
from mac_decoder.api.door import REASONS, Crowd, Door, Refusals
from mac_decoder.api.errors import STATUS_BY_REASON
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.settings import ApiSettings
from mac_decoder.endpoint import make_room
from protocol.checkpoint import read_checkpoint
from tests.e2e.running import until
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import Part, ScriptedEngine
from tests.mac_decoder.api.serving import MODEL, Server, serving

HOST = "Host: localhost"
PUZZLE = "quite-a-private-matter"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Seat:
    """A connection that is ``busy`` or idle, until it is evicted."""

    def __init__(self, *, busy: bool = False) -> None:
        self.busy = busy
        self.evicted = 0

    def idle(self) -> bool:
        return not self.busy

    def evict(self) -> None:
        self.evicted += 1


@given(st.lists(st.sampled_from(["idle", "busy", "leave", "turn"]), max_size=60))
def test_there_are_never_more_than_there_is_room_for(steps: list[str]) -> None:
    refusals = Refusals(Clock())
    crowd, inside = Crowd(4, refusals), []
    for step in steps:
        if step in ("idle", "busy"):
            new = Seat(busy=step == "busy")
            full, quiet = len(inside) == 4, next((one for one in inside if one.idle()), None)
            entered = crowd.enter(new)
            assert entered == (not full or quiet is not None)
            if full and quiet is not None:
                assert quiet.evicted == 1, "the oldest idle one"
                inside.remove(quiet)
            assert new.evicted == (not entered)
            if entered:
                inside.append(new)
        elif inside and step == "leave":
            assert crowd.leave(inside.pop(0))
        elif inside:
            inside[-1].busy = not inside[-1].busy
        assert len(crowd) == len(inside) <= 4
        assert not any(one.evicted for one in inside)


def test_who_was_evicted_has_left() -> None:
    crowd, first, second = Crowd(1, Refusals(Clock())), Seat(), Seat()
    assert crowd.enter(first)
    assert crowd.enter(second)
    assert (crowd.leave(first), crowd.leave(second), crowd.leave(second)) == (False, True, False)


def test_a_thousand_refusals_are_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    refusals = Refusals(clock)
    with caplog.at_level(logging.DEBUG):
        for number in range(1000):
            clock.now = number * 0.119
            refusals.count("host_not_allowed")
        refusals.count("invalid_api_key")
    assert [record.getMessage() for record in caplog.records] == [
        "refused at the door (host_not_allowed), 1 so far",
        "refused at the door (host_not_allowed), 506 so far",
        "refused at the door (invalid_api_key), 1 so far",
    ]
    assert refusals.counts["host_not_allowed"] == 1000
    assert set(refusals.counts) == set(REASONS)


def test_no_other_label_can_be_made() -> None:
    with pytest.raises(KeyError):
        Door().refusals.count(PUZZLE)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyFiles:
    return KeyFiles(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def key(keys: KeyFiles) -> str:
    return keys.create("attacked")


@contextlib.contextmanager
def scripted(recital: Recital, settings: ApiSettings, **more: object) -> Iterator[Server]:
    """A server whose answers go on, slowly, until their client leaves."""
    checkpoint = read_checkpoint(recital.path)

    async def play(part: Part) -> None:
        while not part.left.is_set():
            part.token(10)
            await asyncio.sleep(0.1)
        part.end()

    with serving(lambda: ScriptedEngine(checkpoint, play), settings, **more) as running:
        yield running


@pytest.fixture(scope="module")
def server(recital: Recital, keys: KeyFiles, key: str) -> Iterator[Server]:
    settings = ApiSettings(keys_demanded=True, max_body_bytes=10_000, max_requests=2)
    with scripted(recital, settings, stored=keys) as running:
        yield running


def said(server: Server, raw: bytes) -> bytes:
    """All that is answered to these bytes."""
    found = b""
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
        with contextlib.suppress(ConnectionError):  # it need not read all of it
            client.sendall(raw)
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                found += piece
    return found


def asked(server: Server, line: bytes, *headers: str, body: bytes = b"") -> tuple[int, bytes]:
    """Status and answer of one request, whose line is sent as it is."""
    lines = [line, *(one.encode() for one in headers), b"Connection: close", b"", body]
    found = said(server, b"\r\n".join(lines))
    return int(found.split()[1]), found


@contextlib.contextmanager
def counted(
    server: Server, reason: str, caplog: pytest.LogCaptureFixture, key: str
) -> Iterator[None]:
    """The refusals of a block are counted and shown, all for one reason; no log has more."""
    before = dict(server.door.refusals.counts)
    with caplog.at_level(logging.DEBUG):
        yield
    grown = {one: n - before[one] for one, n in server.door.refusals.counts.items()}
    assert {one for one, n in grown.items() if n} == {reason}
    headers = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=server.url, headers=headers) as http:
        assert http.get("/status").json()["door"]["refused"][reason] == before[reason] + 1
        line = f'baton_door_refusals_total{{reason="{reason}"}} {before[reason] + 1}.0'
        assert line in http.get("/metrics").text
    assert PUZZLE not in caplog.text
    assert key not in caplog.text


@pytest.mark.parametrize(
    ("method", "headers", "status", "reason"),
    [
        ("GET", (f"Host: {PUZZLE}.example",), 403, "host_not_allowed"),
        ("GET", ("Host: 127.0.0.1.example",), 403, "host_not_allowed"),
        ("GET", ("Host: localhost.evil.example:80",), 403, "host_not_allowed"),
        ("GET", (HOST, HOST), 400, "bad_request"),
        ("GET", (), 400, "bad_request"),
        ("POST", (HOST, f"Origin: https://{PUZZLE}.example"), 403, "origin_not_allowed"),
        ("POST", (HOST, "Origin: null"), 403, "origin_not_allowed"),
        ("POST", (HOST, "Origin: http://localhost:3000"), 403, "origin_not_allowed"),
        ("OPTIONS", (HOST, "Origin: https://evil.example"), 403, "origin_not_allowed"),
        ("POST", (HOST,), 401, "invalid_api_key"),
        ("POST", (HOST, f"Authorization: Bearer baton-{PUZZLE}"), 401, "invalid_api_key"),
        ("POST", (HOST, f"Authorization: Basic {PUZZLE}"), 401, "invalid_api_key"),
    ],
)
def test_strangers_are_refused_and_counted(
    server: Server,
    key: str,
    caplog: pytest.LogCaptureFixture,
    method: str,
    headers: tuple[str, ...],
    status: int,
    reason: str,
) -> None:
    """With a valid key in their hands, where it is not the key that is wrong."""
    if reason != "invalid_api_key":
        headers = (*headers, f"Authorization: Bearer {key}")
    with counted(server, reason, caplog, key):
        line = f"{method} /v1/chat/completions HTTP/1.1".encode()
        found, answer = asked(server, line, *headers, body=PUZZLE.encode())
    assert found == status
    assert f'"code":"{reason}"'.encode() in answer
    assert b"access-control" not in answer.lower()


BODY = b"x" * 12_000
"""Too long, and still read in one piece: what is left unread would reset the answer."""


@pytest.mark.parametrize(
    ("headers", "body", "status", "reason"),
    [
        (("Content-Length: 10001",), b"", 413, "request_too_large"),
        ((f"Content-Length: {'9' * 30}",), b"", 400, "bad_request"),
        (("Content-Length: -1",), b"", 400, "bad_request"),
        (("Transfer-Encoding: chunked",), b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY), 413, ""),
        (("Content-Length: 5", "Content-Length: 6"), b"", 400, "bad_request"),
        (("Content-Length: 5", "Transfer-Encoding: gzip"), b"", 400, "bad_request"),
        ((f"X-Long: {'x' * 100_000}",), b"", 400, "bad_request"),
        (tuple(f"X-{n}: {'x' * 100}" for n in range(1000)), b"", 400, "bad_request"),
        (("X-Nul: a\0b",), b"", 400, "bad_request"),
    ],
    ids=[
        "length",
        "digits",
        "negative",
        "chunks",
        "two-lengths",
        "encoding",
        "long-header",
        "many-headers",
        "nul",
    ],
)
def test_what_is_too_large_or_no_http_is_refused_and_counted(
    server: Server,
    key: str,
    caplog: pytest.LogCaptureFixture,
    headers: tuple[str, ...],
    body: bytes,
    status: int,
    reason: str,
) -> None:
    with counted(server, reason or "request_too_large", caplog, key):
        line = b"POST /v1/completions HTTP/1.1"
        lines = [HOST, f"Authorization: Bearer {key}", *headers, "Connection: close", "", ""]
        found = said(server, line + b"\r\n" + "\r\n".join(lines).encode() + body)
    # What is cut off in the middle of its head may be reset before it reads why.
    cut = sum(map(len, headers)) > 16_384
    assert found.startswith(f"HTTP/1.1 {status} ".encode()) or (cut and not found)


def test_above_the_limit_requests_are_refused_and_counted(
    server: Server, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        head = [f"Authorization: Bearer {key}", HOST, "Content-Length: 10", "", ""]
        for _ in range(2):
            address = ("127.0.0.1", server.port)
            one = stack.enter_context(socket.create_connection(address, 10))
            one.sendall("\r\n".join(["POST /v1/completions HTTP/1.1", *head]).encode())
        time.sleep(0.3)
        with counted(server, "too_many_requests", caplog, key):
            headers = (f"Authorization: Bearer {key}", HOST, "Content-Length: 2")
            found, _ = asked(server, b"POST /v1/completions HTTP/1.1", *headers, body=b"{}")
        assert found == 503


TARGETS = [
    *["/v1/models", "//v1/models", "/v1//models", "/./v1/models", "/v1/models/", "/v1/models//"],
    *["/health/../v1/models", "/health/%2e%2e/v1/models", "/%2e%2e/v1/models", "/ready/../status"],
    *["/health%2f..%2fv1%2fmodels", "/v1%2fmodels", "/%76%31/models", "/health%00/../v1/models"],
    *["/v1/models%00/health", "/v1/models%00", "/v1/models;/health", "/health;/v1/models"],
    *["/v1/models?/health", "/v1/models%3f/health", "/v1/models%23/health", "/v1/models#/health"],
    *["http://localhost/v1/models", "http://localhost/health", "http://evil.example/health"],
    *["//health/v1/models", "//localhost/health", "/HEALTH", "/health/", "//health", "/health//"],
    *["/health%20", "/health%0a", "/health%0d%0ax:%20y", "\\health", "/\\health", "/health\\"],
    *["*", "health", "localhost:80", "/status", "/metrics", "/status/", "//status", "/.%2fstatus"],
    *["/%252e%252e/v1/models", "/health%252f", "/%c0%ae%c0%ae/v1/models", "/%ff%fe/health"],
    *["/docs", "/openapi.json", "/redoc", "/", ""],
]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "DELETE", "BREW"])
def test_no_spelling_of_a_path_gets_past_the_key(server: Server, method: str) -> None:
    """Not even what is there: whoever has no key is not told."""
    for target in TARGETS:
        found = said(server, f"{method} {target} HTTP/1.1\r\n{HOST}\r\n\r\n".encode()[:-2] + CLOSE)
        assert found.split()[1] in (b"401", b"400"), target
        assert MODEL.encode() not in found


CLOSE = b"Connection: close\r\n\r\n"


@pytest.mark.parametrize("target", [b"/v1/models\0/health", b"/health\0", b"/health\t/v1/models"])
def test_a_target_with_bytes_that_no_path_has_is_no_request(server: Server, target: bytes) -> None:
    assert asked(server, b"GET " + target + b" HTTP/1.1", HOST)[0] == 400


@pytest.mark.parametrize("target", ["/health", "/ready", "/%68ealth", "/health?/v1/models"])
def test_what_is_open_says_that_and_no_more(server: Server, target: str) -> None:
    status, answer = asked(server, f"GET {target} HTTP/1.1".encode(), HOST)
    assert status == 200
    body = answer.partition(b"\r\n\r\n")[2]
    ready = b'{"status":"ready","model":"tiny"}'
    assert body == (ready if target == "/ready" else b'{"status":"alive"}')


def test_a_second_request_hidden_in_the_first_is_asked_for_its_own_key(server: Server) -> None:
    """A length and chunks at once are read differently by different servers."""
    hidden = f"GET /v1/models HTTP/1.1\r\n{HOST}\r\n\r\n"
    smuggled = f"POST /health HTTP/1.1\r\n{HOST}\r\nContent-Length: {len(hidden)}\r\n"
    smuggled += "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    found = said(server, f"{smuggled}{hidden}GET / HTTP/1.1\r\n{HOST}\r\n".encode() + CLOSE)
    statuses = [part.split()[1] for part in found.split(b"HTTP/1.1 ") if part[:1].isdigit()]
    assert statuses
    assert MODEL.encode() not in found
    following = f"GET /health HTTP/1.1\r\n{HOST}\r\n\r\n{hidden}GET / HTTP/1.1\r\n{HOST}\r\n"
    found = said(server, following.encode() + CLOSE)
    assert found.count(b"HTTP/1.1 200") == 1
    assert found.count(b"HTTP/1.1 401") == 2


def test_every_reason_has_a_status_or_is_that_of_a_connection() -> None:
    silent = {"head_timeout", "connection_limit", "tls_handshake_failed"}
    assert silent < set(REASONS)
    assert not silent & set(STATUS_BY_REASON)


@pytest.fixture
def room() -> Iterator[None]:
    """Descriptors for both ends of a thousand connections."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    make_room()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2600:
        pytest.skip("this machine allows too few descriptors for both ends in one process")
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def answers_soon(server: Server) -> None:
    began = time.monotonic()
    assert httpx.get(f"{server.url}/ready", verify=False, timeout=10).status_code == 200
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("secured", [False, True], ids=["clear", "tls"])
@pytest.mark.parametrize("most", [1024, 100])
@pytest.mark.usefixtures("room")
def test_a_thousand_idle_connections_keep_nobody_out(
    recital: Recital, tmp_path: Path, *, most: int, secured: bool
) -> None:
    """With room for them and without; a stream that is under way is none of those that go."""
    context = tls.own(tmp_path, ["127.0.0.1"]).context if secured else None
    half = b"\x16\x03\x01\x02" if secured else b"POST /v1/completions HTTP/1.1\r\nX-Slow: "
    with (
        scripted(recital, ApiSettings(), tls=context, most_connections=most) as server,
        httpx.Client(base_url=server.url, verify=False, timeout=30) as http,
        ExitStack() as stack,
    ):
        body = {"model": MODEL, "prompt": [1], "max_tokens": 5, "stream": True}
        stream = stack.enter_context(http.stream("POST", "/v1/completions", json=body))
        assert stream.status_code == 200
        for number in range(1000):
            address = ("127.0.0.1", server.port)
            idle = stack.enter_context(socket.create_connection(address, 10))
            if number % 2:
                idle.sendall(half)
        answers_soon(server)
        until(lambda: server.door.crowd.most == most >= len(server.door.crowd), 10)
        evicted = server.door.refusals.counts["connection_limit"]
        if most > 1002:
            assert evicted == 0
            until(lambda: len(server.door.crowd) > 900, 5)
        else:
            assert evicted >= 1000 - most
        # It goes on: more comes than can have waited for this.
        pieces = stream.iter_raw()
        before = time.monotonic()
        while time.monotonic() < before + 1:
            assert next(pieces)
        answers_soon(server)


def test_a_client_of_tls_that_is_idle_makes_room_for_another(
    recital: Recital, tmp_path: Path
) -> None:
    """Also one whose handshake is done, and whose last answer was given."""
    shown = tls.own(tmp_path, ["127.0.0.1"])
    client = ssl.create_default_context(cafile=str(shown.path))
    with (
        scripted(recital, ApiSettings(), tls=shown.context, most_connections=1) as server,
        ExitStack() as stack,
    ):
        for _ in range(3):
            raw = socket.create_connection(("127.0.0.1", server.port), 10)
            kept = stack.enter_context(client.wrap_socket(raw, server_hostname="127.0.0.1"))
            kept.sendall(f"GET /health HTTP/1.1\r\n{HOST}\r\n\r\n".encode())
            assert kept.recv(4096).startswith(b"HTTP/1.1 200")
        assert server.door.refusals.counts["connection_limit"] == 2
        assert server.door.refusals.counts["tls_handshake_failed"] == 0
        assert len(server.door.crowd) == 1


def test_a_head_that_does_not_come_is_counted(recital: Recital) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeadlineProtocol, "head_timeout_s", 0.3)
        with scripted(recital, ApiSettings()) as server:
            assert said(server, b"GET /health HTTP/1.1\r\nX-Slow: ") == b""
            assert server.door.refusals.counts["head_timeout"] == 1
