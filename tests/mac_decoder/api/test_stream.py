"""Streams against an engine that plays a script: silence, errors, clients that leave or lag."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import httpx
import openai
import pytest

from mac_decoder.api.app import create_app
from mac_decoder.api.service import Service
from mac_decoder.api.settings import ApiSettings
from mac_decoder.engine.events import Failed, Fallback, GenerationFault, Progress, Token
from mac_decoder.engine.facade import Engine
from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.errors import CapacityError, EngineFault
from tests.mac_decoder.api.answers import chat, events, refused, text
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import REPORT, Part, Play, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

Served = Callable[..., Any]


@pytest.fixture(scope="module")
def checkpoint(recital: Recital) -> Checkpoint:
    return read_checkpoint(recital.path)


@pytest.fixture
def served(checkpoint: Checkpoint) -> Served:
    @contextmanager
    def serve(play: Play, **settings: Any) -> Iterator[tuple[Server, httpx.Client]]:
        chosen = ApiSettings(**({"heartbeat_s": 0.05} | settings))
        with (
            serving(lambda: ScriptedEngine(checkpoint, play), chosen) as server,
            httpx.Client(base_url=server.url, timeout=20) as http,
        ):
            yield server, http

    return serve


def wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


def test_headers_come_at_once_and_comments_tell_of_a_long_prefill(
    served: Served, recital: Recital
) -> None:
    there = threading.Event()

    async def play(part: Part) -> None:
        while not there.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        for processed in (100, 200, 300):
            part.say(Progress(processed, 400, "remote"))
            await asyncio.sleep(0.1)
        part.say(Fallback("connection_lost"))
        part.say(REPORT)
        part.token(recital.heads["greeting"])
        part.end()

    with (
        served(play) as (_, http),
        http.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        there.set()
        payloads, comments = events(response.iter_lines())
    assert comments[0] == "accepted"
    assert "queued" in comments
    assert "prefill 100/400" in comments
    assert "prefill 300/400" in comments
    assert comments[-1] == "connection_lost: prefilled here"
    assert payloads[-1]["baton"]["source"] == "remote"
    assert payloads[-1]["baton"]["transferred_bytes"] == 1234


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"open": 1, "requests": {"waiting": 0, "prefill": 1}}, "prefill 0/"),
        ({"open": 1, "requests": {"waiting": 1, "prefill": 0}}, "queued"),
        ({"open": 2, "requests": {"waiting": 0, "prefill": 1}}, "queued"),
        (
            {"open": 1, "requests": {"waiting": 0, "remote": 1}, "waiting_for_producer": 1},
            "queued",
        ),
    ],
    ids=["admitted", "waiting", "not taken yet", "another's turn at the producer"],
)
def test_before_the_first_tile_is_computed_it_is_told_from_the_queue(
    served: Served, recital: Recital, figures: dict[str, Any], said: str
) -> None:
    async def play(part: Part) -> None:
        await asyncio.sleep(0.2)
        part.token(recital.heads["greeting"])
        part.end()

    with served(play) as (server, http):
        server.engine.figures = figures
        with http.stream("POST", CHAT, json=chat(stream=True)) as response:
            _, comments = events(response.iter_lines())
        total = len(server.engine.parts[0].generation.tokens) - 1
    expected = f"{said}{total}" if said.endswith("/") else said
    assert set(comments) == {"accepted", expected}


def test_a_long_call_is_not_silent(served: Served, recital: Recital) -> None:
    tokens = {"start": 0}

    async def play(part: Part) -> None:
        for _ in range(20):
            part.token(tokens["start"])
            await asyncio.sleep(0.02)
        part.end("length")

    with served(play) as (server, http):
        tokenizer = server.engine.loaded.tokenizer
        tokens["start"] = tokenizer.convert_tokens_to_ids("<tool_call>")
        body = chat(stream=True, tools=[{"type": "function", "function": {"name": "f"}}])
        with http.stream("POST", CHAT, json=body) as response:
            _, comments = events(response.iter_lines())
    assert any(comment.startswith("generated") for comment in comments)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (GenerationFault("x"), "logits_not_finite"),
        (EngineFault("x"), "engine_fault"),
        (CapacityError("x", reason="cache_memory_exhausted"), "cache_memory_exhausted"),
    ],
)
def test_an_error_in_mid_stream_is_told_and_the_stream_is_not_done(
    served: Served, recital: Recital, path: str, error: Any, code: str
) -> None:
    async def play(part: Part) -> None:
        part.say(REPORT)
        part.token(recital.heads["greeting"])
        await asyncio.sleep(0.02)
        part.say(Failed(error))

    body = (chat if path == CHAT else text)(stream=True)
    with served(play) as (server, http):
        with http.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert "Good" in lines[-2]
        assert json.loads(lines[-1][6:])["error"]["code"] == code
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.APIError) as caught,
        ):
            list(client.chat.completions.create(**chat(stream=True)))
        assert caught.value.code == code
        metrics = http.get("/metrics").text
        assert f'baton_request_errors_total{{reason="{code}"}}' in metrics
        assert f'outcome="failed",route="{"chat" if path == CHAT else "completions"}"' in metrics
        # The handoff was made, whatever came after it.
        assert "baton_handoff_bytes_total 2468.0" in metrics


def test_an_error_before_the_answer_has_its_own_status(served: Served) -> None:
    async def play(part: Part) -> None:
        part.say(Failed(GenerationFault("x")))

    with served(play) as (_, http):
        refused(http.post(CHAT, json=chat()), 500, "logits_not_finite")


def test_a_full_queue_is_a_503_with_a_time_to_come_back(served: Served) -> None:
    async def play(part: Part) -> None: ...

    with served(play) as (server, http):
        server.engine.refusal = CapacityError("x", reason="queue_full", retry_after_s=7)
        for stream in (False, True):
            response = http.post(CHAT, json=chat(stream=stream))
            refused(response, 503, "queue_full")
            assert response.headers["retry-after"] == "7"
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.InternalServerError) as caught,
        ):
            client.chat.completions.create(**chat())
        assert caught.value.status_code == 503


def test_before_it_is_ready_nothing_is_answered_but_the_truth(served: Served) -> None:
    async def play(part: Part) -> None: ...

    with served(play) as (server, http):
        server.engine.is_ready = False
        response = http.post(CHAT, json=chat())
        refused(response, 503, "engine_not_ready")
        assert int(response.headers["retry-after"]) >= 1
        assert http.get("/health").status_code == 200
        for path in ("/v1/models", "/v1/models/tiny"):
            refused(http.get(path), 503, "engine_not_ready")
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reason"] == "engine_not_ready"
        assert int(ready.headers["retry-after"]) >= 1
        assert "baton_ready 0.0" in http.get("/metrics").text
        server.engine.is_ready = True
        assert http.get("/ready").status_code == 200


@pytest.mark.parametrize(
    ("figures", "warm", "sentence"),
    [
        ({}, False, "the model is being loaded, for 42 s so far; try again when /ready"),
        ({}, True, "the decoder is stopping"),
        ({"fault": "engine_fault"}, True, "the engine has failed, and the decoder starts again"),
    ],
    ids=["loading", "stopping", "failed"],
)
def test_a_refusal_says_what_is_going_on(
    recital: Recital, figures: dict[str, Any], warm: bool, sentence: str
) -> None:
    async def play(part: Part) -> None: ...

    async def main() -> list[httpx.Response]:
        engine = ScriptedEngine(read_checkpoint(recital.path), play)
        service = Service(cast(Engine, engine), "tiny", ApiSettings())
        if warm:
            await service.warm()
        engine.is_ready, engine.figures = False, figures
        service._began -= 42
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get("/v1/models"), await client.post(CHAT, json=chat())]

    for response in asyncio.run(main()):
        refused(response, 503, "engine_not_ready")
        assert response.json()["error"]["message"].startswith(sentence)
        assert response.headers["retry-after"] == "5"


def test_an_engine_that_closes_ends_its_streams_with_an_error(
    served: Served, recital: Recital
) -> None:
    async def play(part: Part) -> None:
        part.token(recital.heads["greeting"])
        await asyncio.sleep(0.02)
        part.close()

    with served(play) as (_, http):
        with http.stream("POST", CHAT, json=chat(stream=True)) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: ")]
        assert json.loads(lines[-1][6:])["error"]["code"] == "engine_not_ready"
        refused(http.post(CHAT, json=chat()), 503, "engine_not_ready")


def test_one_failed_choice_ends_the_others(served: Served, recital: Recital) -> None:
    async def play(part: Part) -> None:
        part.token(recital.heads["greeting"])
        if part.generation.sampling.seed == 8:
            part.say(Failed(GenerationFault("x")))

    with served(play) as (server, http):
        refused(http.post(CHAT, json=chat(n=3, seed=7)), 500, "logits_not_finite")
        wait_for(lambda: all(part.left.is_set() for part in (server.engine.parts[0],)))
        assert server.engine.parts[2].left.is_set()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_a_stop_string_ends_is_a_completed_one(
    served: Served, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """The engine is told to leave off, which is no client that left."""

    async def play(part: Part) -> None:
        part.say(REPORT)
        while not part.left.is_set():
            part.token(number)
            await asyncio.sleep(0.01)

    with served(play) as (server, http), caplog.at_level(logging.INFO):
        tokenizer = server.engine.loaded.tokenizer
        number = tokenizer.encode("a", add_special_tokens=False)[0]
        stop = tokenizer.decode([number]) * 3
        response = http.post(TEXT, json=text(stream=stream, stop=stop))
        assert response.status_code == 200
        wait_for(lambda: server.engine.parts[0].left.is_set())
        counted = (
            'baton_requests_total{outcome="completed",route="completions",source="remote"} 1.0'
        )
        wait_for(lambda: counted in http.get("/metrics").text)
        assert 'outcome="cancelled"' not in http.get("/metrics").text
    lines = [record.getMessage() for record in caplog.records if record.name == "mac_decoder.api"]
    assert json.loads(lines[-1])["finish_reasons"] == ["stop"]


# -- clients that leave


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_client_that_leaves_frees_its_slot(
    served: Served, recital: Recital, stream: bool, tokens: int
) -> None:
    async def play(part: Part) -> None:
        for _ in range(tokens):
            part.token(recital.heads["endless"])

    with served(play) as (server, http):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            body = json.dumps(chat(stream=stream)).encode()
            raw.sendall(_head(server, body) + body)
            wait_for(lambda: bool(server.engine.parts))
            if stream:
                assert raw.recv(1 << 16)
        wait_for(lambda: server.engine.parts[0].left.is_set())
        wait_for(lambda: 'outcome="cancelled"' in http.get("/metrics").text)
        assert "baton_requests_in_hand 0.0" in http.get("/metrics").text


def test_a_client_that_leaves_in_mid_body_is_nobody(served: Served) -> None:
    async def play(part: Part) -> None: ...

    with served(play) as (server, http):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(_head(server, b"x" * 1000) + b"x" * 10)
            wait_for(lambda: "baton_requests_in_hand 1.0" in http.get("/metrics").text)
        wait_for(lambda: "baton_requests_in_hand 0.0" in http.get("/metrics").text)
        assert server.engine.parts == []


def test_a_body_that_never_comes_is_given_up(served: Served) -> None:
    async def play(part: Part) -> None: ...

    with (
        served(play, body_timeout_s=0.1) as (server, _),
        socket.create_connection(("127.0.0.1", server.port)) as raw,
    ):
        raw.sendall(_head(server, b"x" * 1000) + b"x" * 10)
        raw.settimeout(5)
        assert b" 408 " in raw.recv(1 << 16)


def test_a_client_that_reads_slowly_does_not_fill_the_memory(
    served: Served, recital: Recital
) -> None:
    async def play(part: Part) -> None:
        # A long text twenty times over: a chunk of some ten kilobytes.
        token = Token(recital.heads["endless"], -0.5, ((recital.heads["two_tools"], -1.0),) * 20)
        for _ in range(400):
            if part.left.is_set():
                return
            part.say(*[token] * 250)
            await asyncio.sleep(0.005)
        part.end("length")

    with (
        served(play) as (server, _),
        socket.create_connection(("127.0.0.1", server.port)) as raw,
    ):
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        body = json.dumps(chat(stream=True, logprobs=True, top_logprobs=20)).encode()
        raw.sendall(_head(server, body) + body)
        wait_for(lambda: bool(server.engine.parts))
        wait_for(lambda: server.engine.parts[0].left.is_set())


def test_a_client_that_takes_nothing_is_gone(served: Served, recital: Recital) -> None:
    async def play(part: Part) -> None:
        # A long text twenty times over: a chunk of some ten kilobytes.
        token = Token(recital.heads["endless"], -0.5, ((recital.heads["two_tools"], -1.0),) * 20)
        while not part.left.is_set():
            part.say(*[token] * 50)
            await asyncio.sleep(0.005)

    with served(play, stall_timeout_s=0.2) as (server, http):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
            body = json.dumps(chat(stream=True, logprobs=True, top_logprobs=20)).encode()
            raw.sendall(_head(server, body) + body)
            wait_for(lambda: bool(server.engine.parts) and server.engine.parts[0].left.is_set())
        wait_for(lambda: "client_stalled" in http.get("/metrics").text)


def _head(server: Server, body: bytes) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


# -- bugs


def test_a_bug_is_a_500_and_its_log_has_the_place_but_no_value(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(part: Part) -> None:
        part.token(["the secret in a token"])  # type: ignore[arg-type]

    with served(play) as (server, http), caplog.at_level(logging.INFO):
        error = refused(http.post(CHAT, json=chat()), 500, "internal_error")
        assert error["type"] == "server_error"
        with (
            http.stream("POST", CHAT, json=chat(stream=True)) as response,
            pytest.raises(httpx.RemoteProtocolError),
        ):
            response.read()
        assert all(part.left.is_set() for part in server.engine.parts)
        assert http.get("/health").status_code == 200
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "unexpected TypeError at" in logged
    assert "secret" not in logged
    assert not any(record.exc_info for record in caplog.records)


# -- time


def test_a_chunk_follows_its_token_closely(served: Served, recital: Recital) -> None:
    said: list[float] = []

    async def play(part: Part) -> None:
        for _ in range(40):
            await asyncio.sleep(0.005)
            said.append(time.perf_counter())
            part.token(recital.heads["endless"])
        part.end("length")

    with served(play) as (_, http), http.stream("POST", CHAT, json=chat(stream=True)) as response:
        heard = [time.perf_counter() for line in response.iter_lines() if '"content":"la"' in line]
    delays = [later - earlier for earlier, later in zip(said, heard, strict=True)]
    assert statistics.median(delays) < 0.02
