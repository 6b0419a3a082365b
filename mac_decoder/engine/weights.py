"""What the decoder does to tensors that mlx-lm would not find, or would misread.

Names are those of ``Architecture.mlx_weights``. Nothing is written: tensors are renamed, split
or scaled in memory while the model loads. Checkpoints that mlx-lm saved itself pass unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from protocol.architectures import text_config

Weights = dict[str, mx.array]
Config = dict[str, Any]

_VISION = ("vision_tower", "vision_adapter", "vision_projection")


def drop_vision(weights: Weights, _config: Config) -> Weights:
    """Leave out the tensors of a vision tower, whatever level they are nested at."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if not any(part in _VISION for part in name.split("."))
    }


def split_experts(weights: Weights, _config: Config) -> Weights:
    """gpt-oss in transformers' form: experts ``(E, in, 2 out)``, gate and up columns in turn."""
    found: Weights = {}
    for name, tensor in weights.items():
        stem, _, last = name.rpartition(".")
        match last:
            case "gate_up_proj":
                found[f"{stem}.gate_proj.weight"] = tensor[..., ::2].swapaxes(1, 2)
                found[f"{stem}.up_proj.weight"] = tensor[..., 1::2].swapaxes(1, 2)
            case "gate_up_proj_bias":
                found[f"{stem}.gate_proj.bias"] = tensor[..., ::2]
                found[f"{stem}.up_proj.bias"] = tensor[..., 1::2]
            case "down_proj":
                found[f"{name}.weight"] = tensor.swapaxes(1, 2)
            case "down_proj_bias":
                found[f"{stem}.down_proj.bias"] = tensor
            case _:
                found[name] = tensor
    return found


def fold_multipliers(weights: Weights, config: Config) -> Weights:
    """Falcon-H1: the two multipliers of keys and values that mlx-lm leaves unfolded."""
    convolution = weights["model.layers.0.mamba.conv1d.weight"]
    if convolution.shape[-1] <= convolution.shape[1]:
        return weights
    text = text_config(config)
    factors = {
        "k_proj.weight": text.get("key_multiplier", 1.0),
        "v_proj.weight": text.get("attention_in_multiplier", 1.0),
    }
    return {
        name: tensor * factors.get(".".join(name.split(".")[-2:]), 1.0)
        for name, tensor in weights.items()
    }


TWEAKS: dict[str, Callable[[Weights, Config], Weights]] = {
    "drop_vision": drop_vision,
    "split_experts": split_experts,
    "fold_multipliers": fold_multipliers,
}


def adapted(model_class: Any, tweaks: Sequence[str], config: Config) -> Any:
    """``model_class`` with ``tweaks`` applied to the stored weights before its own ``sanitize``."""
    if not tweaks:
        return model_class

    class Adapted(model_class):
        def sanitize(self, weights: Weights) -> Weights:
            for name in tweaks:
                weights = TWEAKS[name](weights, config)
            return super().sanitize(weights)

    # mlx-lm looks up settings by the module of the class.
    Adapted.__module__ = model_class.__module__
    Adapted.__name__ = model_class.__name__
    return Adapted
