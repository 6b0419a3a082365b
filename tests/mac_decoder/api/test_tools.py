"""Tools: calls told whole and streamed, what may be chosen, and text that is no call."""

from __future__ import annotations

import importlib
import json
import pkgutil
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm import tool_parsers
from mlx_lm.tool_parsers import (
    glm47,
    json_tools,
    kimi_k2,
    mistral,
    pythonic,
    qwen3_coder,
)

from mac_decoder.api.tools import ToolPlan, read_calls
from tests.mac_decoder.api.answers import chat, checked_chat, ends, joined, refused, streamed
from tests.mac_decoder.api.recital import Recital

PATH = "/v1/chat/completions"

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]


def asked(recital: Recital, script: str, **fields: Any) -> dict[str, Any]:
    return chat(logit_bias=recital.bias(script), tools=TOOLS) | fields


def calls(http: httpx.Client, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """The calls of a whole answer, after comparing them with those of a stream."""
    payload = http.post(PATH, json=body).json()
    answer = checked_chat(payload)
    message = answer.choices[0].message
    found = []
    for call in message.tool_calls or []:
        assert call.type == "function"
        found.append((call.function.name, json.loads(call.function.arguments)))
    chunks = streamed(http, PATH, body)
    assert _streamed_calls(chunks) == found
    assert joined(chunks) == (message.content or "")
    assert ends(chunks) == {0: answer.choices[0].finish_reason}
    return found


def _streamed_calls(chunks: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            for part in choice["delta"].get("tool_calls", []):
                number = part["index"]
                if number not in names:
                    assert part["id"].startswith("call_")
                    assert part["type"] == "function"
                    names[number] = part["function"]["name"]
                    arguments[number] = ""
                arguments[number] += part["function"]["arguments"]
    return [(names[number], json.loads(arguments[number])) for number in sorted(names)]


def test_a_call_is_told_with_its_arguments(http: httpx.Client, recital: Recital) -> None:
    found = calls(http, asked(recital, "tool"))
    assert found == [("get_weather", {"city": "Paris", "note": "ü"})]


def test_the_text_before_a_call_is_the_answer_s(http: httpx.Client, recital: Recital) -> None:
    message = http.post(PATH, json=asked(recital, "tool")).json()["choices"][0]["message"]
    assert message["content"] == "I look. "


def test_several_calls_have_their_own_index_and_id(http: httpx.Client, recital: Recital) -> None:
    body = asked(recital, "two_tools")
    assert calls(http, body) == [("get_weather", {"city": "Oslo"}), ("get_time", {})]
    told = http.post(PATH, json=body).json()["choices"][0]["message"]["tool_calls"]
    assert len({call["id"] for call in told}) == 2


def test_without_parallel_calls_the_answer_ends_after_one(
    http: httpx.Client, recital: Recital
) -> None:
    body = asked(recital, "two_tools", parallel_tool_calls=False)
    assert calls(http, body) == [("get_weather", {"city": "Oslo"})]


def test_the_official_client_accumulates_a_streamed_call(
    client: openai.OpenAI, recital: Recital
) -> None:
    tool = {**WEATHER, "function": {**WEATHER["function"], "strict": True}}
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        tools=[tool],  # type: ignore[list-item]
        logit_bias=recital.bias("tool"),
    ) as stream:
        final = stream.get_final_completion()
    choice = final.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    assert json.loads(choice.message.tool_calls[0].function.arguments)["city"] == "Paris"
    assert final.model_extra is not None


def test_text_that_is_no_call_goes_to_the_client_as_it_is(
    http: httpx.Client, recital: Recital
) -> None:
    body = asked(recital, "bad_tool")
    assert calls(http, body) == []
    payload = http.post(PATH, json=body).json()
    assert payload["choices"][0]["message"]["content"] == (
        "<tool_call>no call at all</tool_call> sorry"
    )
    assert payload["choices"][0]["finish_reason"] == "stop"
    assert "tool_call_unreadable" in payload["baton"]["reasons"]


@pytest.mark.parametrize("limit", [2, 3, 4])
def test_a_call_cut_short_is_text_and_never_a_call(
    http: httpx.Client, recital: Recital, limit: int
) -> None:
    body = asked(recital, "tool", max_tokens=limit)
    assert calls(http, body) == []
    payload = http.post(PATH, json=body).json()
    assert payload["choices"][0]["finish_reason"] == "length"
    assert payload["choices"][0]["message"]["content"].startswith("I look. <tool_call>")
    assert "tool_call_cut" in payload["baton"]["reasons"]


def test_a_stop_string_inside_a_call_makes_it_text(http: httpx.Client, recital: Recital) -> None:
    body = asked(recital, "tool", stop="Paris")
    assert calls(http, body) == []
    assert http.post(PATH, json=body).json()["choices"][0]["finish_reason"] == "stop"


def test_with_none_the_marks_are_text_and_tools_are_not_in_the_prompt(
    http: httpx.Client, recital: Recital
) -> None:
    body = asked(recital, "tool", tool_choice="none")
    assert calls(http, body) == []
    payload = http.post(PATH, json=body).json()
    assert "<tool_call>" in payload["choices"][0]["message"]["content"]
    plain = http.post(PATH, json=chat(logit_bias=recital.bias("tool"))).json()
    assert payload["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_a_required_call_is_begun_for_the_model(http: httpx.Client, recital: Recital) -> None:
    body = asked(recital, "begun_call", tool_choice="required")
    assert calls(http, body) == [("get_time", {"zone": "UTC"})]


def test_a_named_function_is_begun_for_the_model(http: httpx.Client, recital: Recital) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = asked(recital, "given_name", tool_choice=choice)
    assert calls(http, body) == [("get_weather", {"city": "Rome"})]


def test_a_required_call_that_does_not_come_is_an_error(
    http: httpx.Client, recital: Recital
) -> None:
    body = asked(recital, "prose", tool_choice="required")
    refused(http.post(PATH, json=body), 500, "tool_call_missing")
    with http.stream("POST", PATH, json=body | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert json.loads(lines[-1][6:])["error"]["code"] == "tool_call_missing"
    assert "data: [DONE]" not in lines


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"tools": None, "tool_choice": "required"}, "invalid_value", "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "nobody"}}},
            "tool_not_found",
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
            "tool_choice_unsupported",
            "tool_choice",
        ),
        (
            {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
            "tool_type_unsupported",
            "tools[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "tool_type_unsupported", "tools[0].type"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "missing_parameter",
            "tools[0].function.name",
        ),
        ({"tool_choice": "sometimes"}, "invalid_value", "tool_choice"),
        ({"functions": [{"name": "f"}]}, "parameter_unsupported", "functions"),
        ({"function_call": "auto"}, "parameter_unsupported", "function_call"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    http: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    error = refused(http.post(PATH, json=chat(tools=TOOLS) | fields), 400, code)
    assert error["param"] == param


# -- one text of each family, through mlx-lm's parsers


PLAN = ToolPlan(tools=(WEATHER,))


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (json_tools, '\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'),
        (json_tools, '{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}'),
        (
            qwen3_coder,
            "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n",
        ),
        (glm47, "get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"),
        (mistral, 'get_weather[ARGS]{"city": "Paris"}'),
        (pythonic, '[get_weather(city="Paris")]'),
        (
            kimi_k2,
            "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
            '{"city": "Paris"}<|tool_call_end|>',
        ),
    ],
)
def test_calls_of_every_family_have_one_form(parser: Any, text: str) -> None:
    (call,) = read_calls(parser.parse_tool_call, text, PLAN)
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "7",
        "null",
        "[]",
        "[[]]",
        '{"arguments": {}}',
        '{"name": 7}',
        '{"name": ""}',
        '{"name": "f", "arguments": []}',
        '{"name": "f", "arguments": "nonsense"}',
        '{"name": "f", "arguments": {"x": NaN}}',
        '{"name": "\\ud800", "arguments": {}}',
        "[" * 100_000,
    ],
)
def test_a_text_that_is_no_call_gives_none(text: str) -> None:
    assert read_calls(json_tools.parse_tool_call, text, PLAN) == []


