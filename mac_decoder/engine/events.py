"""What goes into the engine and what comes out: requests, events, and the report.

Everything here is immutable, and plain Python: no mlx, no tokenizer. Tokens are ids.
A request's events arrive in this order::

    (Progress | Fallback)*  Token*  (Finished | Failed)

and nothing follows ``Finished`` or ``Failed``. A request that is cancelled by its client
ends without either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from protocol.errors import BatonError, RequestError

Lane = Literal["auto", "local", "remote"]
Source = Literal["live", "resident", "durable", "remote", "local"]
FinishReason = Literal["stop", "length"]

MAX_TOP_LOGPROBS = 20
"""Largest ``top_logprobs`` that is served (OpenAI's limit)."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn, with the meaning of OpenAI's parameters.

    ``temperature`` 0 is greedy. ``top_p`` 1, ``top_k`` 0 and ``min_p`` 0 filter nothing.
    ``seed`` makes the draws a function of the seed and the logits alone; ``None`` draws a
    fresh seed. ``presence_penalty`` and ``frequency_penalty`` look at all generated tokens
    and none of the prompt; ``repetition_penalty``, which is mlx-lm's, at the last
    ``penalty_context`` tokens, prompt included. ``logit_bias`` is added to the logits, by
    token id.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    penalty_context: int = 20
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ``RequestError`` naming the first value that is out of range."""
        _within("temperature", self.temperature, 0.0, 100.0)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("top_k", self.top_k, 0, 1 << 31)
        _within("penalty_context", self.penalty_context, 1, 1 << 31)
        if self.repetition_penalty is not None:
            _within("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if value is not None:
                _within(name, value, -1e3, 1e3)
        for value in self.logit_bias.values():
            _within("logit_bias", value, -1e4, 1e4)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """One request to the engine: a prompt in token ids and how to go on from it.

    ``tokens`` has at least one id. At most ``max_tokens`` (at least 1) are generated; an id
    of ``stop_token_ids`` ends the request with reason ``stop`` and is not itself an event.
    ``top_logprobs`` ``None`` reports no log probabilities, 0 the chosen token's alone.

    ``turns`` are positions in the prompt up to which other prompts will share it (see
    ``template.Rendered``): what is computed there is kept, of ``next_turn`` also what a
    producer computes. ``salt`` separates the caches of API keys; ``reuse`` false neither uses
    nor keeps any.
    """

    request_id: str
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    top_logprobs: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    lane: Lane = "auto"
    turns: tuple[int, ...] = ()
    next_turn: int = 0
    salt: bytes = b""
    reuse: bool = True

    def __post_init__(self) -> None:
        """Raise ``RequestError`` naming the first value that cannot be served."""
        if not self.tokens:
            raise RequestError("the prompt has no tokens", reason="prompt_empty", field="prompt")
        _within("max_tokens", self.max_tokens, 1, 1 << 31)
        if self.top_logprobs is not None:
            _within("top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)


@dataclass(frozen=True, slots=True)
class Progress:
    """``processed`` of ``total`` prompt positions are in the cache, by work of ``tier``."""

    processed: int
    total: int
    tier: Source


@dataclass(frozen=True, slots=True)
class Fallback:
    """The producer was to prefill this prompt and cannot, for ``reason``: this machine does."""

    reason: str


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token.

    ``logprob`` and ``top`` (pairs of id and log probability, most likely first) are of the
    distribution that the model and the logits processors give, before temperature and
    filters; ``None`` and empty where they were not asked for.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Where a request's prompt came from and what it cost; ``phases`` in milliseconds:
    ``queue``, ``lookup``, ``read``, ``verify``, ``place``, ``swap`` (of a restore),
    ``compute``, ``wire``, ``verify``, ``compose`` (what a delta's held rows took longer),
    ``install``, ``boundary_decode``, ``failed_handoff`` and
    ``failed_restore``, each where there was one.

    ``reused_tokens`` were prefilled nowhere for this request; ``prefilled_tokens`` were, on
    either machine, the boundary token not counted. ``computed_tokens`` is how many tokens that
    took: fewer where the producer held some of them, more where it did not hold what lies below
    a delta. ``shared_tokens`` is the longest prefix
    that any tier held; ``parts_at`` where this prompt and what is held have different tokens.
    ``restore_ms`` and ``restore_bytes`` are of a restored cut, ``staging_bytes`` the memory
    that restoring took beyond it, ``evicted_bytes`` what was let go of to make room for this
    request. ``reasons`` are stable codes, in the
    order in which they were found, and say why the prompt took the lane that it took.
    ``fallback`` says that the producer was meant to prefill it and could not; the last of
    ``reasons`` then says why.
    """

    source: Source
    reused_tokens: int
    prefilled_tokens: int
    transferred_bytes: int
    ttft_ms: float
    phases: Mapping[str, float]
    reasons: tuple[str, ...]
    fallback: bool = False
    shared_tokens: int = 0
    parts_at: int | None = None
    restore_ms: float = 0.0
    restore_bytes: int = 0
    staging_bytes: int = 0
    evicted_bytes: int = 0
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended as it should: at a stop token, or at its limit."""

    reason: FinishReason
    report: Report


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended with an error; other requests are not concerned by it."""

    error: BatonError


Event = Progress | Fallback | Token | Finished | Failed


class GenerationFault(BatonError):
    """The model gave no usable distribution for one request; others go on."""

    default_reason = "logits_not_finite"


def _within(name: str, value: float, low: float, high: float) -> None:
    # A comparison that is false for NaN, so that NaN is refused too.
    if not low <= value <= high:
        raise RequestError(
            f"{name} is out of range",
            reason="parameter_out_of_range",
            field=name,
            found=value,
            expected=f"{low} to {high}",
        )
