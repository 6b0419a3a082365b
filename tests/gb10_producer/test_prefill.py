"""The tile grid: same tiles, same bits; what is emitted, when, and how a prefill ends early."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gb10_producer.prefill import Rows, State, TorchPrefiller, default_tile
from protocol.errors import Cancelled, CapacityError, ConfigError, EngineFault, TransferError
from protocol.layout import (
    KEY,
    STATE,
    FullLayer,
    Layout,
    RecurrentLayer,
    StateArray,
    row_bytes,
    schedule,
)
from tests import crossing
from tests.ordinary import usual
from tests.tiny_models import FAMILIES, NAMES, REFUSED

Checkpoints = Callable[..., Path]
TILE = crossing.TILE
KINDS = ("llama", "muse_glimmer", "deepseek_v3", "lfm2", "qwen3_next", "falcon_h1")
CARRIED = [name for name in NAMES if name not in REFUSED]


def never() -> bool:
    return False


def ignore(_: object) -> None:
    return None


def full_rows(layout: Layout, rows: crossing.Bytes, first: int, last: int) -> list[np.ndarray]:
    """Rows ``[first, last)`` of every full layer, from rows that begin at position 0."""
    found: list[np.ndarray] = []
    for (index, role), data in rows.items():
        layer = layout.layers[index]
        if isinstance(layer, FullLayer):
            width = row_bytes(layer, role)
            found.append(data[first * width : last * width])
    return found


@pytest.mark.parametrize("name", usual(CARRIED, FAMILIES))
def test_rows_of_whole_tiles_do_not_depend_on_the_prompts_length(
    name: str, checkpoint: Checkpoints
) -> None:
    prefiller = crossing.producer(checkpoint(name))
    prompt = crossing.tokens(220)
    runs = {end: crossing.collect(prefiller, prompt, 0, end) for end in (128, 170, 220)}
    layout = prefiller.layout
    for end, whole in ((170, 128), (220, 128)):
        ours = full_rows(layout, runs[end], 0, whole)
        theirs = full_rows(layout, runs[128], 0, whole)
        assert all(map(np.array_equal, ours, theirs))


@pytest.mark.parametrize("name", KINDS)
def test_the_same_prompt_gives_the_same_bits(name: str, checkpoint: Checkpoints) -> None:
    """In a second process' place: a second model of the same checkpoint."""
    prompt = crossing.tokens(150)
    first = crossing.collect(crossing.producer(checkpoint(name)), prompt, 0, 150)
    second = crossing.collect(crossing.producer(checkpoint(name)), prompt, 0, 150)
    assert all(np.array_equal(first[place], second[place]) for place in first)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", usual([1, 64, 100, 128, 149], [1, 100]))
def test_a_delta_is_the_end_of_the_full_transfer(
    name: str, cut: int, checkpoint: Checkpoints
) -> None:
    prefiller = crossing.producer(checkpoint(name))
    prompt, end = crossing.tokens(150), 150
    full = crossing.collect(prefiller, prompt, 0, end)
    delta = crossing.collect(prefiller, prompt, cut, end)
    assert full.keys() == delta.keys()
    for place, data in delta.items():
        assert np.array_equal(data, full[place][full[place].nbytes - data.nbytes :])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("cut", "extra"),
    usual([(0, ()), (70, ()), (70, (130, 146)), (0, (128,))], [(0, ()), (70, (130, 146))]),
)
def test_rows_come_in_the_order_of_the_schedule(
    name: str, cut: int, extra: tuple[int, ...], checkpoint: Checkpoints
) -> None:
    prefiller = crossing.producer(checkpoint(name))
    layout, end = prefiller.layout, 150
    got: list[tuple[int, int, int]] = []

    def emit(item: Rows | State) -> None:
        if isinstance(item, Rows):
            got.append((item.index, item.first, item.last))
        else:
            got.append((item.index, item.position, STATE + item.number))

    computed = prefiller.prefill(crossing.tokens(end), cut, end, emit, never, ignore, extra)
    slots = schedule(layout, cut, end, TILE, extra=extra)
    expected = [
        (slot.index, slot.first, slot.last if slot.role == KEY else slot.role)
        for slot in slots
        if slot.role == KEY or slot.role >= STATE
    ]
    assert got == expected
    assert computed == end


@pytest.mark.both_blas
@pytest.mark.parametrize("name", KINDS)
def test_an_extra_cut_is_the_prefill_that_ends_there(name: str, checkpoint: Checkpoints) -> None:
    """Its states and rows are those of the shorter prompt, and whole tiles those of any prompt."""
    prefiller = crossing.producer(checkpoint(name))
    layout, prompt, (x, end) = prefiller.layout, crossing.tokens(150), (139, 150)
    both = crossing.collect_all(prefiller, prompt, 0, end, (x,))
    shorter, plain = (crossing.collect(prefiller, prompt, 0, stop) for stop in (x, end))
    for place, data in shorter.items():
        layer = layout.layers[place[0]]
        if isinstance(layer, RecurrentLayer):
            assert np.array_equal(both[x][place], data)
            continue
        ours = both[end][place]
        behind = (end - x) * row_bytes(layer, place[1])
        assert np.array_equal(ours[len(ours) - behind - len(data) : len(ours) - behind], data)
    whole = 2 * TILE
    ours, theirs = (full_rows(layout, rows, 0, whole) for rows in (both[end], plain))
    assert all(map(np.array_equal, ours, theirs))


