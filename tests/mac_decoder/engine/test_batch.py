"""Decode groups: alone, in company, from one to the other, and when a first token is handed on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mac_decoder.engine.admission import PaddingRule
from mac_decoder.engine.events import Generation, Sampling
from mac_decoder.engine.groups import Groups
from mac_decoder.engine.member import Member, Step
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.engine.sampling import Draw, Drawn
from mac_decoder.kv.install import build, canonical, extract, views
from mac_decoder.kv.shadow import Shadow
from tests.mac_decoder.engine.drive import loaded_copy, prompt, reference
from tests.ordinary import usual

GREEDY = Sampling(temperature=0.0)
KINDS = ("llama", "muse_glimmer", "lfm2")

Checkpoint = Callable[..., Path]


class _Counted(Draw):
    """A sampler that tells how many steps were launched."""

    launched = 0

    def __call__(self, logprobs: mx.array) -> mx.array:
        self.launched += 1
        return super().__call__(logprobs)


class Decoding:
    """Groups that are driven by hand."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self.found: dict[int, list[Step]] = {}
        stream = mx.default_stream(mx.default_device())
        self.groups = Groups(loaded.model, loaded.layout, PaddingRule(), stream)

    def insert(
        self,
        key: int,
        tokens: tuple[int, ...],
        count: int,
        sampling: Sampling = GREEDY,
        stops: tuple[int, ...] = (),
    ) -> _Counted:
        prefill = LocalPrefill(self.loaded.model, tokens, 64)
        while prefill.remaining:
            prefill.advance()
        generation = Generation(f"r{key}", tokens, count, sampling, stop_token_ids=frozenset(stops))
        draw = _Counted(sampling, None, self.loaded.vocabulary)
        member = Member(key, generation, draw, prefill.end, len(tokens) + count)
        self.groups.insert(member, prefill.caches, 1 << 30)
        return draw

    def step(self, times: int = 1) -> list[Step]:
        found = [step for _ in range(times) for step in self.groups.step()]
        for step in found:
            self.found.setdefault(step.key, []).append(step)
        return found

    def finish(self) -> None:
        while len(self.groups):
            self.step()

    def tokens(self, key: int) -> list[int]:
        return [step.drawn.token for step in self.found[key]]


@pytest.fixture
def decoding(checkpoint: Checkpoint, name: str) -> Decoding:
    return Decoding(loaded_copy(checkpoint(name)))


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("company", [False, True])
def test_a_first_token_does_not_wait_for_the_second_step(decoding: Decoding, company: bool) -> None:
    """MLX's CPU backend blocks whoever launches: two steps would pass before the first token."""
    if company:
        decoding.insert(1, prompt(70, 1), 30)
        decoding.step(3)
    tokens = prompt(70)
    draw = decoding.insert(0, tokens, 4)
    # What the other one had under way was read, and goes first.
    decoding.step(2 if company else 1)
    (first,) = decoding.step()
    expected = reference(decoding.loaded, tokens, 4)
    assert (first.key, first.drawn.token, first.ended, draw.launched) == (0, expected[0], None, 1)
    decoding.finish()
    assert decoding.tokens(0) == expected
    assert [step.ended for step in decoding.found[0]] == [None, None, None, "length"]


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("ended", ["stop", "length"])
@pytest.mark.parametrize("company", [False, True])
def test_an_answer_of_one_token_ends_at_its_first(
    decoding: Decoding, ended: str, company: bool
) -> None:
    """Its neighbour, which joined earlier, goes on as if alone."""
    tokens, others = prompt(40, 1), prompt(50, 2)
    (only,) = reference(decoding.loaded, tokens, 1)
    if company:
        decoding.insert(1, others, 6)
        decoding.step(3)
    stop = ended == "stop"
    draw = decoding.insert(2, tokens, 9 if stop else 1, stops=(only,) if stop else ())
    decoding.finish()
    (mine,) = decoding.found[2]
    assert (mine.drawn.token, mine.ended, draw.launched) == (only, ended, 1)
    if company:
        assert decoding.tokens(1) == reference(decoding.loaded, others, 6)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("before", range(7))
