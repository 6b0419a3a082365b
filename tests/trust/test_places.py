"""Private directories and files: whole or not at all, and nobody else's."""

from __future__ import annotations

import itertools
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from trust import places
from trust.places import Kind, Place

KIND = Kind("test's file", "test", "test_exposed", "test_unreadable", "none")


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "state" / "place", patience_s=0.1)


def read(place: Place, name: str = "a") -> bytes | None:
    return place.read(name, 1000, KIND)


def refusal(call, *arguments: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# What it does


def test_nothing_is_made_before_something_is_written(place: Place) -> None:
    assert (read(place), place.names(), place.remove("a")) == (None, [], False)
    assert place.stamp() is None
    assert not place.path.parent.exists()


def test_what_is_written_is_private(place: Place) -> None:
    before = os.umask(0o000)
    try:
        place.write("a", b"one")
    finally:
        os.umask(before)
    assert (read(place), place.names()) == (b"one", ["a"])
    assert mode(place.path.parent) == mode(place.path) == 0o700
    assert {mode(file) for file in place.path.iterdir()} == {0o600}


def test_a_file_is_replaced_but_not_made_twice(place: Place) -> None:
    assert place.create("a", b"one")
    assert not place.create("a", b"two")
    assert read(place) == b"one"
    place.write("a", b"three")
    assert read(place) == b"three"
    assert place.remove("a")
    assert not place.remove("a")
    assert read(place) is None


@pytest.mark.parametrize("name", ["", ".", "..", "../a", "a/b", ".a", "-a", "a\n", "a\0", "ä"])
def test_a_name_leads_nowhere_else(place: Place, name: str) -> None:
    for call in (lambda: place.write(name, b""), lambda: place.remove(name)):
        with pytest.raises(ValueError):
            call()


def test_a_stamp_tells_every_change(place: Place) -> None:
    other = Place(place.path)
    stamps = [place.stamp()]
    for change in (
        lambda: other.write("a", b"one"),
        lambda: other.write("a", b"two"),  # of the same length, within a tick of the clock
        lambda: other.write("b", b"one"),
        lambda: other.remove("a"),
        lambda: other.remove("b"),
    ):
        change()
        stamps.append(place.stamp())
        assert place.stamp() == stamps[-1], "nothing happened in between"
    assert stamps[-1] == (), "as before anything was written, but for the directory"
    assert all(one != two for one, two in itertools.pairwise(stamps))


# Whose it is


@pytest.mark.parametrize("bits", [0o750, 0o705, 0o710, 0o701, 0o720])
def test_a_directory_that_others_may_enter_is_refused(place: Place, bits: int) -> None:
    place.write("a", b"one")
    place.path.chmod(bits)
    for call in (
        lambda: read(place),
        place.names,
        place.stamp,
        lambda: place.write("a", b"two"),
        lambda: place.remove("a"),
    ):
        error = refusal(call)
        assert error.reason == "directory_exposed"
        assert error.hint is not None
        assert f"chmod 700 {place.path}" in error.hint
    place.path.chmod(0o700)
    assert read(place) == b"one"


@pytest.mark.parametrize("bits", [0o770, 0o702, 0o777])
def test_a_directory_around_in_which_others_may_rename_is_refused(place: Place, bits: int) -> None:
    place.write("a", b"one")
    place.path.parent.chmod(bits)
    assert refusal(read, place).reason == "directory_exposed"
    place.path.parent.chmod(bits | stat.S_ISVTX)
    assert read(place) == b"one", "there nobody may"


def test_a_directory_of_another_user_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", b"one")
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    for call in (lambda: read(place), place.names, lambda: place.write("a", b"two")):
        assert refusal(call).reason == "directory_unusable"


def test_a_directory_around_of_another_user_is_refused(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", b"one")
    stat_of = os.stat

    def foreign(path, *rest, **named):
        status = stat_of(path, *rest, **named)
        if path != "..":
            return status
        return os.stat_result([*status[:4], 54321, *status[5:10]])

    monkeypatch.setattr(os, "stat", foreign)
    assert refusal(read, place).reason == "directory_unusable"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_another_user_is_refused(place: Place) -> None:
    place.write("a", b"one")
    os.chown(place.path / "a", 54321, -1)
    assert refusal(read, place).reason == "test_unreadable"


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o602, 0o601])
def test_a_file_that_others_have_access_to_is_refused(place: Place, bits: int) -> None:
    place.write("a", b"one")
    (place.path / "a").chmod(bits)
    error = refusal(read, place)
    assert (error.reason, error.found) == ("test_exposed", f"mode {bits:04o}")


