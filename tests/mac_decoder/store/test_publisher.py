"""Publishing behind the response."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from weakref import ref

import pytest

from mac_decoder.reuse.line import Line
from mac_decoder.store import publisher as publishing_thread
from mac_decoder.store.manifest import Role
from mac_decoder.store.publisher import Job, Publisher
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from tests.mac_decoder.reuse.made import SLIDING
from tests.mac_decoder.store.made import (
    IDENTITY,
    SPACE,
    conversation,
    made,
    name_of,
    opened,
    serves,
)
from tests.mac_decoder.store.simulated import SimulatedDisk

TOKENS = conversation(900)


class Held(SimulatedDisk):
    """A disk on which nothing is written until it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.waits = threading.Event()

    def create(self, path: Path) -> int:
        self.waits.set()
        assert self.may.wait(30)
        return super().create(path)


class Outcomes:
    """What was told and released, in order."""

    def __init__(self) -> None:
        self.told: list[tuple[int, Published | Refused]] = []
        self.released: list[int] = []
        self.cuts_released: list[object] = []

    def tell(self, job: Job, outcome: Published | Refused) -> None:
        assert outcome.name == job.name
        assert outcome.position == job.cut.position
        assert job.cut not in self.cuts_released
        self.told.append((job.cut.position, outcome))

    def job(self, tokens: list[int], role: Role = "turn", known: int = 0) -> Job:
        cut, blocks = made(SLIDING, tokens)

        def release() -> None:
            self.released.append(len(tokens))
            self.cuts_released.append(cut)

        return Job(SPACE, IDENTITY, cut, blocks[known:], role, release=release)


@pytest.fixture
def outcomes() -> Outcomes:
    return Outcomes()


def test_jobs_are_published_in_order_and_let_go(tmp_path: Path, outcomes: Outcomes) -> None:
    with opened(tmp_path, SimulatedDisk()) as store:
        publisher = Publisher(store, outcomes.tell)
        for length in (300, 600, 900):
            assert publisher.submit(outcomes.job(TOKENS[:length]))
        assert publisher.close()
        assert [position for position, _ in outcomes.told] == [300, 600, 900]
        assert outcomes.released == [300, 600, 900]
        assert all(serves(store, SLIDING, TOKENS[:length]) for length in (300, 600, 900))


def test_submitting_does_not_wait(tmp_path: Path, outcomes: Outcomes) -> None:
    disk = Held()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(TOKENS[:300]))
        publisher.submit(outcomes.job(TOKENS))
        assert publisher.waiting() == 2
        assert not publisher.drain(0.01)
        assert outcomes.told == []
        disk.may.set()
        assert publisher.drain(30)
        assert publisher.waiting() == 0
        publisher.close()


def test_steps_that_a_waiting_cut_extends_are_not_written(
    tmp_path: Path, outcomes: Outcomes
) -> None:
    disk = Held()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(conversation(20, 7)))
        assert disk.waits.wait(30)
        for length, role in ((256, "step"), (400, "turn"), (512, "step"), (768, "step")):
            publisher.submit(outcomes.job(TOKENS[:length], role))  # type: ignore[arg-type]
        publisher.submit(outcomes.job(conversation(512, 9), "step"))
        publisher.submit(outcomes.job(TOKENS, "step"))
        assert publisher.waiting() == 4
        disk.may.set()
        publisher.close()
        assert [position for position, _ in outcomes.told] == [20, 256, 400, 512, 512, 768, 900]
        assert all(isinstance(outcome, Published) for _, outcome in outcomes.told)
        assert sorted(outcomes.released) == [20, 256, 400, 512, 512, 768, 900]
        lengths = (256, 400, 512, 768, 900)
        served = [length for length in lengths if serves(store, SLIDING, TOKENS[:length])]
        assert served == [400, 900]


