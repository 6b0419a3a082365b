"""Rotary embeddings: one normal form of what two generations of ``config.json`` say.

transformers 5 writes ``rope_parameters`` (for some architectures one per layer type); older
files have ``rope_theta`` beside ``rope_scaling``. mlx-lm's models mostly read the older keys
and fall back to a default where they are missing, without a word. So the decoder always
passes the values it means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from protocol.architectures.definition import Config, text_config, unsupported

PROVEN_TYPES: Final = ("default", "linear", "llama3", "yarn")
"""RoPE types that are the same function on both sides."""

SLIDING: Final = "sliding_attention"
FULL: Final = "full_attention"


@dataclass(frozen=True)
class Rope:
    """Base, scaling and rotated share of one kind of layer.

    ``scaling`` is ``None`` for plain RoPE, ``partial`` where the whole head is rotated.
    """

    theta: float
    scaling: dict[str, Any] | None
    partial: float | None


def rope(config: Config, layer_type: str | None = None, *, theta: float = 1e4) -> Rope:
    """The rotary embedding of ``layer_type`` (or of all layers) in its normal form.

    ``theta`` is transformers' base where the file names none. Raises ``ConfigError`` for a
    type that is not in :data:`PROVEN_TYPES` or a YaRN that mlx-lm reads differently.
    """
    text = text_config(config)
    parameters = _given(text, layer_type)
    base = parameters.pop("rope_theta", None)
    if base is None:
        base = text.get("rope_theta")
    partial = parameters.pop("partial_rotary_factor", text.get("partial_rotary_factor"))
    kind = parameters.setdefault("rope_type", "default")
    if kind not in PROVEN_TYPES:
        raise unsupported(
            config,
            f"the two frameworks are not proven to agree on RoPE of type {kind}",
            field="rope_type",
            found=kind,
        )
    if kind in ("llama3", "yarn"):
        own = text.get("original_max_position_embeddings", text.get("max_position_embeddings"))
        parameters.setdefault("original_max_position_embeddings", own)
    if kind == "yarn":
        _complete_yarn(config, text, parameters)
    return Rope(
        theta=float(theta if base is None else base),
        scaling=None if kind == "default" else parameters,
        partial=partial,
    )


def flat(*, theta: float = 1e4) -> Callable[[Config], Config]:
    """``fields`` of an entry: ``rope_theta`` and ``rope_scaling`` as mlx-lm's models read them."""

    def fields(config: Config) -> Config:
        found = rope(config, theta=theta)
        return {"rope_theta": found.theta, "rope_scaling": found.scaling}

    return fields


def plain(config: Config, *, theta: float = 1e4, layer_type: str | None = None) -> float:
    """The base, for models in which mlx-lm knows no scaling; a scaling is refused."""
    found = rope(config, layer_type, theta=theta)
    if found.scaling is not None:
        raise unsupported(
            config,
            "mlx-lm knows no RoPE scaling here",
            field="rope_type",
            found=found.scaling["rope_type"],
        )
    return found.theta


def _given(text: Config, layer_type: str | None) -> dict[str, Any]:
    """A copy of what the file says, ``type`` spelt ``rope_type``."""
    given = text.get("rope_parameters")
    if not isinstance(given, dict) or not given:
        given = text.get("rope_scaling") or {}
    elif layer_type is not None and isinstance(given.get(layer_type), dict):
        given = given[layer_type]
    parameters = dict(given)
    spelt = parameters.pop("type", None)
    if spelt is not None:
        parameters.setdefault("rope_type", spelt)
    return parameters


def _complete_yarn(config: Config, text: Config, parameters: dict[str, Any]) -> None:
    """Fill in the defaults of transformers, and refuse a factor that mlx-lm does not read."""
    parameters["beta_fast"] = parameters.get("beta_fast") or 32.0
    parameters["beta_slow"] = parameters.get("beta_slow") or 1.0
    factor = parameters.get("factor")
    if factor is None:
        original = parameters["original_max_position_embeddings"]
        factor = parameters["factor"] = text["max_position_embeddings"] / original
    mscale, all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    meant = parameters.get("attention_factor")
    if meant is None:
        # transformers takes the ratio only where both are given.
        meant = _magnitude(factor, 1.0)
        if mscale and all_dim:
            meant = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    numerator = _magnitude(factor, 1.0 if mscale is None else mscale)
    computed = numerator / _magnitude(factor, all_dim or 0.0)
    if not math.isclose(meant, computed, rel_tol=1e-6):
        raise unsupported(
            config,
            f"mlx-lm scales this YaRN by {computed:.6f}, transformers by {meant:.6f}",
            field="attention_factor",
            found=meant,
        )


def _magnitude(factor: float, mscale: float) -> float:
    """YaRN's attention scale (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
