"""``POST /v1/chat/completions``: a conversation in, the next message out."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from mac_decoder.api.choice import CallMarks, Choice, Delta
from mac_decoder.api.generation import generation, require_choices, wish
from mac_decoder.api.logprobs import chat_entry
from mac_decoder.api.schemas import ChatMessage, ChatRequest, Part, ignored_parameters, parsed
from mac_decoder.api.service import Record, Service
from mac_decoder.api.stream import Answer, Answered, Job
from mac_decoder.api.tools import Parser, ToolCall, ToolPlan, opening, plan_tools
from mac_decoder.engine.template import Rendered
from mac_decoder.engine.text import TOOL, TokenText
from protocol.errors import RequestError

_TEMPLATE_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
"""Names that are not the template's variables but the renderer's own parameters."""


async def answer(service: Service, record: Record, body: bytes) -> Answer:
    """Check a request, render its conversation, and return the response that will run it."""
    request = await parsed(ChatRequest, body)
    record.streamed = request.streamed
    service.require_model(request.model)
    _refuse_formats(request)
    texts = await service.text()
    tokenizer = service.loaded.tokenizer
    plan = plan_tools(request, tokenizer)
    wished = wish(service, request, _top_logprobs(request))
    require_choices(service, wished.choices, "n")
    ignored = ignored_parameters(request)
    rendered, given = await _render(service, request, plan, ignored)
    record.prompt_tokens = len(rendered.tokens)
    limit = _limit(service, request, len(rendered.tokens))
    marks = None
    if plan.tools:
        start, end = str(tokenizer.tool_call_start), str(tokenizer.tool_call_end or "")
        marks = CallMarks(cast(Parser, tokenizer.tool_parser), start, end, plan, given)
    jobs = []
    for number in range(wished.choices):
        reader = texts.reader(
            section=TOOL if plan.required else rendered.initial_state,
            stops=request.stops,
            tools=bool(plan.tools),
        )
        choice = Choice(number, reader, marks, logprobs=wished.top_logprobs is not None)
        ahead = rendered.turns, rendered.next_turn
        wanted = generation(service, wished, record, rendered.tokens, number, limit, *ahead)
        jobs.append(Job(choice, wanted))
    return Answer(
        service,
        record,
        ChatForm(
            record.id,
            service,
            texts,
            with_usage=request.with_usage,
            logprobs=wished.top_logprobs is not None,
        ),
        jobs,
        streamed=request.streamed,
        with_usage=request.with_usage,
        ignored=ignored,
    )


class ChatForm:
    """Chat completions, whole and in chunks."""

    def __init__(
        self, name: str, service: Service, texts: TokenText, *, with_usage: bool, logprobs: bool
    ) -> None:
        self._texts = texts
        self._logprobs = logprobs
        self._calls: dict[int, int] = {}
        self._head = {
            "id": name,
            "created": int(time.time()),
            "model": service.served_name,
            "system_fingerprint": service.fingerprint,
        }
        self._chunk: dict[str, Any] = {"object": "chat.completion.chunk", **self._head}
        if with_usage:
            self._chunk["usage"] = None

    def first(self, choice: Choice) -> list[dict[str, Any]]:
        """The chunk with the role."""
        return [self._one(choice, {"role": "assistant", "content": ""})]

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """A chunk for text, two for a call: its name first, then its arguments."""
        told: list[dict[str, Any]] = []
        if delta.reasoning:
            told.append({"reasoning_content": delta.reasoning})
        if delta.content or (delta.entries and not delta.reasoning):
            told.append({"content": delta.content})
        chunks = [self._one(choice, change) for change in told]
        if delta.entries:
            chunks[-1]["choices"][0]["logprobs"] = self._content(delta)
        for call in delta.calls:
            number = self._calls.get(choice.index, 0)
            self._calls[choice.index] = number + 1
            head = {**_call(call), "index": number}
            head["function"] = {"name": call.name, "arguments": ""}
            rest = {"index": number, "function": {"arguments": call.arguments}}
            chunks += [self._one(choice, {"tool_calls": [part]}) for part in (head, rest)]
        return chunks

    def last(self, choice: Choice) -> dict[str, Any]:
        """The chunk with the reason why the choice ended."""
        chunk = self._one(choice, {})
        chunk["choices"][0]["finish_reason"] = choice.finish_reason
        return chunk

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that has no choices."""
        return {**self._chunk, "choices": [], "usage": usage}

    def whole(self, answers: Sequence[Answered], usage: dict[str, Any]) -> dict[str, Any]:
        """The ``chat.completion`` object."""
        choices = [self._answered(answered) for answered in answers]
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": usage}

    def _one(self, choice: Choice, change: dict[str, Any]) -> dict[str, Any]:
        one = {"index": choice.index, "delta": change, "logprobs": None, "finish_reason": None}
        return {**self._chunk, "choices": [one]}

    def _content(self, delta: Delta) -> dict[str, Any]:
        entries = [chat_entry(entry, self._texts) for entry in delta.entries]
        return {"content": entries, "refusal": None}

    def _answered(self, answered: Answered) -> dict[str, Any]:
        choice, deltas = answered.choice, answered.deltas
        content = "".join(delta.content for delta in deltas)
        reasoning = "".join(delta.reasoning for delta in deltas)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if choice.calls:
            message["content"] = content or None
            message["tool_calls"] = [_call(call) for call in choice.calls]
        logprobs = None
        if self._logprobs:
            entries = tuple(entry for delta in deltas for entry in delta.entries)
            logprobs = self._content(Delta(entries=entries))
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _refuse_formats(request: ChatRequest) -> None:
    if request.response_format is not None and request.response_format.type != "text":
        raise RequestError(
            "only response_format text is supported; decoding is not constrained",
            reason="response_format_unsupported",
            field="response_format",
        )