def test_a_step_that_is_on_disk_already_is_not_said_to_be_superseded(
    tmp_path: Path, outcomes: Outcomes
) -> None:
    disk = Held()
    disk.may.set()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(TOKENS[:256]))
        assert publisher.drain(30)
        disk.may.clear()
        disk.waits.clear()
        publisher.submit(outcomes.job(conversation(20, 7)))
        assert disk.waits.wait(30)
        publisher.submit(outcomes.job(TOKENS[:256], "step"))
        publisher.submit(outcomes.job(TOKENS[:512], "step"))
        publisher.submit(outcomes.job(TOKENS))
        disk.may.set()
        publisher.close()
        said = {
            outcome.position: (outcome.existed, bool(outcome.superseded))
            for _, outcome in outcomes.told[2:]
            if isinstance(outcome, Published)
        }
        assert said == {256: (True, False), 512: (False, True), 900: (False, False)}
        assert serves(store, SLIDING, TOKENS[:256])


def test_a_line_s_cuts_go_on_from_each_other_on_disk(tmp_path: Path, outcomes: Outcomes) -> None:
    """Each brings its own blocks alone; a refusal costs what it brought and all that follows."""
    disk = Held()
    line = Line()
    cut, blocks = made(SLIDING, TOKENS)

    def job(length: int, known: int, role: Role = "turn") -> Job:
        return replace(outcomes.job(TOKENS[:length], role, known), line=line)

    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(job(300, 0))
        assert disk.waits.wait(30)
        # The steps' blocks go with the turn that they wait for, past nothing that needs them.
        publisher.submit(job(512, 1, "step"))
        publisher.submit(job(600, 2, "step"))
        publisher.submit(job(700, 2))
        publisher.submit(job(768, 2, "step"))
        assert publisher.waiting() == 3
        disk.may.set()
        assert publisher.drain(30)
        assert len(line.files) == 3
        assert store.stats().blocks == 3
        assert [position for position, _ in outcomes.told] == [300, 512, 600, 700, 768]
        line.files = line.files[:2]
        publisher.submit(Job(SPACE, IDENTITY, cut, (), line=line))
        publisher.close()
        assert getattr(outcomes.told[-1][1], "reason", "") == "block_missing"
        assert len(line.files) == 2
    assert len(blocks) == 3


def test_a_step_is_there_before_what_needs_its_blocks(tmp_path: Path, outcomes: Outcomes) -> None:
    """A turn at the same position does not bring them, so a later cut must not take them away."""
    disk = Held()
    line = Line()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(conversation(20, 7)))
        assert disk.waits.wait(30)
        for length, known, role in ((512, 0, "step"), (512, 2, "turn"), (900, 2, "turn")):
            job = outcomes.job(TOKENS[:length], role, known)  # type: ignore[arg-type]
            publisher.submit(replace(job, line=line))
        disk.may.set()
        publisher.close()
        assert [isinstance(outcome, Published) for _, outcome in outcomes.told] == [True] * 4
        assert serves(store, SLIDING, TOKENS[:512])
        assert serves(store, SLIDING, TOKENS)


def test_a_step_of_another_line_is_written_all_the_same(tmp_path: Path, outcomes: Outcomes) -> None:
    """Its rows may be others than those of the cut that has its tokens."""
    disk = Held()
    ours, theirs = Line(), Line()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(conversation(20, 7)))
        assert disk.waits.wait(30)
        publisher.submit(replace(outcomes.job(TOKENS[:512], "step"), line=ours))
        publisher.submit(replace(outcomes.job(TOKENS[:600]), line=theirs))
        publisher.submit(replace(outcomes.job(TOKENS, known=2), line=ours))
        disk.may.set()
        publisher.close()
        assert [isinstance(outcome, Published) for _, outcome in outcomes.told] == [True] * 4
        assert (len(ours.files), len(theirs.files)) == (3, 2)
        assert serves(store, SLIDING, TOKENS)


