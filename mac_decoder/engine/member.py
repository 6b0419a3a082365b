"""A sequence that decodes, alone or in a batch, and what a step of it gives."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from mac_decoder.engine.events import FinishReason, Generation
from mac_decoder.engine.sampling import Draw, Drawn, Processor, processors


class First(enum.Enum):
    """Where a sequence's first token stands."""

    TO_LAUNCH = enum.auto()
    LAUNCHED = enum.auto()
    GIVEN = enum.auto()
    """Handed on, while the batch, which launches a step ahead, has yet to return it."""
    PAST = enum.auto()


@dataclass(slots=True)
class Member:
    """A sequence in a group. ``position`` is its cache's, ``rows`` what is reserved for it.

    ``given`` are the tokens that it gave while it was alone, of which the last is not in its
    cache.
    """

    key: int
    generation: Generation
    draw: Draw
    position: int
    rows: int
    first: First = First.TO_LAUNCH
    given: list[int] = field(default_factory=list)

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens in its cache from the boundary token on, when it joins a batch."""
        return (self.generation.tokens[-1], *self.given)[:-1]

    @property
    def due(self) -> int:
        """The token to be fed next, when it joins."""
        return (self.generation.tokens[-1], *self.given)[-1]

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens of the prompt, before the boundary token, that its processors look at."""
        sampling = self.generation.sampling
        if sampling.repetition_penalty is None:
            return ()
        return self.generation.tokens[-sampling.penalty_context - 1 : -1]

    def processors(self) -> list[Processor]:
        """Its logits processors: they see the context, the boundary token and what is given."""
        return processors(self.generation.sampling, len(self.context) + 1)


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
