"""Every architecture: torch's rows, handed over, continue in mlx-lm as its own would.

Keys and values within 5e-5 of mlx-lm's own prefill, relative to the largest value of a layer,
and 64 equal greedy tokens. Where torch itself computes a recurrence in two ways (the gated delta
rule by chunks or token by token), the bound is what those two differ by.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from gb10_producer.prefill import TorchPrefiller
from mac_decoder.engine.model import load
from mac_decoder.kv import install
from protocol.checkpoint import read_checkpoint
from protocol.layout import KEY, STATE, VALUE, Layout, SlidingLayer
from tests import checkpoints, crossing
from tests.ordinary import usual
from tests.tiny_models import FAMILIES, NAMES, REFUSED, THETA

pytestmark = pytest.mark.both_blas

CARRIED = [name for name in NAMES if name not in REFUSED]
TWO_RULES = ("qwen3_next", "qwen3_5", "qwen3_5_vision")
"""Gated delta nets: a chunked rule for prefill, a sequential one for single tokens."""

EVERY_KIND = ("llama", "muse_glimmer", "deepseek_v3", "lfm2", "granitemoehybrid", "falcon_h1")
"""Full, sliding, latent, convolution, state, and a composite cache."""

BOUND = 5e-5
PROMPT = 300
NEW_TOKENS = 64

Checkpoints = Callable[..., Path]


class Sides(NamedTuple):
    """Both sides of one checkpoint."""

    prefiller: TorchPrefiller
    model: Any
    layout: Layout


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """``calm(name)``: a checkpoint of unit gain, so that what is compared is not noise."""
    root = tmp_path_factory.mktemp("calm")

    def get(name: str) -> Path:
        path = root / name
        return path if path.is_dir() else checkpoints.make(name, path, spread=0.125)

    return get


def sides(path: Path, weights: Path | None = None) -> Sides:
    """The decoder of ``path``, and a producer with the same or other weights."""
    loaded = load(read_checkpoint(path))
    return Sides(crossing.producer(weights or path), loaded.model, loaded.layout)


def bound(name: str, path: Path, prompt: list[int], rows: crossing.Bytes, end: int) -> float:
    """What rows may differ by: see the module's docstring."""
    if name not in TWO_RULES:
        return BOUND
    prefiller = crossing.producer(path, tile=1)
    token_wise = crossing.collect(prefiller, prompt, 0, end)
    # two such differences, torch's and ours, are of one kind; neither bounds the other exactly
    return 2 * max(BOUND, *crossing.errors(prefiller.layout, rows, token_wise).values())


@pytest.mark.parametrize("name", usual(CARRIED, FAMILIES))
def test_rows_and_tokens_are_mlxs_own(name: str, calm: Checkpoints) -> None:
    path = calm(name)
    prefiller, model, layout = sides(path)
    prompt = crossing.tokens(160 if name in TWO_RULES else PROMPT)
    end = len(prompt) - 1
    rows = crossing.collect(prefiller, prompt, 0, end)
    own = crossing.own_prefill(model, prompt, end)
    errors = crossing.errors(layout, rows, install.extract(own, layout, end))
    assert max(errors.values()) <= bound(name, path, prompt, rows, end), errors
    handed_over = crossing.installed(model, layout, rows, end)
    ours = crossing.greedy(model, handed_over, prompt[-1], NEW_TOKENS)
    assert ours == crossing.greedy(model, own, prompt[-1], NEW_TOKENS)


@pytest.mark.parametrize("name", EVERY_KIND)
def test_every_length_carries_over(name: str, calm: Checkpoints) -> None:
    """A single row, and both sides of the window's edge and of a tile's."""
    prefiller, model, layout = sides(calm(name))
    for end in (1, 2, 31, 32, 33, 64, 65):
        prompt = crossing.tokens(end + 1)
        rows = crossing.collect(prefiller, prompt, 0, end)
        own = crossing.own_prefill(model, prompt, end)
        errors = crossing.errors(layout, rows, install.extract(own, layout, end))
        assert max(errors.values()) <= BOUND, (end, errors)
        handed_over = crossing.installed(model, layout, rows, end)
        ours = crossing.greedy(model, handed_over, prompt[-1], 2)
        assert ours == crossing.greedy(model, own, prompt[-1], 2)


@pytest.mark.parametrize(
    ("name", "bits"),
    usual(
        itertools.product(["llama", "muse_glimmer", "qwen3_moe"], [4, 8]),
        [("muse_glimmer", 4), ("qwen3_moe", 8)],
    ),
)
def test_a_quantised_decoder_gets_rows_of_its_own_weights(
    name: str, bits: int, calm: Checkpoints, tmp_path: Path
) -> None:
    path = crossing.save_as_mlx(calm(name), tmp_path / "quantised", bits)
    prefiller, model, layout = sides(path)
    prompt = crossing.tokens(PROMPT)
    end = PROMPT - 1
    rows = crossing.collect(prefiller, prompt, 0, end)
    own = crossing.own_prefill(model, prompt, end)
    errors = crossing.errors(layout, rows, install.extract(own, layout, end))
    assert max(errors.values()) <= BOUND, errors
    handed_over = crossing.installed(model, layout, rows, end)
    ours = crossing.greedy(model, handed_over, prompt[-1], NEW_TOKENS)
    assert ours == crossing.greedy(model, own, prompt[-1], NEW_TOKENS)


