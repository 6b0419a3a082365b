"""Cuts go in and come out, byte for byte; what is there is not written again."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_decoder.store import index, names
from mac_decoder.store.files import RealDisk
from mac_decoder.store.publishing import Published
from mac_decoder.store.store import Store
from protocol.layout import Layout
from protocol.messages import History
from tests.mac_decoder.reuse.made import (
    BLOCKLESS,
    DECODE,
    FULL,
    LAYOUTS,
    PREFILL,
    RECURRENT,
    SLIDING,
    made_of,
)
from tests.mac_decoder.store.made import (
    IDENTITY,
    KEY,
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


@pytest.fixture
def disk() -> SimulatedDisk:
    return SimulatedDisk()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("position", [1, 255, 256, 257, 299, 300, 301, 900])
def test_a_published_cut_comes_back_exactly(
    layout: Layout, position: int, tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(position)
    with opened(tmp_path, disk) as store:
        outcome = publish(store, layout, tokens)
        assert isinstance(outcome, Published)
        assert outcome.written > 0
        assert serves(store, layout, tokens)
    with opened(tmp_path, disk) as store:
        assert serves(store, layout, tokens)
        assert store.stats().on_disk == walk(tmp_path, disk)
    assert disk.open_handles == 0


def test_publishing_what_exists_writes_nothing(tmp_path: Path, disk: SimulatedDisk) -> None:
    tokens = conversation(600)
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, tokens)
        before = disk.files()
        disk.log.clear()
        again = publish(store, SLIDING, tokens)
        assert isinstance(again, Published)
        assert (again.existed, again.written, again.files) == (True, 0, 0)
        assert disk.log == []
        assert disk.files() == before


@pytest.mark.parametrize("position", [1, 255, 256, 300, 512, 599, 600])
def test_a_cut_of_full_layers_serves_every_position_below(
    position: int, tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(600)
    with opened(tmp_path, disk) as store:
        publish(store, FULL, tokens)
        memory = restored(store, FULL, tokens, position)
        assert memory
        assert memory.holds(rows_of(FULL, tokens[:position]))


def test_a_boundary_is_restored_without_reading_what_lies_past_it(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(3 * 256 + 10)
    with opened(tmp_path, disk) as store:
        publish(store, FULL, tokens)
        disk.log.clear()
        assert restored(store, FULL, tokens, 256)
        assert disk.log.count("open") == 3  # the manifest, the cut's rest, one block


@pytest.mark.parametrize(("layout", "position"), [(SLIDING, 400), (RECURRENT, 256), (FULL, 601)])
def test_a_position_that_a_cut_cannot_supply_is_a_mistake_of_the_caller(
    layout: Layout, position: int, tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(600)
    with opened(tmp_path, disk) as store:
        publish(store, layout, tokens)
        with pytest.raises(ValueError):
            restored(store, layout, tokens, position)
        assert serves(store, layout, tokens)


def test_a_system_prompt_of_ten_conversations_is_stored_once(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    with opened(tmp_path, disk) as store:
        for seed in range(10):
            publish(store, FULL, conversation(1024 + 300, seed, shared=1024))
        stats = store.stats()
        assert stats.blocks == 4 + 10
        one_block = stats.block_bytes // 14
        shared_nine_times_more = 9 * 4 * one_block
        held = sum(len(data) for data in disk.files().values())
        assert stats.referenced == held + shared_nine_times_more
        assert stats.on_disk == walk(tmp_path, disk)
        assert all(
            serves(store, FULL, conversation(1024 + 300, seed, shared=1024)) for seed in range(10)
        )


def test_equal_tokens_with_other_rows_share_nothing(tmp_path: Path, disk: SimulatedDisk) -> None:
    """Rows that were made otherwise differ in rounding; each cut gives back its own."""
    tokens = conversation(700)
    with opened(tmp_path, disk) as store:
        publish(store, FULL, tokens[:600])
        publish(store, FULL, tokens, flavour=1)
        assert serves(store, FULL, tokens[:600])
        assert serves(store, FULL, tokens, flavour=1)
        assert store.stats().blocks == 4
    with opened(tmp_path, disk) as store:
        assert serves(store, FULL, tokens[:600])
        assert serves(store, FULL, tokens, flavour=1)


def test_blocks_whose_files_are_there_need_not_be_given(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = conversation(1000)
    with opened(tmp_path, disk) as store:
        first = publish(store, FULL, tokens[:600])
        publish(store, FULL, tokens[:600] + tokens[:5], flavour=1)
        cut, blocks = made(FULL, tokens)
        missing = store.publish(SPACE, IDENTITY, cut, blocks[2:])
        assert (getattr(missing, "reason", ""), missing.block_files) == ("block_missing", ())
        gap = store.publish(SPACE, IDENTITY, cut, blocks[3:], block_files=first.block_files)
        assert (getattr(gap, "reason", ""), gap.block_files) == (
            "block_missing",
            first.block_files,
        )
        done = store.publish(SPACE, IDENTITY, cut, blocks[2:], block_files=first.block_files)
        assert isinstance(done, Published)
        assert done.files == 2  # a block and the cut
        assert (len(done.block_files), done.block_files[:2]) == (3, first.block_files)
        assert serves(store, FULL, tokens)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_outcome_says_which_blocks_are_there_as_this_cut_has_them(
    layout: Layout, tmp_path: Path, disk: SimulatedDisk
) -> None:
    """Of an existing cut of the same tokens those with the same rows alone, all of them once."""
    tokens = conversation(900)
    with opened(tmp_path, disk) as store:
        done = publish(store, layout, tokens)
        again = publish(store, layout, tokens)
        other = publish(store, layout, tokens, flavour=1)
        assert isinstance(other, Published)
        assert again.block_files == done.block_files
        has_rows = layout is not BLOCKLESS
        assert len(done.block_files) == 3
        assert all(done.block_files) == has_rows
        assert other.existed
        assert other.block_files == (() if has_rows else done.block_files)
        cut, blocks = made(layout, [*tokens[:512], *conversation(200, 5)])
        on = store.publish(SPACE, IDENTITY, cut, blocks[2:], block_files=done.block_files[:2])
        assert isinstance(on, Published)
        assert on.block_files[:2] == done.block_files[:2]


def test_a_file_that_went_or_broke_is_not_said_to_be_there(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    """The refusal says up to where the blocks still are; what is given again is written again."""
    tokens = conversation(1100)
    cut, blocks = made(FULL, tokens)
    with opened(tmp_path, disk) as store:
        files = publish(store, FULL, tokens[:900]).block_files
        disk.put(tmp_path / names.block_path(files[1]), b"damage")
        assert [bad.reason for bad in store.verify().bad] == ["file_malformed"]
        refused = store.publish(SPACE, IDENTITY, cut, blocks[3:], block_files=files)
        assert (getattr(refused, "reason", ""), refused.block_files) == (
            "block_missing",
            files[:1],
        )
        done = store.publish(SPACE, IDENTITY, cut, blocks[1:], block_files=files[:1])
        assert isinstance(done, Published)
        assert done.files == 3
        assert serves(store, FULL, tokens)
        store.prune(to_bytes=0)
        refused = store.publish(SPACE, IDENTITY, cut, blocks[3:], block_files=done.block_files)
        assert refused.block_files == ()


def test_what_is_written_is_called_after_its_own_bytes(tmp_path: Path, disk: SimulatedDisk) -> None:
    """Whatever a caller says that its file was called."""
    tokens = conversation(600)
    cut, blocks = made(FULL, tokens)
    with opened(tmp_path, disk) as store:
        done = store.publish(SPACE, IDENTITY, cut, blocks, block_files=(bytes(32), b"\1" * 32))
        assert isinstance(done, Published)
        assert serves(store, FULL, tokens)
        assert store.verify().bad == []


def test_an_extension_supersedes_its_own_steps_only(tmp_path: Path, disk: SimulatedDisk) -> None:
    """Shared, turn and newest cuts stay."""
    ours, theirs = conversation(900, 1, shared=300), conversation(900, 2, shared=300)
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, ours[:256], "shared")
        publish(store, SLIDING, ours[:512], "step")
        publish(store, SLIDING, theirs[:600], "turn")
        publish(store, SLIDING, ours[:700], "turn")
        publish(store, SLIDING, ours[:800], "step")
        done = publish(store, SLIDING, ours, "step")
        assert isinstance(done, Published)
        assert done.superseded == (name_of(SLIDING, ours[:800]),)
        lengths = [256, 512, 700, 800, 900]
        served = [length for length in lengths if serves(store, SLIDING, ours[:length])]
        assert served == [256, 700, 900]
        assert serves(store, SLIDING, theirs[:600])
        assert store.stats().on_disk == walk(tmp_path, disk)


def test_a_step_that_another_cut_extends_too_is_shared(tmp_path: Path, disk: SimulatedDisk) -> None:
    ours, theirs = conversation(900, 1, shared=300), conversation(900, 2, shared=300)
    with opened(tmp_path, disk) as store:
        publish(store, SLIDING, ours[:256], "step")
        memory = Destination(SLIDING, 256)

        def into(index: int, role: int, offset: int, nbytes: int) -> memoryview:
            if not store.holds(name_of(SLIDING, theirs)):
                publish(store, SLIDING, theirs)  # while the step is in use
            return memory.into(index, role, offset, nbytes)

        store.read(name_of(SLIDING, ours[:256]), into)
        publish(store, SLIDING, ours)
        assert serves(store, SLIDING, ours[:256])


def test_cuts_of_mixed_histories_are_counted_and_no_file_is_read_for_it(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    texts = {length: conversation(length, length) for length in (100, 200, 300)}
    histories = {
        100: (History(0, 100, PREFILL),),
        200: (History(0, 150, PREFILL), History(150, 200, PREFILL)),
        300: (History(0, 299, PREFILL), History(299, 300, DECODE)),
    }
    with opened(tmp_path, disk) as store:
        for length, tokens in texts.items():
            made_as = made_of(SLIDING, tokens, space=SPACE, history=histories[length])
            store.publish(SPACE, IDENTITY, *made_as)
        assert store.stats().mixed == 1
    disk.log.clear()
    with opened(tmp_path, disk) as store:
        assert store.stats().mixed == 1
        assert "open" not in disk.log
    index.remove(tmp_path)
    with opened(tmp_path, disk) as store:
        assert store.stats().mixed == 1
        store.clear()
        assert store.stats().mixed == 0


def test_files_and_directories_are_private_and_out_of_backups(tmp_path: Path) -> None:
    with Store.open(tmp_path / "cache", KEY, 1 << 30, 0) as store:
        cut, blocks = made(FULL, conversation(300))
        store.publish(SPACE, IDENTITY, cut, blocks)
        for path in (tmp_path / "cache").rglob("*"):
            assert path.stat().st_mode & 0o077 == 0, path
        assert (tmp_path / "cache/CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28")
        found = RealDisk().walk(tmp_path / "cache")
        assert store.stats().on_disk == sum(file.nbytes for file in found)
        assert serves(store, FULL, conversation(300))


def test_names_records_and_events_tell_nothing_of_a_prompt(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    tokens = [7_654_321] * 300
    events: list[object] = []
    with opened(tmp_path, disk, events=events) as store:  # type: ignore[arg-type]
        publish(store, FULL, tokens)
        told = [str(path) for path in disk.files()]
        told += [repr(store.manifest(name_of(FULL, tokens))), repr(store.stats())]
        store.clear()
        told += map(repr, events)
        assert not [text for text in told if "7654321" in text or "7, 6" in text]
        assert len(events) == 2


def test_a_closed_store_refuses(tmp_path: Path, disk: SimulatedDisk) -> None:
    store = opened(tmp_path, disk)
    store.close()
    store.close()
    refused = publish(store, FULL, conversation(10))
    assert getattr(refused, "reason", "") == "store_closed"
