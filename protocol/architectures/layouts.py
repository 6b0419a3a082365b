"""Layouts as functions of ``config.json``: what caches mlx-lm makes for a stack of layers."""

from __future__ import annotations

from collections.abc import Sequence

from protocol.architectures.definition import Config, text_config
from protocol.layout import Dtype, FullLayer, Layout, SlidingLayer


def head_dim(text: Config) -> int:
    """Elements per head: the field, or an equal share of the width."""
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def kv_heads(text: Config) -> int:
    """Heads of keys and values; as many as query heads where the file names none."""
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def attention(text: Config, index: int, dtype: Dtype, window: int | None = None):
    """A full layer, or a sliding one where ``window`` is given."""
    heads, dim = kv_heads(text), head_dim(text)
    if window is None:
        return FullLayer(index, heads, dim, dim, dtype)
    return SlidingLayer(index, heads, dim, dim, dtype, window)


def all_full(config: Config, dtype: Dtype) -> Layout:
    """Every layer keeps all rows."""
    text = text_config(config)
    return Layout(
        tuple(attention(text, index, dtype) for index in range(text["num_hidden_layers"]))
    )


def windowed(config: Config, dtype: Dtype, types: Sequence[str]) -> Layout:
    """Full and sliding layers as ``types`` (``full_attention``, ``sliding_attention``) says."""
    text = text_config(config)
    window = text.get("sliding_window")
    return Layout(
        tuple(
            attention(text, index, dtype, window if kind == "sliding_attention" else None)
            for index, kind in enumerate(types)
        )
    )


def by_layer_types(config: Config, dtype: Dtype) -> Layout:
    """Full and sliding layers as the configuration's own ``layer_types`` says."""
    return windowed(config, dtype, text_config(config)["layer_types"])
