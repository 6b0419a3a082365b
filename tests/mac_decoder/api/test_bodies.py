"""No body, however wrong, is more than a refusal."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import ErrorObject

from mac_decoder.api import schemas
from mac_decoder.api.schemas import REFUSED, THREAD_BYTES, ChatRequest, TextRequest, parse
from protocol.errors import RequestError
from tests.mac_decoder.api.answers import chat, text
from tests.ordinary import usual

QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.sampled_from(["user", "assistant", "tool", "system", "text", "function", "auto", "tiny"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "function", "name", "arguments", "tool_calls"]
            )
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)

CHAT_FIELDS = [
    *ChatRequest.model_fields,
    *REFUSED,
    "modalities",
    "verbosity",
]
TEXT_FIELDS = [*TextRequest.model_fields]


def check(response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        error = ErrorObject.model_validate(response.json()["error"], strict=True)
        assert error.code
        assert error.message


@QUICK
@given(fields=st.dictionaries(st.sampled_from(CHAT_FIELDS), JSON, min_size=1, max_size=2))
def test_any_value_of_any_chat_parameter(http: httpx.Client, fields: dict[str, Any]) -> None:
    check(http.post("/v1/chat/completions", json=chat(max_tokens=2) | fields))


@QUICK
@given(fields=st.dictionaries(st.sampled_from(TEXT_FIELDS), JSON, min_size=1, max_size=2))
def test_any_value_of_any_completion_parameter(http: httpx.Client, fields: dict[str, Any]) -> None:
    check(http.post("/v1/completions", json=text(max_tokens=2) | fields))


MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "developer", "user", "assistant", "tool"])},
    optional={
        "content": JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON})),
        "name": JSON,
        "tool_call_id": JSON,
        "tool_calls": JSON
        | st.lists(
            st.fixed_dictionaries(
                {
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries({"name": st.just("f"), "arguments": JSON}),
                }
            ),
            max_size=2,
        ),
        "reasoning_content": JSON,
    },
)


@QUICK
@given(messages=st.lists(MESSAGE, min_size=1, max_size=3), tools=st.none() | JSON)
def test_any_messages(http: httpx.Client, messages: list[Any], tools: Any) -> None:
    check(
        http.post("/v1/chat/completions", json=chat(messages=messages, tools=tools, max_tokens=2))
    )


@QUICK
@given(body=st.binary(max_size=64))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_any_bytes(http: httpx.Client, path: str, body: bytes) -> None:
    check(http.post(path, content=body))


@QUICK
@given(
    prompt=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40),
    stops=st.lists(st.text("ablrun ,!", min_size=1, max_size=3), max_size=4),
    limit=st.integers(1, 6),
)
def test_any_prompt_is_answered_and_no_stop_string_is_told(
    http: httpx.Client, prompt: str, stops: list[str], limit: int
) -> None:
    body = text(prompt, stop=stops, max_tokens=limit, temperature=1.5, seed=1)
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found = response.json()["choices"][0]["text"]
    assert not any(stop in found for stop in stops)


LONGEST = 16 << 20

CHAT_HEAD = '{"model": "tiny", "messages": [{"role": "user", "content": "x"}], '
CALLS = '{"model": "tiny", "messages": [{"role": "assistant", "tool_calls": ['
PARTS = '{"model": "tiny", "messages": [{"role": "user", "content": ['
SERVED = "served"
TEXT_HEAD = '{"model": "tiny", "prompt": ['

HUGE: dict[str, tuple[type[Any], str, Callable[[int], str], str, str | None]] = {
    "biases": (
        ChatRequest,
        CHAT_HEAD + '"logit_bias": {',
        lambda n: f'"{n}": 200,',
        '"0": 0}}',
        "logit_bias",
    ),
    "messages": (
        ChatRequest,
        '{"model": "tiny", "messages": [',
        lambda _: '{"role":"user","content":"x"},',
        '{"role":"user","content":"x"}]}',
        None,
    ),
    "parts": (ChatRequest, PARTS, lambda _: '{"type":"text","text":"x"},', "{}]}]}", None),
    "calls": (ChatRequest, CALLS, lambda _: '{"function":{"name":"f"}},', "{}]}]}", None),
    "variables": (
        ChatRequest,
        CHAT_HEAD + '"chat_template_kwargs": {',
        lambda n: f'"a{n}": 1,',
        '"b": 1}}',
        "chat_template_kwargs",
    ),
    "ids": (TextRequest, TEXT_HEAD, lambda _: "1,", "1]}", SERVED),
    "negative": (TextRequest, TEXT_HEAD, lambda _: "1,", "-1]}", "prompt"),
    "lists": (TextRequest, TEXT_HEAD, lambda _: "[1],", "[1]]}", None),
    "nested": (TextRequest, TEXT_HEAD, lambda _: "[[1]],", "[1]]}", None),
    "texts": (TextRequest, TEXT_HEAD, lambda _: '"x",', '"x"]}', SERVED),
    "mixed": (TextRequest, TEXT_HEAD, lambda _: '"x",', "1]}", "prompt"),
}


@pytest.mark.parametrize("kind", usual(HUGE, ("biases", "messages", "ids", "negative", "nested")))
def test_a_body_as_long_as_allowed_is_read_soon(kind: str) -> None:
    """Processor time, so that a busy machine fails nothing: about one second is usual."""
    model, start, item, end, field = HUGE[kind]
    room = LONGEST - 128 - len(start) - len(end)
    if item(1) == item(2):
        items = item(1) * (room // len(item(1)) + 1)
    else:
        made, size = list[str](), 0
        while size < room:
            made.append(item(len(made) + 1))
            size += len(made[-1])
        items = "".join(made)
    body = (start + items + end).encode()
    began = time.thread_time()
    if field == SERVED:
        parse(model, body)
    else:
        with pytest.raises(RequestError) as caught:
            parse(model, body)
        assert caught.value.field == field
    assert time.thread_time() - began < 4


def few(messages: int, parts: int) -> bytes:
    content = [{"type": "text", "text": "x"}] * parts
    return json.dumps(chat(messages=[{"role": "user", "content": content}] * messages)).encode()


@pytest.mark.parametrize(
    ("most", "more"),
    [((16_384, 0), (16_385, 0)), ((100, 162), (101, 162)), ((1, 16_383), (1, 16_384))],
)
def test_as_many_messages_and_parts_as_allowed(
    most: tuple[int, int], more: tuple[int, int]
) -> None:
    parse(ChatRequest, few(*most))
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, few(*more))
    assert (caught.value.reason, caught.value.field) == ("invalid_value", "messages")


@pytest.mark.parametrize("tail", ['"', "", "\\", '\\"'])
def test_brackets_in_a_text_are_no_lists(tail: str) -> None:
    """Nor is a text that never ends a reason to search it again and again."""
    text = r"[{[{\"" * 200_000
    body = (CHAT_HEAD + '"user": "' + text + tail).encode()
    began = time.thread_time()
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, body)
    assert caught.value.reason == "invalid_json"
    assert time.thread_time() - began < 4
    parse(ChatRequest, (CHAT_HEAD + '"user": "' + text + '"}').encode())


def test_as_many_biases_as_allowed() -> None:
    biases = {str(token): 1.0 for token in range(300)}
    parse(ChatRequest, json.dumps(chat(logit_bias=biases)).encode())
    with pytest.raises(RequestError) as caught:
        parse(ChatRequest, json.dumps(chat(logit_bias={**biases, "300": 1.0})).encode())
    assert caught.value.field == "logit_bias"


@pytest.mark.parametrize(("length", "aside"), [(100, False), (THREAD_BYTES, True)])
def test_a_long_body_is_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, length: int, aside: bool
) -> None:
    threads: list[int] = []

    def watched(model: type[Any], body: bytes) -> Any:
        threads.append(threading.get_ident())
        return parse(model, body)

    monkeypatch.setattr(schemas, "parse", watched)
    body = f'{{"model": "tiny", "prompt": "{"x" * length}"}}'.encode()
    asyncio.run(schemas.parsed(TextRequest, body))
    assert (threads != [threading.get_ident()]) == aside


@pytest.mark.parametrize(
    "prompt",
    [[1, 2], ["a", "b"], [[1], [2, 3]], "a", ["", "a"]],
)
def test_prompts_are_texts_or_tokens(prompt: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": prompt}).encode()
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert parse(TextRequest, body).prompts == (prompt if several else [prompt])


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([], "invalid_value"),
        ([[]], "invalid_value"),
        ([[1], "a"], "invalid_value"),
        ([True], "invalid_type"),
        ([1.5], "invalid_type"),
        ([1, "a"], "invalid_type"),
        ([-1], "invalid_value"),
        ([1 << 32], "invalid_value"),
        (None, "invalid_type"),
        ({"a": 1}, "invalid_type"),
        (7, "invalid_type"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse(TextRequest, json.dumps({"model": "tiny", "prompt": prompt}).encode())
    assert (caught.value.reason, caught.value.field) == (reason, "prompt")
