"""What a text may cost the threads that tokenise, and whom it may keep waiting."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from mlx_lm.utils import load_tokenizer

from mac_decoder.engine import template
from mac_decoder.engine.prompts import LONG_CHARACTERS, PIECE, Prompts
from protocol.errors import RequestError

CONTEXT = 8192
LONG = "one two three, " * (4 * CONTEXT // 12)
HUGE = "one two three, " * 200_000


class Watched:
    """A tokenizer that knows what it was asked to encode, and waits when told to."""

    has_chat_template = True
    response_initial_state = None
    has_thinking = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[str] = []
        self.free = threading.Event()
        self.free.set()
        self.reached = threading.Event()

    def __deepcopy__(self, _: object) -> Self:
        return self

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        if len(text) > 1000:
            self.reached.set()
            assert self.free.wait(20)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, *given: Any, tokenize: bool, **named: Any) -> Any:
        text = self._tokenizer.apply_chat_template(*given, tokenize=False, **named)
        return self.encode(text, add_special_tokens=False) if tokenize else text


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> Any:
    return load_tokenizer(checkpoint("llama"))


@pytest.fixture
def watched(tokenizer: Any) -> Watched:
    return Watched(tokenizer)


def run(watched: Any, work: Callable[[Prompts], Any], context: int = CONTEXT) -> Any:
    async def main() -> Any:
        prompts = Prompts(watched, context)
        try:
            return await work(prompts)
        finally:
            prompts.close()

    return asyncio.run(main())


def chat(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def tool(text: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "description": text, "parameters": {}}}


@pytest.mark.parametrize(
    ("work", "field"),
    [
        (lambda prompts: prompts.encode(HUGE), "prompt"),
        (lambda prompts: prompts.render(chat(HUGE)), "messages"),
        (lambda prompts: prompts.render(chat("x"), [tool(HUGE)]), "messages"),
        (lambda prompts: prompts.render(chat("") * 16_384), "messages"),
    ],
    ids=["text", "message", "tool", "messages"],
)
def test_what_cannot_fit_is_refused_at_the_cost_of_a_context(
    watched: Watched, work: Callable[[Prompts], Any], field: str
) -> None:
    with pytest.raises(RequestError) as caught:
        run(watched, work)
    assert (caught.value.reason, caught.value.field) == ("context_length_exceeded", field)
    # A token of this text has fewer than eight characters.
    assert sum(map(len, watched.encoded)) < 8 * 2 * CONTEXT


def test_what_may_fit_is_tokenised_as_it_is(tokenizer: Any) -> None:
    """On both sides of the measure, by the tokenizer and by its copy."""
    whole = template.encode(tokenizer, LONG)
    assert len(LONG) > 4 * CONTEXT // 2
    for context in (len(whole), CONTEXT, 1 << 20):
        for text in (LONG, LONG * (LONG_CHARACTERS // len(LONG) + 1)):
            exact = template.encode(tokenizer, text)
            if len(exact) <= context:
                assert run(tokenizer, lambda prompts, t=text: prompts.encode(t), context) == exact
                found = run(tokenizer, lambda prompts, t=text: prompts.render(chat(t)), 2 * context)
                assert found == template.render(tokenizer, chat(text))


def test_a_short_text_does_not_wait_for_a_long_one(watched: Watched) -> None:
    async def work(prompts: Prompts) -> None:
        watched.free.clear()
        long = asyncio.ensure_future(prompts.encode(HUGE))
        assert await asyncio.to_thread(watched.reached.wait, 20)
        async with asyncio.timeout(10):
            assert await prompts.encode("one two")
        watched.free.set()
        with pytest.raises(RequestError):
            await long

    run(watched, work)


def test_a_text_that_nobody_waits_for_is_dropped(watched: Watched) -> None:
    async def work(prompts: Prompts) -> None:
        watched.free.clear()
        running = asyncio.ensure_future(prompts.encode(HUGE))
        assert await asyncio.to_thread(watched.reached.wait, 20)
        queued = asyncio.ensure_future(prompts.encode("b" * LONG_CHARACTERS * 2))
        await asyncio.sleep(0)
        for one in (running, queued):
            one.cancel()
        await asyncio.wait({running, queued})
        watched.free.set()

    run(watched, work)
    assert watched.encoded == [HUGE[:PIECE]]
