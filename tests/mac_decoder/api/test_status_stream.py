"""``/status/stream`` over real sockets: what is told when, who is let in, who is left."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from starlette.websockets import WebSocket, WebSocketDisconnected
from uvicorn.protocols.utils import ClientDisconnected
from websockets.exceptions import InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.sync.client import connect
from websockets.typing import Origin

from mac_decoder.api import deadlines, status_stream, tls
from mac_decoder.api.app import server_config
from mac_decoder.api.deadlines import DeadlineProtocol, UpgradedProtocol
from mac_decoder.api.door import Door
from mac_decoder.api.errors import Backstop
from mac_decoder.api.guard import KeyGuard
from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.settings import ApiSettings
from mac_decoder.custody import Duplicates, Owed, inherited
from mac_decoder.engine.events import Progress, Token
from mac_decoder.status.board import BEAT_S
from protocol.checkpoint import read_checkpoint
from protocol.errors import EngineFault
from protocol.status.stream import Change, Full
from tests.e2e.running import until
from tests.mac_decoder.api.answers import text
from tests.mac_decoder.api.following import following, following_over_tls
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import REPORT, Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving

SECRET = "quite a private matter"


@contextmanager
def scripted(recital: Recital, play: Any, **more: Any) -> Iterator[Server]:
    checkpoint = read_checkpoint(recital.path)
    with serving(lambda: ScriptedEngine(checkpoint, play), **more) as server:
        yield server


async def nothing(_: Part) -> None: ...


# What is told


def test_a_request_appears_at_once_and_ends_with_its_answers_own_figures(
    server: Server, http: httpx.Client
) -> None:
    with following(server.url) as follower:
        answer = http.post("/v1/completions", json=text(max_tokens=3)).json()
        took = follower.until(
            lambda now: now.recent.finished and now.recent.finished[0].id == answer["id"], 1.0
        )
        assert took < 1.0
        ended = follower.snapshot.recent.finished[0]
    assert ended.outcome == "completed"
    assert ended.served is not None
    assert ended.served.source == answer["baton"]["source"] == "local"
    assert ended.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert ended.generated_tokens == answer["usage"]["completion_tokens"] == 3
    assert ended.tokens_per_s.basis == "measured"


def test_a_request_in_hand_is_told_of_at_every_step(recital: Recital) -> None:
    go = {name: asyncio.Event() for name in ("progress", "more", "token", "end")}

    async def play(part: Part) -> None:
        await go["progress"].wait()
        part.say(Progress(64, 640, "remote"))
        await go["more"].wait()
        part.say(Progress(320, 640, "remote"))
        await go["token"].wait()
        part.say(REPORT, Token(5), Token(6))
        await go["end"].wait()
        part.end("length")

    with scripted(recital, play) as server, following(server.url) as follower:

        def let(name: str) -> None:
            server.run(_set(go[name]))

        body = text(list(range(3, 40)))
        asking = threading.Thread(
            target=httpx.post, args=(f"{server.url}/v1/completions",), kwargs={"json": body}
        )
        asking.start()
        follower.until(lambda now: now.requests.in_hand, 1.0)
        one = follower.snapshot.requests.in_hand[0]
        assert (one.route, one.stage, one.source) == ("completions", "queued", None)
        assert (one.prompt_tokens, one.processed, one.total) == (37, None, None)
        assert one.tokens_per_s.value is None
        assert abs(one.began_at - time.time()) < 5
        let("progress")
        follower.until(lambda now: now.requests.in_hand[0].processed == 64, 1.0)
        one = follower.snapshot.requests.in_hand[0]
        assert (one.total, one.source, one.generated_tokens) == (640, None, 0)
        let("more")
        follower.until(lambda now: now.requests.in_hand[0].processed == 320, 1.0)
        let("token")
        follower.until(lambda now: now.requests.in_hand[0].generated_tokens == 2, 1.0)
        one = follower.snapshot.requests.in_hand[0]
        assert one.source == "remote"
        let("end")
        follower.until(lambda now: now.recent.finished, 1.0)
        assert follower.snapshot.requests.in_hand == ()
        ended = follower.snapshot.recent.finished[0]
        assert (ended.id, ended.outcome) == (one.id, "completed")
        asking.join(10)


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_nothing_is_sent_where_nothing_changes(recital: Recital) -> None:
    with (
        scripted(recital, nothing) as server,
        following(server.url) as follower,
        pytest.raises(TimeoutError),
    ):
        follower.take(1.5)


def test_a_whole_one_comes_now_and_then(recital: Recital, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status_stream, "FULL_EVERY_S", 0.6)
    with scripted(recital, nothing) as server, following(server.url) as follower:
        began = time.monotonic()
        while not isinstance(follower.take(10.0), Full):
            pass
        assert 0.4 < time.monotonic() - began < 10.0


def test_many_changes_are_told_as_few(recital: Recital) -> None:
    async def play(part: Part) -> None:
        part.say(REPORT)
        for number in range(1000):
            part.token(number % 90)
            await asyncio.sleep(0.001)
        part.end("length")

    with scripted(recital, play) as server, following(server.url) as follower:
        httpx.post(f"{server.url}/v1/completions", json=text(max_tokens=1000), timeout=30)
        began = follower.messages[0].at
        follower.until(lambda now: now.recent.finished, 2.0)
        seconds = follower.messages[-1].at - began
    # hello and full, one at once and one at the next beat, and then one for each
    assert len(follower.messages) <= 4 + seconds / BEAT_S
    assert len(follower.messages) > 2 * seconds


def test_what_touches_nothing_is_noticed_too(recital: Recital) -> None:
    """A link breaks in a thread of its own, and tells nobody."""
    with scripted(recital, nothing) as server, following(server.url) as follower:
        server.engine.figures["fault"] = "engine_failed"
        server.engine.is_ready = False
        assert follower.until(lambda now: now.engine.doing == "trouble", 2.0) < 2.0
        assert follower.snapshot.engine.fault == "engine_failed"


def test_the_page_and_the_stream_tell_the_same(server: Server, http: httpx.Client) -> None:
    with following(server.url) as follower:
        answer = http.post("/v1/completions", json=text(max_tokens=2)).json()
        follower.settle()
        assert follower.snapshot.recent.finished[0].id == answer["id"]
        assert any(isinstance(message, Change) for message in follower.messages)
        page = http.get("/status").json()["snapshot"]
        told = json.loads(msgspec.json.encode(follower.snapshot))
    for name in ("decoder", "engine", "requests", "recent", "nodes", "cache"):
        assert page[name] == told[name], name


def test_a_failed_request_is_shown_with_its_reason_and_without_figures(recital: Recital) -> None:
    with scripted(recital, nothing) as server, following(server.url) as follower:
        server.engine.refusal = EngineFault("it failed", reason="engine_not_ready")
        httpx.post(f"{server.url}/v1/completions", json=text())
        follower.until(lambda now: now.recent.finished, 1.0)
        ended = follower.snapshot.recent.finished[0]
        assert (ended.outcome, ended.code, ended.served) == ("failed", "engine_not_ready", None)
        assert ended.decode_ms.value is None
        assert ended.tokens_per_s.value is None


def test_what_was_refused_before_any_work_takes_nobodys_place(
    server: Server, http: httpx.Client
) -> None:
    before = http.get("/status").json()["snapshot"]
    assert http.post("/v1/completions", json={"prompt": SECRET}).status_code == 400
    after = http.get("/status").json()["snapshot"]
    assert after["recent"] == before["recent"]
    refused = before["requests"]["outcomes"].get("refused", 0)
    assert after["requests"]["outcomes"]["refused"] == refused + 1


def test_nothing_that_a_client_says_is_told(
    server: Server, http: httpx.Client, recital: Recital
) -> None:
    said = {"user": SECRET, "metadata": {SECRET: SECRET}, SECRET: SECRET, "stop": [SECRET]}
    messages = [{"role": "user", "content": SECRET, "name": SECRET}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 8} | said
    with following(server.url) as follower:
        ids = {one.id for one in follower.snapshot.recent.finished}
        headers = {"x-request-id": SECRET, "user-agent": SECRET, "referer": SECRET}
        bias = recital.bias("greeting")
        answer = http.post(
            "/v1/chat/completions", json=body | {"logit_bias": bias}, headers=headers
        )
        assert answer.status_code == 200
        http.post(f"/v1/chat/completions?{SECRET}", json=body | {"model": SECRET})
        http.get(f"/{SECRET}")
        follower.until(lambda now: {one.id for one in now.recent.finished} - ids, 2.0)
        everything = "".join(follower.texts) + http.get("/status").text + http.get("/metrics").text
    assert SECRET not in everything
    assert SECRET.replace(" ", "%20") not in everything
    content = answer.json()["choices"][0]["message"]["content"]
    assert "morning" in content
    assert "morning" not in everything


# Who is let in


def refused(url: str, **more: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as caught, following(url, **more):
        pass
    response = caught.value.response
    return response.status_code, json.loads(response.body)["error"]["code"]


def test_pages_of_other_sites_and_other_names_get_nothing(server: Server) -> None:
    before = dict(server.door.refusals.counts)
    evil = Origin("http://evil.example")
    assert refused(server.url, origin=evil) == (403, "origin_not_allowed")
    assert refused(server.url, origin=Origin("null")) == (403, "origin_not_allowed")
    rebound = socket.create_connection(("127.0.0.1", server.port))
    other = f"http://evil.example:{server.port}"
    assert refused(other, sock=rebound) == (403, "host_not_allowed")
    counts = server.door.refusals.counts
    assert counts["origin_not_allowed"] == before["origin_not_allowed"] + 2
    assert counts["host_not_allowed"] == before["host_not_allowed"] + 1


def test_its_own_page_gets_in(server: Server) -> None:
    with following(server.url, origin=Origin(server.url)) as follower:
        assert follower.snapshot.decoder.model == "tiny"


def test_where_keys_are_asked_for_the_stream_asks_too(recital: Recital, tmp_path: Path) -> None:
    """And it ends with its key: a revoked one sees nothing more."""
    files = KeyFiles(tmp_path)
    key = files.create("laptop")
    api = ApiSettings(keys_demanded=True)
    with scripted(recital, nothing, settings=api, stored=files) as server:
        assert refused(server.url) == (401, "invalid_api_key")
        wrong = {"authorization": "Bearer baton-wrong"}
        assert refused(server.url, additional_headers=wrong) == (401, "invalid_api_key")
        right = {"authorization": f"Bearer {key}"}
        with following(server.url, additional_headers=right) as follower:
            assert follower.snapshot.door.keys == 1
            assert follower.snapshot.door.streams <= 1
            files.revoke("laptop")
            assert follower.ended(within_s=3.0) == 1008


def test_there_are_never_too_many(recital: Recital) -> None:
    api = ApiSettings(max_streams=3)
    with scripted(recital, nothing, settings=api) as server, ExitStack() as opened:
        for _ in range(3):
            opened.enter_context(following(server.url))
        assert refused(server.url) == (503, "too_many_streams")
        assert server.door.refusals.counts["too_many_streams"] == 1
        opened.close()
        until(lambda: _streams(server) == 0, 5)
        with following(server.url):
            pass


def _streams(server: Server) -> int:
    return httpx.get(f"{server.url}/status").json()["snapshot"]["door"]["streams"]


@pytest.mark.parametrize(("said", "code"), [("hello", 1008), ("x" * 2000, 1009), (b"\x00", 1008)])
def test_whoever_says_anything_is_told_to_go(server: Server, said: Any, code: int) -> None:
    with following(server.url) as follower:
        follower.connection.send(said)
        assert follower.ended() == code


def test_no_other_path_is_a_websocket(server: Server) -> None:
    for path in ("/status", "/v1/chat/completions", "/status/stream/", "//status/stream"):
        address = "ws" + server.url.removeprefix("http") + path
        with pytest.raises(InvalidStatus) as caught, connect(address, proxy=None):
            pass
        assert caught.value.response.status_code == 403


# Who is left


class Deaf:
    """An ASGI connection whose client takes ``taken`` messages and then no more."""

    def __init__(self, taken: int) -> None:
        self.taken = taken
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        if not self.sent:
            return {"type": "websocket.connect"}
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        if len(self.sent) > self.taken:
            await asyncio.Event().wait()
        self.sent.append(message)


def test_a_client_that_takes_nothing_is_left(recital: Recital) -> None:
    """It holds up its own task alone, for so long."""
    api = ApiSettings(stream_stall_s=0.3)
    with scripted(recital, nothing, settings=api) as server, following(server.url) as other:
        deaf = Deaf(taken=2)
        scope = {"type": "websocket", "headers": [], KeyGuard.ALLOWED: lambda: True}

        async def serve() -> float:
            began = time.monotonic()
            websocket = WebSocket(scope, deaf.receive, deaf.send)
            serving = asyncio.ensure_future(status_stream.answer(server.service, websocket))
            await asyncio.sleep(0.2)
            server.engine.figures["fault"] = "engine_failed"
            server.service.board.touch()
            await asyncio.wait_for(serving, 5)
            return time.monotonic() - began

        assert server.run(serve()) < 2.0
        assert len(deaf.sent) == 3
        assert other.until(lambda now: now.engine.fault, 1.0) < 1.0


BROKEN = {
    "bad text": Frame(Opcode.TEXT, b"\xff").serialize(mask=True),
    "no frame": bytes([0xF1, 0x80, 0, 0, 0, 0]),
    "words before": Frame(Opcode.TEXT, b"hi").serialize(mask=True)
    + Frame(Opcode.TEXT, b"\xff").serialize(mask=True),
}


@pytest.mark.parametrize("said", BROKEN.values(), ids=BROKEN)
def test_a_connection_that_the_server_closes_under_a_message_is_no_bug(
    recital: Recital,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    said: bytes,
) -> None:
    """What is to be sent meets a connection that uvicorn has just closed and not yet lost."""
    closing = asyncio.Event()
    closes = UpgradedProtocol.handle_parser_exception
    raised: list[BaseException] = []
    sends = UpgradedProtocol.send

    def closes_and_wakes(protocol: UpgradedProtocol) -> None:
        closing.set()  # whoever waits for it goes on before the connection is lost
        closes(protocol)

    async def send(protocol: UpgradedProtocol, message: Any) -> None:
        try:
            await sends(protocol, message)
        except OSError as error:
            raised.append(error)
            raise

    monkeypatch.setattr(UpgradedProtocol, "handle_parser_exception", closes_and_wakes)
    monkeypatch.setattr(UpgradedProtocol, "send", send)
    with scripted(recital, nothing) as server:
        shot = server.run(server.service.board.now(0))

        async def late(_: float) -> Any:
            await closing.wait()
            return shot

        monkeypatch.setattr(server.service.board, "now", late)
        with upgraded(server.port) as client:
            client.sendall(said)
            until(lambda: server.service.streams == 0 and len(server.door.crowd) == 0, 5)
        assert [type(error) for error in raised] == [ClientDisconnected], "the race was not met"
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


class Torn:
    """An ASGI connection that the server has closed: its sender is told so by ``error``, from the
    ``after``-th message on. ``heard`` is what the client, or the server, has said before.
    """

    def __init__(self, error: Exception, after: int, *heard: Any) -> None:
        self.error = error
        self.left = after
        self.heard = [{"type": "websocket.connect"}, *heard]
        self.tried: list[str] = []

    async def receive(self) -> Any:
        if not self.heard:
            await asyncio.Event().wait()
        return self.heard.pop(0)

    async def send(self, message: Any) -> None:
        self.tried.append(message["type"].removeprefix("websocket."))
        self.left -= 1
        if self.left < 0:
            raise self.error


GONE = {"type": "websocket.disconnect", "code": 1007, "reason": ""}
WORD = {"type": "websocket.receive", "text": "hi"}


@pytest.mark.parametrize(
    ("after", "heard", "tried"),
    [
        (0, [GONE], ["accept"]),
        (1, [GONE], ["accept", "send"]),
        (2, [GONE], ["accept", "send", "send"]),
        # a ping that nobody answers: uvicorn closes, and nothing is heard of it
        (1, [], ["accept", "send"]),
        (3, [], ["accept", "send", "send", "send"]),
        (3, [WORD, GONE], ["accept", "send", "send", "close"]),
    ],
)
def test_whatever_was_to_be_sent_the_client_is_gone(
    recital: Recital,
    caplog: pytest.LogCaptureFixture,
    after: int,
    heard: list[Any],
    tried: list[str],
) -> None:
    with scripted(recital, nothing) as server:
        torn = Torn(ClientDisconnected(), after, *heard)
        server.run(_answered(server, torn, full_every_s=0.0))
        assert torn.tried == tried
        assert server.service.streams == 0
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_what_is_no_word_of_the_server_is_a_bug(
    recital: Recital, caplog: pytest.LogCaptureFixture
) -> None:
    """starlette's word for a message after our own close, and uvicorn's for another mistake."""
    with scripted(recital, nothing) as server:
        for error in (WebSocketDisconnected("after our close"), RuntimeError("of another kind")):
            caplog.clear()
            server.run(_answered(server, Torn(error, 1, GONE)))
            assert f"unexpected {type(error).__name__}" in caplog.text


async def _answered(server: Server, torn: Torn, full_every_s: float = 30.0) -> None:
    """Serve ``torn`` to its end, behind what logs bugs."""

    async def route(scope: Any, receive: Any, send: Any) -> None:
        await status_stream.answer(server.service, WebSocket(scope, receive, send))

    scope = {"type": "websocket", "headers": [], KeyGuard.ALLOWED: lambda: True}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(status_stream, "FULL_EVERY_S", full_every_s)
        # As uvicorn does, which knows that it has lost the connection.
        with suppress(ClientDisconnected):
            await asyncio.wait_for(Backstop(route)(scope, torn.receive, torn.send), 5)


def test_what_a_client_does_not_take_is_thrown_away_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing alone waits for a client to take what is written, for ever."""
    monkeypatch.setattr(UpgradedProtocol, "rest_s", 0.3)

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "bytes": bytes(64 << 20)})

    door = Door()
    with running(server_config(flood, door)) as port:
        deaf = upgraded(port)
        until(lambda: len(door.crowd) == 0, 5)
        deaf.close()


