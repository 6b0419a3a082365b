"""Rotary embeddings: one normal form of what two generations of ``config.json`` say.

transformers 5 writes ``rope_parameters`` (for some architectures one per layer type); older
files have ``rope_theta`` beside ``rope_scaling``. mlx-lm's models mostly read the older keys
and fall back to a default where they are missing, without a word. So the decoder always
passes the values it means.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from protocol.architectures.definition import Config, text_config, unsupported

PROVEN_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types that are the same function on both sides."""


@dataclass(frozen=True)
class Rope:
    """Base and scaling of one kind of layer; ``scaling`` is ``None`` for plain RoPE."""

    theta: float
    scaling: dict[str, Any] | None
    partial: float | None


def rope(config: Config, layer_type: str | None = None, *, default_theta: float = 1e4) -> Rope:
    """The rotary embedding of ``layer_type`` (or of all layers) in its normal form.

    ``default_theta`` is transformers' base where the file names none. Raises ``ConfigError``
    for a type that is not in :data:`PROVEN_TYPES` or a YaRN that mlx-lm reads differently.
    """
    text = text_config(config)
    given = text.get("rope_parameters")
    if isinstance(given, dict) and given:
        if layer_type is not None and isinstance(given.get(layer_type), dict):
            given = given[layer_type]
        parameters = dict(given)
    else:
        parameters = dict(text.get("rope_scaling") or {})
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters.pop("type"))
    theta = parameters.pop("rope_theta", text.get("rope_theta"))
    partial = parameters.pop("partial_rotary_factor", text.get("partial_rotary_factor"))
    kind = parameters.setdefault("rope_type", "default")
    if kind not in PROVEN_TYPES:
        raise unsupported(
            config,
            f"the two frameworks are not proven to agree on RoPE of type {kind}",
            field="rope_type",
            found=kind,
        )
    if kind == "yarn":
        _complete_yarn(config, text, parameters)
    return Rope(
        theta=float(default_theta if theta is None else theta),
        scaling=None if kind == "default" else parameters,
        partial=partial,
    )


def _complete_yarn(config: Config, text: Config, parameters: dict[str, Any]) -> None:
    """Fill in the defaults of transformers, and refuse a factor that mlx-lm does not read."""
    parameters.setdefault(
        "original_max_position_embeddings", text.get("max_position_embeddings", 4096)
    )
    parameters["beta_fast"] = parameters.get("beta_fast") or 32.0
    parameters["beta_slow"] = parameters.get("beta_slow") or 1.0
    given = parameters.get("attention_factor")
    factor = parameters["factor"]
    mscale, all_dim = parameters.get("mscale", 1.0), parameters.get("mscale_all_dim", 0.0)
    implied = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
    if given is not None and not math.isclose(given, implied, rel_tol=1e-6):
        raise unsupported(
            config,
            f"mlx-lm scales YaRN by {implied:.6f} whatever attention_factor says",
            field="attention_factor",
            found=given,
        )


def _magnitude(factor: float, mscale: float) -> float:
    """YaRN's attention scale (Peng et al., 2023, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def flat(config: Config, layer_type: str | None = None, *, default_theta: float = 1e4) -> Config:
    """Overrides ``rope_theta`` and ``rope_scaling`` as mlx-lm's models read them."""
    found = rope(config, layer_type, default_theta=default_theta)
    return {"rope_theta": found.theta, "rope_scaling": found.scaling}