def test_a_cut_is_not_held_on_to_after_its_outcome(tmp_path: Path, outcomes: Outcomes) -> None:
    """What is published may be in no other memory any more."""
    with opened(tmp_path, SimulatedDisk()) as store:
        publisher = Publisher(store, outcomes.tell)
        cut, blocks = made(SLIDING, TOKENS)
        rows = [ref(body) for body in blocks]
        publisher.submit(Job(SPACE, IDENTITY, cut, blocks))
        del cut, blocks
        assert publisher.drain(30)
        assert [row() for row in rows] == [None] * 3
        publisher.close()


def test_steps_share_a_refusal(tmp_path: Path, outcomes: Outcomes) -> None:
    disk = Held()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(conversation(20, 7)))
        assert disk.waits.wait(30)
        publisher.submit(outcomes.job(TOKENS[:256], "step"))
        publisher.submit(outcomes.job(TOKENS))
        disk.fail_at, disk.stuck = 1, True
        disk.may.set()
        publisher.close()
        assert [(position, getattr(o, "reason", "")) for position, o in outcomes.told] == [
            (20, "io_failed"),
            (256, "io_failed"),
            (900, "io_failed"),
        ]
        disk.fail_at = None


def test_a_full_queue_refuses(
    tmp_path: Path, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing_thread, "MOST_WAITING", 2)
    disk = Held()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        publisher.submit(outcomes.job(conversation(20, 7)))
        assert disk.waits.wait(30)
        accepted = [publisher.submit(outcomes.job(conversation(20, seed))) for seed in range(3)]
        assert accepted == [True, True, False]
        assert [outcome.reason for _, outcome in outcomes.told if isinstance(outcome, Refused)] == [
            "publisher_behind"
        ]
        disk.may.set()
        publisher.close()


def test_a_clean_shutdown_drains(tmp_path: Path, outcomes: Outcomes) -> None:
    disk = SimulatedDisk()
    store = opened(tmp_path, disk)
    publisher = Publisher(store, outcomes.tell)
    for seed in range(5):
        publisher.submit(outcomes.job(conversation(300, seed)))
    assert publisher.close()
    assert publisher.close()
    store.close()
    with opened(tmp_path, disk) as store:
        assert all(serves(store, SLIDING, conversation(300, seed)) for seed in range(5))
    assert not publisher.submit(outcomes.job(TOKENS))
    assert outcomes.told[-1][1] == Refused(name_of(SLIDING, TOKENS), 900, "store_closed")


def test_a_shutdown_in_a_hurry_says_what_was_not_done(tmp_path: Path, outcomes: Outcomes) -> None:
    disk = Held()
    with opened(tmp_path, disk) as store:
        publisher = Publisher(store, outcomes.tell)
        for seed in range(3):
            publisher.submit(outcomes.job(conversation(20, seed)))
        assert disk.waits.wait(30)
        threading.Timer(0.1, disk.may.set).start()
        assert not publisher.close(0.01)
        reasons = [getattr(outcome, "reason", "published") for _, outcome in outcomes.told]
        assert sorted(reasons) == ["published", "store_closed", "store_closed"]
        assert len(outcomes.released) == 3


def test_a_wrong_cut_does_not_end_the_thread(tmp_path: Path, outcomes: Outcomes) -> None:
    with opened(tmp_path, SimulatedDisk()) as store:
        publisher = Publisher(store, outcomes.tell)
        cut, blocks = made(SLIDING, TOKENS, space=bytes(32))
        publisher.submit(Job(SPACE, IDENTITY, cut, blocks))
        publisher.submit(outcomes.job(TOKENS))
        publisher.close()
        assert getattr(outcomes.told[0][1], "reason", "") == "chain_differs"
        assert serves(store, SLIDING, TOKENS)


def test_recency_reaches_the_index_while_nothing_is_published(
    tmp_path: Path, outcomes: Outcomes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing_thread, "_TIDY_EVERY_S", 0.02)
    flushed = threading.Event()
    with opened(tmp_path, SimulatedDisk()) as store:
        flush = Store.flush

        def noted(self: Store) -> None:
            flush(self)
            flushed.set()

        monkeypatch.setattr(Store, "flush", noted)
        publisher = Publisher(store, outcomes.tell)
        assert flushed.wait(30)
        publisher.close()
