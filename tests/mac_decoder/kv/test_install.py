"""Caches to rows and back: same bytes, same position, same decoding, or a refusal."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mac_decoder.engine.admission import cache_bytes
from mac_decoder.engine.model import LoadedModel, load
from mac_decoder.kv import install
from mac_decoder.kv.shadow import Shadow
from protocol.checkpoint import read_checkpoint
from protocol.errors import EngineFault, IdentityMismatch, IntegrityError
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, regions, schedule
from tests.crossing import Bytes, installed, own_prefill, tokens
from tests.tiny_models import WINDOW

Models = Callable[..., LoadedModel]

KINDS = (
    "llama",  # full
    "muse_glimmer",  # full and sliding, NoPE and RoPE
    "gpt_oss",  # sliding first, attention sinks
    "deepseek_v3",  # latent, values of another width
    "qwen3_next",  # delta net
    "lfm2",  # a state of one array
    "granitemoehybrid",  # mamba
    "falcon_h1",  # composite
)
HALVES = (
    "llama",
    "gemma3_text",
    "deepseek_v3_dense",
    "qwen3_5",
    "lfm2",
    "granitemoehybrid_dense",
    "falcon_h1",
)
"""The same kinds without experts, which mlx's CPU backend multiplies in float32 only."""
POSITIONS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW)
STEP = 20
"""Prefill step: no divisor of the window, so that rings are left with more rows than it."""


@pytest.fixture(scope="module")
def models(checkpoint: Callable[..., Path]) -> Models:
    """``models(name, dtype="float32")``: the loaded model, once per module."""
    loaded: dict[tuple[str, str], LoadedModel] = {}

    def get(name: str, dtype: str = "float32") -> LoadedModel:
        if (name, dtype) not in loaded:
            loaded[name, dtype] = load(read_checkpoint(checkpoint(name, dtype)))
        return loaded[name, dtype]

    return get


def _same(left: Bytes, right: Bytes) -> bool:
    return left.keys() == right.keys() and all(
        np.array_equal(left[place], right[place]) for place in left
    )


def _decode(model: Any, caches: list[Any], token: int, count: int) -> list[mx.array]:
    """Logits of ``count`` greedy steps."""
    found: list[mx.array] = []
    for _ in range(count):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        mx.eval(logits)
        found.append(logits)
        token = int(mx.argmax(logits))
    return found


