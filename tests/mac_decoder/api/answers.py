"""Checking answers against OpenAI's own types, strictly."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import httpx
from openai.types import Completion, ErrorObject
from openai.types.chat import ChatCompletion, ChatCompletionChunk

USER = [{"role": "user", "content": "Hello"}]


def chat(**fields: Any) -> dict[str, Any]:
    """A chat body: greedy, short, one user message."""
    return {"model": "tiny", "messages": USER, "temperature": 0, "max_tokens": 24} | fields


def text(prompt: Any = "[greeting]", **fields: Any) -> dict[str, Any]:
    """A completion body: greedy."""
    return {"model": "tiny", "prompt": prompt, "temperature": 0} | fields


def checked_chat(payload: Any) -> ChatCompletion:
    """A whole chat answer: every required field is there, and the figures agree."""
    answer = ChatCompletion.model_validate(payload, strict=True)
    assert answer.usage is not None
    _check_usage(payload["usage"])
    _check_baton(payload["baton"], payload["usage"])
    for choice in answer.choices:
        assert choice.message.role == "assistant"
        assert (choice.finish_reason == "tool_calls") == bool(choice.message.tool_calls)
    return answer


def checked_text(payload: Any) -> Completion:
    """A whole completion."""
    answer = Completion.model_validate(payload, strict=True)
    _check_usage(payload["usage"])
    _check_baton(payload["baton"], payload["usage"])
    return answer


def _check_usage(usage: dict[str, Any]) -> None:
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    details = usage["completion_tokens_details"]
    assert 0 <= details["reasoning_tokens"] <= usage["completion_tokens"]


def _check_baton(baton: dict[str, Any], usage: dict[str, Any]) -> None:
    assert {
        "source",
        "reused_tokens",
        "prefilled_tokens",
        "computed_tokens",
        "transferred_bytes",
        "ttft_ms",
        "phases",
        "reasons",
    } <= set(baton)
    assert baton["source"] in ("local", "remote", "mixed")
    assert baton["ttft_ms"] > 0
    assert baton["phases"]
    assert baton["reasons"]


def events(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """The payloads and the comments of a stream, which must end with ``[DONE]``."""
    payloads, comments, done = [], [], False
    for line in lines:
        if not line:
            continue
        assert not done, "a line after [DONE]"
        if line.startswith(":"):
            comments.append(line[1:].strip())
        elif line == "data: [DONE]":
            done = True
        else:
            payloads.append(json.loads(line.removeprefix("data: ")))
    assert done
    return payloads, comments


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a stream, each checked against OpenAI's type."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        payloads, _ = events(response.iter_lines())
    kind = ChatCompletionChunk if "chat" in path else Completion
    chunks = payloads if kind is ChatCompletionChunk else _with_ends(payloads)
    for chunk in chunks:
        kind.model_validate(chunk, strict=True)
    assert len({chunk["id"] for chunk in payloads}) == 1
    return payloads


def _with_ends(payloads: list[dict[str, Any]]) -> list[dict[str, Any]]:
    # OpenAI's type for completions has no null finish_reason, which its own streams send.
    return [
        chunk
        | {
            "choices": [
                choice | {"finish_reason": choice["finish_reason"] or "stop"}
                for choice in chunk["choices"]
            ]
        }
        for chunk in payloads
    ]


def joined(payloads: list[dict[str, Any]], name: str = "content", index: int = 0) -> str:
    """All of a choice's text in a stream of chat chunks."""
    return "".join(
        choice["delta"].get(name) or ""
        for chunk in payloads
        for choice in chunk["choices"]
        if choice["index"] == index
    )


def ends(payloads: list[dict[str, Any]]) -> dict[int, str]:
    """The finish reason of every choice; each is told once, in its last chunk."""
    found: dict[int, str] = {}
    for chunk in payloads:
        for choice in chunk["choices"]:
            assert choice["index"] not in found, "a chunk after the last one"
            if choice["finish_reason"] is not None:
                found[choice["index"]] = choice["finish_reason"]
    return found


def refused(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error object of a refusal."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    ErrorObject.model_validate(error, strict=True)
    assert error["code"] == code, error
    return error
