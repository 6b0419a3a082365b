"""What every disk does, the machine's and the simulated one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mac_decoder.store.files import Disk, NotAFileError, RealDisk
from tests.mac_decoder.store.simulated import SimulatedDisk


@pytest.fixture(params=[RealDisk, SimulatedDisk])
def disk(request: pytest.FixtureRequest) -> Disk:
    return request.param()


def write(disk: Disk, path: Path, *parts: bytes) -> None:
    handle = disk.create(path)
    disk.write(handle, [memoryview(part) for part in parts])
    disk.sync(handle)
    disk.barrier(handle)
    disk.close(handle)


def read(disk: Disk, path: Path, offset: int, nbytes: int) -> bytes:
    view = memoryview(bytearray(nbytes))
    handle = disk.open(path)
    count = disk.read_into(handle, view, offset)
    disk.close(handle)
    return bytes(view[:count])


def test_what_is_written_is_read(disk: Disk, tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(disk, path, b"one", b"", b"two" * 1000, *[b"x"] * 2000)
    handle = disk.open(path)
    assert disk.size(handle) == 5003
    disk.close(handle)
    assert read(disk, path, 1, 4) == b"netw"
    assert read(disk, path, 5000, 10) == b"xxx"
    assert read(disk, path, 6000, 10) == b""


def test_nothing_is_written_over(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        disk.create(tmp_path / "a")


def test_a_rename_replaces(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "a", b"one")
    write(disk, tmp_path / "b", b"two")
    disk.rename(tmp_path / "a", tmp_path / "b")
    disk.sync_directory(tmp_path)
    assert read(disk, tmp_path / "b", 0, 9) == b"one"
    with pytest.raises(FileNotFoundError):
        disk.open(tmp_path / "a")


def test_what_is_missing_says_so(disk: Disk, tmp_path: Path) -> None:
    for call in (disk.open, disk.unlink):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        disk.rename(tmp_path / "none", tmp_path / "other")


def test_a_walk_finds_every_file(disk: Disk, tmp_path: Path) -> None:
    disk.make_directory(tmp_path / "deep/er")
    write(disk, tmp_path / "deep/er/a", b"12345")
    write(disk, tmp_path / "b", b"1")
    found = {(entry.path, entry.nbytes) for entry in disk.walk(tmp_path)}
    assert found == {("deep/er/a", 5), ("b", 1)}
    disk.unlink(tmp_path / "b")
    assert len(list(disk.walk(tmp_path))) == 1


def test_an_open_file_outlives_its_name(disk: Disk, tmp_path: Path) -> None:
    write(disk, tmp_path / "a", b"12345")
    handle = disk.open(tmp_path / "a")
    disk.unlink(tmp_path / "a")
    view = memoryview(bytearray(5))
    assert disk.read_into(handle, view, 0) == 5
    disk.close(handle)


def test_some_space_is_free(disk: Disk, tmp_path: Path) -> None:
    assert disk.free(tmp_path) > 0


def test_real_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    disk = RealDisk()
    previous = os.umask(0)
    try:
        disk.make_directory(tmp_path / "cache")
        write(disk, tmp_path / "cache/a", b"x")
    finally:
        os.umask(previous)
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "cache/a").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "cache/a")
    with pytest.raises(NotAFileError):
        disk.open(tmp_path / "link")
    with pytest.raises(OSError):
        disk.create(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotAFileError):
        disk.open(tmp_path / "pipe")
    assert [entry.path for entry in disk.walk(tmp_path)] == ["cache/a"]


def test_a_directory_that_was_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o755)
    RealDisk().make_directory(tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
