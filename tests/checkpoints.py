"""Tiny random checkpoints, one per architecture (and variant), saved in transformers' format.

``make(name, path)`` builds ``NAMES[name]`` with a fixed seed: 8 layers of width 64, vocabulary
512, weights of standard deviation 0.2, so that the output depends on every position and on all
of the history. The window of sliding layers is 32. A tokenizer with a chat template lies beside
the weights. Everything is deterministic: the same name and dtype give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_tokenizer import EOS, PAD, START, VOCABULARY, save_tokenizer

WINDOW = 32
THETA = 25000.0
"""The RoPE base: no framework's default, so that a base that is not read shows."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": EOS,
    "bos_token_id": START,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
}
_HEAD = {"head_dim": 16}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": THETA}}


def _causal(config_class: str, *parts: dict[str, Any], **fields: Any) -> Any:
    """A causal language model from ``transformers`` with the shared sizes and ``fields``."""
    import transformers

    merged: dict[str, Any] = dict(_SIZES)
    for part in parts:
        merged |= part
    config = getattr(transformers, config_class)(**(merged | fields))
    return transformers.AutoModelForCausalLM.from_config(config)


def _llama(**fields: Any) -> Any:
    return _causal("LlamaConfig", _HEAD, _ROPE, **fields)


def _muse_glimmer() -> Any:
    from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    text = {name: value for name, value in _SIZES.items() if name != "pad_token_id"}
    text |= _HEAD | _ROPE | {"sliding_window": WINDOW, "output_multiplier": 2.0}
    vision = {
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
    }
    # The projector's widths are no use to a text model; the defaults would weigh 100 MB.
    small = {"projector_hidden_size": 32, "out_hidden_size": 32}
    config = MuseGlimmerConfig(text_config=text, vision_config=vision, **small)
    return MuseGlimmerForConditionalGeneration(config)


NAMES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "muse_glimmer": _muse_glimmer,
}
"""Name of a checkpoint (architecture, or architecture and variant) -> its untrained model."""


def make(
    name: str,
    path: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    reasoning: bool = False,
) -> Path:
    """Write the checkpoint ``name`` into the new directory ``path`` and return it.

    ``dtype`` is that of all weights (``float32``, ``bfloat16`` or ``float16``); another
    ``seed`` gives a model with other weights; ``reasoning`` adds thinking marks.
    """
    import torch

    torch.set_num_threads(1)
    path.mkdir(parents=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = NAMES[name]().float().eval()
        _randomise(model)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _set_end_of_turn(path)
    save_tokenizer(path, reasoning=reasoning)
    return path


def _randomise(model: Any) -> None:
    """Give every parameter a spread at which logits depend on position and history."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name or "expert_bias" in name:
                buffer.add_(0.1 * torch.randn_like(buffer))


def _set_end_of_turn(path: Path) -> None:
    """Name the end-of-turn token in ``generation_config.json``, as chat models do."""
    settings = {"eos_token_id": EOS, "pad_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(settings))