def _top_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs is not None:
        raise RequestError(
            "top_logprobs needs logprobs", reason="invalid_value", field="top_logprobs"
        )
    return None


def _limit(service: Service, request: ChatRequest, prompt: int) -> int:
    """The number of tokens to generate at most; the context's end is one limit of them."""
    room = service.room_for(prompt, "messages")
    newer, older = request.max_completion_tokens, request.max_tokens
    if newer is not None and older is not None and newer != older:
        raise RequestError(
            "max_tokens and max_completion_tokens differ",
            reason="invalid_value",
            field="max_tokens",
        )
    asked = newer or older or service.settings.default_max_tokens
    return room if asked is None else min(asked, room)


async def _render(
    service: Service, request: ChatRequest, plan: ToolPlan, ignored: list[str]
) -> tuple[Rendered, str]:
    """The prompt, and the text of the call's beginning with which it ends, marker left out."""
    tokenizer = service.loaded.tokenizer
    source = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    options = _template_options(request, source, ignored)
    if plan.required:
        options["enable_thinking"] = False
    messages = [
        _message(message, f"messages[{index}]", source)
        for index, message in enumerate(request.messages)
    ]
    rendered = await service.engine.render(messages, list(plan.tools) or None, options)
    begun = opening(plan, tokenizer)
    if not begun:
        return rendered, ""
    if rendered.initial_state != "normal":
        raise RequestError(
            "this model's answers begin with reasoning, so a call cannot be begun for it",
            reason="tool_choice_unsupported",
            field="tool_choice",
        )
    extra = await service.engine.encode(begun, special=False)
    prompt = replace(rendered, tokens=rendered.tokens + extra)
    return prompt, begun.removeprefix(str(tokenizer.tool_call_start))


def _template_options(request: ChatRequest, source: str, ignored: list[str]) -> dict[str, Any]:
    """Variables of the template: the client's own, and what ``reasoning_effort`` means."""
    options: dict[str, Any] = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        scalar = value is None or isinstance(value, (bool, int, float, str))
        if name in _TEMPLATE_RESERVED or not name.isidentifier() or not scalar:
            raise RequestError(
                "chat_template_kwargs are variables of the template with plain values",
                reason="invalid_value",
                field="chat_template_kwargs",
            )
        options[name] = value
    effort = request.reasoning_effort
    if effort == "none":
        options.setdefault("enable_thinking", False)
    elif effort is not None and "reasoning_effort" in source:
        options.setdefault("reasoning_effort", effort)
    elif effort is not None:
        ignored.append("reasoning_effort")
    if any(tool.function is not None and tool.function.strict for tool in request.tools or ()):
        ignored.append("tools.function.strict")
    return options


def _message(message: ChatMessage, name: str, template: str) -> dict[str, Any]:
    """A message as templates expect it.

    ``developer`` is ``system`` to templates that do not know it. Raises ``RequestError``:
    ``unsupported_modality`` for parts that are not text, ``invalid_value`` for a message
    that lacks what its role needs.
    """
    role: str = message.role
    if role == "developer" and "developer" not in template:
        role = "system"
    calls = message.tool_calls if role == "assistant" else None
    if message.content is None and role != "assistant":
        raise RequestError(
            "this message needs content", reason="invalid_value", field=f"{name}.content"
        )
    if role == "tool" and message.tool_call_id is None:
        raise RequestError(
            "a tool's message needs tool_call_id",
            reason="missing_parameter",
            field=f"{name}.tool_call_id",
        )
    found: dict[str, Any] = {"role": role, "content": _text(message.content, f"{name}.content")}
    optional: Mapping[str, Any] = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_calls": [call.model_dump() for call in calls] if calls else None,
    }
    return found | {key: value for key, value in optional.items() if value is not None}


def _text(content: str | list[Part] | None, name: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in ("text", "input_text", "output_text", "refusal"):
            raise RequestError(
                "only text is read: pictures, sound and files are no part of a cache's identity",
                reason="unsupported_modality",
                field=f"{name}[{index}].type",
            )
        if text is None:
            raise RequestError(
                "this part has no text", reason="missing_parameter", field=f"{name}[{index}].text"
            )
        texts.append(text)
    return "".join(texts)
