"""What a model says after given tokens: for comparing two caches that should mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.tokenizer_utils import load as load_tokenizer


def encode(model_dir: Path, text: str) -> list[int]:
    """The tokens of ``text``, by the checkpoint's tokenizer alone."""
    return [int(token) for token in load_tokenizer(model_dir).encode(text)]


def likeliest(model: Any, caches: list[Any], tokens: Sequence[int]) -> list[int]:
    """The most likely next token after each of ``tokens``, which follow what ``caches`` hold.

    The caches move on by ``len(tokens)`` positions. On the MLX thread.
    """
    logits = model(mx.array([list(tokens)]), cache=caches)
    return [int(token) for token in np.array(mx.argmax(logits[0], axis=-1))]


def greedy(model: Any, caches: list[Any], boundary: int, count: int) -> list[int]:
    """``count`` greedy tokens after the boundary token. On the MLX thread."""
    found: list[int] = []
    token = boundary
    for _ in range(count):
        token = likeliest(model, caches, [token])[0]
        found.append(token)
    return found
