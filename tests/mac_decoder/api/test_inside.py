"""The endpoints called from within the process: the same answers, the same journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mac_decoder.api.inside import Inside
from mac_decoder.api.settings import ApiSettings
from mac_decoder.engine.events import Token
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.answers import text
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.scripted import REPORT, Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving


@pytest.fixture
def inside(server: Server) -> Inside:
    return Inside(server.routes)


@pytest.fixture
def held(recital: Recital) -> Iterator[Server]:
    """A server whose answers begin and never end."""

    async def play(part: Part) -> None:
        part.say(REPORT, Token(5))
        await part.left.wait()

    checkpoint = read_checkpoint(recital.path)
    settings = ApiSettings(max_requests=1)
    with serving(lambda: ScriptedEngine(checkpoint, play), settings) as server:
        yield server


async def all_of(inside: Inside, payload: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    async with inside.post("/v1/completions", payload) as reply:
        return reply.status, [event async for event in reply.events()]


async def whole(inside: Inside, payload: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    async with inside.post("/v1/completions", payload) as reply:
        return reply.status, await reply.json()


def test_it_is_answered_as_a_client_is_and_is_in_the_journal(
    server: Server, inside: Inside
) -> None:
    status, body = server.run(whole(inside, text(max_tokens=3)))
    assert status == 200
    assert body["usage"]["completion_tokens"] == 3
    assert server.service.journal.recent().finished[0].id == body["id"]


def test_a_stream_comes_in_its_events(server: Server, inside: Inside) -> None:
    status, events = server.run(all_of(inside, text(max_tokens=3, stream=True)))
    assert status == 200
    said = "".join(event["choices"][0]["text"] for event in events if event["choices"])
    _, body = server.run(whole(inside, text(max_tokens=3)))
    assert said == body["choices"][0]["text"]


def test_a_refusal_is_the_api_s_own(server: Server, inside: Inside) -> None:
    status, body = server.run(whole(inside, {"model": "tiny"}))
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


def test_whoever_leaves_ends_the_work_and_makes_room(held: Server) -> None:
    inside = Inside(held.routes)

    async def begun(then: Callable[[], Any]) -> dict[str, Any]:
        async with inside.post("/v1/completions", text(stream=True)) as reply:
            async for event in reply.events():
                await then()
                return event
        raise AssertionError("nothing came")

    async def busy() -> None:
        status, body = await whole(inside, text())
        assert (status, body["error"]["code"]) == (503, "too_many_requests")

    async def nothing() -> None: ...

    held.run(begun(busy))
    ended = held.service.journal.recent().finished[0]
    assert ended.outcome == "cancelled"
    held.run(begun(nothing))


def test_a_cancelled_caller_leaves_too(held: Server) -> None:
    inside = Inside(held.routes)

    async def cancelled() -> None:
        caller = asyncio.create_task(all_of(inside, text(stream=True)))
        while not held.engine.parts:
            await asyncio.sleep(0.01)
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert held.engine.parts[0].left.is_set()

    held.run(cancelled())
    assert held.service.journal.recent().finished[0].outcome == "cancelled"


def test_a_slow_reader_gets_all_of_what_waited_for_it(recital: Recital) -> None:
    async def play(part: Part) -> None:
        part.say(REPORT)
        for _ in range(100):
            part.token(5)
            await asyncio.sleep(0)
        part.end("length")

    async def slowly(inside: Inside) -> list[dict[str, Any]]:
        async with inside.post("/v1/completions", text(stream=True)) as reply:
            await asyncio.sleep(0.5)
            return [event async for event in reply.events()]

    checkpoint = read_checkpoint(recital.path)
    with serving(lambda: ScriptedEngine(checkpoint, play)) as server:
        events = server.run(slowly(Inside(server.routes)))
        _, body = server.run(whole(Inside(server.routes), text()))
    said = [event["choices"][0]["text"] for event in events if event["choices"]]
    assert "".join(said) == body["choices"][0]["text"] != ""
    assert len(said) > 16
