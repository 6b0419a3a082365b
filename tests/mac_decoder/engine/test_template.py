"""Rendering conversations with the checkpoint's own template."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from mac_decoder.engine import template
from protocol.errors import RequestError
from tests.mac_decoder.engine.drive import running

ASK = {"role": "user", "content": "What is the weather in Paris?"}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Callable[..., Path]) -> Any:
    return load_tokenizer(checkpoint("llama"))


def text(tokenizer: Any, rendered: template.Rendered) -> str:
    return tokenizer.decode(list(rendered.tokens))


def test_a_conversation_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    rendered = template.render(tokenizer, [ASK])
    assert text(tokenizer, rendered).endswith("<|im_start|>assistant\n")
    assert rendered.initial_state == "normal"


def test_tools_and_their_calls_are_rendered(tokenizer: Any) -> None:
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    messages = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
        {"role": "tool", "content": "sunny", "tool_call_id": "1"},
    ]
    shown = text(tokenizer, template.render(tokenizer, messages, [TOOL]))
    assert '"get_weather"' in shown
    assert '"arguments": {"city": "Paris"}' in shown
    assert "sunny" in shown
    assert call["arguments"] == '{"city": "Paris"}'


def test_the_final_message_can_be_left_open(tokenizer: Any) -> None:
    messages = [ASK, {"role": "assistant", "content": "It is sunny"}]
    rendered = template.render(tokenizer, messages, continue_final=True)
    assert text(tokenizer, rendered).endswith("It is sunny")


def test_thoughts_that_are_open_are_the_initial_state(checkpoint: Callable[..., Path]) -> None:
    thinking = load_tokenizer(checkpoint("llama", reasoning=True))
    assert template.render(thinking, [ASK]).initial_state == "normal"
    opened = [ASK, {"role": "assistant", "content": "<think>Well"}]
    assert template.render(thinking, opened, continue_final=True).initial_state == "reasoning"
    closed = [ASK, {"role": "assistant", "content": "<think>Well</think>So"}]
    assert template.render(thinking, closed, continue_final=True).initial_state == "normal"


@pytest.mark.parametrize(
    "arguments",
    ["{", "[" * 100_000, '{"n": ' + "9" * 5000 + "}"],
    ids=["open", "deep", "long number"],
)
def test_arguments_that_are_not_json_are_refused(tokenizer: Any, arguments: str) -> None:
    calls = [{"function": {"name": "f", "arguments": arguments}}]
    with pytest.raises(RequestError) as caught:
        template.render(tokenizer, [ASK, {"role": "assistant", "tool_calls": calls}])
    assert caught.value.reason == "tool_arguments_invalid"


def test_arguments_too_deep_for_a_template_are_refused(tokenizer: Any) -> None:
    """They are JSON that can be read, and more than can be written again."""
    nested: Any = 1
    for _ in range(900):
        nested = [nested]
    calls = [{"function": {"name": "f", "arguments": {"deep": nested}}}]
    with pytest.raises(RequestError) as caught:
        template.render(tokenizer, [ASK, {"role": "assistant", "tool_calls": calls}])
    assert caught.value.reason == "template_failed"


def test_a_template_that_refuses_says_so_without_the_prompt(tokenizer: Any) -> None:
    nameless = {"role": "assistant", "content": "secret", "tool_calls": [{"function": {}}]}
    with pytest.raises(RequestError) as caught:
        template.render(tokenizer, [ASK, nameless])
    assert caught.value.reason == "template_failed"
    assert "secret" not in str(caught.value.details())


def test_the_engine_renders_off_the_loop(checkpoint: Callable[..., Path], tokenizer: Any) -> None:
    async def main() -> None:
        async with running(checkpoint("llama")) as engine:
            several = await asyncio.gather(*(engine.render([ASK]) for _ in range(5)))
            assert set(several) == {template.render(tokenizer, [ASK])}
            assert await engine.encode("one two") == template.encode(tokenizer, "one two")

    asyncio.run(main())
