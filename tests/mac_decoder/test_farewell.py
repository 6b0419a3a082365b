"""A child dies in the middle of answers: real processes, and what their clients see."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from mac_decoder.custody import Owed
from mac_decoder.farewell import Farewells, last_words
from mac_decoder.standin import Standing
from tests.mac_decoder.test_supervisor import Running
from tests.ordinary import usual

CHILD = """
import asyncio, os, signal, sys
import uvicorn
from mac_decoder import control, endpoint, supervisor
from mac_decoder.api import sse
from mac_decoder.api.connections import protocol_for
from mac_decoder.api.door import Door

start, listening, channel = supervisor.take_over(int(sys.argv[1]))
with open(os.path.join(start.config.state_dir, "starts"), "a") as file:
    file.write(f"{os.getpid()} {start.restarts} {start.last_fault}\\n")
custody = supervisor.custody(start)
if open(os.path.join(start.config.state_dir, "plan")).read() == "unknown":
    custody._channel.close()

async def app(scope, receive, send):
    async def begin(status, headers):
        await send({"type": "http.response.start", "status": status, "headers": headers})
    async def write(body, more=False):
        await send({"type": "http.response.body", "body": body, "more_body": more})
    path = scope["path"]
    if path == "/ready":
        await begin(200, [(b"content-length", b"2")])
        await write(b"ok")
    elif path == "/big":
        await begin(200, [(b"content-length", b"50000000")])
        await write(b"x" * 50000000)
    elif path == "/half":
        await begin(200, [(b"content-length", b"100")])
        await write(b"x" * 10, True)
        await asyncio.sleep(60)
    elif path == "/early":
        await begin(404, [(b"content-length", b"2")])
        await write(b"no")
    elif path in ("/v1/chat/completions", "/flood") and scope["method"] == "POST":
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        if b'"stream":true' in body:
            await begin(200, list(sse.HEADERS))
            await write(sse.comment("accepted"), True)
            piece = {"choices": [{"index": 0, "delta": {"content": "word "}}]}
            await write(sse.event(piece), True)
            while path == "/flood":
                await write(sse.event(piece) * 100, True)
        await asyncio.sleep(60)
    else:
        await asyncio.sleep(60)

