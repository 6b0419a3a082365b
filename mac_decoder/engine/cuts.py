"""Cuts worth keeping: where the prefill of a prompt stops, as a pure function of the prompt.

A prefill ends a tile at each of these positions, whether or not anything is kept there, so
that a later run that goes on from one of them computes what this run computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

EVERY: Final = 2048
"""Tokens of a long prefill between two cuts."""

Role = Literal["turn", "step"]
"""``step``: a place on the way, not kept on disk once a cut that extends it is."""


class Segment(NamedTuple):
    """Prefill goes on to ``end``, where a cut of ``role`` is worth keeping."""

    end: int
    role: Role


def segments(end: int, turns: Sequence[int] = ()) -> tuple[Segment, ...]:
    """The segments of a prefill of ``[0, end)``, ``end`` = N-1.

    ``turns`` are positions that other prompts will share: where the next turn parts from this
    prompt, say. Those outside of ``(0, end)`` are left out.
    """
    roles: dict[int, Role] = dict.fromkeys(range(EVERY, end, EVERY), "step")
    roles |= {position: "turn" for position in turns if 0 < position < end}
    if end > 0:
        roles[end] = "turn"
    return tuple(Segment(position, roles[position]) for position in sorted(roles))
