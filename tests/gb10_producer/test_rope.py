"""Rotary frequencies are mlx's own, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.models.rope_utils import initialize_rope

from gb10_producer import model as torch_side
from gb10_producer.rope import inverse_frequencies
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from tests.tiny_models import LOCAL_THETA, NAMES, REFUSED, THETA

Checkpoints = Callable[..., Path]

SIZES = [(1e4, 128), (25000.0, 16), (1e5, 64), (1.5e5, 64), (5e5, 128), (1e6, 256), (1e7, 64)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(("base", "dims"), SIZES)
@pytest.mark.parametrize("factor", [None, 4.0])
def test_plain_angles_are_those_that_mlx_rotates_by(
    base: float, dims: int, factor: float | None
) -> None:
    position, half = 50_000, dims // 2
    unit = np.zeros((1, 1, 1, dims), np.float32)
    unit[..., :half] = 1
    scale = 1.0 if factor is None else 1 / factor
    rotated = np.array(
        mx.fast.rope(
            mx.array(unit), dims, traditional=False, base=base, scale=scale, offset=position
        )
    )[0, 0, 0]
    parameters: dict[str, Any] = {"rope_theta": base}
    if factor is not None:
        parameters |= {"rope_type": "linear", "factor": factor}
    angles = mx.array(inverse_frequencies(parameters, dims)) * mx.array(float(position))
    assert np.array_equal(rotated[:half], np.array(mx.cos(angles)))
    assert np.array_equal(rotated[half:], np.array(mx.sin(angles)))


@pytest.mark.parametrize(("base", "dims"), SIZES)
@pytest.mark.parametrize("scaling", [LLAMA3, YARN, YARN | {"factor": 4.0, "beta_fast": 64.0}])
def test_scaled_tables_are_those_of_mlx_lm(base: float, dims: int, scaling: dict[str, Any]) -> None:
    theirs = initialize_rope(dims, base, False, scaling, 131072)
    ours = inverse_frequencies(scaling | {"rope_theta": base}, dims)
    assert np.array_equal(ours, np.array(1 / theirs._freqs))
    assert ours.dtype == np.float32


def test_a_type_without_a_formula_is_refused() -> None:
    with pytest.raises(ValueError, match="longrope"):
        inverse_frequencies({"rope_type": "longrope", "rope_theta": 1e4}, 64)


def tables(path: Path) -> dict[str, torch.Tensor]:
    loaded = torch_side.load(read_checkpoint(path), "cpu", threads=1, progress=False)
    buffers = dict(loaded.decoder.named_buffers())
    return {
        name: table
        for name, table in buffers.items()
        if name.endswith("inv_freq") and "original" not in name
    }


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
def test_every_model_with_rotary_positions_gets_the_table(
    name: str, checkpoint: Checkpoints
) -> None:
    found = tables(checkpoint(name))
    without_positions = name in ("granitemoehybrid", "granitemoehybrid_dense")
    assert bool(found) is not without_positions
    for table in found.values():
        assert table.dtype == torch.float32
        assert table[0] > 0


def test_layers_of_two_kinds_get_two_tables(checkpoint: Checkpoints) -> None:
    found = tables(checkpoint("gemma3_text"))
    for kind, theta in (("full", THETA), ("sliding", LOCAL_THETA)):
        (table,) = (table for name, table in found.items() if kind in name)
        assert np.array_equal(table.numpy(), inverse_frequencies({"rope_theta": theta}, 16))


def test_frequencies_of_another_formula_are_refused(
    checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as if torch went on without the rounding that mlx-lm's YaRN has
    monkeypatch.setattr(torch_side, "_truncate_yarn", lambda _config: None)
    with pytest.raises(ConfigError) as refused:
        tables(checkpoint("llama_yarn"))
    assert refused.value.reason == "rope_differs"
