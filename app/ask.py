"""Asks a decoder over its OpenAI endpoint, as any client does, and measures what it sees."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from protocol.errors import TransferError

ON_NOTHING: Callable[[Any], None] = lambda _: None  # noqa: E731


@dataclass(frozen=True)
class Question:
    """A chat request: greedy, streamed. ``lane`` says who may prefill, ``reuse`` whether kept
    caches may serve it.
    """

    model: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int
    lane: str = "auto"
    reuse: bool = True

    def body(self) -> dict[str, Any]:
        """The JSON body of the request."""
        return {
            "model": self.model,
            "messages": list(self.messages),
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": True,
            "baton": {"lane": self.lane, "reuse": self.reuse},
        }


@dataclass
class Answer:
    """What came back. Times in milliseconds, as the client saw them.

    ``tokens`` are the generated tokens' bytes, to compare two answers by; ``baton`` is the
    response's field of that name.
    """

    text: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    baton: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    ttft_ms: float = 0.0
    total_ms: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decode speed: tokens after the first, over the time after the first."""
        elapsed = self.total_ms - self.ttft_ms
        return (len(self.tokens) - 1) * 1000 / elapsed if elapsed > 0 and self.tokens else 0.0


def served_model(url: str) -> str:
    """The name under which a decoder serves its model; TransferError if it does not answer."""
    try:
        response = httpx.get(f"{url}/v1/models", timeout=30.0)
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as error:
        raise TransferError(
            f"no decoder answers at {url}",
            reason="decoder_unreachable",
            found=type(error).__name__,
        ) from error


def ask(
    url: str,
    question: Question,
    on_text: Callable[[str], None] = ON_NOTHING,
    on_comment: Callable[[str], None] = ON_NOTHING,
    timeout_s: float = 1200.0,
) -> Answer:
    """Stream one answer; ``on_comment`` gets the stream's comments (progress of the prefill).

    Raises TransferError ``decoder_refused`` with the server's own sentence, or
    ``stream_broken`` when the stream ends early.
    """
    answer = Answer()
    started = time.monotonic()
    try:
        with httpx.stream(
            "POST", f"{url}/v1/chat/completions", json=question.body(), timeout=timeout_s
        ) as response:
            if response.status_code != 200:
                raise _refusal(json.loads(response.read()), response.status_code)
            for line in response.iter_lines():
                if line.startswith(":"):
                    on_comment(line[1:].strip())
                elif line == "data: [DONE]":
                    answer.total_ms = (time.monotonic() - started) * 1000
                    return answer
                elif line.startswith("data: "):
                    _take(answer, json.loads(line[6:]), started, on_text)
    except (httpx.HTTPError, ValueError) as error:
        raise TransferError(
            "the connection to the decoder broke",
            reason="stream_broken",
            found=type(error).__name__,
        ) from error
    raise TransferError("the answer ended before its end mark", reason="stream_broken")


def _take(
    answer: Answer, chunk: dict[str, Any], started: float, on_text: Callable[[str], None]
) -> None:
    """Add one chunk of the stream to the answer."""
    if "error" in chunk:
        raise _refusal(chunk, 200)
    answer.usage = chunk.get("usage") or answer.usage
    answer.baton = chunk.get("baton") or answer.baton
    for choice in chunk.get("choices", ()):
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        delta = choice.get("delta", {})
        said = delta.get("content") or delta.get("reasoning_content") or ""
        entries = (choice.get("logprobs") or {}).get("content") or ()
        if (said or entries) and not answer.ttft_ms:
            answer.ttft_ms = (time.monotonic() - started) * 1000
        answer.tokens += [entry.get("bytes") or list(entry["token"].encode()) for entry in entries]
        if said:
            answer.text += said
            on_text(said)


def _refusal(body: dict[str, Any], status: int) -> TransferError:
    error = body.get("error", {})
    return TransferError(
        str(error.get("message", "the decoder refused the request")),
        reason="decoder_refused",
        found=error.get("code") or status,
    )
