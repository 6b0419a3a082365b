"""Sequences that go on while memory shrinks, the disk fails and others make room: never wrong.

Two sequences begin alike and have other rows. Whatever happens, each tier gives back rows of one
of them and never of both; what is brought is what is kept nowhere; and once the trouble is over,
two cuts later the disk has all of both again.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from mac_decoder.keeper import Keeper, Line
from mac_decoder.store.limits import MIN_CAP
from mac_decoder.store.manifest import Role
from mac_decoder.store.store import Store
from protocol.blocks import BLOCK
from protocol.layout import Layout
from tests.mac_decoder.reuse.made import FULL, RECURRENT, SLIDING
from tests.mac_decoder.store.made import conversation, rows_of
from tests.mac_decoder.store.simulated import SimulatedDisk, SimulatedIndex
from tests.mac_decoder.tiers.brought import IDENTITY, KEY, Brought, restored

PLENTY = 1 << 28
SHARED = 520
FAILURES = frozenset({"create", "write", "sync", "rename", "barrier", "commit"})

which = st.sampled_from((0, 1))
roles = st.sampled_from(("turn", "turn", "step"))
budgets = st.sampled_from((0, 6_000, 20_000, PLENTY))


class Lines(RuleBasedStateMachine):
    """A keeper on a disk that fails, and two sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.disk = SimulatedDisk()
        self.texts = [conversation(1 << 15, seed, shared=SHARED) for seed in (1, 2)]
        self.cuts: list[list[int]] = [[], []]

    @initialize(layout=st.sampled_from((FULL, SLIDING, RECURRENT)), ram=budgets)
    def start(self, layout: Layout, ram: int) -> None:
        self.layout = layout
        self.ram = ram
        self.open()
        self.sequences = [self.begun(at) for at in (0, 1)]

    def begun(self, at: int, line: Line | None = None) -> Brought:
        return Brought(self.keeper, self.layout, self.texts[at], at, line)

    def open(self) -> None:
        self.keeper = Keeper(IDENTITY, self.layout, KEY, self.ram)
        self.store = Store.open(
            self.directory, KEY, MIN_CAP * 4, 0, self.disk, self.keeper.heard,
            lambda where, owner: SimulatedIndex(where, owner, self.disk),
        )  # fmt: skip
        self.keeper.attach(self.store)

    def position(self, at: int) -> int:
        return self.cuts[at][-1] if self.cuts[at] else 0

    # -- what happens

    @rule(at=which, more=st.sampled_from((1, 40, 256, 300, 700)), role=roles)
    def cut(self, at: int, more: int, role: Role) -> None:
        position = self.position(at) + more
        self.sequences[at].cut(position, role)
        self.cuts[at].append(position)

    @rule()
    def wait(self) -> None:
        assert self.keeper.drain(30)

    @rule(at=which)
    def rest(self, at: int) -> None:
        """Its turn is over, and then the next one comes."""
        line = self.sequences[at].line
        self.keeper.rest(line)
        self.keeper.wake(line)

    @rule(at=which, ram=budgets)
    def shrink_while_it_rests(self, at: int, ram: int) -> None:
        line = self.sequences[at].line
        self.keeper.rest(line)
        self.settle()
        self.ram = ram
        self.keeper.resize(ram)
        self.keeper.wake(line)

    @rule(ram=budgets)
    def shrink(self, ram: int) -> None:
        self.ram = ram
        self.keeper.resize(ram)

    @rule(part=st.sampled_from((0.0, 0.5, 0.9)))
    def prune(self, part: float) -> None:
        self.store.prune(to_bytes=int(self.store.stats().on_disk * part))

    @rule(
        at=which,
        more=st.sampled_from((40, 300, 700)),
        after=st.integers(1, 12),
        stuck=st.booleans(),
    )
    def fail(self, at: int, more: int, after: int, stuck: bool) -> None:
        """The disk fails once, or for a while."""
        assert self.keeper.drain(30)
        self.disk.fail_kinds, self.disk.stuck = FAILURES, stuck
        self.disk.fail_at = self.disk.operations + after
        self.cut(at, more, "turn")
        self.cut(at, more, "turn")
        assert self.keeper.drain(30)
        self.disk.fail_at = self.disk.fail_kinds = None

    @rule(at=which, more=st.sampled_from((300, 700)))
    def fill(self, at: int, more: int) -> None:
        """The disk is full; what is there makes room, or the cut is refused."""
        assert self.keeper.drain(30)
        self.disk.capacity = self.disk.nbytes + 1000
        self.cut(at, more, "turn")
        assert self.keeper.drain(30)
        self.disk.capacity = 1 << 40

    @rule()
    def restart(self) -> None:
        """Each goes on from the deepest of its cuts that is on disk, or anew."""
        assert self.keeper.close()
        self.open()
        for at in (0, 1):
            self.sequences[at] = self.gone_on_with(at)

    def gone_on_with(self, at: int) -> Brought:
        for position in reversed(self.cuts[at]):
            found = restored(self.keeper, self.layout, self.texts[at][:position], "durable")
            if found is None or not found[1].holds(self.rows(at, position)):
                continue
            self.cuts[at] = [cut for cut in self.cuts[at] if cut <= position]
            line = Line(found[0].pinned, position // BLOCK, found[0].files)
            sequence = self.begun(at, line)
            sequence.cut(position, publish=False)
            return sequence
        self.cuts[at].clear()
        return self.begun(at)

    # -- what must be true

    def rows(self, at: int, position: int, flavour: int | None = None) -> dict:
        tokens = self.texts[at][:position]
        return rows_of(self.layout, tokens, at if flavour is None else flavour)

    def settle(self) -> None:
        self.keeper._keeping._ordered.submit(lambda: None).result(20)

    @invariant()
    def only_what_was_handed_over_is_on_disk(self) -> None:
        for sequence in getattr(self, "sequences", ()):
            assert len(sequence.line.files) <= sequence.line.blocks

    def check(self, at: int, position: int, tier: str) -> bool:
        found = restored(self.keeper, self.layout, self.texts[at][:position], tier)
        if found is None:
            return False
        done, memory = found
        if done.pinned is not None:
            done.pinned.release()
        alike = (at,) if position > SHARED else (0, 1)
        assert any(memory.holds(self.rows(at, position, flavour)) for flavour in alike)
        return True

    def teardown(self) -> None:
        if not hasattr(self, "sequences"):
            return
        for _ in range(2):
            for at in (0, 1):
                self.cut(at, 700, "turn")
                assert self.keeper.drain(30)
        for at in (0, 1):
            for position in self.cuts[at]:
                for tier in ("resident", "durable"):
                    self.check(at, position, tier)
            assert self.check(at, self.position(at), "durable")
            self.keeper.let_go(self.sequences[at].line)
        self.settle()
        status = self.keeper.status()
        assert "keep_failed" not in status["kept"]
        assert (status["keeping_bytes"], status["resident"]["pinned_bytes"]) == (0, 0)
        assert self.store.verify().bad == []
        self.keeper.close()
        assert self.disk.open_handles == 0
        shutil.rmtree(self.directory)


Lines.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLines = Lines.TestCase


@pytest.mark.soak
def test_a_long_life_of_lines() -> None:
    run_state_machine_as_test(
        Lines, settings=settings(max_examples=200, stateful_step_count=40, deadline=None)
    )
