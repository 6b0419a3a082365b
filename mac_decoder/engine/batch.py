"""Decode groups: sequences of similar length that decode in one batch.

Each group is one mlx-lm ``BatchGenerator`` that never prefills: a sequence enters with its
cache at N-1 and the boundary token, whoever computed the cache. The boundary step runs alone,
then the sequence joins the batch. A group costs one pass over the weights per step, padding
costs memory and attention; ``admission`` decides between them.

Rows made in company, or alone in a group, are rows made by decoding: their history differs
from that of prefilled rows, and nothing here promises them to be the same bits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, StopSequences

from mac_decoder.engine.admission import PaddingRule, choose_group, padded_bytes
from mac_decoder.engine.events import FinishReason, Generation
from mac_decoder.engine.sampling import Draw, Drawn, processors
from protocol.layout import Layout

UNLIMITED = 1 << 30


class First(enum.Enum):
    """Where a sequence's first token stands."""

    TO_LAUNCH = enum.auto()
    LAUNCHED = enum.auto()
    GIVEN = enum.auto()
    """Handed on, while the generator, which launches a step ahead, has yet to return it."""
    PAST = enum.auto()


@dataclass(slots=True)
class Member:
    """A sequence in a group. ``position`` is its cache's, ``rows`` what is reserved for it."""

    key: int
    generation: Generation
    draw: Draw
    position: int
    rows: int
    first: First = First.TO_LAUNCH
    context: int = 0
    """Tokens that the generator was told of beside those it feeds."""


@dataclass(frozen=True, slots=True)
class Left:
    """What a sequence leaves: its caches, and the tokens in them from the boundary token on."""

    caches: list[Any]
    fed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step gave for one sequence; ``ended`` and ``left`` are set with its last token."""

    key: int
    drawn: Drawn
    ended: FinishReason | None
    left: Left | None = None


class Group:
    """One batch. MLX thread only."""

    def __init__(self, model: Any, stream: mx.Stream) -> None:
        # Who is admitted is decided before: a limit here would only delay boundary steps.
        self._generator = BatchGenerator(
            model, stream=stream, completion_batch_size=UNLIMITED, prefill_batch_size=UNLIMITED
        )
        self.members: dict[int, Member] = {}

    @property
    def lengths(self) -> list[int]:
        """The members' positions."""
        return [member.position for member in self.members.values()]

    @property
    def rows(self) -> list[int]:
        """The members' reserved rows."""
        return [member.rows for member in self.members.values()]

    def insert(self, member: Member, caches: list[Any]) -> None:
        """Take over ``caches`` at position N-1; the boundary step is launched by ``step``."""
        generation = member.generation
        sampling = generation.sampling
        # What processors see: this context, the boundary token, and what is generated.
        context: tuple[int, ...] = ()
        if sampling.repetition_penalty is not None:
            context = generation.tokens[-sampling.penalty_context - 1 : -1]
        member.context = len(context)
        wanted = processors(sampling, len(context) + 1)
        (uid,) = self._generator.insert(
            [[generation.tokens[-1]]],
            max_tokens=[generation.max_tokens],
            caches=[caches],
            all_tokens=[list(context)],
            samplers=[member.draw],
            logits_processors=[wanted],
            stop_sequences=[StopSequences([(token,) for token in generation.stop_token_ids])],
        )
        self.members[uid] = member

    def step(self) -> list[Step]:
        """Launch the next step of every member and return what the one before it gave.

        A first token that was launched is handed on alone, before anything else is launched:
        the generator itself returns it one step later.
        """
        launched = [uid for uid, member in self.members.items() if member.first is First.LAUNCHED]
        if launched:
            return [self._hand_on_first(uid) for uid in launched]
        prompts, responses = self._generator.next()
        for prompt in prompts:
            if prompt.end_of_prompt:
                self.members[prompt.uid].first = First.LAUNCHED
        return [step for response in responses if (step := self._taken(response)) is not None]

    def _hand_on_first(self, uid: int) -> Step:
        member = self.members[uid]
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

    def _taken_out(self, uid: int, member: Member) -> Left:
        """Take a sequence out between two steps, with what is in its caches."""
        caches, tokens = self._generator.remove([uid], return_prompt_caches=True)[uid]
        del self.members[uid]
        return Left(caches, tuple(tokens[member.context :]))

    def _taken(self, response: Any) -> Step | None:
        member = self.members[response.uid]
        if member.first is First.GIVEN:
            member.first = First.PAST
            return None
        member.position += 1
        left = None
        if response.finish_reason is not None:
            del self.members[response.uid]
            left = Left(response.prompt_cache, tuple(response.all_tokens[member.context :]))
        return Step(member.key, member.draw.read(), response.finish_reason, left)

    def has(self, key: int) -> bool:
        """Whether the sequence ``key`` is a member."""
        return any(member.key == key for member in self.members.values())

    def remove(self, key: int) -> Left | None:
        """Take out the sequence ``key``, with what it leaves if a token of it was read."""
        for uid, member in self.members.items():
            if member.key == key:
                if member.first in (First.GIVEN, First.PAST):
                    return self._taken_out(uid, member)
                self._generator.remove([uid])
                del self.members[uid]
                return None
        return None

    def close(self) -> None:
        """Give back what the generator holds."""
        self._generator.close()


