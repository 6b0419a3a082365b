"""What tests of both frameworks share: torch's rows in mlx's caches, and how far they differ.

Rows and states are ``{(index, role): flat uint8}`` in the wire's form, as
``mac_decoder.kv.install.extract`` gives them.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _get_classes, load_model, quantize_model, save_config, save_model

from gb10_producer import model as torch_side
from gb10_producer.prefill import Prefiller, Rows, State, TorchPrefiller
from mac_decoder.engine.weights import adapted
from mac_decoder.kv import install
from mac_decoder.kv.shadow import Shadow
from protocol.checkpoint import read_checkpoint
from protocol.layout import KEY, STATE, VALUE, Layout, regions, row_bytes, schedule

Bytes = dict[tuple[int, int], np.ndarray]
States = dict[int, Bytes]
"""The states of extra cuts, by their positions."""

TILE = 64
POISON = 0xA5


def tokens(count: int, seed: int = 7, vocabulary: int = 512) -> list[int]:
    """``count`` random token ids, none of them special."""
    drawn = np.random.default_rng(seed).integers(16, vocabulary, count)
    return [int(token) for token in drawn]


def producer(path: Path, tile: int = TILE) -> TorchPrefiller:
    """The producer's side of the checkpoint in ``path``, on one CPU thread."""
    loaded = torch_side.load(read_checkpoint(path), "cpu", threads=1, progress=False)
    return TorchPrefiller(loaded, tile)


def collect(prefiller: Prefiller, prompt: Sequence[int], cut: int, end: int) -> Bytes:
    """All that ``prefiller`` emits for ``[cut, end)``, each byte exactly once."""
    return collect_all(prefiller, prompt, cut, end, ())[end]


def collect_all(
    prefiller: Prefiller, prompt: Sequence[int], cut: int, end: int, extra: Sequence[int]
) -> States:
    """All that is emitted with cuts at ``extra`` too: their states, and at ``end`` all the rest."""
    regionwise = regions(prefiller.layout, cut, end, extra)
    places = {(r.index, r.role, r.last): r for r in regionwise}
    found = {place: np.full(r.nbytes, POISON, np.uint8) for place, r in places.items()}
    filled = dict.fromkeys(found, 0)

    def emit(item: Rows | State) -> None:
        if isinstance(item, State):
            parts = [((item.index, STATE + item.number, item.position), 0, item.data)]
        else:
            layer = prefiller.layout.layers[item.index]
            parts = []
            for role, data in ((KEY, item.key), (VALUE, item.value)):
                place = (item.index, role, end)
                width = row_bytes(layer, role)  # type: ignore[arg-type]
                assert data.nbytes == (item.last - item.first) * width
                parts.append((place, (item.first - places[place].first) * width, data))
        for place, offset, data in parts:
            assert filled[place] == offset, "rows out of order"
            found[place][offset : offset + data.nbytes] = data
            filled[place] += data.nbytes

    prefiller.prefill(prompt, cut, end, emit, lambda: False, lambda _: None, extra)
    assert filled == {place: data.nbytes for place, data in found.items()}
    divided: States = {stop: {} for stop in (*extra, end)}
    for (index, role, stop), data in found.items():
        divided[stop][index, role] = data
    return divided


def installed(model: Any, layout: Layout, rows: Bytes, end: int, tile: int = TILE) -> list[Any]:
    """mlx-lm's caches of ``model`` at ``end``, made from ``rows`` by way of a shadow."""
    shadow = Shadow(layout, 0, end)
    for slot in schedule(layout, 0, end, tile):
        data = rows[slot.index, slot.role]
        shadow.place(slot)[:] = data[slot.offset : slot.offset + slot.nbytes].data
    return install.build(model, layout, shadow)


def own_prefill(model: Any, prompt: Sequence[int], end: int, step: int = TILE) -> list[Any]:
    """mlx-lm's own caches of ``prompt[:end]``, in steps, rings in canonical order."""
    caches = make_prompt_cache(model)
    for first in range(0, end, step):
        piece = mx.array([list(prompt[first : min(first + step, end)])])
        model(piece, cache=caches)
        mx.eval([cache.state for cache in caches])
    install.canonical(caches)
    return caches


def errors(layout: Layout, found: Bytes, expected: Bytes) -> dict[tuple[int, int], float]:
    """Per layer and role: the largest difference, relative to the largest expected value."""
    assert found.keys() == expected.keys()
    result: dict[tuple[int, int], float] = {}
    for place in expected:
        theirs, ours = floats(layout, place, expected[place]), floats(layout, place, found[place])
        scale = float(np.abs(theirs).max())
        difference = float(np.abs(ours - theirs).max())
        result[place] = difference / scale if scale else difference
    return result


def floats(layout: Layout, place: tuple[int, int], data: np.ndarray) -> np.ndarray:
    """The elements of one region as float32."""
    index, role = place
    layer: Any = layout.layers[index]
    dtype = layer.states[role - STATE].dtype if role >= STATE else layer.dtype
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)


def greedy(model: Any, caches: list[Any], boundary: int, count: int) -> list[int]:
    """``count`` greedy tokens after the boundary token ``boundary``."""
    found: list[int] = []
    token = boundary
    for _ in range(count):
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        token = int(mx.argmax(logits).item())
        found.append(token)
    return found


def save_as_mlx(
    source: Path,
    target: Path,
    bits: int | None = None,
    group_size: int = 32,
    choose: Callable[[str, Any], bool | dict[str, Any]] | None = None,
) -> Path:
    """The checkpoint ``source`` as ``mlx_lm.convert`` saves it, quantised if ``bits`` is given.

    ``choose(path, module)`` may name other widths for some tensors, or none. Nothing is
    computed with the model: mlx's CPU backend lacks experts in bfloat16.
    """
    checkpoint = read_checkpoint(source)
    architecture = checkpoint.architecture

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, arguments = _get_classes(config)
        return adapted(model_class, architecture.mlx_weights, checkpoint.config), arguments

    overrides = architecture.mlx_overrides(checkpoint.config)
    model, _ = load_model(source, model_config=overrides, get_model_classes=classes)
    config = json.loads((source / "config.json").read_text())
    if bits is not None:
        with contextlib.redirect_stdout(io.StringIO()):
            model, config = quantize_model(model, config, group_size, bits, quant_predicate=choose)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("model*", "config.json"))
    save_model(target, model)
    save_config(config, target / "config.json")
    return target