@pytest.mark.both_blas
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("name", KINDS)
def test_built_caches_are_the_extracted_ones(name: str, position: int, models: Models) -> None:
    known = models(name)
    original = own_prefill(known.model, tokens(position), position, STEP)
    rows = install.extract(original, known.layout, position)
    assert sum(map(len, rows.values())) == sum(
        region.nbytes for region in regions(known.layout, 0, position)
    )
    built = installed(known.model, known.layout, rows, position)
    assert _same(install.extract(built, known.layout, position), rows)
    # decoding on is bit-equal, also while a ring wraps, and leaves equal caches
    rings = any(isinstance(layer, SlidingLayer) for layer in known.layout.layers)
    steps = WINDOW + 3 if rings else 4
    ours = _decode(known.model, built, 7, steps)
    theirs = _decode(known.model, original, 7, steps)
    assert all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))
    install.canonical(built)
    install.canonical(original)
    end = position + steps
    assert _same(
        install.extract(built, known.layout, end), install.extract(original, known.layout, end)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", HALVES)
def test_half_precision_is_never_promoted(name: str, dtype: str, models: Models) -> None:
    known = models(name, dtype)
    position = WINDOW + 5
    original = own_prefill(known.model, tokens(position), position, STEP)
    rows = install.extract(original, known.layout, position)
    built = installed(known.model, known.layout, rows, position)
    ours, theirs = (_decode(known.model, caches, 7, 3) for caches in (built, original))
    assert all(mx.array_equal(a, b).item() for a, b in zip(ours, theirs, strict=True))
    # extraction checks each array's type against the layout, which has float32 states only
    install.canonical(built)
    after = install.extract(built, known.layout, position + 3)
    assert after.keys() == rows.keys()
    floats = {
        state.name: state.dtype
        for layer in known.layout.layers
        if isinstance(layer, RecurrentLayer)
        for state in layer.states
    }
    assert floats.get("conv", dtype) == dtype
    assert floats.get("state", "float32") == "float32"


def test_canonical_is_idempotent_and_changes_no_answer(models: Models) -> None:
    known = models("muse_glimmer")
    prompt = tokens(3 * WINDOW)
    caches = make_prompt_cache(known.model)
    mx.eval(known.model(mx.array([prompt]), cache=caches))
    assert caches[0].keys.shape[2] > WINDOW
    twice = own_prefill(known.model, prompt, len(prompt), len(prompt))
    install.canonical(twice)
    install.canonical(caches)
    assert caches[0].keys.shape[2] == WINDOW
    left, right = (install.extract(c, known.layout, len(prompt)) for c in (caches, twice))
    assert _same(left, right)


def test_a_delta_is_completed_with_what_the_decoder_holds(models: Models) -> None:
    known = models("muse_glimmer")
    held, end = 2 * WINDOW + 8, 2 * WINDOW + 20
    prompt = tokens(end)
    source = own_prefill(known.model, prompt, end, STEP)
    rows = install.extract(source, known.layout, end)
    shadow = Shadow(known.layout, held, end)
    sent = {(r.index, r.role): r for r in regions(known.layout, held, end)}
    for place, data in rows.items():
        if below := len(data) - sent[place].nbytes:
            shadow.place_piece(*place, 0, below)[:] = data[:below].data
    for slot in schedule(known.layout, held, end, 64):
        data, region = rows[slot.index, slot.role], sent[slot.index, slot.role]
        start = len(data) - region.nbytes + slot.offset
        shadow.place(slot)[:] = data[start : start + slot.nbytes].data
    built = install.build(known.model, known.layout, shadow)
    assert _same(install.extract(built, known.layout, end), rows)


def test_building_copies_nothing_and_lets_go_of_the_shadow() -> None:
    """The cut's memory is the only memory, until a step needs room for its own row."""
    count, end = 6, 2048
    layout = Layout(tuple(FullLayer(index, 4, 64, 64, "bfloat16") for index in range(count)))
    model = SimpleNamespace(layers=range(count))
    mx.clear_cache()
    before = mx.get_active_memory()
    shadow = _filled(layout, end)
    held = mx.get_active_memory() - before
    assert shadow.nbytes <= held <= shadow.nbytes * 1.01
    mx.reset_peak_memory()
    caches = install.build(model, layout, shadow)
    mx.eval([cache.state for cache in caches])
    assert mx.get_peak_memory() - before <= held * 1.01
    # one layer after the other grows, as in a decoding step: one layer's copy at a time
    one = held // count
    for cache in caches:
        row = mx.zeros((1, 4, 1, 64), mx.bfloat16)
        mx.eval(cache.update_and_fetch(row, row))
    assert mx.get_peak_memory() - before <= held * (1 + 256 / end) + 2 * one
    del caches, cache, shadow
    assert mx.get_active_memory() - before <= one // 10


def test_another_layout_is_refused(models: Models) -> None:
    known, other = models("llama"), models("muse_glimmer")
    shadow = _filled(other.layout, 40)
    with pytest.raises(IdentityMismatch) as caught:
        install.build(known.model, known.layout, shadow)
    assert caught.value.reason == "layout_differs"
    # nothing was taken: the shadow is still whole
    shadow.check_complete()


def test_a_layout_that_is_not_the_models_is_refused(models: Models) -> None:
    known, other = models("llama"), models("muse_glimmer")
    with pytest.raises(IdentityMismatch) as caught:
        install.build(known.model, other.layout, _filled(other.layout, 40))
    assert caught.value.reason == "layout_differs"


@pytest.mark.parametrize("name", ["llama", "muse_glimmer", "falcon_h1"])
def test_a_shadow_without_one_region_never_becomes_caches(name: str, models: Models) -> None:
    known = models(name)
    for missing in regions(known.layout, 0, 40):
        slots = list(schedule(known.layout, 0, 40, 64))
        late = [s for s in slots if (s.index, s.role) == (missing.index, missing.role)]
        assert late
        shadow = Shadow(known.layout, 0, 40)
        for slot in slots:
            if slot not in late:
                shadow.place(slot)[:] = bytes(slot.nbytes)
        with pytest.raises(IntegrityError) as caught:
            install.build(known.model, known.layout, shadow)
        assert caught.value.reason == "shadow_incomplete"
        assert caught.value.field == f"layer {missing.index} role {missing.role}"
        # nothing was taken: it still can be filled
        for slot in late:
            shadow.place(slot)[:] = bytes(slot.nbytes)
        caches = install.build(known.model, known.layout, shadow)
        assert not any(v.any() for v in install.views(caches, known.layout, 40).values())


def test_positions_are_checked_in_every_layer(models: Models) -> None:
    known = models("falcon_h1")
    caches = own_prefill(known.model, tokens(12), 12, STEP)
    install.check_position(caches, 12)
    with pytest.raises(EngineFault) as caught:
        install.extract(caches, known.layout, 11)
    assert (caught.value.reason, caught.value.found) == ("position_differs", 12)
    last = caches[-1]
    assert type(last) is CacheList
    last.caches[1].offset = 13
    with pytest.raises(EngineFault) as caught:
        install.check_position(caches, 12)
    assert caught.value.field == "layer 7"
    states = last.caches[0]
    last.caches[1].offset = 12
    assert type(states) is ArraysCache
    states.cache[1] = None
    with pytest.raises(EngineFault):
        install.check_position(caches, 12)


def test_arrays_of_another_shape_or_type_are_not_extracted(models: Models) -> None:
    known = models("llama")
    for spoil in (lambda array: array.astype(mx.float16), lambda array: array[:, :1]):
        caches = own_prefill(known.model, tokens(5), 5, STEP)
        caches[3].keys = spoil(caches[3].keys)
        with pytest.raises(IntegrityError) as caught:
            install.extract(caches, known.layout, 5)
        assert caught.value.reason == "layout_differs"


def _filled(layout: Layout, end: int) -> Shadow:
    shadow = Shadow(layout, 0, end)
    for slot in schedule(layout, 0, end, 64):
        shadow.place(slot)[:] = bytes(slot.nbytes)
    return shadow


def test_a_state_that_left_a_batch_holds_nothing_of_it() -> None:
    batch = mx.random.normal((16, 1 << 18))
    cache = ArraysCache(1)
    cache.cache = [batch[3:4]]
    mx.eval(cache.cache)
    kept = np.array(cache.cache[0], copy=True)
    del batch
    gc.collect()
    before = mx.get_active_memory()
    install.detach([cache])
    gc.collect()
    assert before - mx.get_active_memory() >= 14 * kept.nbytes
    assert np.array_equal(np.array(cache.cache[0]), kept)


@pytest.mark.parametrize(
    ("end", "room"), [(1, 256), (255, 256), (256, 256), (257, 512), (299, 512)]
)
def test_room_is_given_up_to_a_multiple_of_the_step(end: int, room: int) -> None:
    """Rows stay as they were, and the next one does not make the cache grow by a whole step."""
    layout = Layout((FullLayer(0, 2, 8, 4, "bfloat16"),))
    (cache,) = install.build(SimpleNamespace(layers=range(1)), layout, _filled(layout, end))
    before = install.extract([cache], layout, end)
    install.round_up([cache])
    install.round_up([cache])
    assert (cache.keys.shape, cache.values.shape) == ((1, 2, room, 8), (1, 2, room, 4))
    assert cache.offset == end
    assert _same(install.extract([cache], layout, end), before)
    assert install.allocated([cache]) == cache_bytes(layout, end)
    cache.update_and_fetch(mx.zeros((1, 2, 1, 8), mx.bfloat16), mx.zeros((1, 2, 1, 4), mx.bfloat16))
    assert install.allocated([cache]) == cache_bytes(layout, end + 1)
    rows = install.extract([cache], layout, end + 1)
    assert all(np.array_equal(rows[place][: old.size], old) for place, old in before.items())
