"""A sequence that decodes alone, in its own caches: nothing is copied on its way in or out.

The loop is that of mlx-lm's ``generate_step``: the next step is launched before the token of
the last one is read, so that the device never waits for the host. Two things differ. The first
token is read before a second step is launched, because MLX's CPU backend holds up whoever
launches while much is under way. And nothing is launched past the last token that was asked for.
"""

from __future__ import annotations

from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import TokenBuffer

from mac_decoder.engine.events import FinishReason
from mac_decoder.engine.member import First, Left, Member, Step
from mac_decoder.kv.install import round_up

_CLEAR_EVERY: Final = 256
"""Steps between two returns of freed memory: caches grow by this many rows, by copying."""


class Alone:
    """One sequence. MLX thread only."""

    def __init__(self, model: Any, member: Member, caches: list[Any]) -> None:
        """Take over ``caches`` at position N-1; the boundary step is launched by ``step``."""
        self.member = member
        self._model = model
        self.caches = caches
        # What is allocated is then what was counted.
        round_up(caches)
        self._fed = mx.array([member.generation.tokens[-1]], dtype=mx.uint32)
        self._processors = member.processors()
        self._context = TokenBuffer(list(member.context)) if self._processors else None
        self._launched = 0

    @property
    def members(self) -> list[Member]:
        """The one member."""
        return [self.member]

    @property
    def _under_way(self) -> int:
        return self._launched - len(self.member.given)

    def step(self) -> list[Step]:
        """Launch the next step and return what the one before it gave; the first comes alone."""
        member, most = self.member, self.member.generation.max_tokens
        if member.first is First.LAUNCHED:
            return [self._read()]
        if self._launched < most:
            self._launch()
        if member.first is First.TO_LAUNCH:
            member.first = First.LAUNCHED
            return []
        return [self._read()] if self._under_way == 2 or self._launched == most else []

    def settle(self) -> list[Step]:
        """Read what is under way, which waits for it, so that the caches can go elsewhere."""
        return [self._read()] if self._under_way else []

    def remove(self, key: int) -> Left | None:
        """What the sequence, which is ``key``, leaves, if a token of it was read."""
        return self._left() if self.member.given else None

    def _launch(self) -> None:
        logits = self._model(self._fed[None], cache=self.caches)[:, -1, :]
        context: list[mx.array] = []
        if self._context is not None:
            context.append(self._context.update_and_fetch(self._fed))
            for processor in self._processors:
                logits = processor(context[0], logits)
        self._fed = self.member.draw(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.async_eval(self._fed, context)
        self._launched += 1

    def _read(self) -> Step:
        member, generation = self.member, self.member.generation
        drawn = member.draw.read()
        member.first = First.PAST
        member.position += 1
        member.given.append(drawn.token)
        if self._launched % _CLEAR_EVERY == 1:
            mx.clear_cache()
        ended: FinishReason | None = None
        if drawn.token in generation.stop_token_ids:
            ended = "stop"
        elif len(member.given) == generation.max_tokens:
            ended = "length"
        return Step(member.key, drawn, ended, None if ended is None else self._left())

    def _left(self) -> Left | None:
        """Nothing where the step under way, whose row is in the caches, gave no number."""
        if not self.member.draw.rest_is_finite():
            return None
        fed = (self.member.generation.tokens[-1], *self.member.given)
        return Left(self.caches, fed[: self._launched])
