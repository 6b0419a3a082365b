"""Looking at a tier: the figures of a start, and no byte of it changed."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from mac_decoder.store import index
from mac_decoder.store.limits import MIN_CAP, NO_CAP
from mac_decoder.store.lock import NAME as LOCK
from mac_decoder.store.publishing import Refused
from mac_decoder.store.store import Store
from protocol.errors import ConfigError
from protocol.layout import FullLayer, Layout
from protocol.messages import History
from tests.mac_decoder.reuse.made import DECODE, FULL, PREFILL, SLIDING, made_of
from tests.mac_decoder.store.made import IDENTITY, KEY, SPACE, conversation, publish, serves

WIDE = Layout((FullLayer(0, 4, 128, 128, "float32"),))
"""A block is 1 MiB."""


def files(directory: Path) -> dict[str, bytes]:
    """Every file and directory but the lock, with its bytes."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in directory.rglob("*")
        if path.name != LOCK
    }


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A tier that a decoder left: two chats, a torn file, a stranger's."""
    place = tmp_path / "kv"
    with Store.open(place, KEY, 1 << 30, 0) as store:
        publish(store, SLIDING, conversation(620, 1))
        publish(store, FULL, conversation(300, 2))
    (place / "temp" / "torn").write_bytes(b"half")
    (place / "notes.txt").write_text("mine")
    return place


def test_looking_changes_nothing_and_counts_what_a_start_would(directory: Path) -> None:
    before = files(directory)
    with Store.look(directory, KEY) as store:
        stats = store.stats()
        assert stats.on_disk == sum(map(len, before.values())) + (directory / LOCK).stat().st_size
        assert stats.kinds["unfinished"].files == 1
        assert serves(store, SLIDING, conversation(620, 1))
        assert store.verify(dry_run=True).bad == []
        going = store.clear(dry_run=True)
    assert files(directory) == before
    with Store.open(directory, KEY, 1 << 30, 0) as store:
        opened = store.stats()
        assert opened.cuts == stats.cuts == 2
        assert opened.referenced == stats.referenced > 0
        # Opening has removed the torn file.
        assert store.clear().files + 1 == going.files


@pytest.mark.parametrize("state", ["lost", "log", "damaged", "foreign"])
def test_an_index_in_any_state_is_left_as_it_is(directory: Path, state: str) -> None:
    path = directory / index.NAME
    key = KEY
    if state == "lost":
        index.remove(directory)
    elif state == "damaged":
        path.write_bytes(path.read_bytes()[:5000])
    elif state == "foreign":
        key = bytes(32)
    else:
        # A commit that a crash left in the log alone: without it two cuts would be unknown.
        database = sqlite3.connect(path, isolation_level=None)
        database.execute("PRAGMA wal_autocheckpoint = 0")
        database.execute("DELETE FROM cut")
        log = (directory / f"{index.NAME}-wal").read_bytes()
        main = path.read_bytes()
        database.close()
        path.write_bytes(main)
        (directory / f"{index.NAME}-wal").write_bytes(log)
    before = files(directory)
    with Store.look(directory, key) as store:
        stats = store.stats()
        bad = [bad.path for bad in store.verify(dry_run=True).bad]
    assert files(directory) == before
    assert stats.cuts == (0 if state == "foreign" else 2)
    assert stats.counts["adopted"] == (0 if state == "foreign" else 2)
    assert bad == ([index.NAME] if state == "damaged" else [])
    assert stats.kinds["foreign_key"].files == (5 if state == "foreign" else 0)


def test_what_would_write_fails_and_changes_nothing(directory: Path) -> None:
    flipped = next((directory / "blocks").iterdir())
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    before = files(directory)
    with Store.look(directory, KEY) as store:
        refused = publish(store, FULL, conversation(400, 3))
        assert isinstance(refused, Refused)
        assert refused.reason == "io_failed"
        for delete in (store.clear, lambda: store.prune(to_bytes=0)):
            with pytest.raises(ConfigError) as raised:
                delete()
            assert raised.value.reason == "cache_dir_unusable"
        bad = store.verify().bad
        assert [entry.path for entry in bad] == [f"blocks/{flipped.name}"]
    assert files(directory) == before


def test_looking_is_refused_while_another_has_the_tier(directory: Path) -> None:
    with Store.look(directory, KEY), pytest.raises(ConfigError) as raised:
        Store.open(directory, KEY, 1 << 30, 0)
    assert raised.value.reason == "store_locked"
    with Store.open(directory, KEY, 1 << 30, 0), pytest.raises(ConfigError) as raised:
        Store.look(directory, KEY)
    assert raised.value.reason == "store_locked"
    Store.open(directory, KEY, 1 << 30, 0).close()


def test_no_directory_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        Store.look(tmp_path / "none", KEY)
    assert raised.value.reason == "cache_dir_unusable"
    assert list(tmp_path.iterdir()) == []


def test_a_housekeeper_deletes_nothing_for_its_size(tmp_path: Path) -> None:
    with Store.open(tmp_path, KEY, 1 << 30, 0) as store:
        for seed in range(6):
            publish(store, WIDE, conversation(3 * 256, seed))
        assert store.stats().on_disk > MIN_CAP
    before = files(tmp_path)
    Store.open(tmp_path, KEY, NO_CAP, 0).close()
    assert files(tmp_path) == before
    Store.open(tmp_path, KEY, MIN_CAP, 0).close()
    assert len(files(tmp_path)) < len(before)


def test_a_damaged_index_is_named_once_by_the_next_verification(directory: Path) -> None:
    path = directory / index.NAME
    with Store.look(directory, KEY) as store:
        name = next(iter(store._held.ledger.cuts))
    data = bytearray(path.read_bytes())
    data[data.rindex(name)] ^= 1
    path.write_bytes(data)
    with Store.open(directory, KEY, 1 << 30, 0) as store:
        assert [bad.path for bad in store.verify().bad] == [index.NAME]
        assert store.verify().bad == []
        assert store.stats().cuts == 2
    with Store.open(directory, KEY, 1 << 30, 0) as store:
        assert store.verify().bad == []


def test_a_verification_counts_cuts_of_mixed_histories(tmp_path: Path) -> None:
    histories = {
        100: (History(0, 100, PREFILL),),
        200: (History(0, 100, PREFILL), History(100, 200, PREFILL)),
        300: (History(0, 100, PREFILL), History(100, 300, DECODE)),
    }
    with Store.open(tmp_path, KEY, 1 << 30, 0) as store:
        for length, history in histories.items():
            tokens = conversation(length, length)
            cut, blocks = made_of(FULL, tokens, space=SPACE, history=history)
            store.publish(SPACE, IDENTITY, cut, blocks)
        assert store.verify().mixed == 1
