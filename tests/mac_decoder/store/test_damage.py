"""Files that are not what was written: found, named, set aside, never served."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mac_decoder.reuse.cut import pieces
from mac_decoder.store import index
from mac_decoder.store.events import Event, Invalid
from mac_decoder.store.index import Index
from mac_decoder.store.key import key_number
from mac_decoder.store.manifest import StoreKeys
from mac_decoder.store.reading import Reader
from mac_decoder.store.store import Store
from protocol.errors import IntegrityError
from protocol.layout import FullLayer, Layout, SlidingLayer
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
    restored,
    rows_of,
    serves,
    walk,
)
from tests.mac_decoder.store.simulated import SimulatedDisk

SMALL = Layout((FullLayer(0, 1, 1, 0, "float16"), SlidingLayer(1, 1, 1, 0, "float16", 4)))
TOKENS = conversation(258)


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


def file_of(disk: SimulatedDisk, folder: str) -> Path:
    """The one file in ``folder``."""
    (path,) = (path for path in disk.files() if path.parent.name == folder)
    return path


def restore_outright(disk: SimulatedDisk, directory: Path, reader: Reader, cut: Path) -> bool:
    """Restore without a store; whether the right bytes came."""
    memory = Destination(SMALL, len(TOKENS))
    manifest = reader.manifest(f"cuts/{cut.name}")
    parts = pieces(SMALL, manifest.position, manifest.position)
    reader.restore(manifest, bytes.fromhex(cut.stem), parts, memory.into, lambda: False)
    return memory.holds(rows_of(SMALL, TOKENS))


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
def test_every_byte_counts(folder: str, tmp_path: Path, disk: SimulatedDisk) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
    reader = Reader(disk, tmp_path, StoreKeys(KEY))
    cut, path = file_of(disk, "cuts"), file_of(disk, folder)
    whole = disk.files()[path]
    assert restore_outright(disk, tmp_path, reader, cut)
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1 << (at % 8)
        disk.put(path, bytes(flipped))
        with pytest.raises(IntegrityError) as caught:
            restore_outright(disk, tmp_path, reader, cut)
        assert caught.value.field == f"{folder}/{path.name}", at
    reader.close()


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
def test_every_length_counts(folder: str, tmp_path: Path, disk: SimulatedDisk) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
    reader = Reader(disk, tmp_path, StoreKeys(KEY))
    cut, path = file_of(disk, "cuts"), file_of(disk, folder)
    whole = disk.files()[path]
    for length in (*range(len(whole)), len(whole) + 1, len(whole) + 8):
        disk.put(path, (whole + bytes(8))[:length])
        with pytest.raises(IntegrityError):
            restore_outright(disk, tmp_path, reader, cut)
    reader.close()


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("at", [0, 9, 20, 100, 340, -700, -40, -1])
def test_a_damaged_file_is_set_aside_and_replaced(
    folder: str, restarted: bool, at: int, tmp_path: Path, disk: SimulatedDisk
) -> None:
    events: list[Event] = []
    store = opened(tmp_path, disk, events=events)
    publish(store, SMALL, TOKENS)
    path = file_of(disk, folder)
    data = bytearray(disk.files()[path])
    data[at] ^= 0x40
    disk.put(path, bytes(data))
    if restarted:
        store.close()
        store = opened(tmp_path, disk, events=events)
    with pytest.raises(IntegrityError) as caught:
        restored(store, SMALL, TOKENS)
    assert caught.value.field == f"{folder}/{path.name}"
    assert restored(store, SMALL, TOKENS) is None
    told = [event for event in events if isinstance(event, Invalid)]
    assert [(event.path, event.cuts) for event in told] == [
        (f"{folder}/{path.name}", (name_of(SMALL, TOKENS),))
    ]
    stats = store.stats()
    assert stats.counts["invalid"] == 1
    assert stats.kinds["quarantined"] == (1, len(data))
    assert stats.on_disk == walk(tmp_path, disk)
    assert disk.files()[tmp_path / "quarantine" / f"{folder}-{path.name}"] == data
    done = publish(store, SMALL, TOKENS)
    assert getattr(done, "written", 0) > 0
    assert serves(store, SMALL, TOKENS)
    assert store.stats().on_disk == walk(tmp_path, disk)
    store.close()
    with opened(tmp_path, disk) as store:
        assert serves(store, SMALL, TOKENS)
        assert store.verify().bad == []
    assert disk.open_handles == 0


def test_a_damaged_shared_block_takes_its_cuts_until_it_is_back(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    with opened(tmp_path, disk) as store:
        chats = [conversation(400, seed, shared=256) for seed in range(3)]
        for tokens in chats:
            publish(store, SMALL, tokens)
        other = conversation(300, 9)
        publish(store, SMALL, other)
        shared = store._held.ledger.cuts[name_of(SMALL, chats[0])].node
        assert shared
        assert shared.file
        path = tmp_path / f"blocks/{shared.file.digest.hex()}.safetensors"
        disk.put(path, bytes(len(disk.files()[path])))
        with pytest.raises(IntegrityError):
            restored(store, SMALL, chats[1])
        assert [serves(store, SMALL, tokens) for tokens in chats] == [False] * 3
        assert serves(store, SMALL, other)
        publish(store, SMALL, chats[2])
        assert [serves(store, SMALL, tokens) for tokens in chats] == [True] * 3


def test_a_medium_that_fails_once_costs_nothing_after_the_restart(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    """The file may be good: it is withheld, not moved."""
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
        before = disk.files()
        disk.fail_kinds = frozenset({"read"})
        disk.fail_at, disk.stuck = disk.operations, True
        with pytest.raises(IntegrityError) as caught:
            restored(store, SMALL, TOKENS)
        assert caught.value.reason == "file_unreadable"
        disk.fail_at = None
        assert restored(store, SMALL, TOKENS) is None
        assert disk.files() == before
    with opened(tmp_path, disk) as store:
        assert serves(store, SMALL, TOKENS)


def swap(disk: SimulatedDisk, one: Path, two: Path, cut_at: Callable[[bytes], int]) -> None:
    """Exchange what lies before ``cut_at`` of two files."""
    ours, theirs = disk.files()[one], disk.files()[two]
    disk.put(one, theirs[: cut_at(theirs)] + ours[cut_at(ours) :])
    disk.put(two, ours[: cut_at(ours)] + theirs[cut_at(theirs) :])


@pytest.mark.parametrize("folder", ["blocks", "cuts"])
@pytest.mark.parametrize("part", ["whole", "manifest", "rows"])
@pytest.mark.parametrize("lost", [False, True])
def test_files_swapped_between_conversations_are_noticed(
    folder: str, part: str, lost: bool, tmp_path: Path, disk: SimulatedDisk
) -> None:
    ours, theirs = conversation(258, 1), conversation(258, 2)
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, ours)
        publish(store, SMALL, theirs)
    one, two = (path for path in disk.files() if path.parent.name == folder)
    rows = 512 if folder == "blocks" else 2 * 2 + 4 * 2
    cut_at = {"whole": len, "manifest": lambda data: len(data) - rows, "rows": lambda data: 0}
    swap(disk, one, two, cut_at[part])
    if part == "rows":
        tails = disk.files()[one][-rows:], disk.files()[two][-rows:]
        disk.put(one, disk.files()[one][:-rows] + tails[1])
        disk.put(two, disk.files()[two][:-rows] + tails[0])
    if lost:
        index.remove(tmp_path)
    with opened(tmp_path, disk) as store:
        for tokens in (ours, theirs):
            try:
                good = serves(store, SMALL, tokens)
            except IntegrityError:
                good = False
            # Whole cut files are authentic under any name: an index made anew finds them.
            assert good == (lost and folder == "cuts" and part == "whole")


def test_another_identitys_files_are_not_this_ones(tmp_path: Path, disk: SimulatedDisk) -> None:
    """The same tokens in two namespaces, one's cut in the other's place."""
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
        cut, blocks = made(SMALL, TOKENS, flavour=1, space=OTHER_SPACE)
        store.publish(OTHER_SPACE, OTHER_IDENTITY, cut, blocks)
        one, two = (path for path in disk.files() if path.parent.name == "cuts")
        swap(disk, one, two, len)
        for name in (name_of(SMALL, TOKENS), name_of(SMALL, TOKENS, OTHER_SPACE)):
            with pytest.raises(IntegrityError):
                store.read(name, Destination(SMALL, 258).into)
            assert not store.holds(name)


def test_another_keys_files_are_foreign(tmp_path: Path, disk: SimulatedDisk) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
        size = sum(len(data) for data in disk.files().values())
    with opened(tmp_path, disk, key=bytes(32)) as store:
        assert store.stats().kinds["foreign_key"] == (2, size)
        assert store.stats().cuts == 0
        assert store.verify().bad == []
    with opened(tmp_path, disk) as store:
        assert serves(store, SMALL, TOKENS)


@pytest.mark.parametrize("dry_run", [False, True])
def test_verify_names_the_file_with_the_wrong_byte(
    dry_run: bool, tmp_path: Path, disk: SimulatedDisk
) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, FULL, conversation(700))
        publish(store, SMALL, TOKENS)
        seen: list[tuple[int, int]] = []
        result = store.verify(lambda done, total: seen.append((done, total)), dry_run=dry_run)
        assert result.bad == []
        assert result.files == len(disk.files()) == len(seen)
        assert seen[-1] == (result.nbytes, result.nbytes)
        before = disk.files()
        for path, data in before.items():
            for at in (3, len(data) // 2, len(data) - 1):
                disk.put(path, data[:at] + bytes([data[at] ^ 2]) + data[at + 1 :])
                result = store.verify(dry_run=True)
                name = path.relative_to(tmp_path).as_posix()
                assert [bad.path for bad in result.bad] == [name]
                disk.put(path, data)
        path = next(path for path in before if path.parent.name == "blocks")
        disk.put(path, before[path][:-1])
        assert len(store.verify(dry_run=dry_run).bad) == 1
        assert (path in disk.files()) == dry_run


def test_verify_finds_a_truncated_file_after_the_restart(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
    for path, data in disk.files().items():
        disk.put(path, data[:-1])
    with opened(tmp_path, disk) as store:
        assert not serves(store, SMALL, TOKENS)
        assert store.stats().kinds["malformed"].files == 2
        there = {path.relative_to(tmp_path).as_posix() for path in disk.files()}
        assert {bad.path for bad in store.verify(dry_run=True).bad} == there
        assert {path.relative_to(tmp_path).as_posix() for path in disk.files()} == there
        assert {bad.path for bad in store.verify().bad} == there
        assert {path.parent.name for path in disk.files()} == {"quarantine"}
        assert store.stats().kinds["malformed"].files == 0
        assert store.stats().on_disk == walk(tmp_path, disk)
        assert store.stats().on_disk == walk(tmp_path, disk)


@pytest.mark.parametrize("step", [1, 7, 61])
def test_an_index_with_a_wrong_byte_costs_no_cut(step: int, tmp_path: Path) -> None:
    """SQLite notices damage to its pages, sums notice damage to values; files say the rest."""
    disk = SimulatedDisk()
    texts = [conversation(300 + seed, seed) for seed in range(3)]
    with opened(tmp_path, disk) as store:
        for tokens in texts:
            publish(store, SMALL, tokens)
    path = tmp_path / index.NAME
    whole = path.read_bytes()
    places = [at for at in range(len(whole)) if whole[at]][step :: len(whole) // 12]
    for at in places:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x11]) + whole[at + 1 :])
        with opened(tmp_path, disk) as store:
            assert all(serves(store, SMALL, tokens) for tokens in texts), at
            assert store.stats().on_disk == walk(tmp_path, disk)


@pytest.mark.parametrize("content", [b"", b"not a database", bytes(8192)])
def test_an_index_that_is_none_is_made_anew(
    content: bytes, tmp_path: Path, disk: SimulatedDisk
) -> None:
    with opened(tmp_path, disk) as store:
        publish(store, SMALL, TOKENS)
    (tmp_path / index.NAME).write_bytes(content)
    with opened(tmp_path, disk) as store:
        assert serves(store, SMALL, TOKENS)
    assert Index(tmp_path, key_number(KEY)).load().cuts


def test_a_stores_own_words_for_a_real_directory(tmp_path: Path) -> None:
    """The same, once, on the machine's own disk."""
    with Store.open(tmp_path, KEY, 1 << 30, 0) as store:
        cut, blocks = made(SMALL, TOKENS)
        store.publish(SPACE, IDENTITY, cut, blocks)
        (path,) = (tmp_path / "blocks").iterdir()
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        with pytest.raises(IntegrityError):
            restored(store, SMALL, TOKENS)
        assert [found.name for found in (tmp_path / "quarantine").iterdir()] == [
            f"blocks-{path.name}"
        ]
        store.publish(SPACE, IDENTITY, cut, blocks)
        assert serves(store, SMALL, TOKENS)
