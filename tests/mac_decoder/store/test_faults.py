"""A disk that fails: every operation once, for good, or full; what was promised still holds."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path

import pytest

from mac_decoder.store import index
from mac_decoder.store.events import Event
from mac_decoder.store.publishing import Published, Refused
from protocol.errors import ConfigError, IntegrityError
from tests.mac_decoder.reuse.made import SLIDING
from tests.mac_decoder.store.made import conversation, opened, publish, restored, serves, walk
from tests.mac_decoder.store.scenario import Truth, scenario
from tests.mac_decoder.store.simulated import SimulatedDisk


def operations() -> list[str]:
    """The kinds of all operations of the scenario, in order."""
    disk = SimulatedDisk()
    with tempfile.TemporaryDirectory() as directory:
        scenario(Path(directory), disk, Truth())
    return disk.log


LOG = operations()


def attempt(directory: Path, disk: SimulatedDisk) -> Truth:
    """Run the scenario on a failing disk: nothing escapes but what is meant for callers."""
    truth = Truth()
    try:
        scenario(directory, disk, truth)
    except ConfigError as error:
        if error.reason != "cache_dir_unusable":
            raise
    assert disk.open_handles == 0
    return truth


@pytest.mark.parametrize("at", range(1, len(LOG) + 1))
def test_one_failed_operation_breaks_no_promise(at: int, tmp_path: Path) -> None:
    disk = SimulatedDisk()
    disk.fail_at = at
    truth = attempt(tmp_path, disk)
    disk.fail_at = None
    truth.check(tmp_path, disk)


@pytest.mark.parametrize("at", range(1, len(LOG) + 1, 3))
def test_a_disk_that_fails_for_good_breaks_no_promise(at: int, tmp_path: Path) -> None:
    disk = SimulatedDisk()
    disk.fail_at, disk.stuck = at, True
    truth = attempt(tmp_path, disk)
    disk.fail_at = None
    truth.check(tmp_path, disk)


@pytest.mark.parametrize(
    "at", [at for at, kind in enumerate(LOG, 1) if kind in ("create", "write", "commit")]
)
def test_a_full_disk_breaks_no_promise(at: int, tmp_path: Path) -> None:
    disk = SimulatedDisk()
    disk.fail_at, disk.fail_with, disk.stuck = at, errno.ENOSPC, True
    disk.fail_kinds = frozenset({"create", "write", "commit"})
    truth = attempt(tmp_path, disk)
    assert {refused.reason for refused in truth.refused} <= {"disk_full"}
    disk.fail_at = None
    truth.check(tmp_path, disk)


@pytest.mark.parametrize("kind", ["write", "sync", "rename", "sync_directory", "barrier", "commit"])
def test_a_refused_cut_leaves_the_disk_as_it_was(kind: str, tmp_path: Path) -> None:
    disk = SimulatedDisk()
    tokens = conversation(700)
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, tokens[:300])
        before = disk.files()
        disk.fail_kinds, disk.fail_at, disk.stuck = frozenset({kind}), 1, True
        refused = publish(store, SLIDING, tokens)
        assert isinstance(refused, Refused)
        assert refused.reason == ("index_failed" if kind == "commit" else "io_failed")
        assert not refused.out_of_space
        assert disk.files() == before
        disk.fail_at = None
        assert store.stats().on_disk == walk(tmp_path, disk)
        assert isinstance(publish(store, SLIDING, tokens), Published)


@pytest.mark.parametrize("kind", ["sync", "sync_directory", "barrier"])
def test_a_failed_sync_is_never_tried_again(kind: str, tmp_path: Path) -> None:
    """A second one would succeed and mean nothing: what it should have written is forgotten."""
    disk = SimulatedDisk()
    with opened(tmp_path / "dry", disk) as store:
        start = len(disk.log)
        publish(store, SLIDING, conversation(600))
        log = disk.log[start:]
    places = [at for at, step in enumerate(log, 1) if step == kind]
    assert places
    for number, at in enumerate(places):
        disk = SimulatedDisk()
        with opened(tmp_path / str(number), disk) as store:
            disk.fail_at = disk.operations + at
            start = len(disk.log)
            assert isinstance(publish(store, SLIDING, conversation(600)), Refused)
            after = disk.log[start + at :]
            assert set(after) <= {"close", "unlink"}
            assert disk.files() == {}


def test_what_could_not_be_deleted_is_still_counted(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    events: list[Event] = []
    with opened(tmp_path, disk, events=events) as store:
        disk.fail_kinds, disk.fail_at = frozenset({"sync", "unlink"}), 1
        disk.stuck = True
        assert isinstance(publish(store, SLIDING, conversation(600)), Refused)
        assert store.stats().kinds["unfinished"].files == 1
        assert store.stats().on_disk == walk(tmp_path, disk)
        disk.fail_at = None
    with opened(tmp_path, disk) as store:
        assert disk.files() == {}


def test_a_restore_from_a_failing_medium_is_an_integrity_error(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, conversation(600))
        disk.fail_kinds, disk.fail_at, disk.stuck = frozenset({"open", "size", "read"}), 1, True
        with pytest.raises(IntegrityError) as caught:
            restored(store, SLIDING, conversation(600))
        assert caught.value.reason == "file_unreadable"


def test_the_index_alone_fails(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, conversation(600))
    index.remove(tmp_path)
    disk.fail_kinds, disk.fail_at, disk.stuck = frozenset({"commit"}), 1, True
    with opened(tmp_path, disk) as store:
        assert serves(store, SLIDING, conversation(600))
        assert store.stats().counts["index_failures"] > 0
        refused = publish(store, SLIDING, conversation(700))
        assert getattr(refused, "reason", "") == "index_failed"
        disk.fail_at = None
        publish(store, SLIDING, conversation(700))
    with opened(tmp_path, disk) as store:
        assert serves(store, SLIDING, conversation(600))
        assert serves(store, SLIDING, conversation(700))
