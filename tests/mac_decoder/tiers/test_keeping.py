"""Sequences that memory has no room for: each cut brings what is new, and the disk has it all."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import ref

import pytest

from mac_decoder.keeper import Keeper, Line
from mac_decoder.reuse.cut import block_sizes
from mac_decoder.store import names
from mac_decoder.store.events import Deleting, Event
from mac_decoder.store.files import Disk
from mac_decoder.store.limits import MIN_CAP
from mac_decoder.store.store import Store
from mac_decoder.tiers import waiting
from protocol.blocks import BLOCK
from protocol.layout import Layout
from tests.mac_decoder.reuse.made import BLOCKLESS, FULL, LAYOUTS, SLIDING
from tests.mac_decoder.store.made import conversation
from tests.mac_decoder.store.simulated import SimulatedDisk, SimulatedIndex
from tests.mac_decoder.tiers.brought import (
    IDENTITY,
    KEY,
    Brought,
    brought_bytes,
    restored,
    serves,
)

TURNS = (300, 700, 1100, 1500, 1650, 2100)
TEXT = conversation(3000)
PLENTY = 1 << 28


class Slow(SimulatedDisk):
    """A disk on which nothing is written until it may be."""

    def __init__(self) -> None:
        super().__init__()
        self.may = threading.Event()
        self.may.set()
        self.waits = threading.Event()

    def create(self, path: Path) -> int:
        self.waits.set()
        assert self.may.wait(30)
        return super().create(path)


@contextmanager
def keeping(
    directory: Path,
    disk: Disk,
    ram: int,
    layout: Layout = SLIDING,
    heard: Callable[[Event], None] = lambda _: None,
) -> Iterator[tuple[Keeper, Store]]:
    """A keeper on a simulated disk."""
    keeper = Keeper(IDENTITY, layout, KEY, ram)

    def listener(event: Event) -> None:
        heard(event)
        keeper.heard(event)

    store = Store.open(
        directory, KEY, MIN_CAP * 4, 0, disk, listener,
        lambda where, owner: SimulatedIndex(where, owner, disk),  # type: ignore[arg-type]
    )  # fmt: skip
    keeper.attach(store)
    try:
        yield keeper, store
    finally:
        keeper.close()


@pytest.fixture
def disk() -> Slow:
    return Slow()


def rests(layout: Layout, positions: tuple[int, ...]) -> int:
    """Bytes of the cuts at these positions, blocks that a cut before has left out."""
    before = (0, *positions[:-1])
    return sum(
        brought_bytes(layout, last // BLOCK, position)
        for last, position in zip(before, positions, strict=True)
    )


def put(keeper: Keeper) -> None:
    """Wait until the keeping thread has done what it was told."""
    keeper._keeping._ordered.submit(lambda: None).result(20)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ram", [0, 6_000, 20_000, PLENTY])
def test_six_turns_bring_and_write_each_block_once_whatever_memory_has(
    layout: Layout, ram: int, tmp_path: Path, disk: Slow
) -> None:
    """Then the disk has them as deep as it does for someone whose memory has room for all."""
    with keeping(tmp_path, disk, ram, layout) as (keeper, store):
        sequence = Brought(keeper, layout, TEXT)
        for position in TURNS:
            sequence.settled(position)
            keeper.rest(sequence.line)
            keeper.wake(sequence.line)
        assert sequence.known == [0, *(position // BLOCK for position in TURNS[:-1])]
        assert keeper.status()["brought_bytes"] == sum(sequence.nbytes) == rests(layout, TURNS)
        assert keeper.status()["keeping_bytes"] == 0
        stats = store.stats()
        blocks = TURNS[-1] // BLOCK if layout is not BLOCKLESS else 0
        assert stats.blocks == blocks
        assert disk.log.count("create") == blocks + len(TURNS)
        assert (stats.cuts, stats.counts["published"]) == (len(TURNS), len(TURNS))
    with keeping(tmp_path, disk, ram, layout) as (keeper, store):
        again = Brought(keeper, layout, TEXT)
        assert all(serves(keeper, again, position, "durable") for position in TURNS)
        assert store.verify().bad == []


@pytest.mark.parametrize("paced", [True, False])
def test_steps_of_a_long_prefill_are_gone_on_from_as_turns_are(
    paced: bool, tmp_path: Path, disk: Slow
) -> None:
    """Written and deleted again, or never written: what they brought is not brought again."""
    with keeping(tmp_path, disk, 0) as (keeper, store):
        sequence = Brought(keeper, SLIDING, TEXT)
        if not paced:
            disk.may.clear()
        for position in range(BLOCK, 2048, BLOCK):
            sequence.cut(position, "step")
            assert keeper.drain(30) if paced else disk.waits.wait(30)
        sequence.cut(2100)
        put(keeper)
        disk.may.set()
        assert keeper.drain(30)
        sequence.settled(2400)
        assert sequence.known == [*range(8), 8]
        assert (store.stats().cuts, store.stats().blocks) == (2, 9)
        assert disk.log.count("create") == (8 + 7 + 1 if paced else 8 + 1 + 1) + 2
        assert serves(keeper, sequence, 2400, "durable")
        assert keeper.status()["keeping_bytes"] == 0


def test_what_memory_had_before_it_became_too_small_is_not_brought_again(
    tmp_path: Path, disk: Slow
) -> None:
    with keeping(tmp_path, disk, 12_000) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        disk.may.clear()
        for position in (300, 600, 900, 1200):
            sequence.cut(position)
        counts = {"put_stored": 2, "put_no_room": 1, "put_past_memory": 1}
        put(keeper)
        assert keeper.status()["kept"] == counts
        disk.may.set()
        assert keeper.drain(30)
        assert keeper.status()["kept"] == counts
        assert keeper.status()["resident"]["pinned_bytes"] == 0
        assert all(serves(keeper, sequence, position, "durable") for position in (900, 1200))


def test_a_sequence_that_memory_let_go_of_while_it_rested_goes_on_from_the_disk(
    tmp_path: Path, disk: Slow
) -> None:
    with keeping(tmp_path, disk, PLENTY) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        sequence.settled(700)
        keeper.rest(sequence.line)
        put(keeper)
        keeper.resize(0)
        keeper.wake(sequence.line)
        sequence.settled(1100)
        assert sequence.known == [0, 2]
        assert serves(keeper, sequence, 1100, "durable")


# -- what goes wrong


def test_a_refused_cut_is_brought_again_and_nothing_before_it(tmp_path: Path, disk: Slow) -> None:
    """One that was taken before that was known is dropped, and counted."""
    with keeping(tmp_path, disk, 0) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        sequence.settled(700)
        disk.may.clear()
        disk.fail_kinds, disk.fail_at, disk.stuck = frozenset({"create"}), disk.operations, True
        sequence.cut(1100)
        sequence.cut(1200)
        put(keeper)
        broken = sequence.line
        disk.may.set()
        assert keeper.drain(30)
        disk.fail_at = None
        assert broken.broken
        broken.broken = False
        sequence.settled(1250)
        assert broken.broken
        sequence.settled(1500)
        sequence.settled(1700)
        assert sequence.known == [0, 2, 4, 4, 2, 5]
        kept = keeper.status()["kept"]
        assert (kept["io_failed"], kept["block_missing"]) == (1, 1)
        assert (kept["line_broken"], kept["line_renewed"]) == (1, 1)
        assert not serves(keeper, sequence, 1100, "durable")
        assert all(serves(keeper, sequence, position, "durable") for position in (700, 1500, 1700))


def test_what_the_disk_refused_before_is_written_out_of_memory(tmp_path: Path, disk: Slow) -> None:
    """Once memory is too small for the next cut, it still has what came before."""
    with keeping(tmp_path, disk, 12_000) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        disk.fail_kinds, disk.fail_at, disk.stuck = frozenset({"create"}), disk.operations, True
        sequence.settled(300)
        sequence.settled(600)
        disk.fail_at = None
        for position in (900, 1200):
            sequence.settled(position)
            assert serves(keeper, sequence, position, "durable")
        assert sequence.known == [0, 1, 2, 3]
        assert keeper.status()["kept"]["io_failed"] == 2
        assert keeper.status()["resident"]["pinned_bytes"] == 0


@pytest.mark.parametrize("ram", [0, PLENTY])
def test_what_was_pruned_is_brought_again_once(ram: int, tmp_path: Path, disk: Slow) -> None:
    """Of what memory still has nothing is."""
    with keeping(tmp_path, disk, ram) as (keeper, store):
        sequence = Brought(keeper, SLIDING, TEXT)
        for position in (700, 1100):
            sequence.settled(position)
        store.prune(to_bytes=0)
        for position in (1500, 1700, 2100):
            sequence.settled(position)
        kept = keeper.status()["kept"]
        if ram:
            assert sequence.known == [0, 2, 4, 5, 6]
            assert serves(keeper, sequence, 1500, "durable")
        else:
            # The first cut after it finds that out.
            assert sequence.known == [0, 2, 4, 0, 6]
            assert (kept["block_missing"], kept["line_anew"]) == (1, 1)
        assert serves(keeper, sequence, 2100, "durable")
        assert store.verify().bad == []


def test_what_made_room_for_others_is_brought_again_from_there_on(
    tmp_path: Path, disk: Slow
) -> None:
    """A later turn is gone, an earlier one was used since."""
    gone: list[bytes] = []

    def heard(event: Event) -> None:
        if isinstance(event, Deleting) and event.cut:
            gone.append(event.cut)

    with keeping(tmp_path, disk, 0, heard=heard) as (keeper, store):
        sequence = Brought(keeper, SLIDING, TEXT)
        for position in (700, 1100):
            sequence.settled(position)
        assert serves(keeper, sequence, 700, "durable")
        sweeper = store._sweeper
        with store._held.writing:
            sweeper.delete(sweeper.plan(1), "room")
        assert len(gone) == 1
        for position in (1300, 1600, 1700):
            sequence.settled(position)
        assert sequence.known == [0, 2, 4, 2, 6]
        assert keeper.status()["kept"]["line_renewed"] == 1
        assert serves(keeper, sequence, 1700, "durable")


def test_a_damaged_block_is_brought_again(tmp_path: Path, disk: Slow) -> None:
    with keeping(tmp_path, disk, 0, FULL) as (keeper, store):
        sequence = Brought(keeper, FULL, TEXT)
        for position in (700, 1100):
            sequence.settled(position)
        path = tmp_path / names.block_path(sequence.line.files[1])
        disk.put(path, bytes(len(disk.files()[path])))
        assert len(store.verify().bad) == 1
        for position in (1300, 1600):
            sequence.settled(position)
        assert sequence.known == [0, 2, 4, 1]
        assert serves(keeper, sequence, 1600, "durable")
        # And what lacked it is whole again.
        assert serves(keeper, sequence, 1100, "durable")


@pytest.mark.parametrize("ram", [0, PLENTY])
def test_rows_that_were_made_otherwise_are_never_gone_on_from(
    ram: int, tmp_path: Path, disk: Slow
) -> None:
    """The same tokens are there already, with other bytes: they stay, and ours are brought."""
    with keeping(tmp_path, disk, ram) as (keeper, _):
        theirs = Brought(keeper, SLIDING, TEXT[:700])
        theirs.settled(700)
        ours = Brought(keeper, SLIDING, TEXT, flavour=1)
        for position in (700, 1100, 1500):
            ours.settled(position)
        assert ours.known == [0, 0, 4]
        assert serves(keeper, theirs, 700, "durable")
        assert serves(keeper, ours, 1100, "durable")
        assert serves(keeper, ours, 1500, "durable")


def test_one_that_is_not_in_memory_says_nothing_of_what_is(tmp_path: Path, disk: Slow) -> None:
    """A cut of the same name with other rows is published: memory's own stays refused."""
    with keeping(tmp_path, disk, PLENTY) as (keeper, _):
        theirs = Brought(keeper, SLIDING, TEXT[:1100])
        disk.fail_at, disk.stuck = disk.operations + 1, True
        theirs.settled(1100)
        disk.fail_at = None
        assert keeper.status()["resident"]["publications"] == {"refused": 1}
        ours = Brought(keeper, SLIDING, TEXT, flavour=1)
        ours.settled(700)
        keeper._keeping._ordered.submit(ours.line.release).result(20)
        ours.settled(1100)
        assert ours.known == [0, 2]
        assert keeper.status()["kept"]["put_past_memory"] == 1
        assert keeper.status()["resident"]["publications"] == {"refused": 1, "published": 1}
        assert serves(keeper, ours, 1100, "durable")