def test_a_client_that_pings_and_never_reads_is_left(
    recital: Recital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each ping is answered with as many bytes, which nothing else would bound."""
    monkeypatch.setattr(deadlines, "_MOST_UNREAD", 1 << 16)
    ping = Frame(Opcode.PING, bytes(125)).serialize(mask=True)
    with scripted(recital, nothing) as server:
        deaf = upgraded(server.port)
        with suppress(ConnectionError):
            for _ in range(4000):
                deaf.sendall(ping * 100)
        until(lambda: len(server.door.crowd) == 0, 10)
        deaf.close()


HANDSHAKE = (
    "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


def upgraded(port: int) -> socket.socket:
    """A connection that follows the status, and hardly reads."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", port))
    made.sendall(f"GET /status/stream HTTP/1.1\r\n{HANDSHAKE}\r\n".encode())
    assert made.recv(12) == b"HTTP/1.1 101"
    return made


@pytest.mark.parametrize(
    "head",
    [
        f"POST /status/stream HTTP/1.1\r\n{HANDSHAKE}Content-Length: 0\r\n",
        f"GET /status/stream HTTP/1.1\r\n{HANDSHAKE}Content-Length: 5\r\n",
        f"GET /status/stream HTTP/1.1\r\n{HANDSHAKE}Transfer-Encoding: chunked\r\n",
        f"GET /status/stream HTTP/1.1\r\n{HANDSHAKE}".replace("-Version: 13", "-Version: 7"),
        f"GET /status/stream HTTP/1.1\r\n{HANDSHAKE}".replace("dGhl", ""),
        f"GET /status/stream HTTP/1.1\r\n{HANDSHAKE}X: {'x' * 9000}\r\n",
    ],
    ids=["post", "length", "chunked", "version", "key", "long line"],
)
def test_what_is_no_handshake_after_all_is_refused_and_keeps_no_place(
    recital: Recital, head: str
) -> None:
    """Whoever could leave such a connection open without an answer could leave a thousand."""
    with (
        scripted(recital, nothing) as server,
        socket.create_connection(("127.0.0.1", server.port), 10) as client,
    ):
        client.sendall(f"{head}\r\n".encode())
        answer = b""
        with suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 4")
        until(lambda: len(server.door.crowd) == 0, 5)


