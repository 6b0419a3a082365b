"""Memory as mlx has it: nothing written to it, everything that is written in the array."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import mlx.core as mx
import numpy as np
import psutil
import pytest

from mac_decoder.kv import memory
from mac_decoder.kv.memory import unwritten

SHAPES = [(7,), (5, 3), (4, 2, 3), (1, 2, 3, 4), (2, 1, 3, 1, 2), (0,), (3, 0, 5), (1, 0, 2, 0)]
MIB = 1 << 20


@pytest.mark.parametrize("dtype", [mx.uint16, mx.uint32])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_written_is_in_the_array(shape: tuple[int, ...], dtype: mx.Dtype) -> None:
    array, written = unwritten(shape, dtype)
    assert (array.shape, array.dtype, array.nbytes) == (shape, dtype, written.nbytes)
    assert (written.ndim, written.dtype) == (1, np.uint8)
    data = np.random.default_rng(1).bytes(written.nbytes)
    written.data[:] = data
    assert np.array(array).tobytes() == data


def test_nothing_is_written_to_it() -> None:
    """Pages that nobody wrote to are not there."""
    before = psutil.Process().memory_info().rss
    _array, written = unwritten((256 * MIB,), mx.uint16)
    assert psutil.Process().memory_info().rss - before < 32 * MIB
    written[:] = 1
    assert psutil.Process().memory_info().rss - before > 480 * MIB


def test_it_is_freed_with_the_array_and_the_view() -> None:
    process, before = psutil.Process(), mx.get_active_memory()
    for number in range(50):
        array, written = unwritten((8 * MIB,), mx.uint16)
        written[:] = number
        assert mx.get_active_memory() - before == pytest.approx(16 * MIB, rel=0.01)
        del array
        assert mx.get_active_memory() - before == pytest.approx(16 * MIB, rel=0.01)
        assert (written == number).all()
        del written
        assert mx.get_active_memory() == before
        if number == 9:
            held = process.memory_info().rss
    assert process.memory_info().rss - held < 24 * MIB  # 40 of 16 MiB each


def test_threads_get_memory_of_their_own() -> None:
    good: list[bool] = []

    def take(number: int) -> None:
        found = [unwritten((1000, count), mx.uint16) for count in range(1, 30)]
        for _, written in found:
            written[:] = number
        good.append(all((np.array(array) == number * 257).all() for array, _ in found))

    threads = [threading.Thread(target=take, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 4


class Other:
    """mlx with another loader, evaluated when asked."""

    def __init__(self, loaded: Any, evaluate: Any = mx.eval) -> None:
        self.load = lambda file, format: loaded(mx.load(file, format=format))
        self.eval = evaluate
        self.uint16 = mx.uint16


@pytest.mark.parametrize("loaded", [mx.zeros_like, lambda array: array + 0])
def test_an_mlx_that_fills_or_reads_later_writes_over_nothing(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "mx", Other(loaded))
    array, written = unwritten((300, 70), mx.uint16)
    written[:] = 0xA5
    mx.eval(array)
    assert (np.array(array) == 0xA5A5).all()


def test_memory_that_is_not_mlxs_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mlx gave none, numpy makes a view of memory of its own."""

    class Nowhere:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return np.empty((300, 70), np.uint16)

    monkeypatch.setattr(memory, "mx", Other(lambda _: Nowhere(), lambda _: None))
    with pytest.raises(RuntimeError, match="no memory"):
        unwritten((300, 70), mx.uint16)


OUT_OF_MEMORY = """
import resource
import mlx.core as mx
from mac_decoder.kv.shadow import Shadow
from protocol.errors import EngineFault
from protocol.layout import FullLayer, Layout

mx.eval(mx.zeros(1))
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
try:
    Shadow(Layout((FullLayer(0, 8, 1024, 1024, "bfloat16"),)), 0, 1 << 20)
except EngineFault as error:
    print(error.reason, error.field, error.found)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS does not limit address space")
def test_no_memory_is_an_engine_fault_that_says_for_what() -> None:
    run = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY], capture_output=True, text=True, timeout=60
    )
    assert run.stdout.strip() == f"engine_fault layer 0 role 0 {16 << 30} bytes", run.stderr