def test_a_sequence_goes_on_in_company_where_it_was_alone(decoding: Decoding, before: int) -> None:
    """Whenever another joins it, before its first token or with a step under way."""
    tokens, others = prompt(130, 3), prompt(120, 4)
    decoding.insert(1, tokens, 12)
    decoding.step(before)
    assert decoding.groups.sizes == [1]
    decoding.insert(2, others, 5)
    assert decoding.groups.sizes == [2]
    decoding.finish()
    assert decoding.tokens(1) == reference(decoding.loaded, tokens, 12)
    assert decoding.tokens(2) == reference(decoding.loaded, others, 5)
    (left,) = [step.left for step in decoding.found[1] if step.left is not None]
    fed = (tokens[-1], *decoding.tokens(1))[: len(left.fed)]
    assert left.fed == fed


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("ended", ["stop", "length"])
@pytest.mark.parametrize("gone", [(), (1,), (2,), (1, 2)])
def test_who_joins_one_that_is_at_its_end_decodes_alone(
    decoding: Decoding, ended: str, gone: tuple[int, ...]
) -> None:
    """Its last token, read on the way, is handed on all the same, unless it is taken out."""
    tokens, others = prompt(60, 3), prompt(50, 4)
    expected = reference(decoding.loaded, tokens, 3)
    stops = (expected[2],) if ended == "stop" else ()
    decoding.insert(1, tokens, 9 if stops else 3, stops=stops)
    decoding.step(4)
    assert decoding.tokens(1) == expected[:2]
    decoding.insert(2, others, 4)
    assert len(decoding.groups) == 2
    left = [decoding.groups.remove(key) for key in gone]
    assert len(decoding.groups) == 2 - len(gone)
    decoding.finish()
    if 1 in gone:
        assert left[0] is not None
        assert decoding.tokens(1) == expected[:2]
    else:
        assert decoding.tokens(1) == expected
        assert decoding.found[1][-1].ended == ended
    if 2 in gone:
        assert 2 not in decoding.found
    else:
        assert decoding.tokens(2) == reference(decoding.loaded, others, 4)


@pytest.mark.parametrize("name", ["llama"])
def test_penalties_see_what_was_said_alone(decoding: Decoding) -> None:
    """A sequence that joins others goes on under the same penalties."""
    sampling = Sampling(
        temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.2
    )
    tokens = prompt(60, 3)
    decoding.insert(1, tokens, 16, sampling)
    decoding.finish()
    alone = decoding.tokens(1)
    assert alone != reference(decoding.loaded, tokens, 16)
    decoding.found.clear()
    decoding.insert(1, tokens, 16, sampling)
    decoding.step(6)
    decoding.insert(2, prompt(50, 4), 20)
    decoding.finish()
    assert decoding.tokens(1) == alone


@pytest.mark.parametrize("name", ["llama"])
def test_what_was_read_when_another_joined_goes_before_the_next_step(decoding: Decoding) -> None:
    """It may be a first token."""
    draw = decoding.insert(1, prompt(60, 3), 12)
    decoding.step()
    decoding.insert(2, prompt(50, 4), 12)
    (first,) = decoding.step()
    assert (first.key, draw.launched) == (1, 1)


class _Broken(Draw):
    """A sampler whose draws are finite up to a step."""

    until = 0
    reads = 0

    def read(self) -> Drawn:
        self.reads += 1
        drawn = super().read()
        return drawn if self.reads <= self.until else replace(drawn, finite=False)


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("until", [2, 3])
@pytest.mark.parametrize("how", ["taken out", "stopped", "settled", "in a batch"])
def test_a_row_whose_step_gave_no_number_is_not_left(
    decoding: Decoding, until: int, how: str
) -> None:
    """It is in the caches already, though nobody has read the token."""
    tokens = prompt(60, 3)
    expected = reference(decoding.loaded, tokens, 2)
    draw = _Broken(GREEDY, None, decoding.loaded.vocabulary)
    draw.until = until
    stops = frozenset({expected[1]}) if how == "stopped" else frozenset[int]()
    generation = Generation("r", tokens, 20, GREEDY, stop_token_ids=stops)
    prefill = LocalPrefill(decoding.loaded.model, tokens, 64)
    while prefill.remaining:
        prefill.advance()
    if how == "in a batch":
        decoding.insert(2, prompt(50, 4), 30)
    decoding.groups.insert(Member(1, generation, draw, 59, 80), prefill.caches, 1 << 30)
    while len(decoding.found.get(1, ())) < 2:
        decoding.step()
    if how == "stopped":
        left = decoding.found[1][-1].left
    else:
        if how == "settled":
            decoding.insert(2, prompt(50, 4), 30)
        left = decoding.groups.remove(1)
    assert (left is None) == (until == 2)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("steps", range(2, 6))
