"""From messages to token ids: the chat template, and the state in which the answer starts.

Blocking and CPU-heavy; the engine runs it in a thread of its own, one call at a time, since
tokenizers are not safe to share between threads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import jinja2

from protocol.errors import RequestError

InitialState = Literal["normal", "reasoning"]

# A template sees arbitrary messages and raises what its author did not foresee.
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


@dataclass(frozen=True)
class Rendered:
    """A prompt in token ids, and where the model's answer starts: in its thoughts or not.

    ``turns`` are positions up to which other prompts are expected to share this one: the next
    turn of the conversation, and another last message. ``next_turn`` is the first of these,
    0 where all of this prompt will be shared, or nothing is known. They are guesses, good for
    choosing where to keep a cut and for nothing else.
    """

    tokens: tuple[int, ...]
    initial_state: str = "normal"
    turns: tuple[int, ...] = ()
    next_turn: int = 0


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    continue_final: bool = False,
) -> Rendered:
    """Render a conversation with the checkpoint's own chat template.

    ``tokenizer`` is mlx-lm's wrapper; ``messages`` and ``tools`` are OpenAI's, contents as text;
    ``options`` are further variables of the template (``enable_thinking``, ...). With
    ``continue_final`` the last message is left open for the model to go on with.

    Raises ``RequestError``: ``tool_arguments_invalid`` for arguments that are not JSON,
    ``template_missing``, and ``template_failed`` where the template itself refuses the
    conversation.
    """
    asked = (tokenizer, messages, tools, options)
    tokens = tuple(_applied(*asked, continue_final=continue_final, tokenize=True))
    following, edited = (0, 0) if continue_final else _turns(*asked, tokens)
    turns = tuple(sorted({following, edited} - {0}))
    return Rendered(tokens, _initial_state(tokenizer, tokens), turns, following)


def written(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    continue_final: bool = False,
) -> str:
    """The text that :func:`render` tokenises; raises what it raises."""
    asked = (tokenizer, messages, tools, options)
    return str(_applied(*asked, continue_final=continue_final, tokenize=False))


def _turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    tokens: tuple[int, ...],
) -> tuple[int, int]:
    """Where prompts that are likely to follow part from this one: the conversation's next turn,
    and another last message. 0 where they do not, or no position is known.

    Templates rewrite what lies behind: a reasoning model's thoughts are dropped from earlier
    turns, say. So the prompts themselves are rendered, with one letter for what is not known
    yet, and compared with this one.
    """
    answered = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]
    edited = [*messages[:-1], {"role": "user", "content": _OTHER}]
    asked = bool(messages) and messages[-1].get("role") == "user"
    text = written(tokenizer, messages, tools, options)

    def parting(other: Sequence[Mapping[str, Any]]) -> int:
        try:
            theirs = written(tokenizer, other, tools, options)
        except RequestError:
            # A template that refuses what was only imagined: no position is known then.
            return 0
        position = _position(tokenizer, text, _common(text, theirs), tokens)
        return position if position < len(tokens) else 0

    return parting(answered), parting(edited) if asked else 0


def _common(ours: str, theirs: str) -> int:
    """The length of the longest common prefix, by halving."""
    known, most = 0, min(len(ours), len(theirs))
    while known < most:
        middle = (known + most + 1) // 2
        if ours[known:middle] == theirs[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known


def _position(tokenizer: Any, text: str, characters: int, tokens: tuple[int, ...]) -> int:
    """How many of ``tokens``, which are ``text``, make up its first ``characters``.

    0 where no token ends there. Only the shorter side is tokenised again.
    """
    before = characters < len(text) - characters
    side = text[:characters] if before else text[characters:]
    part = encode(tokenizer, side, special=False) if side else ()
    if before:
        return len(part) if tokens[: len(part)] == part else 0
    start = len(tokens) - len(part)
    return start if start >= 0 and tokens[start:] == part else 0


_OTHER: Final = "\u0007"
"""A message that begins like no other."""


def encode(tokenizer: Any, text: str, *, special: bool = True) -> tuple[int, ...]:
    """The token ids of a text: with the tokenizer's own special tokens, as a raw completion
    prompt has them, or without, as the continuation of a rendered one.
    """
    return tuple(tokenizer.encode(text, add_special_tokens=special))


def _applied(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any] | None,
    *,
    continue_final: bool,
    tokenize: bool,
) -> Any:
    if not tokenizer.has_chat_template:
        raise RequestError(
            "this checkpoint has no chat template; use /v1/completions",
            reason="template_missing",
            field="messages",
        )
    prepared = [_prepared(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(
            prepared,
            tools=[dict(tool) for tool in tools] if tools else None,
            add_generation_prompt=not continue_final,
            continue_final_message=continue_final,
            tokenize=tokenize,
            **dict(options or {}),
        )
    except _TEMPLATE_ERRORS as error:
        raise RequestError(
            "the model's chat template refuses this conversation",
            reason="template_failed",
            field="messages",
            found=type(error).__name__,
        ) from error


def _initial_state(tokenizer: Any, tokens: Sequence[int]) -> str:
    """As mlx-lm's server decides: thoughts that were opened and not closed are still open."""
    if tokenizer.response_initial_state:
        return str(tokenizer.response_initial_state)
    if tokenizer.has_thinking:
        opened = tokenizer.rfind_think_start(tokens)
        if opened > tokenizer.rfind_think_end(tokens):
            return "reasoning"
    return "normal"


def _prepared(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates expect it: with content, tool arguments as objects."""
    prepared = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = [_prepared_call(call) for call in calls]
    return prepared


def _prepared_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _parsed(function["arguments"])
    return {**call, "function": function}


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        # Besides texts that are no JSON: numbers of thousands of digits, and deep nesting.
        raise RequestError(
            "a tool call's arguments are not JSON that can be read",
            reason="tool_arguments_invalid",
            field="messages.tool_calls.function.arguments",
        ) from error
