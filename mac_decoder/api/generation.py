"""From a request's parameters to the engine's generations; the same for both endpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mac_decoder.api.schemas import ChatRequest, TextRequest
from mac_decoder.api.service import Record, Service
from mac_decoder.engine.events import Generation, Lane, Sampling
from protocol.errors import RequestError


@dataclass(frozen=True)
class Wish:
    """What a request asks of each of its generations, the prompt and the seed apart."""

    sampling: Sampling
    choices: int
    top_logprobs: int | None
    lane: Lane
    reuse: bool


def wish(service: Service, request: ChatRequest | TextRequest, top_logprobs: int | None) -> Wish:
    """The parameters that both endpoints share, with the server's defaults."""
    settings = service.settings
    temperature = request.temperature
    top_k = request.top_k or 0
    sampling = Sampling(
        temperature=settings.default_temperature if temperature is None else temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(top_k, 0),
        min_p=request.min_p or 0.0,
        seed=request.seed,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty or None,
        frequency_penalty=request.frequency_penalty or None,
        logit_bias=_biases(request.logit_bias or {}, service.loaded.vocabulary),
    )
    lane = request.baton.lane if request.baton is not None else None
    reuse = request.baton.reuse if request.baton is not None else True
    return Wish(sampling, request.n or 1, top_logprobs, lane or settings.lane, reuse)


def require_choices(service: Service, count: int, field: str) -> None:
    """Raise ``RequestError`` (``too_many_choices``) above the server's limit."""
    limit = service.settings.max_choices
    if count > limit:
        raise RequestError(
            f"at most {limit} choices are generated for one request",
            reason="too_many_choices",
            field=field,
        )


def generation(
    service: Service,
    wished: Wish,
    record: Record,
    tokens: tuple[int, ...],
    number: int,
    max_tokens: int,
    turns: tuple[int, ...] = (),
    next_turn: int = 0,
) -> Generation:
    """The generation of choice ``number``. Choices of one seed have seeds that follow it.

    ``turns`` and ``next_turn`` are those of ``template.Rendered``.
    """
    sampling = wished.sampling
    if sampling.seed is not None and number:
        sampling = replace(sampling, seed=sampling.seed + number)
    return Generation(
        request_id=record.id,
        tokens=tokens,
        max_tokens=max_tokens,
        sampling=sampling,
        top_logprobs=wished.top_logprobs,
        stop_token_ids=service.loaded.stop_token_ids,
        lane=wished.lane,
        turns=turns,
        next_turn=next_turn,
        reuse=wished.reuse,
        salt=record.salt,
    )


def _biases(given: dict[str, float], vocabulary: int) -> dict[int, float]:
    biases: dict[int, float] = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) < 10 and int(name) < vocabulary):
            raise RequestError(
                "logit_bias maps token ids of this model to numbers",
                reason="token_out_of_vocabulary",
                field="logit_bias",
            )
        biases[int(name)] = value
    return biases
