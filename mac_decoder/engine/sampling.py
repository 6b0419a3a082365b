"""How one request's tokens are drawn, and what is reported about each of them.

A :class:`Draw` is the sampler of exactly one request inside a batch. It is called once per
step, when the step is *launched*; what it found out about that step travels to the host with
the token itself, so that log probabilities and the check for finite logits cost no second
wait for the device.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import (
    apply_min_p,
    apply_top_k,
    apply_top_p,
    make_logits_processors,
)

from mac_decoder.engine.events import Generation, Sampling
from protocol.errors import RequestError

_COLDEST: Final = 1e-5
"""Below this temperature draws are greedy: single precision has no room for the quotients."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """One drawn token and what is known about it; ``finite`` is false for logits NaN or inf."""

    token: int
    finite: bool
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Draw:
    """The sampler of one request: a function of its seed, its step and the logits alone."""

    def __init__(self, sampling: Sampling, top_logprobs: int | None, vocabulary: int) -> None:
        """``vocabulary`` is the number of logits; filters that keep all of it are left out."""
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        self._seed = str(seed).encode()
        self._sampling = sampling
        self._greedy = (
            sampling.temperature < _COLDEST
            # The likeliest token has at least this share, so that it is all that is kept.
            or sampling.top_p <= 1.0 / vocabulary
            or sampling.top_k == 1
        )
        self._top_k = sampling.top_k if sampling.top_k < vocabulary else 0
        self._reported = top_logprobs
        self._top = 0 if top_logprobs is None else min(top_logprobs, vocabulary)
        self._step = 0
        self._launched: deque[tuple[mx.array, ...]] = deque()

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Launch one draw from ``(1, vocabulary)`` log probabilities; returns ``(1,)`` ids."""
        tokens = self._choose(logprobs)
        # Any NaN, and an infinity in the logits, leave no finite maximum here.
        facts = [mx.max(logprobs, axis=-1)]
        if self._reported is not None:
            exact = logprobs.astype(mx.float32)
            exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
            facts.append(mx.take_along_axis(exact, tokens[:, None], axis=-1))
            if self._top:
                best = mx.argpartition(-exact, kth=self._top - 1, axis=-1)[:, : self._top]
                facts += [best, mx.take_along_axis(exact, best, axis=-1)]
        self._step += 1
        drawn = mx.depends([tokens], facts)[0]
        self._launched.append((drawn, *facts))
        return drawn

    def read(self) -> Drawn:
        """The oldest draw not read yet; waits for the step that it was launched with."""
        drawn, maximum, *reported = self._launched.popleft()
        token = int(_number(drawn))
        finite = math.isfinite(_number(maximum))
        if not reported or not finite:
            return Drawn(token, finite)
        chosen, *best = reported
        top: tuple[tuple[int, float], ...] = ()
        if best:
            ids, values = (np.array(array)[0].tolist() for array in best)
            top = tuple(sorted(zip(ids, values, strict=True), key=lambda pair: -pair[1]))
        return Drawn(token, finite, _number(chosen), top)

    def rest_is_finite(self) -> bool:
        """Whether what was launched and not read yet is finite; waits for it."""
        drawn = [self.read() for _ in range(len(self._launched))]
        return all(each.finite for each in drawn)

    def _choose(self, logprobs: mx.array) -> mx.array:
        if self._greedy:
            return mx.argmax(logprobs, axis=-1)
        # Temperature first, then the filters, as OpenAI's parameters are commonly read;
        # mlx-lm's own sampler filters the distribution as it is before temperature.
        scaled = logprobs.astype(mx.float32) * (1.0 / self._sampling.temperature)
        scaled = scaled - mx.logsumexp(scaled, axis=-1, keepdims=True)
        if self._top_k:
            scaled = apply_top_k(scaled, self._top_k)
        if self._sampling.top_p < 1.0:
            scaled = apply_top_p(scaled, self._sampling.top_p)
        if self._sampling.min_p > 0.0:
            scaled = apply_min_p(scaled, self._sampling.min_p)
        return mx.random.categorical(scaled, key=self._key())

    def _key(self) -> mx.array:
        """The random key of this step: 64 bits that depend on seed and step only."""
        digest = hashlib.blake2b(
            self._step.to_bytes(8, "big") + self._seed, digest_size=8, person=b"baton-draw"
        ).digest()
        words = [int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")]
        return mx.array(words, dtype=mx.uint32)


def _number(array: mx.array) -> float:
    """The only element of a real array."""
    return float(array.item())  # pyright: ignore[reportArgumentType]


Processor = Callable[[mx.array, mx.array], mx.array]


def processors(sampling: Sampling, prompt: int) -> list[Processor]:
    """Logits processors for the penalties and the bias that are set.

    They are called with the ids of a sequence and its ``(1, vocabulary)`` logits; the first
    ``prompt`` of the ids belong to the prompt.
    """
    repetition = sampling.repetition_penalty
    found: list[Processor] = make_logits_processors(
        logit_bias=dict(sampling.logit_bias) or None,
        repetition_penalty=None if repetition == 1.0 else repetition,
        repetition_context_size=sampling.penalty_context,
    )
    presence, frequency = sampling.presence_penalty or 0.0, sampling.frequency_penalty or 0.0
    if presence or frequency:
        found.append(partial(_penalised, presence, frequency, prompt))
    return found


def _penalised(
    presence: float, frequency: float, prompt: int, tokens: mx.array, logits: mx.array
) -> mx.array:
    """OpenAI's ``mu[j] - c[j] * frequency - (c[j] > 0) * presence``, where ``c[j]`` counts the
    token ``j`` in all of the text generated so far (API reference of chat completions).

    mlx-lm's processors look at the last 20 tokens, prompt included.
    """
    generated = tokens[prompt:]
    if not generated.size:
        return logits
    counts = mx.zeros(logits.shape[-1], dtype=mx.float32).at[generated].add(1.0)
    penalty = frequency * counts + presence * (counts > 0)
    return (logits.astype(mx.float32) - penalty).astype(logits.dtype)


def check_vocabulary(generation: Generation, vocabulary: int) -> None:
    """Raise ``RequestError`` for ids that the model does not have.

    MLX does not check indices: an id out of range would read foreign memory.
    """
    named = {
        "tokens": generation.tokens,
        "logit_bias": generation.sampling.logit_bias,
    }
    for field, ids in named.items():
        if ids and (min(ids) < 0 or max(ids) >= vocabulary):
            raise RequestError(
                "a token id is not in the model's vocabulary",
                reason="token_out_of_vocabulary",
                field=field,
                expected=f"0 to {vocabulary - 1}",
            )
