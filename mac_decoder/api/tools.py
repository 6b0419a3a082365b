"""Tool calls: what a request may ask for, and from a section of generated text to calls.

The text of a call is read by mlx-lm's parser for the model's family. A text that the parser
cannot read is never dropped and never mended: it goes to the client as the text that it is.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mac_decoder.api.schemas import ChatRequest, NamedChoice, Tool
from protocol.errors import RequestError

Parser = Callable[[str, Any], Any]

# What mlx-lm's parsers raise over a text that is no call in their form.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, SyntaxError, RecursionError)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class ToolPlan:
    """What one request may do with tools.

    ``tools`` are rendered into the prompt; empty: calls are not looked for. With ``required``
    the answer must be a call, of ``only`` where that names a function: the prompt then ends
    with the call's :func:`opening`. With ``single`` the answer ends after a call.
    """

    tools: tuple[dict[str, Any], ...] = ()
    required: bool = False
    only: str | None = None
    single: bool = False


def plan_tools(request: ChatRequest, tokenizer: Any) -> ToolPlan:
    """Check ``tools`` and ``tool_choice`` against each other and against the model.

    Raises ``RequestError``: ``tool_type_unsupported``, ``tools_unsupported`` where mlx-lm has
    no parser for the model's calls, ``tool_choice_unsupported``, ``tool_not_found``.
    """
    tools = tuple(_function(tool, index) for index, tool in enumerate(request.tools or ()))
    choice = request.tool_choice
    if choice is None:
        choice = "auto"
    if choice == "none":
        return ToolPlan()
    if not tools:
        if choice != "auto":
            raise RequestError(
                "tool_choice needs tools", reason="invalid_value", field="tool_choice"
            )
        return ToolPlan()
    if not tokenizer.has_tool_calling:
        raise RequestError(
            "this model has no tool calls that mlx-lm can read",
            reason="tools_unsupported",
            field="tools",
            hint='send tool_choice "none" to go on without',
        )
    only = _named(choice, tools) if isinstance(choice, NamedChoice) else None
    plan = ToolPlan(tools, choice != "auto", only, request.parallel_tool_calls is False)
    if plan.required:
        opening(plan, tokenizer)
    return plan


def opening(plan: ToolPlan, tokenizer: Any) -> str:
    """The text of a call's beginning with which the prompt must end; empty: the model chooses.

    Decoding is not constrained, so a choice is enforced by beginning the call for the model.
    Raises ``RequestError`` ``tool_choice_unsupported`` where the form of a call that is begun
    with a name is not known for the model's family.
    """
    if not plan.required:
        return ""
    family = tokenizer.init_kwargs.get("tool_parser_type")
    start = str(tokenizer.tool_call_start)
    if family in ("json_tools", "qwen3_coder"):
        start += "\n"
    if plan.only is None:
        return start
    if family == "json_tools":
        return f'{start}{{"name": {json.dumps(plan.only)}, "arguments":'
    if family == "qwen3_coder":
        return f"{start}<function={plan.only}>\n"
    raise RequestError(
        "this model cannot be held to one function; decoding is not constrained",
        reason="tool_choice_unsupported",
        field="tool_choice",
    )


def read_calls(parser: Parser, text: str, plan: ToolPlan) -> list[ToolCall]:
    """The calls in ``text``, a tool section without its markers; empty if it cannot be read."""
    try:
        found = parser(text, list(plan.tools))
        calls = [_call(one) for one in (found if isinstance(found, list) else [found])]
    except _UNREADABLE:
        return []
    if any(_is_placeholder(call, plan) for call in calls):
        return []
    if plan.only is not None and any(call.name != plan.only for call in calls):
        return []
    return calls[:1] if plan.single else calls


def _call(found: Mapping[str, Any]) -> ToolCall:
    """One parsed call; raises what ``_UNREADABLE`` lists where it is none."""
    name, arguments = found["name"], found.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    name.encode()
    if isinstance(arguments, str):
        # Some models write the arguments as JSON inside a string.
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are not an object")
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not text.isascii() and _has_surrogates(text):
        text = json.dumps(arguments)
    return ToolCall(f"call_{secrets.token_hex(12)}", name, text)


def _is_placeholder(call: ToolCall, plan: ToolPlan) -> bool:
    """Whether this is what mlx-lm's GLM parser makes of a text that it cannot read."""
    known = any(tool["function"]["name"] == call.name for tool in plan.tools)
    return call.name == "unknown" and not known and list(json.loads(call.arguments)) == ["raw"]


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _function(tool: Tool, index: int) -> dict[str, Any]:
    """The tool as chat templates expect it."""
    if tool.type != "function" or tool.function is None:
        raise RequestError(
            "only tools of type function are supported",
            reason="tool_type_unsupported",
            field=f"tools[{index}].type",
        )
    function: dict[str, Any] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _named(choice: NamedChoice, tools: Sequence[Mapping[str, Any]]) -> str:
    if choice.type != "function" or choice.function is None:
        raise RequestError(
            "tool_choice can be none, auto, required or one function",
            reason="tool_choice_unsupported",
            field="tool_choice",
        )
    name = choice.function.name
    if all(tool["function"]["name"] != name for tool in tools):
        raise RequestError(
            "tool_choice names a function that is not among the tools",
            reason="tool_not_found",
            field="tool_choice",
        )
    return name
