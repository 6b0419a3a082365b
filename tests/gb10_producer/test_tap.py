"""Rows leave the device in order, as copies, in the decoder's form; errors come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gb10_producer.prefill import Rows, State
from gb10_producer.tap import (
    Copy,
    CudaCopier,
    HostOutlet,
    TapCache,
    ThreadedOutlet,
    Ticket,
    interleave,
)
from protocol.errors import TransferError
from tests import crossing


def ticket(number: int, *tensors: torch.Tensor) -> Ticket:
    return Ticket(lambda *views: State(number, 0, 0, views[0]), tensors)


def at_once(tensors: tuple[torch.Tensor, ...]) -> Copy:
    return Copy(tensors, lambda: None)


def test_interleaving_pairs_the_halves() -> None:
    halves = torch.tensor([[0.0, 2.0, 4.0, 1.0, 3.0, 5.0]])
    assert interleave(halves).tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


def test_new_rows_are_seen_before_they_are_cached(checkpoint: Callable[..., Path]) -> None:
    decoder = crossing.producer(checkpoint("llama"))._model.decoder
    seen: list[tuple[int, int]] = []
    lengths: list[int] = []

    def on_rows(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        assert keys.shape == values.shape
        seen.append((layer, keys.shape[-2]))
        lengths.append(cache.get_seq_length(layer))

    cache = TapCache(decoder.config, on_rows)
    with torch.inference_mode():
        decoder(input_ids=torch.tensor([[1, 2, 3]]), cache=cache, use_cache=True)
        decoder(input_ids=torch.tensor([[4, 5]]), cache=cache, use_cache=True)
    assert seen == [(layer, count) for count in (3, 2) for layer in range(8)]
    assert lengths == [0] * 8 + [3] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_the_tensors(dtype: torch.dtype) -> None:
    tensor = torch.arange(12, dtype=dtype).reshape(3, 2, 2)
    got: list[Rows | State] = []
    HostOutlet(got.append).put(ticket(0, tensor))
    assert isinstance(got[0], State)
    expected = tensor.view(torch.uint8).numpy().tobytes()
    assert got[0].data.tobytes() == expected
    assert got[0].data.format == "B"
    assert got[0].data.ndim == 1


def test_emitted_rows_are_nobody_elses_memory(checkpoint: Callable[..., Path]) -> None:
    prefiller = crossing.producer(checkpoint("muse_glimmer"), tile=16)
    kept: list[Rows | State] = []
    copies: list[bytes] = []

    def emit(item: Rows | State) -> None:
        kept.append(item)
        copies.append(item.key.tobytes() if isinstance(item, Rows) else item.data.tobytes())

    prefiller.prefill(crossing.tokens(80), 0, 80, emit, lambda: False, lambda _: None)
    views = [item.key if isinstance(item, Rows) else item.data for item in kept]
    assert [view.tobytes() for view in views] == copies
    starts = {np.frombuffer(view, np.uint8).ctypes.data for view in views}
    assert len(starts) == len(views)


def test_a_second_thread_emits_in_order() -> None:
    got: list[int] = []
    outlet = ThreadedOutlet(lambda item: got.append(item.index), at_once)
    for number in range(50):
        outlet.put(ticket(number, torch.zeros(1)))
    outlet.close(drain=True)
    assert got == list(range(50))


def test_nothing_is_emitted_before_its_copy_is_done() -> None:
    host = torch.zeros(4, dtype=torch.uint8)
    copied = threading.Event()
    got: list[bytes] = []

    def copier(_tensors: tuple[torch.Tensor, ...]) -> Copy:
        def wait() -> None:
            assert copied.wait(10)

        return Copy((host,), wait)

    outlet = ThreadedOutlet(lambda item: got.append(item[-1].tobytes()), copier)
    outlet.put(ticket(0, torch.ones(4)))
    assert got == []
    host.fill_(7)
    copied.set()
    outlet.close(drain=True)
    assert got == [b"\x07\x07\x07\x07"]


def test_a_slow_sender_holds_the_computation_back() -> None:
    free = threading.Event()
    put: list[int] = []

    def emit(_item: Rows | State) -> None:
        assert free.wait(10)

    outlet = ThreadedOutlet(emit, at_once)

    def compute() -> None:
        for number in range(100):
            outlet.put(ticket(number, torch.zeros(1)))
            put.append(number)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    assert len(put) <= 8
    free.set()
    thread.join(10)
    outlet.close(drain=True)
    assert len(put) == 100


@pytest.mark.parametrize("error", [TransferError("gone"), KeyError("a bug")])
def test_what_emit_raised_ends_the_prefill(error: Exception) -> None:
    got: list[int] = []

    def emit(item: Rows | State) -> None:
        if item.index == 3:
            raise error
        got.append(item.index)

    outlet = ThreadedOutlet(emit, at_once)

    def compute() -> None:
        for number in range(100):
            outlet.put(ticket(number, torch.zeros(1)))
        outlet.close(drain=True)

    with pytest.raises(type(error)):
        compute()
    outlet.close(drain=False)
    assert got == [0, 1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_off_a_cuda_device_are_exact() -> None:
    device = torch.device("cuda:0")
    got: list[bytes] = []
    expected: list[bytes] = []
    outlet = ThreadedOutlet(lambda item: got.append(item[-1].tobytes()), CudaCopier(device))
    tensor = torch.zeros(1 << 20, device=device)
    for number in range(20):
        # each tensor is written by a kernel just before and freed right after
        outlet.put(ticket(number, tensor + number))
        expected.append((torch.zeros(1 << 20) + number).numpy().tobytes())
    outlet.close(drain=True)
    assert got == expected
