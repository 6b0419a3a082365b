"""Decode groups: sequences of similar length that decode together, or one that decodes alone.

A group begins with one sequence in its own caches (``alone``) and becomes a batch when another
joins it; it stays one until it is empty, since taking the last one out would copy its caches.

Rows made in company, or alone in a batch, are rows made by decoding: their history differs
from that of prefilled rows, and nothing here promises them to be the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from mac_decoder.engine.admission import PaddingRule, choose_group, padded_bytes
from mac_decoder.engine.alone import Alone
from mac_decoder.engine.batch import Batch
from mac_decoder.engine.member import First, Left, Member, Step
from mac_decoder.kv.install import canonical
from protocol.layout import Layout


class Groups:
    """All decode groups. MLX thread only."""

    def __init__(self, model: Any, layout: Layout, rule: PaddingRule, stream: mx.Stream) -> None:
        self._model = model
        self._layout = layout
        self._rule = rule
        self._stream = stream
        self._groups: list[Alone | Batch] = []
        self._settled: list[Step] = []

    def __len__(self) -> int:
        """Sequences whose last token was not handed on yet."""
        ended = sum(step.ended is not None for step in self._settled)
        return ended + sum(len(group.members) for group in self._groups)

    def members(self) -> Iterator[Member]:
        """Every sequence that decodes."""
        for group in self._groups:
            yield from group.members

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
        return sum(padded_bytes(self._layout, rows) for rows in self._rows)

    @property
    def _rows(self) -> list[list[int]]:
        return [[member.rows for member in group.members] for group in self._groups]

    def insert(self, member: Member, caches: list[Any], spare: int) -> None:
        """Join the group where the padding fits in ``spare`` bytes, or open a new one."""
        # Reserved rows are compared, not positions: they are what padding will grow to.
        index = choose_group(self._layout, self._rows, member.rows, self._rule, spare)
        batch = None if index is None else self._batch(index)
        if batch is None:
            self._groups.append(Alone(self._model, member, caches))
        else:
            batch.insert(member, caches)

    def _batch(self, index: int) -> Batch | None:
        """The batch that a group is, or becomes; ``None`` if the one in it is at its end."""
        group = self._groups[index]
        if isinstance(group, Batch):
            return group
        steps = group.settle()
        self._settled += steps
        if any(step.ended for step in steps):
            del self._groups[index]
            return None
        canonical(group.caches)
        batch = Batch(self._model, self._stream)
        batch.insert(group.member, group.caches)
        self._groups[index] = batch
        return batch

    def grow(self, key: int, rows: int) -> int:
        """Reserve ``rows`` for the sequence ``key``; returns the padded bytes this adds."""
        before = self.reserved
        for member in self.members():
            if member.key == key:
                member.rows = rows
        return self.reserved - before

    def step(self) -> list[Step]:
        """One step of every group, in turn; what was read before that goes alone."""
        if self._settled:
            settled, self._settled = self._settled, []
            return settled
        steps: list[Step] = []
        for group in self._groups:
            steps += group.step()
        ended = {step.key for step in steps if step.ended}
        self._groups = [group for group in self._groups if not self._empty(group, ended)]
        return steps

    def remove(self, key: int) -> Left | None:
        """Take out a sequence, which frees its slot now.

        What it leaves, if a token of it was read and all that was drawn is finite; ``None`` for
        one that is in no group.
        """
        settled = [step for step in self._settled if step.key == key]
        self._settled = [step for step in self._settled if step.key != key]
        finite = all(step.drawn.finite for step in settled)
        for step in settled:
            if step.ended is not None:
                return step.left if finite else None
        for group in self._groups:
            if any(member.key == key for member in group.members):
                left = group.remove(key)
                self._groups = [group for group in self._groups if not self._empty(group, {key})]
                return left if finite else None
        return None

    def close(self) -> None:
        """Drop everything."""
        for group in self._groups:
            if isinstance(group, Batch):
                group.close()
        self._groups.clear()
        self._settled.clear()

    @staticmethod
    def _empty(group: Alone | Batch, gone: set[int]) -> bool:
        """Whether nobody is left in a group once those of ``gone`` are; it is then closed."""
        if isinstance(group, Alone):
            return group.member.key in gone
        if not group.members:
            group.close()
        return not group.members