def test_links_are_not_followed(place: Place, tmp_path: Path) -> None:
    place.write("a", b"one")
    (place.path / "b").symlink_to("a")
    assert refusal(read, place, "b").reason == "test_unreadable"
    (tmp_path / "link").symlink_to(place.path)
    through = Place(tmp_path / "link")
    for call in (lambda: read(through), lambda: through.write("a", b"two")):
        assert refusal(call).reason == "directory_unusable"
    place.write("b", b"two")
    assert (read(place, "a"), read(place, "b")) == (b"one", b"two"), "the link was replaced"


def test_a_lock_that_is_a_link_is_not_followed(place: Place, tmp_path: Path) -> None:
    place.write("a", b"one")
    (place.path / ".lock").unlink()
    (place.path / ".lock").symlink_to(tmp_path / "victim")
    assert refusal(place.write, "a", b"two").reason == "directory_unusable"
    assert not (tmp_path / "victim").exists()


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one, chdir(path.parent):
        one.bind(path.name)  # whole paths of tests are too long for it


@pytest.mark.parametrize(
    "make",
    [
        lambda path: os.mkfifo(path, 0o600),
        lambda path: path.mkdir(0o700),
        lambda path: path.symlink_to("a"),
        lambda path: path.symlink_to("nowhere"),
        _socket,
    ],
    ids=["pipe", "directory", "link", "dangling", "socket"],
)
def test_what_is_no_file_in_place_of_the_lock_is_refused_at_once(
    place: Place, make: Callable[[Path], None]
) -> None:
    place.write("a", b"one")
    (place.path / ".lock").unlink()
    make(place.path / ".lock")
    began = time.monotonic()
    before = len(os.listdir("/dev/fd"))
    for call in (
        place.names,
        lambda: place.write("a", b"two"),
        lambda: place.create("b", b"two"),
        lambda: place.remove("a"),
        lambda: place.rewrite("a", 1000, KIND, lambda found: found + b"two"),
        lambda: place.alone().__enter__(),
    ):
        error = refusal(call)
        assert error.reason == "directory_unusable"
        assert ".lock" in error.message
        assert error.hint is not None
        assert error.hint.startswith("remove ")
    assert time.monotonic() - began < 1
    assert len(os.listdir("/dev/fd")) == before, "nothing is left open"
    assert read(place) == b"one"
    assert not list(place.path.glob("b"))


def test_what_is_no_file_is_refused_at_once(place: Place) -> None:
    place.write("a", b"one")
    os.mkfifo(place.path / "fifo", 0o600)
    (place.path / "folder").mkdir(0o700)
    for name in ("fifo", "folder"):
        assert refusal(read, place, name).reason == "test_unreadable"
    for call in (lambda: place.write("folder", b"two"), lambda: place.remove("folder")):
        error = refusal(call)
        assert error.reason == "trust_not_durable"
        assert error.hint == f"remove {place.path / 'folder'}, which is no file but a directory"


def test_a_file_is_not_read_beyond_its_bound(place: Place) -> None:
    place.write("a", b"x" * 1000)
    assert read(place) == b"x" * 1000
    place.write("a", b"x" * 1001)
    assert refusal(read, place).reason == "test_unreadable"
    with (place.path / "a").open("wb") as file:
        file.truncate(1 << 40)
    assert refusal(read, place).reason == "test_unreadable"


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for place in (Place(tmp_path / "file"), Place(tmp_path / "file" / "below")):
        for call in (place.names, lambda place=place: place.write("a", b"one")):
            assert refusal(call).reason == "directory_unusable"


