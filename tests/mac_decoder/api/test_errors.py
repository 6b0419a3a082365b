"""Every refusal: its status, its code, the parameter that it names."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from mac_decoder.api.errors import error_body, error_headers, status_of
from mac_decoder.engine.events import GenerationFault
from protocol.errors import (
    BatonError,
    Cancelled,
    CapacityError,
    ConfigError,
    EngineFault,
    IdentityMismatch,
    IntegrityError,
    LocalProtocolError,
    PeerProtocolError,
    RequestError,
    TransferError,
)
from tests.mac_decoder.api.answers import chat, refused, text

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def part(kind: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": kind} | fields]}]


BAD_CHAT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"messages": None}, "invalid_type", "messages"),
    ({"messages": []}, "invalid_value", "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "invalid_value", "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "missing_parameter", "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "invalid_value", "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "invalid_type", "messages[0].content"),
    (
        {"messages": [{"role": "tool", "content": "x"}]},
        "missing_parameter",
        "messages[0].tool_call_id",
    ),
    ({"messages": part("text")}, "missing_parameter", "messages[0].content[1].text"),
    (
        {"messages": part("image_url", image_url={"url": "data:"})},
        "unsupported_modality",
        "messages[0].content[1].type",
    ),
    (
        {"messages": part("input_audio", input_audio={})},
        "unsupported_modality",
        "messages[0].content[1].type",
    ),
    ({"messages": part("file", file={})}, "unsupported_modality", "messages[0].content[1].type"),
    ({"audio": {"voice": "x"}}, "unsupported_modality", "audio"),
    ({"modalities": ["text", "audio"]}, "unsupported_modality", "modalities"),
    ({"draft_model": "small"}, "draft_model_unsupported", "draft_model"),
    ({"num_draft_tokens": 3}, "draft_model_unsupported", "num_draft_tokens"),
    ({"speculative_config": {"model": "x"}}, "draft_model_unsupported", "speculative_config"),
    ({"prediction": {"type": "content", "content": "x"}}, "draft_model_unsupported", "prediction"),
    ({"adapters": "x"}, "adapter_unsupported", "adapters"),
    (
        {"response_format": {"type": "json_object"}},
        "response_format_unsupported",
        "response_format",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format_unsupported",
        "response_format",
    ),
    ({"guided_json": {"type": "object"}}, "response_format_unsupported", "guided_json"),
    (
        {"web_search_options": {"search_context_size": "low"}},
        "parameter_unsupported",
        "web_search_options",
    ),
    ({"store": True}, "parameter_unsupported", "store"),
    ({"verbosity": "low"}, "parameter_unsupported", "verbosity"),
    ({"temperature": -1}, "invalid_value", "temperature"),
    ({"temperature": "0.5"}, "invalid_type", "temperature"),
    ({"temperature": 3}, "invalid_value", "temperature"),
    ({"top_p": 1.5}, "invalid_value", "top_p"),
    ({"frequency_penalty": 3}, "invalid_value", "frequency_penalty"),
    ({"presence_penalty": -3}, "invalid_value", "presence_penalty"),
    ({"n": 0}, "invalid_value", "n"),
    ({"n": 9}, "too_many_choices", "n"),
    ({"n": True}, "invalid_type", "n"),
    ({"max_tokens": 0}, "invalid_value", "max_tokens"),
    ({"max_completion_tokens": 0}, "invalid_value", "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "invalid_value", "max_tokens"),
    ({"seed": 1 << 64}, "invalid_value", "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
    ({"stop": ""}, "invalid_value", "stop"),
    ({"stop": [7]}, "invalid_type", "stop"),
    ({"logprobs": 3}, "invalid_type", "logprobs"),
    ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
    ({"logit_bias": {"five": 1}}, "token_out_of_vocabulary", "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "token_out_of_vocabulary", "logit_bias"),
    ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias"),
    ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ({"chat_template_kwargs": {"messages": "x"}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "invalid_value", "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": []}}, "invalid_value", "chat_template_kwargs"),
    ({"baton": {"lane": "fast"}}, "invalid_value", "baton.lane"),
    ({"model": 7}, "invalid_type", "model"),
    (
        {"messages": [{"role": "user", "content": "the runner " * 2000}]},
        "context_length_exceeded",
        "messages",
    ),
]

BAD_TEXT: list[tuple[dict[str, Any], str, str | None]] = [
    ({"prompt": None}, "invalid_type", "prompt"),
    ({"prompt": ""}, "prompt_empty", "prompt"),
    ({"prompt": []}, "invalid_value", "prompt"),
    ({"prompt": [[]]}, "invalid_value", "prompt"),
    ({"prompt": [-1]}, "invalid_value", "prompt"),
    ({"prompt": [1.5]}, "invalid_type", "prompt"),
    ({"prompt": [100000]}, "token_out_of_vocabulary", "prompt"),
    ({"prompt": ["x"] * 9}, "too_many_choices", "prompt"),
    ({"prompt": [1] * 2048}, "context_length_exceeded", "prompt"),
    ({"logprobs": 6}, "invalid_value", "logprobs"),
    ({"logprobs": True}, "invalid_type", "logprobs"),
    ({"echo": True}, "parameter_unsupported", "echo"),
    ({"suffix": "x"}, "parameter_unsupported", "suffix"),
    ({"best_of": 2}, "parameter_unsupported", "best_of"),
]


@pytest.mark.parametrize(("fields", "code", "param"), BAD_CHAT)
def test_a_bad_chat_request_names_the_parameter_at_fault(
    http: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    for stream in (False, True):
        body = chat() | fields | ({"stream": True} if stream else {})
        if stream and "stream_options" in fields:
            continue
        error = refused(http.post(CHAT, json=body), 400, code)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("fields", "code", "param"), BAD_TEXT)
def test_a_bad_completion_request_names_the_parameter_at_fault(
    http: httpx.Client, fields: dict[str, Any], code: str, param: str
) -> None:
    error = refused(http.post(TEXT, json=text() | fields), 400, code)
    assert error["param"] == param


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model": "tiny", }', "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"model": "\\ud800"}', "invalid_json"),
        (b"[]", "invalid_value"),
        (b"7", "invalid_value"),
        (b"null", "invalid_value"),
        (b"{}", "missing_parameter"),
        (b"[" * 100_000, "invalid_json"),
    ],
)
def test_a_body_that_is_no_request(http: httpx.Client, path: str, body: bytes, code: str) -> None:
    refused(http.post(path, content=body), 400, code)


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_official_client_raises_its_own_kind(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], temperature=9
        )
    assert caught.value.code == "invalid_value"
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_what_is_not_there(http: httpx.Client) -> None:
    refused(http.get("/v1/nothing"), 404, "route_not_found")
    refused(http.get("/docs"), 404, "route_not_found")
    refused(http.get(CHAT), 405, "method_not_allowed")
    refused(http.post("/health"), 405, "method_not_allowed")


def test_a_body_that_is_too_long(http: httpx.Client) -> None:
    body = json.dumps(chat(user="x" * (17 << 20))).encode()
    refused(http.post(CHAT, content=body), 413, "request_too_large")

    def pieces() -> Any:
        for start in range(0, len(body), 1 << 20):
            yield body[start : start + (1 << 20)]

    refused(http.post(CHAT, content=pieces()), 413, "request_too_large")
    assert http.get("/health").status_code == 200


def test_no_error_repeats_what_the_client_wrote(http: httpx.Client) -> None:
    secret = "a secret between us"
    bodies = [
        {"model": secret, "messages": [{"role": "user", "content": "x"}]},
        chat(messages=[{"role": secret, "content": secret}]),
        chat(messages=[{"role": "user", "content": {"x": secret}}]),
        chat(tool_choice=secret),
        chat(logit_bias={secret: 1}),
        chat(stop=[secret] * 5),
        chat(chat_template_kwargs={secret: secret}),
        chat(messages=[{"role": "user", "content": [{"type": secret, "text": secret}]}]),
        chat(baton={"lane": secret}),
    ]
    for body in bodies:
        response = http.post(CHAT, json=body)
        assert response.status_code in (400, 404)
        assert secret not in response.text
    response = http.post(CHAT, content=f'{{"model": "{secret}'.encode())
    assert secret not in response.text


# -- the table


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x"), 400, "invalid_request_error"),
        (RequestError("x", reason="model_not_found"), 404, "invalid_request_error"),
        (RequestError("x", reason="request_too_large"), 413, "invalid_request_error"),
        (RequestError("x", reason="invalid_api_key"), 401, "invalid_request_error"),
        (ConfigError("x"), 400, "invalid_request_error"),
        (CapacityError("x"), 503, "server_error"),
        (EngineFault("x"), 503, "server_error"),
        (GenerationFault("x"), 500, "server_error"),
        (IdentityMismatch("x"), 502, "server_error"),
        (IntegrityError("x"), 502, "server_error"),
        (TransferError("x"), 502, "server_error"),
        (TransferError("x", reason="connection_lost"), 502, "server_error"),
        (TransferError("x", reason="producer_unreachable"), 503, "server_error"),
        (TransferError("x", reason="connect_timeout"), 503, "server_error"),
        (CapacityError("x", reason="producer_busy"), 503, "server_error"),
        (RequestError("x", reason="no_producer"), 400, "invalid_request_error"),
        (PeerProtocolError("x"), 502, "server_error"),
        (LocalProtocolError("x"), 502, "server_error"),
        (Cancelled("x"), 499, "invalid_request_error"),
        (BatonError("x"), 500, "server_error"),
    ],
)
def test_each_kind_of_error_has_its_status(error: BatonError, status: int, kind: str) -> None:
    assert status_of(error) == status
    assert error_body(error)["error"]["type"] == kind
    assert error_body(error)["error"]["code"] == error.reason


def test_every_error_of_the_tree_is_in_the_table() -> None:
    waiting: list[type[BatonError]] = [BatonError]
    while waiting:
        kind = waiting.pop()
        assert status_of(kind("x")) >= 400
        waiting += kind.__subclasses__()


def test_retry_after_is_told_where_trying_again_can_help() -> None:
    assert error_headers(CapacityError("x", retry_after_s=2.2)) == {"retry-after": "3"}
    assert error_headers(CapacityError("x", retry_after_s=0.01)) == {"retry-after": "1"}
    assert error_headers(EngineFault("x")) == {"retry-after": "5"}
    away = TransferError("x", reason="producer_down")
    assert error_headers(away) == {"retry-after": "5"}
    assert error_headers(TransferError("x")) == {}
    assert error_headers(RequestError("x")) == {}