# --- controls: each of these must fail what the tests above demand -----------------------------


class Verdict(NamedTuple):
    """How a tampered handover compares with mlx-lm's own prefill."""

    error: float
    same_tokens: int


def verdict(given: Sides, rows: crossing.Bytes, prompt: list[int]) -> Verdict:
    """The largest error of ``rows`` in any layer, and greedy tokens before the first other one."""
    end = len(prompt) - 1
    own = crossing.own_prefill(given.model, prompt, end)
    errors = crossing.errors(given.layout, rows, install.extract(own, given.layout, end))
    handed_over = crossing.installed(given.model, given.layout, rows, end)
    ours = crossing.greedy(given.model, handed_over, prompt[-1], NEW_TOKENS)
    theirs = crossing.greedy(given.model, own, prompt[-1], NEW_TOKENS)
    parted = (i for i in range(NEW_TOKENS) if ours[i] != theirs[i])
    return Verdict(max(errors.values()), next(parted, NEW_TOKENS))


def refused(found: Verdict) -> bool:
    """Whether both measures notice, by far."""
    return found.error > 100 * BOUND and found.same_tokens < NEW_TOKENS


def test_a_window_off_by_one_is_noticed(calm: Checkpoints) -> None:
    given = sides(calm("muse_glimmer"))
    prompt = crossing.tokens(PROMPT)
    rows = crossing.collect(given.prefiller, prompt, 0, PROMPT - 1)
    earlier = crossing.collect(given.prefiller, prompt, 0, PROMPT - 2)
    for index, layer in enumerate(given.layout.layers):
        if isinstance(layer, SlidingLayer):
            for role in (KEY, VALUE):
                rows[index, role] = earlier[index, role]
    assert refused(verdict(given, rows, prompt))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_rows_of_shifted_positions_are_noticed(name: str, calm: Checkpoints) -> None:
    given = sides(calm(name))
    prompt = crossing.tokens(PROMPT)
    longer = crossing.collect(given.prefiller, [prompt[0], *prompt], 0, PROMPT)
    rows = {place: data[data.nbytes // PROMPT :] for place, data in longer.items()}
    assert refused(verdict(given, rows, prompt))


def test_a_state_one_position_off_is_noticed(calm: Checkpoints) -> None:
    given = sides(calm("granitemoehybrid"))
    prompt = crossing.tokens(PROMPT)
    rows = crossing.collect(given.prefiller, prompt, 0, PROMPT - 1)
    earlier = crossing.collect(given.prefiller, prompt, 0, PROMPT - 2)
    rows |= {place: data for place, data in earlier.items() if place[1] >= STATE}
    assert refused(verdict(given, rows, prompt))


def test_swapped_keys_and_values_are_noticed(calm: Checkpoints) -> None:
    given = sides(calm("llama"))
    prompt = crossing.tokens(PROMPT)
    rows = crossing.collect(given.prefiller, prompt, 0, PROMPT - 1)
    swapped = {(index, VALUE - role): data for (index, role), data in rows.items()}
    assert refused(verdict(given, swapped, prompt))


def test_the_other_order_of_rotary_halves_is_noticed(calm: Checkpoints) -> None:
    given = sides(calm("deepseek_v3"))
    prompt = crossing.tokens(PROMPT)
    rows = crossing.collect(given.prefiller, prompt, 0, PROMPT - 1)
    for (index, role), data in rows.items():
        if role == VALUE:
            width = given.layout.layers[index].value_dim  # type: ignore[union-attr]
            pairs = data.view(np.float32).reshape(-1, width // 2, 2)
            rows[index, role] = (
                np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1).view(np.uint8)
            )
    assert refused(verdict(given, rows, prompt))


def test_the_other_rope_base_is_noticed(calm: Checkpoints, tmp_path: Path) -> None:
    path = calm("llama")
    other = shutil.copytree(path, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    assert config["rope_parameters"]["rope_theta"] == THETA
    config["rope_parameters"]["rope_theta"] = 10000.0
    (other / "config.json").write_text(json.dumps(config))
    given = sides(path, weights=other)
    prompt = crossing.tokens(PROMPT)
    rows = crossing.collect(given.prefiller, prompt, 0, PROMPT - 1)
    assert refused(verdict(given, rows, prompt))


@pytest.mark.parametrize("name", ["llama", "muse_glimmer"])
def test_original_weights_behind_a_quantised_decoder_are_noticed(
    name: str, calm: Checkpoints, tmp_path: Path
) -> None:
    path = crossing.save_as_mlx(calm(name), tmp_path / "quantised", 4)
    given = sides(path, weights=calm(name))
    prompt = crossing.tokens(PROMPT)
    rows = crossing.collect(given.prefiller, prompt, 0, PROMPT - 1)
    assert refused(verdict(given, rows, prompt))