FAMILIES = [name for _, name, _ in pkgutil.iter_modules(tool_parsers.__path__)]

SHREDS = st.lists(
    st.sampled_from(
        [
            "<function=f>",
            "</function>",
            "<parameter=city>",
            "</parameter>",
            "<arg_key>",
            "</arg_key>",
            "<arg_value>",
            "call:f{",
            "<escape>",
            "[ARGS]",
            "[f(",
            "x=1",
            "city:",
            ")]",
            '{"name": "f", "arguments": ',
            '{"x": 1}',
            "}",
            "[",
            "]",
            ",",
            "unknown",
            "functions.f:0<|tool_call_argument_begin|>",
            '<invoke name="f">',
            '<param name="x">',
            '<atem:invoke name="f">',
            "\x00",
            "\ud800",
            "1e999",
            "\n",
        ]
    )
    | st.text(max_size=4),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("family", FAMILIES)
@given(text=SHREDS)
def test_no_text_breaks_a_parser_s_reading(family: str, text: str) -> None:
    parser = importlib.import_module(f"mlx_lm.tool_parsers.{family}").parse_tool_call
    for call in read_calls(parser, text, PLAN):
        assert call.name
        assert isinstance(json.loads(call.arguments), dict)
        call.arguments.encode()


def test_what_the_glm_parser_cannot_read_is_no_call() -> None:
    assert read_calls(glm47.parse_tool_call, "", PLAN) == []
    tools = ({"type": "function", "function": {"name": "unknown"}},)
    assert len(read_calls(glm47.parse_tool_call, "unknown raw=1", ToolPlan(tools))) == 1


def test_letters_stay_letters_and_half_of_one_is_escaped() -> None:
    (call,) = read_calls(
        json_tools.parse_tool_call, '{"name": "f", "arguments": {"x": "ü"}}', ToolPlan()
    )
    assert call.arguments == '{"x": "ü"}'
    (call,) = read_calls(
        json_tools.parse_tool_call, '{"name": "f", "arguments": {"x": "\\ud800"}}', ToolPlan()
    )
    assert call.arguments == '{"x": "\\ud800"}'


def test_a_call_of_another_function_than_the_named_one_is_none() -> None:
    plan = ToolPlan(tools=(WEATHER, TIME), required=True, only="get_time")
    text = '{"name": "get_weather", "arguments": {}}'
    assert read_calls(json_tools.parse_tool_call, text, plan) == []
