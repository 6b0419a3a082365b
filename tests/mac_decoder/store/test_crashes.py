"""Power cuts: at every operation, with everything that was not synced lost, torn or reordered."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path

import pytest

from mac_decoder.store import index
from protocol.errors import IntegrityError
from tests.mac_decoder.reuse.made import SLIDING
from tests.mac_decoder.store.made import conversation, crashed, opened, publish, serves
from tests.mac_decoder.store.scenario import Truth, scenario
from tests.mac_decoder.store.simulated import Model, PowerCut, SimulatedDisk
from tests.ordinary import usual


def operations() -> int:
    disk = SimulatedDisk()
    with tempfile.TemporaryDirectory() as directory:
        scenario(Path(directory), disk, Truth())
    return disk.operations


CUTS = range(1, operations() + 1)
MODELS: tuple[Model, ...] = ("posix", "cache")
IN_TURNS = {(at, MODELS[at % 2]) for at in CUTS}


def cut_off(directory: Path, disk: SimulatedDisk, at: int) -> tuple[Truth, SimulatedDisk]:
    """Live until the power fails at operation ``at``."""
    truth = Truth()
    disk.cut_at = at
    with contextlib.suppress(PowerCut):
        scenario(directory, disk, truth)
    return truth, crashed(directory, disk)


@pytest.mark.parametrize(("at", "model"), usual(itertools.product(CUTS, MODELS), IN_TURNS))
def test_what_was_acknowledged_survives_and_nothing_is_wrong(
    model: Model, at: int, tmp_path: Path
) -> None:
    truth, after = cut_off(tmp_path, SimulatedDisk(model, seed=at), at)
    truth.check(tmp_path, after)


@pytest.mark.parametrize("model", ["posix", "cache"])
@pytest.mark.parametrize("at", CUTS[::4])
def test_the_index_is_lost_too(model: Model, at: int, tmp_path: Path) -> None:
    truth, after = cut_off(tmp_path, SimulatedDisk(model, seed=1000 + at), at)
    index.remove(tmp_path)
    truth.check(tmp_path, after)


@pytest.mark.soak
@pytest.mark.parametrize("model", ["posix", "cache"])
@pytest.mark.parametrize("at", CUTS)
def test_many_ways_to_lose_what_was_not_synced(model: Model, at: int, tmp_path: Path) -> None:
    for seed in range(8):
        directory = tmp_path / str(seed)
        truth, after = cut_off(directory, SimulatedDisk(model, seed=seed * 7919 + at), at)
        truth.check(directory, after)


@pytest.mark.parametrize("skipped", ["sync", "sync_directory", "barrier"])
def test_the_simulated_disk_notices_a_missing_sync(skipped: str, tmp_path: Path) -> None:
    """A control: without each of the syncs, some crash loses a published cut."""
    model: Model = "cache" if skipped == "barrier" else "posix"
    lost = 0
    for seed in range(40):
        disk = SimulatedDisk(model, seed)
        setattr(disk, skipped, lambda _: None)
        directory = tmp_path / str(seed)
        store = opened(directory, disk)
        publish(store, SLIDING, conversation(300))
        after = crashed(directory, disk)
        index.remove(directory)
        with opened(directory, after) as store:
            try:
                lost += not serves(store, SLIDING, conversation(300))
            except IntegrityError:
                lost += 1
    assert lost > 0