@contextmanager
def running(config: uvicorn.Config) -> Iterator[int]:
    """A server without an engine; its port."""
    server = uvicorn.Server(config)
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until(lambda: server.started, 10)
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(10)


def test_streams_have_a_place_in_the_crowd_while_they_last(
    recital: Recital, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is taken for an idle connection, however long it lasts."""
    monkeypatch.setattr(DeadlineProtocol, "head_timeout_s", 0.3)
    with scripted(recital, nothing, most_connections=2) as server:
        with following(server.url) as one, following(server.url) as other:
            time.sleep(0.8)
            assert len(server.door.crowd) == 2
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{server.url}/health")
            for follower in (one, other):
                server.engine.figures["open"] = server.engine.figures.get("open", 0) + 1
                follower.until(lambda now: now.engine.open, 2.0)
        until(lambda: len(server.door.crowd) == 0, 5)
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_connection_that_was_used_before_can_follow(recital: Recital) -> None:
    with scripted(recital, nothing) as server:
        kept = socket.create_connection(("127.0.0.1", server.port))
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while b"}" not in kept.recv(4096):
            pass
        with following(server.url, sock=kept):
            time.sleep(0.2)
            assert len(server.door.crowd) == 1
        until(lambda: len(server.door.crowd) == 0, 5)


def test_behind_tls_it_is_the_same(recital: Recital, tmp_path: Path) -> None:
    shown = tls.own(tmp_path, ("localhost", "127.0.0.1"))
    trusting = ssl.create_default_context(cafile=str(shown.path))
    with scripted(recital, nothing, tls=shown.context) as server:
        with following_over_tls(server.port, trusting) as follower:
            server.engine.figures["open"] = 5
            follower.until(lambda now: now.engine.open == 5, 2.0)
            assert len(server.door.crowd) == 1
        until(lambda: len(server.door.crowd) == 0, 5)


def test_the_supervisor_knows_that_it_cannot_finish_a_stream() -> None:
    """And its slot is free again once the stream has ended."""
    duplicates = Duplicates(4)
    custody = inherited(socket.dup(duplicates.theirs.fileno()), socket.dup(duplicates.page_fd))
    duplicates.passed_on()
    told: list[Any] = []

    async def one_word(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await send({"type": "websocket.send", "text": "word"})
        told.append(await receive())

    door = Door()
    with running(server_config(one_word, door, custody=custody)) as port:
        for _ in range(3):
            with connect(f"ws://127.0.0.1:{port}/", proxy=None) as client:
                assert client.recv(timeout=10) == "word"
                owed = bytes(custody._page)
                assert owed.count(Owed.UNKNOWN) == 1
            until(lambda: len(door.crowd) == 0, 5)
            until(lambda: set(bytes(custody._page)) == {Owed.NOTHING}, 5)
    duplicates.close()
    assert custody._channel is not None
    custody._channel.close()


def test_a_server_that_stops_says_so(recital: Recital) -> None:
    with scripted(recital, nothing) as server, following(server.url) as follower:
        server._server.should_exit = True
        assert follower.ended() == 1012


def test_another_process_is_another_process(recital: Recital) -> None:
    """A client that comes back begins anew, and can tell."""
    seen = set()
    for _ in range(2):
        with scripted(recital, nothing) as server, following(server.url) as follower:
            assert follower.hello.process == follower.snapshot.decoder.process
            seen.add(follower.snapshot.decoder.process)
    assert len(seen) == 2
