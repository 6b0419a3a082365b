"""The index of cuts against a plain dictionary that compares everything with everything."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mac_decoder.reuse.radix import Match, Radix, match_of_few
from protocol.blocks import BLOCK, as_tokens, chain
from protocol.errors import IntegrityError, LocalProtocolError
from tests.mac_decoder.reuse.made import OTHER_SPACE, SPACE
from tests.ordinary import examples

# Runs of few different tokens, with ends around a block's: prompts meet and part everywhere.
runs = st.tuples(st.integers(0, 2), st.sampled_from((1, 2, 100, 254, 255, 256, 257)))
prompts = st.lists(runs, min_size=1, max_size=5).map(
    lambda parts: tuple(token for token, count in parts for _ in range(count))
)
SPACES = (SPACE, OTHER_SPACE)
spaces = st.sampled_from(SPACES)


def common(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(ours), len(theirs)))


def check_match(found: Match, held: dict, space: bytes, prompt: tuple[int, ...]) -> None:
    """Compare with what looking at every cut says."""
    there = {key: tokens for (where, tokens), key in held.items() if where == space}
    shares = {key: common(tokens, prompt) for key, tokens in there.items()}
    assert found.shared == max(shares.values(), default=0)
    assert found.prompt == len(prompt)
    assert found.names == tuple(chain(space, prompt)[: found.shared // BLOCK])
    prefixes = sorted((len(t), key) for key, t in there.items() if prompt[: len(t)] == t)
    assert list(found.cuts) == prefixes
    if found.shared:
        assert found.witness is not None
        assert shares[found.witness.key] == found.shared
        assert found.witness.position == len(there[found.witness.key])
        ends = [len(tokens) for tokens in there.values() if prompt[: len(tokens)] == tokens]
        parts = found.shared not in (found.prompt, *ends)
        assert found.parts_at == (found.shared if parts else None)
    else:
        assert found.witness is None
        assert found.parts_at is None
    for position in {1, 255, 256, 257, found.shared or 1, found.shared + 1, found.shared // 2 or 1}:
        able = [len(t) for key, t in there.items() if shares[key] >= position]
        covering = found.covering(position)
        if not able:
            assert covering is None
            continue
        assert covering is not None
        assert shares[covering.key] >= position
        if position % BLOCK == 0:
            assert covering.position == min(able)


@examples(120)
@given(st.lists(st.tuples(spaces, prompts), max_size=12, unique=True), spaces, prompts)
def test_a_match_is_what_comparing_everything_says(
    cuts: list[tuple[bytes, tuple[int, ...]]], space: bytes, prompt: tuple[int, ...]
) -> None:
    radix: Radix[int] = Radix()
    held = {cut: key for key, cut in enumerate(cuts)}
    for (where, tokens), key in held.items():
        radix.insert(where, key, tokens)
    few = {s: [(k, as_tokens(t)) for (where, t), k in held.items() if where == s] for s in SPACES}
    for where, tokens in [(space, prompt), *cuts]:
        check_match(radix.match(where, tokens), held, where, tokens)
        found = match_of_few(few[where], as_tokens(tokens), chain(where, tokens))
        check_match(found, held, where, tokens)


class AgainstDictionary(RuleBasedStateMachine):
    """Inserts, removals and look-ups in any order."""

    cuts = Bundle("cuts")

    def __init__(self) -> None:
        super().__init__()
        self.radix: Radix[int] = Radix()
        self.held: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.used = 0

    @rule(target=cuts, space=spaces, tokens=prompts)
    def insert(self, space: bytes, tokens: tuple[int, ...]) -> tuple[bytes, tuple[int, ...]]:
        self.used += 1
        if (space, tokens) in self.held:
            with pytest.raises(LocalProtocolError):
                self.radix.insert(space, self.used, tokens)
        else:
            self.radix.insert(space, self.used, tokens)
            self.held[space, tokens] = self.used
        return space, tokens

    @rule(cut=consumes(cuts))
    def remove(self, cut: tuple[bytes, tuple[int, ...]]) -> None:
        key = self.held.pop(cut, None)
        if key is None:
            with pytest.raises(KeyError):
                self.radix.remove(0)
        else:
            self.radix.remove(key)

    @rule(space=spaces, prompt=prompts)
    def match(self, space: bytes, prompt: tuple[int, ...]) -> None:
        check_match(self.radix.match(space, prompt), self.held, space, prompt)

    @rule(cut=cuts, more=prompts)
    def go_on(self, cut: tuple[bytes, tuple[int, ...]], more: tuple[int, ...]) -> None:
        space, tokens = cut
        check_match(self.radix.match(space, tokens + more), self.held, space, tokens + more)

    @invariant()
    def holds_no_more_than_the_cuts_need(self) -> None:
        assert len(self.radix) == len(self.held)
        names = {name for space, tokens in self.held for name in chain(space, tokens)}
        assert self.radix.blocks == len(names)


AgainstDictionary.TestCase.settings = settings(
    max_examples=20, stateful_step_count=15, deadline=None
)
TestAgainstDictionary = AgainstDictionary.TestCase


def test_the_shallowest_covering_cut_after_removals() -> None:
    radix: Radix[int] = Radix()
    for position in (900, 300, 600):
        radix.insert(SPACE, position, range(position))
    for position in (300, 600, 900):
        assert radix.match(SPACE, range(280)).covering(256) == (position, position)
        radix.remove(position)
    assert radix.match(SPACE, range(280)).covering(256) is None


def test_an_empty_index_misses() -> None:
    found = Radix().match(SPACE, range(300))
    assert (found.shared, found.cuts, found.witness, found.covering(1)) == (0, (), None, None)


def test_another_namespace_finds_nothing() -> None:
    radix: Radix[str] = Radix()
    radix.insert(SPACE, "ours", range(300))
    assert radix.match(OTHER_SPACE, range(300)).shared == 0
    assert radix.match(SPACE, range(300)).shared == 300


def test_a_name_alone_makes_no_hit() -> None:
    """Tokens are compared although the names agree, as if SHA-256 had collided."""
    radix: Radix[str] = Radix()
    radix.insert(SPACE, "ours", [1] * 300)
    names = chain(SPACE, [1] * 300)
    found = radix.match(SPACE, [1] * 200 + [2] * 100, names)
    assert (found.shared, found.names, found.cuts) == (200, (), ())
    with pytest.raises(IntegrityError) as refused:
        radix.insert(SPACE, "theirs", [2] * 300, names)
    assert refused.value.reason == "tokens_differ"
    assert radix.match(SPACE, [1] * 300).cuts == ((300, "ours"),)
    assert len(radix) == 1


def test_names_of_another_namespace_make_no_hit() -> None:
    radix: Radix[str] = Radix()
    radix.insert(OTHER_SPACE, "theirs", [1] * 300)
    radix.insert(SPACE, "ours", [2] * 10)
    assert radix.match(SPACE, [1] * 300, chain(OTHER_SPACE, [1] * 300)).shared == 0


def test_as_many_names_as_blocks() -> None:
    with pytest.raises(ValueError):
        Radix().insert(SPACE, "cut", range(300), ())


def test_where_prompts_part_is_a_number_only_if_they_do() -> None:
    radix: Radix[str] = Radix()
    radix.insert(SPACE, "held", range(400))
    assert radix.match(SPACE, [*range(290), 7]).parts_at == 290
    assert radix.match(SPACE, range(290)).parts_at is None
    assert radix.match(SPACE, range(500)).parts_at is None
    assert radix.match(SPACE, [7, 7]).parts_at is None


def test_many_conversations_under_one_system_prompt() -> None:
    """A node with a thousand branches: the one that shares most is found among them."""
    radix: Radix[int] = Radix()
    system = list(range(600))
    for key in range(1000):
        radix.insert(SPACE, key, [*system, 10_000 + key, *range(key % 500)])
    found = radix.match(SPACE, [*system, 10_123, *range(50), 7])
    assert (found.shared, found.witness) == (651, (724, 123))
    for key in range(1000):
        radix.remove(key)
    assert (len(radix), radix.blocks) == (0, 0)


def test_a_deep_prompt_is_looked_up_quickly() -> None:
    """131,072 tokens among 1,000 conversations: under 10 ms of this thread's time."""
    draw = np.random.default_rng(0)
    radix: Radix[int] = Radix()
    deep = draw.integers(0, 50_000, 131_072, np.uint32)
    for key in range(1000):
        shared = int(draw.integers(0, 8192))
        own = draw.integers(0, 50_000, 2048, np.uint32)
        radix.insert(SPACE, key, np.concatenate((deep[:shared], own)))
    for key, position in enumerate(range(2048, len(deep), 2048), 1000):
        radix.insert(SPACE, key, deep[:position])
    took = []
    for _ in range(5):
        began = time.thread_time()
        found = radix.match(SPACE, deep)
        took.append(time.thread_time() - began)
    assert found.shared == 131_072 - 2048
    assert len(found.cuts) == 63
    assert min(took) < 0.010