class Groups:
    """All decode groups. MLX thread only."""

    def __init__(self, model: Any, layout: Layout, rule: PaddingRule, stream: mx.Stream) -> None:
        self._model = model
        self._layout = layout
        self._rule = rule
        self._stream = stream
        self._groups: list[Group] = []

    def __len__(self) -> int:
        return sum(len(group.members) for group in self._groups)

    def members(self) -> Iterator[Member]:
        """Every sequence that decodes."""
        for group in self._groups:
            yield from group.members.values()

    @property
    def fresh(self) -> bool:
        """Whether a boundary step is under way, whose token nobody should wait for long."""
        return any(member.first in (First.TO_LAUNCH, First.LAUNCHED) for member in self.members())

    @property
    def sizes(self) -> list[int]:
        """Number of members of each group."""
        return [len(group.members) for group in self._groups]

    @property
    def reserved(self) -> int:
        """Padded bytes of all groups, by their reserved rows."""
        return sum(padded_bytes(self._layout, group.rows) for group in self._groups)

    def insert(self, member: Member, caches: list[Any], spare: int) -> None:
        """Join the group where the padding fits in ``spare`` bytes, or open a new one."""
        # Reserved rows are compared, not positions: they are what padding will grow to.
        index = choose_group(
            self._layout, [group.rows for group in self._groups], member.rows, self._rule, spare
        )
        if index is None:
            self._groups.append(Group(self._model, self._stream))
            index = len(self._groups) - 1
        self._groups[index].insert(member, caches)

    def grow(self, key: int, rows: int) -> int:
        """Reserve ``rows`` for the sequence ``key``; returns the padded bytes this adds."""
        before = self.reserved
        for member in self.members():
            if member.key == key:
                member.rows = rows
        return self.reserved - before

    def step(self) -> list[Step]:
        """One step of every group, in turn."""
        steps: list[Step] = []
        for group in self._groups:
            steps += group.step()
        self._drop_empty()
        return steps

    def remove(self, key: int) -> Left | None:
        """Take out a sequence, which frees its slot now; what it leaves (see ``Group``)."""
        holding = [group for group in self._groups if group.has(key)]
        left = holding[0].remove(key) if holding else None
        self._drop_empty()
        return left

    def close(self) -> None:
        """Drop everything."""
        for group in self._groups:
            group.close()
        self._groups.clear()

    def _drop_empty(self) -> None:
        for group in self._groups:
            if not group.members:
                group.close()
        self._groups = [group for group in self._groups if group.members]
