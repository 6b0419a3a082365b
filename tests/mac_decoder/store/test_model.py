"""Put, get, evict, crash, reopen, in any order, against a plain dictionary."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from mac_decoder.store import index
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray
from tests.mac_decoder.store.made import (
    SPACE,
    conversation,
    crashed,
    name_of,
    opened,
    serves,
    walk,
)
from tests.mac_decoder.store.scenario import Truth
from tests.mac_decoder.store.simulated import SimulatedDisk

LAYOUT = Layout(
    (
        FullLayer(0, 1, 2, 0, "float16"),
        SlidingLayer(1, 1, 1, 1, "bfloat16", 300),
        RecurrentLayer(2, (StateArray("s", (3,), "float32"),)),
    )
)
TEXTS = [conversation(1100, seed, shared=shared) for seed, shared in ((1, 0), (2, 520), (3, 520))]
texts = st.sampled_from(range(len(TEXTS)))
lengths = st.sampled_from((1, 200, 256, 300, 511, 512, 600, 768, 1000, 1100))


class Life(RuleBasedStateMachine):
    """``Truth.published`` is the dictionary; announced deletions leave it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.disk = SimulatedDisk("posix")
        self.truth = Truth()
        self.open()

    def open(self) -> None:
        self.store = opened(self.directory, self.disk, events=self.truth.events)

    def known(self) -> dict[bytes, list[int]]:
        return {name_of(LAYOUT, tokens): list(tokens) for _, tokens in self.truth.promised()}

    @rule(text=texts, length=lengths, role=st.sampled_from(("turn", "step", "shared")))
    def put(self, text: int, length: int, role: str) -> None:
        tokens = TEXTS[text][:length]
        writes = len([kind for kind in self.disk.log if kind == "write"])
        known = name_of(LAYOUT, tokens) in self.known()
        self.truth.publish(self.store, LAYOUT, tokens, role)
        assert not self.truth.refused
        if known:
            assert len([kind for kind in self.disk.log if kind == "write"]) == writes

    @rule(text=texts, length=lengths)
    def get(self, text: int, length: int) -> None:
        tokens = TEXTS[text][:length]
        assert serves(self.store, LAYOUT, tokens) == (name_of(LAYOUT, tokens) in self.known())

    @rule(text=texts)
    def look_up(self, text: int) -> None:
        """The deepest known prefix is offered, and no offer claims more than is shared."""
        prompt = TEXTS[text]
        holding = self.store.holding(SPACE, prompt)
        known = self.known()
        prefixes = [len(held) for held in known.values() if prompt[: len(held)] == held]
        offered = {offer.position for offer in holding.offers if offer.position == offer.shared}
        assert max(prefixes, default=0) in offered | {0}
        for offer in holding.offers:
            held = known[offer.key]  # type: ignore[index]
            assert held[: offer.shared] == prompt[: offer.shared]

    @rule(part=st.floats(0, 1))
    def evict(self, part: float) -> None:
        held = self.store.stats().on_disk
        target = int(held * part)
        self.store.prune(to_bytes=target)
        stats = self.store.stats()
        assert stats.on_disk <= target or not stats.cuts

    @rule()
    def clear(self) -> None:
        self.store.clear()
        assert not self.known()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.open()

    @rule()
    def crash(self) -> None:
        self.disk = crashed(self.directory, self.disk)
        self.open()

    @rule()
    def crash_and_lose_the_index(self) -> None:
        self.disk = crashed(self.directory, self.disk)
        index.remove(self.directory)
        self.open()

    @invariant()
    def on_disk_is_what_a_walk_counts(self) -> None:
        assert self.store.stats().on_disk == walk(self.directory, self.disk)

    def teardown(self) -> None:
        for name in self.known():
            assert self.store.holds(name)
        assert self.store.verify().bad == []
        self.store.close()
        shutil.rmtree(self.directory)


Life.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLife = Life.TestCase


@pytest.mark.soak
def test_a_long_life() -> None:
    run_state_machine_as_test(
        Life, settings=settings(max_examples=300, stateful_step_count=50, deadline=None)
    )
