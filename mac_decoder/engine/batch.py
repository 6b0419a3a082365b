"""Sequences that decode in one batch: one mlx-lm ``BatchGenerator`` that never prefills.

A sequence enters with its cache and the token to be fed next, whoever computed the cache. Its
step runs alone, then it joins the others. A batch costs one pass over the weights per step,
padding costs memory and attention; ``admission`` decides between them.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from mac_decoder.engine.events import FinishReason
from mac_decoder.engine.member import First, Left, Member, Step

UNLIMITED = 1 << 30


class Batch:
    """One batch. MLX thread only."""

    def __init__(self, model: Any, stream: mx.Stream) -> None:
        # Who is admitted is decided before: a limit here would only delay boundary steps.
        self._generator = BatchGenerator(
            model, stream=stream, completion_batch_size=UNLIMITED, prefill_batch_size=UNLIMITED
        )
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> list[Member]:
        """Who is in it."""
        return list(self._members.values())

    def insert(self, member: Member, caches: list[Any]) -> None:
        """Take over ``caches``, at N-1 or further on; the next step is launched by ``step``."""
        generation = member.generation
        (uid,) = self._generator.insert(
            [[member.due]],
            max_tokens=[generation.max_tokens - len(member.given)],
            caches=[caches],
            all_tokens=[[*member.context, *member.fed]],
            samplers=[member.draw],
            logits_processors=[member.processors()],
            stop_sequences=[StopSequences([(token,) for token in generation.stop_token_ids])],
        )
        self._members[uid] = member

    def step(self) -> list[Step]:
        """Launch the next step of every member and return what the one before it gave.

        A first token that was launched is handed on alone, before anything else is launched:
        the generator itself returns it one step later.
        """
        launched = [uid for uid, member in self._members.items() if member.first is First.LAUNCHED]
        if launched:
            return [self._hand_on_first(uid) for uid in launched]
        prompts, responses = self._generator.next()
        for prompt in prompts:
            member = self._members[prompt.uid]
            if prompt.end_of_prompt and member.first is First.TO_LAUNCH:
                member.first = First.LAUNCHED
        return [step for response in responses if (step := self._taken(response)) is not None]

    def _hand_on_first(self, uid: int) -> Step:
        member = self._members[uid]
        member.position += 1
        member.first = First.GIVEN
        drawn, generation = member.draw.read(), member.generation
        ended: FinishReason | None = None
        if drawn.token in generation.stop_token_ids:
            ended = "stop"
        elif generation.max_tokens == 1:
            ended = "length"
        left = None if ended is None else self._taken_out(uid, member)
        return Step(member.key, drawn, ended, left)

    def _taken_out(self, uid: int, member: Member) -> Left | None:
        """Take a sequence out between two steps, with what is in its caches.

        Nothing where the step under way, whose row is in them, gave no number.
        """
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        del self._members[uid]
        if not member.draw.rest_is_finite():
            return None
        return Left(caches, tuple(tokens[len(member.context) :]))

    def _taken(self, response: Any) -> Step | None:
        member = self._members[response.uid]
        if member.first is First.GIVEN:
            member.first = First.PAST
            return None
        member.position += 1
        drawn, left = member.draw.read(), None
        if response.finish_reason is not None:
            del self._members[response.uid]
            if member.draw.rest_is_finite():
                fed = tuple(response.all_tokens[len(member.context) :])
                left = Left(response.prompt_cache, fed)
        return Step(member.key, drawn, response.finish_reason, left)

    def remove(self, key: int) -> Left | None:
        """Take out the sequence ``key``, with what it leaves if a token of it was read."""
        for uid, member in self._members.items():
            if member.key == key:
                if member.first in (First.GIVEN, First.PAST):
                    return self._taken_out(uid, member)
                self._generator.remove([uid])
                del self._members[uid]
                return None
        return None

    def close(self) -> None:
        """Give back what the generator holds."""
        self._generator.close()
