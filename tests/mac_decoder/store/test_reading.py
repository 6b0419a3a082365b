"""Restores: where bytes go, what stops them, what they cost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from mac_decoder.store.access import CHUNK
from mac_decoder.store.reading import READERS
from protocol.errors import Cancelled, EngineFault, IntegrityError
from protocol.layout import FullLayer, Layout
from tests.mac_decoder.reuse.made import FULL, SLIDING
from tests.mac_decoder.store.made import (
    Destination,
    conversation,
    name_of,
    opened,
    publish,
    rows_of,
    serves,
)
from tests.mac_decoder.store.simulated import SimulatedDisk

TOKENS = conversation(1200)


def test_a_miss_is_a_return_value(tmp_path: Path) -> None:
    memory = Destination(FULL, 300)
    with opened(tmp_path, SimulatedDisk()) as store:
        assert store.read(bytes(32), memory.into) is None
        assert store.manifest(bytes(32)) is None
    assert not memory.written[0, 0].any()


def test_bytes_are_the_manifests(tmp_path: Path) -> None:
    memory = Destination(SLIDING, len(TOKENS))
    with opened(tmp_path, SimulatedDisk()) as store:
        publish(store, SLIDING, TOKENS)
        done = store.read(name_of(SLIDING, TOKENS), memory.into)
        assert done
        assert done.nbytes == sum(array.nbytes for array in memory.arrays.values())
        assert done.read_nbytes > done.nbytes  # headers
        assert list(done.manifest.tokens) == TOKENS


def test_a_restore_can_be_given_up(tmp_path: Path) -> None:
    asked = iter([False] * 5 + [True] * 10_000)
    memory = Destination(FULL, len(TOKENS))
    with opened(tmp_path, SimulatedDisk()) as store:
        publish(store, FULL, TOKENS)
        with pytest.raises(Cancelled):
            store.read(name_of(FULL, TOKENS), memory.into, cancelled=lambda: next(asked))
        assert serves(store, FULL, TOKENS)


def test_what_the_memorys_owner_raises_comes_through(tmp_path: Path) -> None:
    def into(index: int, role: int, offset: int, nbytes: int) -> memoryview:
        raise EngineFault("no memory", field="layer 1")

    with opened(tmp_path, SimulatedDisk()) as store:
        publish(store, FULL, TOKENS)
        with pytest.raises(EngineFault):
            store.read(name_of(FULL, TOKENS), into)
        assert store.stats().counts.get("invalid", 0) == 0
        assert serves(store, FULL, TOKENS)


@pytest.mark.parametrize("wrong", [b"\x00", bytes(1)])
def test_memory_of_another_length_is_refused(wrong: bytes, tmp_path: Path) -> None:
    with opened(tmp_path, SimulatedDisk()) as store:
        publish(store, FULL, TOKENS)
        with pytest.raises(ValueError):
            store.read(name_of(FULL, TOKENS), lambda *_: memoryview(bytearray(wrong)))


def test_no_thread_writes_after_a_failure(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    with opened(tmp_path, disk) as store:
        publish(store, FULL, TOKENS)
        path, data = next((p, d) for p, d in disk.files().items() if p.parent.name == "blocks")
        disk.put(path, data[:-1] + bytes([data[-1] ^ 1]))
        memory = Destination(FULL, len(TOKENS))
        with pytest.raises(IntegrityError):
            store.read(name_of(FULL, TOKENS), memory.into)
        before = {place: array.copy() for place, array in memory.arrays.items()}
        threading.Event().wait(0.02)
        assert all((before[place] == memory.arrays[place]).all() for place in before)


def test_a_cut_in_use_is_not_deleted(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    memory = Destination(FULL, len(TOKENS))
    with opened(tmp_path, disk) as store:
        publish(store, FULL, TOKENS)

        def into(index: int, role: int, offset: int, nbytes: int) -> memoryview:
            store.clear()
            return memory.into(index, role, offset, nbytes)

        assert store.read(name_of(FULL, TOKENS), into)
        assert memory.holds(rows_of(FULL, TOKENS))
        store.clear()
        assert disk.files() == {}


def test_transient_memory_does_not_grow_with_the_cut(tmp_path: Path) -> None:
    """Scratch is for what is read and not wanted, a chunk for each thread."""
    assert READERS * CHUNK <= 8 << 20
    layout = Layout((FullLayer(0, 8, 64, 64, "float32"),))
    tokens = conversation(2048)
    sizes: list[int] = []
    disk = SimulatedDisk()
    read_into = disk.read_into

    def noted(handle: int, view: memoryview, offset: int) -> int:
        if not isinstance(view.obj, type(memory.arrays[0, 0])):
            sizes.append(view.nbytes)
        return read_into(handle, view, offset)

    memory = Destination(layout, len(tokens))
    with opened(tmp_path, disk) as store:
        publish(store, layout, tokens)
        disk.read_into = noted  # type: ignore[method-assign]
        assert store.read(name_of(layout, tokens), memory.into)
    assert memory.holds(rows_of(layout, tokens))
    assert max(sizes) < 64 << 10  # headers, tokens, digests


def test_restores_run_beside_each_other(tmp_path: Path) -> None:
    disk = SimulatedDisk()
    good: list[bool] = []
    with opened(tmp_path, disk) as store:
        for seed in range(4):
            publish(store, FULL, conversation(900, seed))

        def run(seed: int) -> None:
            good.append(all(serves(store, FULL, conversation(900, seed)) for _ in range(3)))

        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert good == [True] * 4