# Two processes, and one that ends


def test_a_writer_waits_for_another_but_not_for_ever(place: Place) -> None:
    other = Place(place.path)
    with other.alone():
        for call in (
            lambda: place.write("a", b"one"),
            lambda: place.create("a", b"one"),
            lambda: place.remove("a"),
        ):
            assert refusal(call).reason == "state_dir_locked"
    place.write("a", b"one")
    assert read(place) == b"one"


def test_what_is_being_written_is_not_listed_and_what_a_crash_left_is(place: Place) -> None:
    place.write("a", b"one")
    (place.path / ".b.0123456789abcdef").write_bytes(b"half")
    other = Place(place.path)
    with other.alone():
        assert place.names() == ["a"]
    assert place.names() == [".b.0123456789abcdef", "a"]
    place.write("b", b"whole")
    assert ".b.0123456789abcdef" in place.names(), "it is nobody's to remove"


WRITER = """
import sys
from pathlib import Path
from trust.places import Place

place, number = Place(Path(sys.argv[1])), int(sys.argv[2])
print("ready", flush=True)
while True:
    for letter in "abc":
        place.write(letter, letter.encode() * 5000 + bytes([number]))
    place.remove("b")
"""


def test_a_file_is_whole_whenever_its_writers_are_killed(place: Place) -> None:
    dice = random.Random(11)
    seen: set[str] = set()
    for _ in range(12):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(place.path), str(number)],
                stdout=subprocess.PIPE,
            )
            for number in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            writer.stdout.close()
        until = time.monotonic() + dice.uniform(0.0, 0.1)
        while time.monotonic() < until:
            check(place)
        for writer in writers:
            writer.kill()
            assert writer.wait() == -signal.SIGKILL
        seen |= check(place)
        place.write("a", b"a" * 5000 + b"\0")  # the lock went with its holder
    assert {"a", "c"} <= seen


def check(place: Place) -> set[str]:
    """Every file that is there is whole; the names."""
    found = set()
    for letter in "abc":
        raw = place.read(letter, 6000, KIND)
        if raw is not None:
            assert raw[:-1] == letter.encode() * 5000
            found.add(letter)
    return found


# Disks that fail


class FailingSync:
    """``sync`` that raises the ``number``-th time."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, descriptor: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize(("number", "after"), [(1, b"one"), (2, b"two")])
def test_a_sync_that_fails_is_told_and_the_file_is_whole(
    place: Place, number: int, after: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", b"one")
    monkeypatch.setattr(places, "sync", FailingSync(number))
    assert refusal(place.write, "a", b"two").reason == "trust_not_durable"
    assert read(place) == after
    assert place.names() == ["a"]


def test_a_removal_that_may_come_back_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write("a", b"one")
    monkeypatch.setattr(places, "sync", FailingSync(1))
    assert refusal(place.remove, "a").reason == "trust_not_durable"


def test_file_and_directory_are_synced_in_this_order(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real_sync, real_rename = places.sync, os.rename

    def sync(descriptor: int) -> None:
        order.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        real_sync(descriptor)

    def rename(*paths: str, **directories: int) -> None:
        order.append("rename")
        real_rename(*paths, **directories)

    monkeypatch.setattr(places, "sync", sync)
    monkeypatch.setattr(os, "rename", rename)
    place.write("a", b"one")
    assert order == ["file", "rename", "directory"]
    place.remove("a")
    assert order[3:] == ["directory"]


def test_a_full_disk_leaves_the_old_file_and_no_half(place: Place) -> None:
    """The limit of file sizes stands in for it: the write is cut short in the same way."""
    place.write("a", b"one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        error = refusal(place.write, "a", b"x" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert error.reason == "trust_not_durable"
    assert read(place) == b"one"
    assert place.names() == ["a"]
