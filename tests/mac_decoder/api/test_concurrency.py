"""Eight clients at once, of very different length, and clients that leave in the middle."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import load
from mac_decoder.engine.settings import EngineSettings
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.answers import chat
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.serving import Server, serving

LENGTHS = [(1, 30), (3, 2), (60, 12), (20, 30), (300, 3), (40, 15), (2, 50), (150, 10)]
"""Words of the prompt, and tokens of the answer."""


def wanted(words: int, tokens: int) -> dict[str, Any]:
    prompt = " ".join(f"{'runner' if n % 3 else 'baton'} {n % 7}" for n in range(words))
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": True,
    }


def check_same(one: Any, other: Any) -> None:
    """The same tokens, and about the same log probabilities: a batch has its own rounding."""
    ours, theirs = one.logprobs.content, other.logprobs.content
    assert [entry.token for entry in ours] == [entry.token for entry in theirs]
    assert [entry.logprob for entry in ours] == pytest.approx(
        [entry.logprob for entry in theirs], abs=1e-3
    )


@pytest.fixture(scope="module")
def random_server(checkpoint: Callable[..., Path]) -> Any:
    found = read_checkpoint(checkpoint("llama"))
    with serving(lambda: Engine(lambda: load(found), EngineSettings(prefill_step=64))) as server:
        yield server


def test_eight_at_once_get_what_each_gets_alone(random_server: Server) -> None:
    async def ask() -> tuple[list[Any], list[Any]]:
        base = f"{random_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as client:

            async def whole(words: int, tokens: int) -> Any:
                return await client.chat.completions.create(**wanted(words, tokens))

            async def streamed(words: int, tokens: int) -> str:
                text = ""
                body = wanted(words, tokens)
                async for chunk in await client.chat.completions.create(**body, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            alone = [await whole(*length) for length in LENGTHS]
            jobs = [
                (whole if index % 2 else streamed)(*length) for index, length in enumerate(LENGTHS)
            ]
            return alone, list(await asyncio.gather(*jobs))

    alone, together = asyncio.run(ask())
    for index, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one.usage.completion_tokens <= LENGTHS[index][1]
        if index % 2:
            check_same(one.choices[0], other.choices[0])
            assert one.choices[0].finish_reason == other.choices[0].finish_reason
            assert one.usage == other.usage
        else:
            assert one.choices[0].message.content == other
    assert random_server.engine.status()["open"] == 0


def test_a_client_that_leaves_in_mid_stream_frees_its_slot(
    server: Server, http: httpx.Client, client: openai.OpenAI, recital: Recital
) -> None:
    stream = client.chat.completions.create(
        **chat(logit_bias=recital.bias("endless"), max_tokens=1900, stream=True)
    )
    next(iter(stream))
    assert http.get("/status").json()["engine"]["open"] == 1
    stream.close()
    limit = time.monotonic() + 5
    while http.get("/status").json()["engine"]["open"]:
        assert time.monotonic() < limit
        time.sleep(0.01)
    # The MLX thread hears of it after its step.
    while any(http.get("/status").json()["engine"]["requests"].values()):
        assert time.monotonic() < limit
        time.sleep(0.01)
    generated = server.engine.status()["generated_tokens"]
    time.sleep(0.1)
    assert server.engine.status()["generated_tokens"] == generated


def test_an_async_client_that_is_cancelled_frees_its_slot(server: Server, recital: Recital) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            body = chat(logit_bias=recital.bias("endless"), max_tokens=1900)
            job = asyncio.create_task(client.chat.completions.create(**body))
            while not server.engine.status()["open"]:
                await asyncio.sleep(0.005)
            job.cancel()
            await asyncio.gather(job, return_exceptions=True)

    asyncio.run(ask())
    limit = time.monotonic() + 5
    while server.engine.status()["open"]:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_client_that_leaves_takes_its_unread_prompt_with_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is an answer to give up, its text may wait to be tokenised."""
    begun, dropped = threading.Event(), threading.Event()

    async def endless(text: str, *, special: bool = True) -> tuple[int, ...]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            dropped.set()
        return ()

    monkeypatch.setattr(server.engine, "encode", endless)
    body = json.dumps({"model": "tiny", "prompt": "x"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}\r\n\r\n{body}".encode())
        assert begun.wait(20)
    assert dropped.wait(20)