def test_a_step_is_not_worth_bringing_all_again() -> None:
    """The end of a turn is."""
    keeper = Keeper(IDENTITY, SLIDING, KEY, 12_000)
    sequence = Brought(keeper, SLIDING, TEXT)
    for position in (300, 600, 900):
        sequence.settled(position, "step")
    assert sequence.line.broken
    assert sequence.cut(1000, "step") is None
    assert sequence.cut(1050)
    assert sequence.known == [0, 1, 2, 0]
    assert keeper.close()
    assert keeper.status()["kept"]["line_anew"] == 1


def test_without_a_disk_nothing_is_brought_that_no_memory_can_hold() -> None:
    keeper = Keeper(IDENTITY, SLIDING, KEY, 5_000)
    sequence = Brought(keeper, SLIDING, TEXT)
    for position in (300, 600, 900, 1100):
        sequence.cut(position)
    assert keeper.drain(30)
    assert sequence.known == [0]
    assert keeper.status()["kept"] == {"put_stored": 1, "put_no_room": 3}
    keeper.close()


# -- bytes


def test_rows_count_until_they_are_on_disk_and_stay_no_longer(tmp_path: Path, disk: Slow) -> None:
    with keeping(tmp_path, disk, 0) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        disk.may.clear()
        kept = sequence.cut(700)
        assert kept is not None
        rows = [ref(array) for array in kept.rows.values()]
        nbytes = kept.nbytes
        del kept
        put(keeper)
        # Whoever looks has nothing to wait for.
        assert keeper.look((*TEXT[:700], 1)).result(20).resident.shared == 0
        assert keeper.status()["keeping_bytes"] == nbytes
        disk.may.set()
        assert keeper.drain(30)
        assert keeper.status()["keeping_bytes"] == 0
        gc.collect()
        assert [array() for array in rows] == [None] * len(rows)


