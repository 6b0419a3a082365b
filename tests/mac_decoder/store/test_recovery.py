"""Start-up: files win over the index, and what does not belong is counted, not deleted."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from mac_decoder.store import container, index
from mac_decoder.store.container import Tensor
from mac_decoder.store.events import Deleting, Event, IndexRebuilt
from protocol.layout import Layout
from tests.mac_decoder.reuse.made import BLOCKLESS, FULL, LAYOUTS, SLIDING
from tests.mac_decoder.store.made import (
    IDENTITY,
    OTHER_IDENTITY,
    OTHER_SPACE,
    Destination,
    conversation,
    made,
    name_of,
    opened,
    publish,
    rows_of,
    serves,
    walk,
)
from tests.mac_decoder.store.simulated import SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_index_is_made_anew_from_the_files(
    layout: Layout, tmp_path: Path, disk: SimulatedDisk
) -> None:
    texts = [conversation(520 + 50 * seed, seed, shared=512) for seed in range(4)]
    with opened(tmp_path, disk) as store:
        for tokens in texts:
            publish(store, layout, tokens)
        before = store.stats()
        kept = store._held.index.load()
    files = disk.files()
    index.remove(tmp_path)
    events: list[Event] = []
    with opened(tmp_path, disk, events=events) as store:
        assert events == [IndexRebuilt(4)]
        after = store.stats()
        assert (after.cuts, after.blocks) == (before.cuts, before.blocks)
        assert (after.referenced, after.on_disk) == (before.referenced, walk(tmp_path, disk))
        assert all(serves(store, layout, tokens) for tokens in texts)
        made_anew = store._held.index.load()
        assert made_anew.spaces == kept.spaces
        assert {row.name: row.file for row in made_anew.cuts} == {
            row.name: row.file for row in kept.cuts
        }
    assert disk.files() == files
    with opened(tmp_path, disk) as store:
        assert store.stats().counts["adopted"] == 0
        assert all(serves(store, layout, tokens) for tokens in texts)


def test_an_adopted_block_is_digested_before_a_new_cut_relies_on_it(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(900)
    with opened(tmp_path, disk) as store:
        publish(store, FULL, tokens[:600])
    index.remove(tmp_path)
    path = next(path for path in disk.files() if path.parent.name == "blocks")
    data = disk.files()[path]
    disk.put(path, data[:-1] + bytes([data[-1] ^ 1]))
    with opened(tmp_path, disk) as store:
        publish(store, FULL, tokens)
        assert serves(store, FULL, tokens)
        assert serves(store, FULL, tokens[:600])  # its block is back
        assert store.stats().kinds["quarantined"].files == 1
        assert store.stats().on_disk == walk(tmp_path, disk)


def test_recency_survives(tmp_path: Path, disk: SimulatedDisk) -> None:
    texts = [conversation(300, seed) for seed in range(3)]
    with opened(tmp_path, disk) as store:
        for tokens in texts:
            publish(store, FULL, tokens)
        assert serves(store, FULL, texts[0])
    with opened(tmp_path, disk) as store:
        order = list(store._held.ledger.cuts)
        assert order == [name_of(FULL, texts[seed]) for seed in (1, 2, 0)]


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
def test_a_file_that_is_gone_is_a_miss(folder: str, tmp_path: Path, disk: SimulatedDisk) -> None:
    tokens = conversation(300)
    with opened(tmp_path, disk) as store:
        publish(store, FULL, tokens)
    path = next(path for path in disk.files() if path.parent.name == folder)
    disk.unlink(path)
    with opened(tmp_path, disk) as store:
        assert not serves(store, FULL, tokens)
        assert store.stats().counts["lost"] == 1
        assert store.stats().on_disk == walk(tmp_path, disk)
        publish(store, FULL, tokens)
        assert serves(store, FULL, tokens)
        assert store.stats().on_disk == walk(tmp_path, disk)
    with opened(tmp_path, disk) as store:
        assert serves(store, FULL, tokens)


def a_file(kind: str) -> bytes:
    """A well-formed file of some format."""
    return container.encode({"format": kind, "key": "0" * 32}, [Tensor("x", "U8", (3,))]) + b"abc"


def test_what_does_not_belong_is_counted_apart_and_left(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, FULL, conversation(300))
        cut, blocks = made(FULL, conversation(300, 1), space=OTHER_SPACE)
        store.publish(OTHER_SPACE, OTHER_IDENTITY, cut, blocks)
    strange = {
        f"cuts/{'a' * 64}.safetensors": a_file("baton cut 2"),
        f"blocks/{'b' * 64}.safetensors": a_file("baton block 9"),
        f"cuts/{'c' * 64}.safetensors": a_file("baton cut 1"),
        f"blocks/{'d' * 64}.safetensors": b"\x00" * 100,
        f"cuts/{'e' * 64}.safetensors": b"short",
        f"blocks/{'f' * 64}.safetensors": a_file("somebody's"),
        "cuts/notes.txt": b"a user's",
        "quarantine/cuts-x.safetensors": b"old",
        "elsewhere/deep/file": b"a user's",
    }
    for name, data in strange.items():
        disk.put(tmp_path / name, data)
    files = disk.files()
    with opened(tmp_path, disk) as store:
        stats = store.stats()
        counted = {kind: tally.files for kind, tally in stats.kinds.items() if tally.files}
        assert counted == {
            "stale_format": 2,
            "foreign_key": 1,
            "malformed": 3,
            "unknown": 2,
            "quarantined": 1,
            "own": 2,
        }
        assert sorted(tally.files for tally in stats.identities.values()) == [1, 1]
        assert stats.on_disk == walk(tmp_path, disk)
        hidden = store.hidden(IDENTITY)
        assert {components: tally.files for components, tally in hidden.items()} == {
            ("weights",): 1
        }
    assert disk.files() == files


def test_an_unfinished_file_is_announced_and_removed(tmp_path: Path, disk: SimulatedDisk) -> None:
    disk.put(tmp_path / "temp/left", b"half")
    events: list[Event] = []
    with opened(tmp_path, disk, events=events):
        assert events == [Deleting("temp/left", 4, "unfinished")]
        assert disk.files() == {}


def test_a_change_of_identity_hides_everything_and_back(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(600)
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, tokens)
        assert store.holding(OTHER_SPACE, tokens).shared == 0
        assert not store.holds(name_of(SLIDING, tokens, OTHER_SPACE))
        cut, blocks = made(SLIDING, tokens, flavour=1, space=OTHER_SPACE)
        store.publish(OTHER_SPACE, OTHER_IDENTITY, cut, blocks)
        memory = Destination(SLIDING, 600)
        store.read(name_of(SLIDING, tokens, OTHER_SPACE), memory.into)
        assert memory.holds(rows_of(SLIDING, tokens, flavour=1))
        assert serves(store, SLIDING, tokens)


def test_a_second_file_of_a_cut_is_a_duplicate(tmp_path: Path, disk: SimulatedDisk) -> None:
    tokens = conversation(20)
    with opened(tmp_path, disk) as store:
        publish(store, BLOCKLESS, tokens)
        one = disk.files()
        store.clear()
        publish(store, BLOCKLESS, tokens, flavour=1)
    disk.put_first(one)
    with opened(tmp_path, disk) as store:
        assert store.stats().kinds["duplicate"].files == 1
        assert serves(store, BLOCKLESS, tokens, flavour=1)


@pytest.mark.parametrize("index_is", ["lost", "older"])
def test_of_two_files_of_a_cut_the_newer_one_is_taken(
    index_is: str, tmp_path: Path, disk: SimulatedDisk
) -> None:
    """A crash undid that the former file was deleted, and the index's last commit."""
    tokens = conversation(20)
    with opened(tmp_path, disk) as store:
        publish(store, BLOCKLESS, tokens)
    one, before = disk.files(), (tmp_path / index.NAME).read_bytes()
    with opened(tmp_path, disk) as store:
        store.clear()
        publish(store, BLOCKLESS, tokens, flavour=1)
    index.remove(tmp_path)
    if index_is == "older":
        (tmp_path / index.NAME).write_bytes(before)
    disk.put_first(one)
    for _ in range(2):
        with opened(tmp_path, disk) as store:
            assert store.stats().kinds["duplicate"].files == 1
            assert serves(store, BLOCKLESS, tokens, flavour=1)


def test_of_two_files_of_a_cut_the_one_that_is_whole_is_taken(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(600)
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, tokens)
        one = disk.files()
        store.clear()
        publish(store, SLIDING, tokens, flavour=1)
    disk.put_first(one)
    index.remove(tmp_path)
    whole = sorted(
        path for path in disk.files() if path not in one and path.parent.name == "blocks"
    )
    disk.unlink(whole[0])
    with opened(tmp_path, disk) as store:
        assert store.stats().kinds["duplicate"].files == 1
        assert serves(store, SLIDING, tokens)


def test_names_are_the_files_digests(tmp_path: Path, disk: SimulatedDisk) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, conversation(700))
    for path, data in disk.files().items():
        assert hashlib.sha256(data).hexdigest() == path.stem
