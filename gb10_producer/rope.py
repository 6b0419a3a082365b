"""The table of rotary frequencies that mlx computes, bit for bit where the CPU can tell.

Both frameworks compute ``base ** (-2i / dims)`` in float32, by other formulas, and differ in
the last bit or two. Times a position that is an angle's error, and it grows with the prompt:
1,500 tokens into SmolLM2 it made keys differ by 6e-5, where with mlx's own table it is 2e-6.

Formulas: ``mlx.core.fast.rope`` (plain and linear) and ``mlx_lm.models.rope_utils`` (llama3,
yarn). The exponential is that of mlx's CPU backend (``simd/math.h``, after Cephes); Metal's
differs from either framework's by as much as those differ from each other.

Arrays are float32 of length ``dims / 2``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float32]

_LOG2_E: Final = np.float32(1.442695)
_EXP2: Final = (
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)
"""Coefficients of ``2 ** x`` on [-1/2, 1/2], highest first."""


def inverse_frequencies(parameters: Mapping[str, Any], dims: int) -> Table:
    """Angle per position of each pair of ``dims`` rotated elements.

    ``parameters`` are transformers' ``rope_parameters`` of one kind of layer, with every field
    that their type needs. Raises ``ValueError`` for a type that mlx-lm has another formula for.
    """
    base = float(parameters["rope_theta"])
    match parameters.get("rope_type", "default"):
        case "default":
            return _plain(base, dims)
        case "linear":
            return _plain(base, dims) * np.float32(1 / parameters["factor"])
        case "llama3":
            return np.float32(1) / _llama3(base, dims, parameters)
        case "yarn":
            return np.float32(1) / _yarn(base, dims, parameters)
        case other:
            raise ValueError(f"no formula for RoPE of type {other}")


def _plain(base: float, dims: int) -> Table:
    half = dims // 2
    step = np.float32(math.log(np.float32(base))) / np.float32(half)
    return _exp(-np.arange(half, dtype=np.float32) * step)


def _exp(values: Table) -> Table:
    scaled = values * _LOG2_E
    whole = np.floor(scaled + np.float32(0.5))
    rest = scaled - whole
    result = np.full_like(values, _EXP2[0])
    for coefficient in _EXP2[1:]:
        # one rounding, as a fused multiply-add: the product is exact in float64
        wide = result.astype(np.float64) * rest + np.float32(coefficient)
        result = wide.astype(np.float32)
    return np.ldexp(result, whole.astype(np.int32))


def _wavelengths(base: float, dims: int) -> Table:
    """``base ** (2i / dims)``, which the scaled types start from."""
    exponents = np.arange(0, dims, 2, dtype=np.float32) / np.float32(dims)
    return np.power(np.float64(np.float32(base)), exponents).astype(np.float32)


def _llama3(base: float, dims: int, parameters: Mapping[str, Any]) -> Table:
    factor = parameters["factor"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    context = parameters["original_max_position_embeddings"]
    plain = _wavelengths(base, dims)
    lengths = np.float32(2 * math.pi) * plain
    smooth = (np.float32(context) / lengths - np.float32(low)) / np.float32(high - low)
    blended = plain / ((np.float32(1) - smooth) / np.float32(factor) + smooth)
    medium = (lengths > context / high) & (lengths < context / low)
    stretched = np.where(lengths > context / low, plain * np.float32(factor), plain)
    return np.where(medium, blended, stretched).astype(np.float32)


def _yarn(base: float, dims: int, parameters: Mapping[str, Any]) -> Table:
    context = parameters["original_max_position_embeddings"]

    def turns_in(rotations: float) -> float:
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(turns_in(parameters.get("beta_fast") or 32)), 0)
    last = min(math.ceil(turns_in(parameters.get("beta_slow") or 1)), dims - 1)
    width = np.float32(last - first or 0.001)
    ramp = (np.arange(dims // 2, dtype=np.float32) - np.float32(first)) / width
    kept = np.float32(1) - np.clip(ramp, np.float32(0), np.float32(1))
    plain = _wavelengths(base, dims)
    stretched = np.float32(parameters["factor"]) * plain
    blended = (stretched * plain) / (stretched * kept + plain * (np.float32(1) - kept))
    return blended.astype(np.float32)