def test_what_is_taken_out_is_a_replay_of_what_was_fed(decoding: Decoding, steps: int) -> None:
    """A client that leaves: the caches hold exactly the tokens that are said to be in them."""
    loaded, tokens = decoding.loaded, prompt(90, 5)
    decoding.insert(1, tokens, 40)
    decoding.step(steps)
    left = decoding.groups.remove(1)
    assert left is not None
    assert len(decoding.groups) == 0
    again = Decoding(loaded)
    again.insert(1, tokens, 40)
    again.step(steps + 4)
    assert left.fed == (tokens[-1], *again.tokens(1))[: len(left.fed)]
    canonical(left.caches)
    position = len(tokens) - 1 + len(left.fed)
    found = extract(left.caches, loaded.layout, position)
    prefill = LocalPrefill(loaded.model, tokens, 64)
    while prefill.remaining:
        prefill.advance()
    for token in left.fed:
        loaded.model(mx.array([[token]]), cache=prefill.caches)
        mx.eval([cache.state for cache in prefill.caches])
    canonical(prefill.caches)
    expected = extract(prefill.caches, loaded.layout, position)
    assert all(np.array_equal(found[place], expected[place]) for place in expected)


@pytest.mark.parametrize("name", ["llama"])
@pytest.mark.parametrize("steps", [0, 1])
def test_who_is_taken_out_before_a_token_leaves_nothing(decoding: Decoding, steps: int) -> None:
    decoding.insert(1, prompt(40, 6), 9)
    decoding.step(steps)
    assert decoding.groups.remove(1) is None
    assert len(decoding.groups) == 0
    assert decoding.groups.step() == []


@pytest.mark.parametrize(
    "name", usual(["llama", "muse_glimmer", "lfm2", "qwen3_next"], ["muse_glimmer", "qwen3_next"])
)
@pytest.mark.parametrize("length", usual([20, 33, 100], [33]))
def test_rows_that_are_being_kept_are_not_written_to(decoding: Decoding, length: int) -> None:
    """A lone sequence decodes in its own memory, of which others still copy what was there."""
    layout, tokens = decoding.loaded.layout, prompt(length + 1, 7)
    prefill = LocalPrefill(decoding.loaded.model, tokens, 64)
    while prefill.remaining:
        prefill.advance()
    shadow = Shadow(layout, 0, length)
    for place, rows in extract(prefill.caches, layout, length).items():
        if rows.nbytes:
            shadow.place_piece(*place, 0, rows.nbytes)[:] = rows.data
    caches = build(decoding.loaded.model, layout, shadow)
    canonical(caches)
    kept = views(caches, layout, length)
    before = {place: rows.copy() for place, rows in kept.items()}
    generation = Generation("r", tokens, 80, GREEDY)
    draw = Draw(GREEDY, None, decoding.loaded.vocabulary)
    decoding.groups.insert(Member(1, generation, draw, length, length + 81), caches, 1 << 30)
    decoding.finish()
    assert decoding.tokens(1) == reference(decoding.loaded, tokens, 80)
    (left,) = [step.left for step in decoding.found[1] if step.left is not None]
    canonical(left.caches)
    at_the_end = views(left.caches, layout, length + len(left.fed))
    snapshot = {place: rows.copy() for place, rows in at_the_end.items()}
    assert all(np.array_equal(kept[place], before[place]) for place in before)
    # The next turn goes on in the same caches, while the last one's end is still being kept.
    more = (*tokens, *decoding.tokens(1)[: len(left.fed) - 1], 5)
    again = Generation("r", more, 40, GREEDY)
    draw = Draw(GREEDY, None, decoding.loaded.vocabulary)
    member = Member(2, again, draw, len(more) - 1, len(more) + 41)
    decoding.groups.insert(member, left.caches, 1 << 30)
    decoding.finish()
    assert all(np.array_equal(at_the_end[place], snapshot[place]) for place in snapshot)
