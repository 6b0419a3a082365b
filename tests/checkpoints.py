"""Tiny random checkpoints, one per architecture (and variant), saved in transformers' format.

``make(name, path)`` builds ``tiny_models.NAMES[name]`` with a fixed seed and weights so wide that
the output depends on every position and on all of the history. A tokenizer with a chat template
lies beside the weights. Everything is deterministic: the same name and dtype give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.tiny_models import NAMES
from tests.tiny_tokenizer import EOS, PAD, save_tokenizer


def make(
    name: str,
    path: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    reasoning: bool = False,
    spread: float = 0.2,
) -> Path:
    """Write the checkpoint ``name`` into the new directory ``path`` and return it; see ``save``."""
    return save(NAMES[name], path, dtype=dtype, seed=seed, reasoning=reasoning, spread=spread)


def save(
    build: Callable[[], Any],
    path: Path,
    *,
    dtype: str = "float32",
    seed: int = 0,
    reasoning: bool = False,
    spread: float = 0.2,
) -> Path:
    """Write what ``build`` makes, with random weights, into the new directory ``path``.

    ``dtype`` is that of all weights (``float32``, ``bfloat16`` or ``float16``); another
    ``seed`` gives a model with other weights; ``reasoning`` adds thinking marks. ``spread`` is
    the standard deviation of matrices: at 1/8 a layer of width 64 keeps the size of what goes
    through it, so that rounding noise does not grow from layer to layer.
    """
    import torch

    torch.set_num_threads(1)
    path.mkdir(parents=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().float().eval()
        _randomise(model, spread)
    model.to(getattr(torch, dtype)).save_pretrained(path)
    _set_end_of_turn(path)
    save_tokenizer(path, reasoning=reasoning)
    return path


def _randomise(model: Any, spread: float) -> None:
    """Give every parameter a spread at which logits depend on position and history."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "A_log" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
            elif parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=spread)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name or "expert_bias" in name:
                buffer.add_(0.1 * torch.randn_like(buffer))


def _set_end_of_turn(path: Path) -> None:
    """Name the end-of-turn token in ``generation_config.json``, as chat models do."""
    settings = {"eos_token_id": EOS, "pad_token_id": PAD}
    (path / "generation_config.json").write_text(json.dumps(settings))
