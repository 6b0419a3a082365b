"""Names of the store that are no files, or files that cannot be removed: the rest goes on."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from mac_decoder.store.events import PassedOver, StaysReason
from mac_decoder.store.files import RealDisk
from mac_decoder.store.limits import MIN_CAP
from mac_decoder.store.publishing import Published
from mac_decoder.store.store import Store
from mac_decoder.store.sweep import Pace
from protocol.errors import ConfigError, IntegrityError
from tests.mac_decoder.reuse.made import FULL
from tests.mac_decoder.store.made import KEY, conversation, publish, restored, serves
from tests.mac_decoder.store.test_sweep import WIDE, text

TEXT = conversation(8 * 256 + 5)
NOTES = "somebody's notes"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


class Refusing(RealDisk):
    """Does not let go of some files, as the system does of those that must not be changed."""

    def __init__(self, number: int = errno.EPERM) -> None:
        self.kept: set[Path] = set()
        self.number = number

    def unlink(self, path: Path) -> None:
        if path in self.kept:
            raise OSError(self.number, "simulated")
        super().unlink(path)


def opened(directory: Path, disk: RealDisk | None = None, cap: int = MIN_CAP * 4) -> Store:
    return Store.open(directory, KEY, cap, 0, disk, listener=lambda event: None)


def agrees(store: Store) -> bool:
    """Whether the books say what a walk does."""
    found = store.footprint()
    return found.total.nbytes == found.on_disk


def blocks(directory: Path) -> list[Path]:
    return sorted((directory / "blocks").iterdir())


def directory_at(path: Path) -> None:
    path.unlink()
    path.mkdir()


def full_directory_at(path: Path) -> None:
    directory_at(path)
    (path / "deeper").mkdir()
    (path / "deeper" / f"{'1' * 64}.safetensors").write_text(NOTES)


def pipe_at(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_at(path: Path) -> None:
    target = path.parents[2] / "target"
    target.write_text(NOTES)
    path.unlink()
    path.symlink_to(target)


def socket_at(path: Path) -> None:
    path.unlink()
    with socket.socket(socket.AF_UNIX) as one, chdir(path.parent):
        one.bind("socket")  # the path of the file is too long for it
    (path.parent / "socket").rename(path)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


STRANGE = [directory_at, full_directory_at, pipe_at, link_at, socket_at]
ALL = [*STRANGE, emptied, flipped]


def notes(directory: Path) -> list[str]:
    """What files there have that are not Baton's."""
    found = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    return [NOTES for path in found if path.read_bytes() == NOTES.encode()]


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("damages", [*([one] for one in ALL), ALL[1:]])
def test_what_a_verification_finds_is_set_aside_and_the_rest_goes(
    damages: list[Callable[[Path], None]], restarted: bool, directory: Path
) -> None:
    store = opened(directory)
    publish(store, FULL, TEXT)
    spoilt = blocks(directory)[: len(damages)]
    for path, damage in zip(spoilt, damages, strict=True):
        damage(path)
    if restarted:
        store.close()
        store = opened(directory)
    with store:
        bad = store.verify().bad
        assert {one.path for one in bad} >= {f"blocks/{path.name}" for path in spoilt}
        strange = {
            f"blocks/{path.name}"
            for path, damage in zip(spoilt, damages, strict=True)
            if damage in STRANGE
        }
        assert {one.path for one in bad if one.reason == "not_a_file"} == strange
        if not restarted:
            assert len(bad) == len(damages)
            assert store.stats().counts["invalid"] == len(damages)
        assert not [path for path in spoilt if path.exists()], "they are where they were"
        assert agrees(store)
        told: list[PassedOver] = []
        store.prune(to_bytes=0, pace=Pace(passed_over=told.append))
        assert blocks(directory) == []
        assert agrees(store)
        store.clear(pace=Pace(passed_over=told.append))
        assert told == []
        assert agrees(store)
        kept = (full_directory_at in damages) + (link_at in damages)
        assert len(notes(directory.parent)) == kept
        stats = store.stats()
        assert (
            stats.on_disk
            == stats.kinds["unknown"].nbytes
            + stats.kinds["own"].nbytes
            + (directory / "index.sqlite").stat().st_size
        )
        assert isinstance(publish(store, FULL, TEXT), Published)
        assert serves(store, FULL, TEXT)
        assert agrees(store)


def prune(store: Store, pace: Pace) -> None:
    store.prune(to_bytes=0, pace=pace)


def clear(store: Store, pace: Pace) -> None:
    store.clear(pace=pace)


@pytest.mark.parametrize("delete", [prune, clear])
@pytest.mark.parametrize("folder", ["blocks", "cuts"])
@pytest.mark.parametrize("damage", ALL)
def test_a_deletion_passes_over_what_nobody_found_before(
    damage: Callable[[Path], None],
    folder: str,
    delete: Callable[[Store, Pace], None],
    directory: Path,
) -> None:
    told: list[PassedOver] = []
    with opened(directory) as store:
        publish(store, FULL, TEXT)
        publish(store, FULL, conversation(300, 7))
        path = sorted((directory / folder).iterdir())[0]
        damage(path)
        delete(store, Pace(passed_over=told.append))
        left = [path] if damage is full_directory_at else []
        assert [*blocks(directory), *(directory / "cuts").iterdir()] == left
        name = f"{folder}/{path.name}"
        assert told == [PassedOver(name, "directory_not_empty") for _ in left]
        assert store.stats().counts.get("passed_over", 0) == len(left)
        assert store.stats().cuts == store.stats().blocks == 0
        assert agrees(store)
        delete(store, Pace(passed_over=told.append))
        assert len(told) == len(left), "what is not ours is not tried again"
    with opened(directory) as store:
        assert agrees(store)
        assert store.stats().cuts == 0
        assert isinstance(publish(store, FULL, TEXT), Published)
        assert serves(store, FULL, TEXT), "the name is free again"
        assert agrees(store)
        assert len(notes(directory.parent)) == (damage in (full_directory_at, link_at))


