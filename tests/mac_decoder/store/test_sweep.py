"""The cap, the floor, and what goes first."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from mac_decoder.store import index
from mac_decoder.store.events import Deleting, Event
from mac_decoder.store.limits import MIN_CAP, default_limits
from mac_decoder.store.publishing import Published, Refused
from mac_decoder.store.store import Store
from protocol.errors import ConfigError
from protocol.layout import FullLayer, Layout
from tests.mac_decoder.reuse.made import FULL
from tests.mac_decoder.store.made import (
    IDENTITY,
    KEY,
    OTHER_IDENTITY,
    OTHER_SPACE,
    SPACE,
    Destination,
    conversation,
    made,
    name_of,
    opened,
    publish,
    serves,
    walk,
)
from tests.mac_decoder.store.simulated import SimulatedDisk

WIDE = Layout((FullLayer(0, 4, 128, 128, "float32"),))
"""4 KiB a row: a block is 1 MiB."""


class Watched(SimulatedDisk):
    """Remembers the most bytes that were ever there, the index's included."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.most = 0

    def look(self) -> None:
        real = sum(path.stat().st_size for path in self.directory.iterdir() if path.is_file())
        self.most = max(self.most, self.nbytes + real)

    def step(self, kind: str) -> None:
        self.look()
        super().step(kind)
        self.look()


def text(seed: int, blocks: int = 3) -> list[int]:
    return conversation(blocks * 256 + 5, seed)


def test_the_cap_holds_at_every_moment_over_all_identities(tmp_path: Path) -> None:
    disk = Watched(tmp_path)
    cap = MIN_CAP
    with opened(tmp_path, disk, cap=cap) as store:
        for seed in range(12):
            if seed % 2:
                assert isinstance(publish(store, WIDE, text(seed)), Published)
            else:
                cut, blocks = made(WIDE, text(seed), space=OTHER_SPACE)
                done = store.publish(OTHER_SPACE, OTHER_IDENTITY, cut, blocks)
                assert isinstance(done, Published)
            assert store.stats().on_disk == walk(tmp_path, disk) <= cap
        assert store.stats().cuts >= 3
        assert store.stats().counts["deleted_files"] > 0
        disk.look()
        assert cap // 2 < disk.most <= cap


