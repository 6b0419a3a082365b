"""Rendering conversations with the checkpoint's own template."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_tokenizer

from mac_decoder.engine import template
from protocol.errors import RequestError
from tests.mac_decoder.engine.drive import running
from tests.tiny_tokenizer import think

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


# -- where other prompts will share this one


def shared(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


@pytest.fixture(scope="module")
def thinking(checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(checkpoint("llama", reasoning=True), path)
    think(path)
    return load_tokenizer(path)


CHAT = [
    {"role": "system", "content": "Answer in one word, about the weather, in any town."},
    ASK,
]


def test_a_turn_ends_where_the_next_one_goes_on(thinking: Any) -> None:
    """The next turn drops the thoughts that this one begins with: it parts before them."""
    rendered = template.render(thinking, CHAT)
    answer = {"role": "assistant", "content": "<think>\nIt may rain.\n</think>\nSunny"}
    following = template.render(thinking, [*CHAT, answer, {"role": "user", "content": "And Oslo?"}])
    parted = shared(rendered.tokens, following.tokens)
    assert parted < len(rendered.tokens) - 1
    assert text(thinking, template.Rendered(rendered.tokens[:parted])).endswith("assistant\n")
    assert parted in rendered.turns
    assert rendered.next_turn == parted
    # And where the turn after that parts from the next one, whose thoughts it drops in turn.
    assert shared(following.tokens, rendered.tokens) == parted


@pytest.mark.parametrize("which", ["tokenizer", "thinking"])
def test_another_last_message_goes_on_from_before_it(
    which: str, request: pytest.FixtureRequest
) -> None:
    chosen = request.getfixturevalue(which)
    rendered = template.render(chosen, CHAT)
    edited = template.render(chosen, [CHAT[0], {"role": "user", "content": "How far is Oslo?"}])
    assert shared(rendered.tokens, edited.tokens) in rendered.turns


def test_without_thoughts_the_next_turn_shares_the_whole_prompt(tokenizer: Any) -> None:
    """Then N-1 is where it goes on, which is kept anyway."""
    rendered = template.render(tokenizer, CHAT)
    assert all(position < len(rendered.tokens) for position in rendered.turns)
    assert rendered.next_turn == 0
    following = [*CHAT, {"role": "assistant", "content": "Sunny"}, ASK]
    assert shared(rendered.tokens, template.render(tokenizer, following).tokens) == len(
        rendered.tokens
    )


def test_a_template_that_refuses_what_is_only_imagined_has_no_turns(tokenizer: Any) -> None:
    strict = copy.deepcopy(tokenizer)
    strict.chat_template = (
        "{%- if messages | length > 1 %}{{- raise_exception('one message only') }}{%- endif %}"
        "{{- messages[0].content }}"
    )
    assert template.render(strict, [ASK]).turns in ((), (1,))


def test_an_open_last_message_has_no_turns(tokenizer: Any) -> None:
    messages = [ASK, {"role": "assistant", "content": "It is sunny"}]
    assert template.render(tokenizer, messages, continue_final=True).turns == ()