def test_files_in_directories_of_temp_and_quarantine_are_not_ours(directory: Path) -> None:
    for folder in ("temp", "quarantine"):
        (directory / folder / "kept").mkdir(parents=True)
        (directory / folder / "kept" / "file").write_text(NOTES)
        (directory / folder / "ours").write_text("nothing")
    with opened(directory) as store:
        assert store.stats().kinds["unknown"].files == 2
        assert store.footprint().kinds["unknown"].files == 2
        store.clear()
        assert len(notes(directory.parent)) == 2
        assert not (directory / "quarantine/ours").exists()
        assert not (directory / "temp/ours").exists()
        assert agrees(store)


@pytest.mark.parametrize("damage", STRANGE)
def test_a_prompt_that_finds_one_takes_the_next_way_and_is_kept_again(
    damage: Callable[[Path], None], directory: Path
) -> None:
    with opened(directory) as store:
        publish(store, FULL, TEXT)
        damage(blocks(directory)[0])
        with pytest.raises(IntegrityError) as found:
            restored(store, FULL, TEXT)
        assert found.value.reason == "not_a_file"
        assert len(blocks(directory)) == 7
        assert isinstance(publish(store, FULL, TEXT), Published)
        assert serves(store, FULL, TEXT)
        assert agrees(store)


@pytest.mark.parametrize("damage", [directory_at, full_directory_at, pipe_at])
def test_a_name_that_is_taken_at_the_start_keeps_nothing_from_being_kept(
    damage: Callable[[Path], None], directory: Path
) -> None:
    with opened(directory) as store:
        publish(store, FULL, TEXT)
    for folder in ("blocks", "cuts"):
        damage(sorted((directory / folder).iterdir())[0])
    with opened(directory) as store:
        assert not serves(store, FULL, TEXT)
        assert isinstance(publish(store, FULL, TEXT), Published)
        assert serves(store, FULL, TEXT)
        assert agrees(store)


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
def test_room_is_made_beside_what_is_no_file(folder: str, directory: Path) -> None:
    with opened(directory, cap=MIN_CAP) as store:
        publish(store, WIDE, text(0))
        for path in sorted((directory / folder).iterdir()):
            full_directory_at(path)
        for seed in range(1, 9):
            assert isinstance(publish(store, WIDE, text(seed)), Published)
            assert store.stats().on_disk <= MIN_CAP
        assert store.stats().counts["passed_over"] == (3 if folder == "blocks" else 1)
        assert agrees(store)


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.EPERM, "not_permitted"), (errno.EBUSY, "in_use")]
)
@pytest.mark.parametrize("folder", ["blocks", "cuts", "quarantine"])
def test_a_file_that_must_stay_is_told_kept_in_the_books_and_tried_again(
    folder: str, number: int, reason: StaysReason, directory: Path
) -> None:
    disk = Refusing(number)
    told: list[PassedOver] = []
    with opened(directory, disk) as store:
        publish(store, FULL, TEXT)
        publish(store, FULL, conversation(300, 7))
        flipped(blocks(directory)[0])
        store.verify()
        path = sorted((directory / folder).iterdir())[-1]
        disk.kept.add(path)
        store.prune(to_bytes=0, pace=Pace(passed_over=told.append))
        name = f"{folder}/{path.name}"
        assert told == [PassedOver(name, reason)]
        assert path.exists()
        assert agrees(store)
        # A cut that stays needs its blocks; but for those everything is gone.
        assert store.stats().cuts == (folder == "cuts")
        store.prune(to_bytes=0, pace=Pace(passed_over=told.append))
        assert len(told) == 1, "it is not counted on"
        began = time.monotonic()
        store.clear(pace=Pace(patience_s=60.0, passed_over=told.append))
        assert time.monotonic() - began < 30, "it is no cut that somebody reads"
        assert told == [PassedOver(name, reason)] * 2
        assert path.exists()
        disk.kept.clear()
        store.clear()
        assert not path.exists()
        assert store.stats().cuts == store.stats().blocks == 0
        assert agrees(store)


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
def test_room_is_made_beside_a_file_that_must_stay(folder: str, directory: Path) -> None:
    disk = Refusing()
    with opened(directory, disk, cap=MIN_CAP) as store:
        publish(store, WIDE, text(0))
        disk.kept.update((directory / folder).iterdir())
        for seed in range(1, 9):
            assert isinstance(publish(store, WIDE, text(seed)), Published)
            assert agrees(store)
            assert store.stats().on_disk <= MIN_CAP
        assert all(path.exists() for path in disk.kept)
        assert store.stats().counts["passed_over"] == len(disk.kept)
        assert serves(store, WIDE, text(0)) == (folder == "cuts")


def test_a_disk_that_fails_is_still_told_as_that(directory: Path) -> None:
    disk = Refusing(errno.EIO)
    with opened(directory, disk) as store:
        publish(store, FULL, TEXT)
        disk.kept.update(blocks(directory))
        with pytest.raises(ConfigError) as failed:
            store.clear()
        assert failed.value.reason == "cache_dir_unusable"
        assert failed.value.message.endswith(" cannot be used: simulated")
        assert store.stats().counts.get("passed_over", 0) == 0