def test_what_there_is_no_room_for_in_the_queue_comes_with_the_next_cut(
    tmp_path: Path, disk: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is lost of the sequence, and a small cut goes beside a long one."""
    monkeypatch.setattr(waiting, "MOST_QUEUED", rests(SLIDING, (300, 700)))
    with keeping(tmp_path, disk, 0) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        disk.may.clear()
        assert sequence.cut(1500)
        assert sequence.cut(1600)
        assert not sequence.cut(2900)
        disk.may.set()
        assert keeper.drain(30)
        sequence.settled(2950)
        assert sequence.known == [0, 5, 6]
        assert keeper.status()["kept"]["keeper_behind"] == 1
        assert serves(keeper, sequence, 2950, "durable")


def test_a_cut_s_whole_window_counts(
    tmp_path: Path, disk: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A delta would ship less of it: rows that the cut before has."""
    monkeypatch.setattr(waiting, "MOST_QUEUED", brought_bytes(SLIDING, 5, 1500) - 1)
    with keeping(tmp_path, disk, 0) as (keeper, _):
        sequence = Brought(keeper, SLIDING, TEXT)
        disk.may.clear()
        assert sequence.cut(1400)
        assert sequence.cut(1500) is None
        disk.may.set()


# -- going on from what was restored


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ram", [0, PLENTY])
@pytest.mark.parametrize("offered", [True, False])
def test_what_came_from_disk_is_gone_on_from_there(
    layout: Layout, ram: int, offered: bool, tmp_path: Path, disk: Slow
) -> None:
    """It is taken into memory where that has room, and not brought at all where it has none.

    As it is, or with the next cut, where it was but the lower part of a handoff.
    """
    with keeping(tmp_path, disk, ram, layout) as (keeper, _):
        Brought(keeper, layout, TEXT).settled(1100)
    disk.log.clear()
    with keeping(tmp_path, disk, ram, layout) as (keeper, _):
        found = restored(keeper, layout, TEXT[:1100], "durable")
        assert found is not None
        done, _ = found
        line = Line(done.pinned, 1100 // BLOCK, done.files)
        sequence = Brought(keeper, layout, TEXT, line=line)
        if offered:
            assert (sequence.cut(1100, publish=False) is not None) == bool(ram)
        sequence.settled(1500)
        sequence.settled(1520)
        assert sequence.known == ([0, 4, 5] if ram and offered else [0, 5] if ram else [4, 5])
        new = 5 - 4 if block_sizes(layout) else 0
        assert disk.log.count("create") == new + 2
        assert serves(keeper, sequence, 1500, "durable")
        assert serves(keeper, sequence, 1500, "resident") == bool(ram)
