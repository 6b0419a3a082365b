"""What the decoder does to tensors that mlx-lm would not find under their names.

Names are those of ``Architecture.mlx_weights``. Nothing is written: the tensors are renamed or
split in memory while the model loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

Weights = dict[str, mx.array]

_VISION = ("vision_tower", "vision_adapter", "vision_projection", "vision_model", "visual")


def drop_vision(weights: Weights) -> Weights:
    """Leave out the tensors of a vision tower, whatever level they are nested at."""
    return {
        name: tensor
        for name, tensor in weights.items()
        if not any(part in _VISION for part in name.split("."))
    }


TWEAKS: dict[str, Callable[[Weights], Weights]] = {"drop_vision": drop_vision}


def adapted(model_class: type, tweaks: Sequence[str]) -> type:
    """``model_class`` with ``tweaks`` applied to the stored weights before its own ``sanitize``."""
    if not tweaks:
        return model_class

    class Adapted(model_class):
        def sanitize(self, weights: Weights) -> Weights:
            for name in tweaks:
                weights = TWEAKS[name](weights)
            own = getattr(super(), "sanitize", None)
            return weights if own is None else own(weights)

    Adapted.__module__ = model_class.__module__
    Adapted.__name__ = model_class.__name__
    return Adapted
