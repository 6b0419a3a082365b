"""transformers' own logits of a checkpoint: what every architecture's decoding is held against.

Independent of the producer: the model class that transformers itself names, one forward pass
for the whole prompt, with the tweaks of ``Architecture.torch_tweaks`` done here once more.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from protocol.architectures import resolve


def torch_model(path: Path) -> Any:
    """transformers' model of the checkpoint in ``path`` in float32, meaning what mlx-lm means."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    given = json.loads((path / "config.json").read_text())
    tweaks = resolve(given).torch_tweaks
    config = transformers.AutoConfig.from_pretrained(path)
    text: Any = config.get_text_config(decoder=True)
    if "no_sliding_window" in tweaks:
        types = getattr(text, "layer_types", None)
        text.sliding_window = None if types is None else 1 << 20
        if types is not None:
            text.layer_types = ["full_attention"] * len(types)
    if "yarn_truncate" in tweaks:
        own = text.rope_parameters
        for entry in [part for part in own.values() if isinstance(part, dict)] or [own]:
            if entry.get("rope_type") == "yarn":
                entry["truncate"] = True
    model_class = getattr(transformers, given["architectures"][0])
    model = model_class.from_pretrained(path, config=config, dtype=torch.float32).eval()
    if "round_embed_scale" in tweaks:
        embedding = model.get_input_embeddings()
        embedding.embed_scale = embedding.embed_scale.bfloat16().float()
    return model


def torch_logits(model: Any, tokens: Sequence[int], step: int | None = None) -> np.ndarray:
    """Logits ``(tokens, vocabulary)`` in one pass, or in passes of ``step`` tokens."""
    import torch
    from transformers import DynamicCache

    prompt = torch.tensor([list(tokens)])
    with torch.inference_mode():
        if step is None:
            return model(input_ids=prompt, use_cache=False).logits[0].numpy()
        cache = DynamicCache(config=model.config)
        pieces = [
            model(input_ids=piece, past_key_values=cache, use_cache=True).logits[0]
            for piece in prompt.split(step, dim=1)
        ]
    return torch.cat(pieces).numpy()