def test_progress_counts_from_the_start_of_the_prompt(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    reached: list[int] = []
    prefiller.prefill(crossing.tokens(150), 100, 150, ignore, never, reached.append)
    assert reached == [64, 128, 150]


def test_nothing_is_computed_for_an_empty_span(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    reached: list[int] = []
    assert prefiller.prefill(crossing.tokens(9), 9, 9, ignore, never, reached.append) == 0
    assert reached == []


@pytest.mark.parametrize(("cut", "end"), [(-1, 5), (6, 5), (0, 11)])
def test_positions_outside_the_prompt_are_refused(
    cut: int, end: int, checkpoint: Checkpoints
) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    with pytest.raises(ValueError):
        prefiller.prefill(crossing.tokens(10), cut, end, ignore, never, ignore)


def test_a_withdrawn_prefill_stops_at_the_next_tile(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("muse_glimmer"))
    reached: list[int] = []
    with pytest.raises(Cancelled) as stopped:
        prefiller.prefill(
            crossing.tokens(300), 0, 300, ignore, lambda: len(reached) == 2, reached.append
        )
    assert stopped.value.reason == "cancelled"
    assert reached == [64, 128]


def test_what_emit_raises_comes_out_as_it_is(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    seen: list[int] = []

    def emit(item: Rows | State) -> None:
        seen.append(item.index)
        if len(seen) == 11:
            raise TransferError("the connection is gone", reason="connection_lost")

    with pytest.raises(TransferError):
        prefiller.prefill(crossing.tokens(150), 0, 150, emit, never, ignore)
    assert len(seen) == 11


def fail_in_layer(prefiller: TorchPrefiller, number: int, action: Callable[[], object]) -> None:
    """Make the first run of one layer do ``action`` instead of computing."""
    layer = prefiller._model.decoder.layers[number]

    def act(_module: object, _inputs: object) -> None:
        hook.remove()
        action()

    hook = layer.register_forward_pre_hook(act)


def test_running_out_of_memory_is_a_refusal_and_the_next_prefill_is_fine(
    checkpoint: Checkpoints,
) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    prompt = crossing.tokens(150)
    before = crossing.collect(prefiller, prompt, 0, 150)
    # torch's allocator really refuses this: a pebibyte
    fail_in_layer(prefiller, 3, lambda: torch.empty(1 << 50, dtype=torch.uint8))
    with pytest.raises(CapacityError) as refused:
        prefiller.prefill(prompt, 0, 150, ignore, never, ignore)
    assert refused.value.reason == "memory_exceeded"
    after = crossing.collect(prefiller, prompt, 0, 150)
    assert all(np.array_equal(before[place], after[place]) for place in before)


def raise_it(error: Exception) -> None:
    raise error


def test_running_out_of_device_memory_is_the_same_refusal(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    fail_in_layer(prefiller, 3, lambda: raise_it(torch.OutOfMemoryError("no room")))
    with pytest.raises(CapacityError) as refused:
        prefiller.prefill(crossing.tokens(150), 0, 150, ignore, never, ignore)
    assert refused.value.reason == "memory_exceeded"


def test_any_other_failure_of_the_device_is_a_fault(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("llama"))
    fail_in_layer(prefiller, 3, lambda: torch.zeros(2, 3) @ torch.zeros(2, 3))
    with pytest.raises(EngineFault) as fault:
        prefiller.prefill(crossing.tokens(150), 0, 150, ignore, never, ignore)
    assert fault.value.reason == "engine_fault"
    assert "tensor" not in str(fault.value)


def test_the_recipe_says_how_rows_were_computed(checkpoint: Checkpoints) -> None:
    prefiller = crossing.producer(checkpoint("llama", dtype="bfloat16"), tile=96)
    recipe = prefiller.recipe
    assert (recipe.who, recipe.device, recipe.dtype, recipe.tile) == (
        "producer",
        "cpu",
        "bfloat16",
        96,
    )
    assert TorchPrefiller(prefiller._model).tile == 512


def shape_changed(layout: Layout) -> Layout:
    """The layout with one key dimension, or one state, of another size."""
    first, *rest = layout.layers
    if isinstance(first, RecurrentLayer):
        state = first.states[0]
        other = StateArray(state.name, (9, 9), state.dtype)
        return Layout((RecurrentLayer(first.layer, (other, *first.states[1:])), *rest))
    wider = FullLayer(first.layer, first.heads, first.key_dim * 2, first.value_dim, first.dtype)
    return Layout((wider, *rest))


@pytest.mark.parametrize("name", ["llama", "lfm2"])
@pytest.mark.parametrize("change", [shape_changed, lambda layout: Layout(layout.layers[:-1])])
def test_a_layout_that_is_not_torchs_is_refused_at_start(
    name: str, change: Callable[[Layout], Layout], checkpoint: Checkpoints
) -> None:
    model = crossing.producer(checkpoint(name))._model
    described = dataclasses.replace(model.checkpoint, layout=change(model.checkpoint.layout))
    with pytest.raises(ConfigError) as refused:
        TorchPrefiller(dataclasses.replace(model, checkpoint=described))
    assert refused.value.reason == "layout_differs"


@pytest.mark.parametrize(
    ("device", "eager", "tile"),
    [("cpu", False, 512), ("cpu", True, 512), ("cuda", False, 2048), ("cuda", True, 512)],
)
def test_the_default_tile_bounds_what_attention_writes_out(
    device: str, eager: bool, tile: int
) -> None:
    assert default_tile(device, eager) == tile


@pytest.mark.parametrize(("name", "eager"), [("gpt_oss", True), ("gemma2", True), ("llama", False)])
def test_attention_that_writes_out_all_scores_is_known(
    name: str, eager: bool, checkpoint: Checkpoints
) -> None:
    assert crossing.producer(checkpoint(name))._model.attends_eagerly is eager