async def main():
    watched = protocol_for(Door(), custody)
    server = uvicorn.Server(uvicorn.Config(app, http=watched, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    while not server.started:
        await asyncio.sleep(0.01)
    control.send_line(channel, control.SERVING)
    await asyncio.to_thread(channel.recv, 100)
    control.send_line(channel, control.READY)
    print("ready " + endpoint.url_of(listening), flush=True)
    await serving

asyncio.run(main())
"""

HOST = "Host: localhost\r\n"
SOON_S = 0.1
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def make(plan: str = "serve") -> Running:
        made.append(Running(tmp_path, plan, child=CHILD))
        made[-1].await_ready()
        return made[-1]

    yield make
    for running in made:
        running.close()


def child(running: Running) -> psutil.Process:
    return psutil.Process(int(running.starts()[-1][0]))


def connected(running: Running) -> socket.socket:
    port = int(running.url.rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), 10.0)


def asking(running: Running, head: str, body: str = "") -> socket.socket:
    """A connection on which this was asked, and which the child has read by now."""
    opened = connected(running)
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    opened.sendall(f"{head} HTTP/1.1\r\n{HOST}{length}\r\n{body}".encode())
    return opened


def heard(opened: socket.socket) -> bytes:
    """All that comes until the end."""
    found = b""
    with opened:
        while data := opened.recv(1 << 16):
            found += data
    return found


def until_heard(opened: socket.socket, text: bytes) -> bytes:
    """What comes until ``text``, and a moment, in which the child notes that it wrote it."""
    found = b""
    while text not in found:
        found += opened.recv(1 << 16)
    time.sleep(SOON_S)
    return found


def refused(raw: bytes) -> dict[str, str]:
    """The error object of a whole answer with status 503."""
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert lines[0] == "http/1.1 503 service unavailable"
    assert f"content-length: {len(body)}" in lines
    assert {"connection: close", "retry-after: 5", "content-type: application/json"} <= set(lines)
    return json.loads(body)["error"]


@pytest.mark.parametrize("number", usual([signal.SIGABRT, signal.SIGKILL], [signal.SIGABRT]))
def test_openais_client_is_told_in_mid_stream_and_before_an_answer(
    supervised: Callable[..., Running], number: int
) -> None:
    running = supervised()
    client = openai.OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0)
    asking = partial(client.chat.completions.create, **CHAT)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(asking)
        stream = iter(asking(stream=True))
        assert next(stream).choices[0].delta.content == "word "
        time.sleep(3 * SOON_S)
        os.kill(child(running).pid, number)
        with pytest.raises(openai.APIError) as told:
            list(stream)
        refusal = waiting.exception(10)
    assert (told.value.code, told.value.type) == ("decoder_restarted", "server_error")
    assert isinstance(refusal, openai.InternalServerError)
    assert (refusal.status_code, refusal.code) == (503, "decoder_restarted")

    running.await_ready()
    assert next(iter(asking(stream=True))).choices[0].delta.content == "word "
    client.close()


@pytest.mark.parametrize("number", usual([signal.SIGABRT, signal.SIGKILL], [signal.SIGKILL]))
def test_whoever_waits_for_an_answer_gets_a_whole_one(
    supervised: Callable[..., Running], number: int
) -> None:
    running = supervised()
    waiting = asking(running, "POST /v1/chat/completions", "{}")
    head_only = asking(running, "HEAD /wait")
    uploading = connected(running)
    uploading.sendall(f"POST /wait HTTP/1.1\r\n{HOST}Content-Length: 1000000\r\n\r\n".encode())
    uploading.sendall(b"x" * 300_000)
    time.sleep(0.3)
    os.kill(child(running).pid, number)
    error = refused(heard(waiting))
    assert (error["code"], error["type"]) == ("decoder_restarted", "server_error")
    head = heard(head_only)
    assert head.startswith(b"HTTP/1.1 503")
    assert head.endswith(b"\r\n\r\n"), "no body follows a head"
    # It goes on sending, as clients do, and finds its answer all the same.
    uploading.sendall(b"x" * 700_000)
    assert refused(heard(uploading))["code"] == "decoder_restarted"


def test_a_stream_ends_with_an_event_and_its_last_chunk(supervised: Callable[..., Running]) -> None:
    running = supervised()
    opened = asking(running, "POST /v1/chat/completions", '{"stream":true}')
    begun = until_heard(opened, b"word")
    child(running).kill()
    body = (begun + heard(opened)).partition(b"\r\n\r\n")[2]
    events = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if size == b"0":
            break
        events, body = events + body[: int(size, 16)], body[int(size, 16) + 2 :]
    assert body == b"\r\n"
    *_, last, end = events.split(b"\n\n")
    assert end == b""
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "decoder_restarted"


def test_nothing_is_written_into_an_answer_that_stands_nobody_knows_where(
    supervised: Callable[..., Running],
) -> None:
    running = supervised()
    half = asking(running, "GET /half")
    began = until_heard(half, b"x" * 10)
    plain = connected(running)  # HTTP/1.0 has no chunks
    plain.sendall(b"POST /v1/chat/completions HTTP/1.0\r\nHost: localhost\r\n")
    plain.sendall(b'Content-Length: 15\r\n\r\n{"stream":true}')
    streamed = until_heard(plain, b"word")
    flood = asking(running, "POST /flood", '{"stream":true}')
    big = asking(running, "GET /big")
    early = connected(running)
    early.sendall(f"POST /early HTTP/1.1\r\n{HOST}Content-Length: 1000\r\n\r\nx".encode())
    answered = until_heard(early, b"no")
    early.sendall(b"GET ")
    time.sleep(0.5)
    # What a request on a connection with unread answers looks like.
    big.sendall(f"GET /ready HTTP/1.1\r\n{HOST}\r\n".encode())
    child(running).kill()
    assert b"503" not in began + rest(half)
    assert b"error" not in streamed + rest(plain)
    assert b"error" not in rest(flood)
    assert b"503" not in rest(big)
    assert b"503" not in answered + rest(early)


def rest(opened: socket.socket) -> bytes:
    try:
        return heard(opened)
    except ConnectionResetError:
        return b""


def test_a_request_that_nobody_read_is_answered_and_idle_connections_are_closed(
    supervised: Callable[..., Running],
) -> None:
    running = supervised()
    asked = asking(running, "GET /ready")
    until_heard(asked, b"ok")
    idle = asking(running, "GET /ready")
    until_heard(idle, b"ok")
    pipelined = connected(running)
    pipelined.sendall(f"GET /ready HTTP/1.1\r\n{HOST}\r\nGET /wait HTTP/1.1\r\n{HOST}\r\n".encode())
    until_heard(pipelined, b"ok")
    dying = child(running)
    dying.suspend()
    asked.sendall(f"GET /ready HTTP/1.1\r\n{HOST}\r\n".encode())
    time.sleep(0.1)
    dying.kill()
    assert refused(heard(asked))["code"] == "decoder_restarted"
    assert heard(idle) == b""
    assert refused(heard(pipelined))["code"] == "decoder_restarted"


def test_a_client_that_left_or_reads_nothing_holds_up_nobody(
    supervised: Callable[..., Running],
) -> None:
    running = supervised()
    gone = asking(running, "POST /v1/chat/completions", "{}")
    silent = asking(running, "POST /v1/chat/completions", '{"stream":true}')
    until_heard(silent, b"word")
    time.sleep(0.2)
    dying = child(running)
    dying.suspend()
    gone.close()
    dying.kill()
    began = time.monotonic()
    running.await_ready()
    assert time.monotonic() - began < 8
    assert running.get("/ready").status_code == 200
    running.until(lambda: psutil.Process(running.process.pid).num_fds() < 20)
    silent.close()


def test_who_stops_the_decoder_and_does_not_wait_leaves_no_client_without_a_word(
    supervised: Callable[..., Running],
) -> None:
    running = supervised()
    waiting = asking(running, "POST /v1/chat/completions", "{}")
    time.sleep(0.3)
    child(running).suspend()  # it will not end by itself; after its grace it is killed
    assert running.stop() == 0
    assert b'"decoder_stopping"' in heard(waiting)


def test_500_connections_leave_no_descriptor_behind(supervised: Callable[..., Running]) -> None:
    running = supervised()
    processes = [psutil.Process(running.process.pid), child(running)]
    running.get("/ready")
    time.sleep(0.2)
    before = [process.num_fds() for process in processes]
    with ExitStack() as closing:
        for number in range(500):
            opened = closing.enter_context(asking(running, "GET /ready"))
            if number % 2:
                assert opened.recv(1 << 16)
        time.sleep(0.3)
        counts = [
            process.num_fds() - first for process, first in zip(processes, before, strict=True)
        ]
        assert counts[1] == 500
        assert 400 < counts[0] <= 500
    running.until(lambda: [process.num_fds() for process in processes] == before)


def test_a_supervisor_that_is_told_nothing_costs_no_request(
    supervised: Callable[..., Running],
) -> None:
    running = supervised("unknown")
    for _ in range(3):
        assert running.get("/ready").status_code == 200
    child(running).kill()
    running.await_ready()
    assert running.get("/ready").status_code == 200


def test_a_supervisor_that_stands_still_costs_no_request(
    supervised: Callable[..., Running],
) -> None:
    """Ctrl-Z stops the supervisor alone: what the child closes must end for its client too."""
    running = supervised()
    supervisor = psutil.Process(running.process.pid)
    supervisor.suspend()
    try:
        for _ in range(700):
            with asking(running, "GET /ready") as opened:
                opened.shutdown(socket.SHUT_WR)
                assert heard(opened).endswith(b"ok")
    finally:
        supervisor.resume()
    running.until(lambda: supervisor.num_fds() < 20 and child(running).num_fds() < 20)


def test_ready_is_truthful_all_along(supervised: Callable[..., Running]) -> None:
    running = supervised()
    waiting = asking(running, "POST /v1/chat/completions", "{}")
    time.sleep(0.3)
    child(running).kill()
    refused(heard(waiting))
    statuses: list[int] = []
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and statuses[-1:] != [200]:
        with httpx.Client() as client:
            statuses.append(client.get(running.url + "/ready").status_code)
    assert set(statuses[:-1]) == {503}
    assert statuses[-1] == 200


STANDING = Standing("restarting", "decoder_restarted", "it is starting again", 5)


@pytest.mark.parametrize("owed", [Owed.NOTHING, Owed.UNKNOWN])
def test_there_is_nothing_to_say_on_other_connections(owed: Owed) -> None:
    assert last_words(owed, STANDING) == b""


def test_no_time_is_promised_where_only_a_person_can_help() -> None:
    standing = Standing("latched", "decoder_latched_off", "see its log", None)
    assert b"Retry-After" not in last_words(Owed.ANSWER, standing)
    assert b"Retry-After: 5\r\n" in last_words(Owed.ANSWER, STANDING)


def test_clients_that_have_read_their_last_words_are_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    farewells = Farewells()
    began = time.monotonic()
    farewells.begin([(ours, Owed.END)], STANDING)
    assert heard(theirs) == last_words(Owed.END, STANDING)
    farewells.end()
    assert time.monotonic() - began < 1.9


def test_a_client_with_no_room_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mac_decoder.farewell._PATIENCE_S", 1.0)
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            ours.send(b"x" * 4096)
    farewells = Farewells()
    began = time.monotonic()
    farewells.begin([(ours, Owed.END)], STANDING)
    assert time.monotonic() - began < 0.8, "it does not wait"
    farewells.end()
    assert 0.8 < time.monotonic() - began < 10
    assert ours.fileno() == -1
    with theirs:
        assert b"error" not in heard(theirs)
