"""No body, however wrong, is more than a refusal."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import ErrorObject

from mac_decoder.api.schemas import REFUSED, ChatRequest, TextRequest
from tests.mac_decoder.api.answers import chat, text

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
