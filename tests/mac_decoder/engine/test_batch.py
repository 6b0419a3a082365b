"""Decode groups: when a first token is handed on, and what ends with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import pytest

from mac_decoder.engine.batch import Group, Member
from mac_decoder.engine.events import Generation, Sampling
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.sampling import Draw
from tests.mac_decoder.engine.drive import loaded_copy, prompt, reference

GREEDY = Sampling(temperature=0.0)


class _Counted(Draw):
    """A sampler that tells how many steps were launched."""

    launched = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.launched += 1
        return super().__call__(logprobs)


def test_a_first_token_does_not_wait_for_the_second_step(
    checkpoint: Callable[..., Path],
) -> None:
    """MLX's CPU backend blocks whoever launches: two steps would pass before the first token."""
    loaded = loaded_copy(checkpoint("llama"))
    tokens = prompt(70)
    expected = reference(loaded, tokens, 4)
    group = Group(loaded.model, mx.default_stream(mx.default_device()))
    draw = _Counted(GREEDY, None, loaded.vocabulary)
    _insert(group, loaded.model, Generation("r", tokens, 4, GREEDY), draw, 0)
    assert group.step() == []
    (first,) = group.step()
    assert (first.drawn.token, first.ended, draw.launched) == (expected[0], None, 1)
    found = [first]
    while group.members:
        found += group.step()
    assert [step.drawn.token for step in found] == expected
    assert [step.ended for step in found] == [None, None, None, "length"]


@pytest.mark.parametrize("ended", ["stop", "length"])
def test_an_answer_of_one_token_ends_at_its_first(
    checkpoint: Callable[..., Path], ended: str
) -> None:
    """Its neighbour, which joined earlier, goes on as if alone."""
    loaded = loaded_copy(checkpoint("llama"))
    tokens, others = prompt(40, 1), prompt(50, 2)
    expected = reference(loaded, others, 6)
    (only,) = reference(loaded, tokens, 1)
    group = Group(loaded.model, mx.default_stream(mx.default_device()))
    neighbour = Draw(GREEDY, None, loaded.vocabulary)
    _insert(group, loaded.model, Generation("n", others, 6, GREEDY), neighbour, 1)
    found = [step for _ in range(3) for step in group.step()]
    stops = frozenset({only}) if ended == "stop" else frozenset[int]()
    limit = 9 if ended == "stop" else 1
    short = Generation("s", tokens, limit, GREEDY, stop_token_ids=stops)
    _insert(group, loaded.model, short, Draw(GREEDY, None, loaded.vocabulary), 2)
    while group.members:
        found += group.step()
    (mine,) = [step for step in found if step.key == 2]
    assert (mine.drawn.token, mine.ended) == (only, ended)
    assert [step.drawn.token for step in found if step.key == 1] == expected


def _insert(group: Group, model: object, generation: Generation, draw: Draw, key: int) -> None:
    prefill = LocalPrefill(model, generation.tokens, 64)
    while prefill.remaining:
        prefill.advance()
    rows = len(generation.tokens) + generation.max_tokens
    group.insert(Member(key, generation, draw, prefill.end, rows), prefill.caches)
