"""``POST /v1/completions``: text or tokens in, the text that follows out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mac_decoder.api.choice import Choice, Delta
from mac_decoder.api.generation import generation, require_choices, wish
from mac_decoder.api.logprobs import text_logprobs
from mac_decoder.api.schemas import TextRequest, ignored_parameters, parsed
from mac_decoder.api.service import Record, Service
from mac_decoder.api.stream import Answer, Answered, Job
from mac_decoder.engine.text import TokenText
from protocol.errors import RequestError

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of this endpoint."""


async def answer(service: Service, record: Record, body: bytes) -> Answer:
    """Check a request, encode its prompts, and return the response that will run it."""
    request = await parsed(TextRequest, body)
    record.streamed = request.streamed
    service.require_model(request.model)
    texts = await service.text()
    wished = wish(service, request, request.logprobs)
    prompts = request.prompts
    require_choices(service, wished.choices, "n")
    require_choices(service, wished.choices * len(prompts), "prompt")
    jobs: list[Job] = []
    for number, prompt in enumerate(prompts):
        tokens = await _tokens(service, prompt)
        record.prompt_tokens += len(tokens)
        room = service.room_for(len(tokens), "prompt")
        limit = min(request.max_tokens or DEFAULT_MAX_TOKENS, room)
        for repeat in range(wished.choices):
            reader = texts.reader(stops=request.stops, reasoning=False, tools=False, continued=True)
            choice = Choice(len(jobs), reader, None, logprobs=request.logprobs is not None)
            wanted = generation(service, wished, record, tokens, repeat, limit)
            jobs.append(Job(choice, wanted, number))
    return Answer(
        service,
        record,
        TextForm(record.id, service, texts, request),
        jobs,
        streamed=request.streamed,
        with_usage=request.with_usage,
        ignored=ignored_parameters(request),
    )


async def _tokens(service: Service, prompt: str | list[int]) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return await service.engine.encode(prompt)
    service.room_for(len(prompt), "prompt")
    if max(prompt) >= service.loaded.vocabulary:
        raise RequestError(
            "a token id is not in the model's vocabulary",
            reason="token_out_of_vocabulary",
            field="prompt",
        )
    return tuple(prompt)


class TextForm:
    """Text completions, whole and in chunks; a chunk has the form of the whole."""

    def __init__(self, name: str, service: Service, texts: TokenText, request: TextRequest) -> None:
        self._texts = texts
        self._logprobs = request.logprobs
        self._head: dict[str, Any] = {
            "id": name,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.served_name,
            "system_fingerprint": service.fingerprint,
        }
        self._chunk = self._head | ({"usage": None} if request.with_usage else {})

    def first(self, choice: Choice) -> list[dict[str, Any]]:
        """This form has no opening chunk."""
        return []

    def chunks(self, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        """One chunk with the text."""
        return [{**self._chunk, "choices": [self._choice(choice, [delta], None)]}]

    def last(self, choice: Choice) -> dict[str, Any]:
        """The chunk with the reason why the choice ended."""
        return {**self._chunk, "choices": [self._choice(choice, [], choice.finish_reason)]}

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk that has no choices."""
        return {**self._chunk, "choices": [], "usage": usage}

    def whole(self, answers: Sequence[Answered], usage: dict[str, Any]) -> dict[str, Any]:
        """The ``text_completion`` object."""
        choices = [
            self._choice(answered.choice, answered.deltas, answered.choice.finish_reason)
            for answered in answers
        ]
        return {**self._head, "choices": choices, "usage": usage}

    def _choice(
        self, choice: Choice, deltas: Sequence[Delta], finish_reason: str | None
    ) -> dict[str, Any]:
        entries = tuple(entry for delta in deltas for entry in delta.entries)
        logprobs = None
        if self._logprobs is not None and (entries or finish_reason is not None):
            logprobs = text_logprobs(entries, self._texts, self._logprobs)
        return {
            "index": choice.index,
            "text": "".join(delta.content for delta in deltas),
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