def test_the_least_recently_used_goes_first_and_is_announced(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    events: list[Event] = []
    with opened(tmp_path, disk, cap=MIN_CAP, events=events) as store:
        for seed in range(3):
            publish(store, WIDE, text(seed))
        assert serves(store, WIDE, text(0))
        there = {path.relative_to(tmp_path).as_posix() for path in disk.files()}
        publish(store, WIDE, text(3, 5))
        assert [serves(store, WIDE, text(seed)) for seed in range(3)] == [True, False, True]
        gone = there - {path.relative_to(tmp_path).as_posix() for path in disk.files()}
        told = [event for event in events if isinstance(event, Deleting)]
        assert {event.path for event in told} == gone
        assert {event.reason for event in told} == {"room"}
        assert told[0].path.startswith("cuts/")
        assert all(bool(event.cut) == event.path.startswith("cuts/") for event in told)
        assert not any(store.holds(event.cut) for event in told)


def test_blocks_that_others_need_stay(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk, cap=MIN_CAP) as store:
        first, second = conversation(1224, 1, shared=1024), conversation(1224, 2, shared=1024)
        publish(store, WIDE, first)
        publish(store, WIDE, second)
        publish(store, WIDE, text(5, 7))
        publish(store, WIDE, conversation(105, 6))
        assert not serves(store, WIDE, first)
        assert serves(store, WIDE, second)


def test_what_cannot_fit_is_refused_and_nothing_goes(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk, cap=MIN_CAP) as store:
        publish(store, WIDE, text(1))
        refused = publish(store, WIDE, text(2, 16))
        assert refused == Refused(name_of(WIDE, text(2, 16)), 16 * 256 + 5, "store_over_cap")
        assert isinstance(refused, Refused)
        assert refused.out_of_space
        assert serves(store, WIDE, text(1))


def test_the_source_of_an_extension_stays(tmp_path: Path) -> None:
    """A conversation that outgrows the cap keeps what it had."""
    disk = SimulatedDisk()
    tokens = text(1, 14)
    with opened(tmp_path, disk, cap=MIN_CAP) as store:
        publish(store, WIDE, tokens[: 8 * 256])
        refused = publish(store, WIDE, tokens)
        assert isinstance(refused, Refused)
        assert serves(store, WIDE, tokens[: 8 * 256])
        assert isinstance(publish(store, WIDE, tokens[: 10 * 256]), Published)


def test_the_floor_keeps_space_free(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    disk.capacity = 12 << 20
    floor = 4 << 20
    with opened(tmp_path, disk, cap=1 << 30, floor=floor) as store:
        for seed in range(5):
            assert isinstance(publish(store, WIDE, text(seed)), Published)
            assert disk.free(tmp_path) >= floor
        assert store.stats().cuts == 2
        refused = publish(store, WIDE, text(9, 9))
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.out_of_space) == ("store_under_floor", True)
        assert serves(store, WIDE, text(4))


def test_what_is_of_no_use_goes_before_any_cut(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    disk.put(tmp_path / "blocks" / f"{'1' * 64}.safetensors", bytes(5 << 20))
    disk.put(tmp_path / "cuts/users-notes", bytes(2 << 20))
    with opened(tmp_path, disk, cap=MIN_CAP) as store:
        publish(store, WIDE, text(1))
        publish(store, WIDE, text(2))
        assert serves(store, WIDE, text(1))
        assert serves(store, WIDE, text(2))
        assert store.stats().kinds["malformed"].files == 0
        assert store.stats().kinds["unknown"].nbytes == 2 << 20
        store.clear()
        assert list(disk.files()) == [tmp_path / "cuts/users-notes"]


def test_a_smaller_cap_holds_from_the_start(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk, cap=MIN_CAP * 2) as store:
        for seed in range(8):
            publish(store, WIDE, text(seed))
    with opened(tmp_path, disk, cap=MIN_CAP) as store:
        assert store.stats().on_disk == walk(tmp_path, disk) <= MIN_CAP
        assert serves(store, WIDE, text(7))
        assert not serves(store, WIDE, text(0))
    index.remove(tmp_path)
    with opened(tmp_path, disk, cap=MIN_CAP) as store:
        assert store.stats().on_disk == walk(tmp_path, disk) <= MIN_CAP
        assert serves(store, WIDE, text(7))


def test_prune_reaches_its_size_and_a_dry_run_tells_it(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk) as store:
        for seed in range(6):
            publish(store, WIDE, conversation(800, seed, shared=256))
        before = store.stats().on_disk
        told = store.prune(to_bytes=before // 2, dry_run=True)
        assert store.stats().on_disk == before
        done = store.prune(to_bytes=before // 2)
        assert told == done
        assert store.stats().on_disk == walk(tmp_path, disk) <= before // 2
        assert store.prune(to_bytes=before) == (0, 0)
        with pytest.raises(ValueError):
            store.prune()
        assert serves(store, WIDE, conversation(800, 5, shared=256))


def test_prune_stale_takes_what_nobody_here_can_use(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk) as store:
        publish(store, FULL, conversation(300))
        cut, blocks = made(FULL, conversation(300), space=OTHER_SPACE)
        store.publish(OTHER_SPACE, OTHER_IDENTITY, cut, blocks)
        assert store.prune(stale=True, dry_run=True) == (0, 0)
        told = store.prune(stale=True, identity=IDENTITY, dry_run=True)
        assert told.files == 2
        assert store.prune(stale=True, identity=IDENTITY) == told
        assert serves(store, FULL, conversation(300))
        assert store.stats().cuts == 1


def test_clear_leaves_nothing(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk) as store:
        for seed in range(4):
            publish(store, FULL, conversation(600, seed, shared=300))
        size = sum(len(data) for data in disk.files().values())
        told = store.clear(dry_run=True)
        assert told == (len(disk.files()), size)
        assert store.clear() == told
        assert disk.files() == {}
        assert store.stats().on_disk == walk(tmp_path, disk)
        name = name_of(FULL, conversation(600, 0, shared=300))
        assert name not in (tmp_path / index.NAME).read_bytes()
    with opened(tmp_path, disk) as store:
        assert store.stats().cuts == 0


def test_a_cap_that_is_too_small_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path, KEY, MIN_CAP - 1, 0)
    assert caught.value.reason == "cache_cap_too_small"


def test_the_default_is_a_part_of_the_volume(tmp_path: Path) -> None:
    limits = default_limits(tmp_path / "not/made/yet")
    volume = os.statvfs(tmp_path)
    assert limits.cap_bytes <= 100 * 10**9
    assert limits.cap_bytes <= volume.f_blocks * volume.f_frsize // 10
    assert 0 < limits.floor_bytes <= 20 * 10**9


def test_the_cap_holds_on_a_real_disk_while_others_read(tmp_path: Path) -> None:
    """Somebody walks the directory all the time, two threads publish, one reads."""
    cap = MIN_CAP
    stop = threading.Event()
    most = [0]
    directory = tmp_path / "cache"

    def watch() -> None:
        while not stop.is_set():
            seen: dict[int, int] = {}
            for folder, _folders, names in os.walk(directory):
                for name in names:
                    try:
                        status = os.lstat(os.path.join(folder, name))
                    except FileNotFoundError:
                        continue
                    seen[status.st_ino] = status.st_size
            most[0] = max(most[0], sum(seen.values()))

    failures: list[BaseException] = []

    def work(seeds: range) -> None:
        try:
            for seed in seeds:
                cut, blocks = made(WIDE, text(seed, 2))
                store.publish(SPACE, IDENTITY, cut, blocks)
                memory = Destination(WIDE, len(text(seed, 2)))
                if store.read(cut.digest(SPACE), memory.into):
                    rows = {
                        place: np.concatenate([b.data[place] for b in blocks] + [rest])
                        for place, rest in cut.rest.items()
                    }
                    assert memory.holds(rows)
        except AssertionError as error:
            failures.append(error)

    with Store.open(directory, KEY, cap, 0, listener=lambda event: None) as store:
        watcher = threading.Thread(target=watch)
        watcher.start()
        workers = [threading.Thread(target=work, args=(range(i, 16, 2),)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        stop.set()
        watcher.join()
        assert failures == []
        assert 0 < most[0] <= cap
        assert store.stats().counts["deleted_files"] > 0
