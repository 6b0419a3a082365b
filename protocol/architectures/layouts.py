"""Layouts as functions of ``config.json``: what caches mlx-lm makes for a stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from protocol.architectures.definition import Config, text_config, unsupported
from protocol.architectures.rope import FULL, SLIDING
from protocol.layout import (
    AttentionLayer,
    Dtype,
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    StateArray,
)


def head_dim(text: Config) -> int:
    """Elements per head: the field, or an equal share of the width."""
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def kv_heads(text: Config) -> int:
    """Heads of keys and values; as many as query heads where the file names none."""
    return int(text.get("num_key_value_heads") or text["num_attention_heads"])


def attention(
    text: Config, index: int, dtype: Dtype, window: int | None = None, member: int = 0
) -> AttentionLayer:
    """A full layer, or a sliding one where ``window`` is given."""
    heads, dim = kv_heads(text), head_dim(text)
    if window is None:
        return FullLayer(index, heads, dim, dim, dtype, member)
    return SlidingLayer(index, heads, dim, dim, dtype, window, member)


def convolution(taps: int, channels: int, dtype: Dtype) -> StateArray:
    """The tail of a causal convolution over ``taps`` positions."""
    return StateArray("conv", (taps - 1, channels), dtype)


def all_full(config: Config, dtype: Dtype) -> Layout:
    """Every layer keeps all rows."""
    text = text_config(config)
    layers = range(text["num_hidden_layers"])
    return Layout(tuple(attention(text, index, dtype) for index in layers))


def by_types(types: Callable[[Config], Sequence[str]]) -> Callable[[Config, Dtype], Layout]:
    """Full and sliding layers as ``types(config)`` says, one name per layer."""

    def layout(config: Config, dtype: Dtype) -> Layout:
        text = text_config(config)
        windows = {FULL: None, SLIDING: text.get("sliding_window")}
        return Layout(
            tuple(
                attention(text, index, dtype, windows[kind])
                for index, kind in enumerate(types(config))
            )
        )

    return layout


def latent(config: Config, dtype: Dtype) -> Layout:
    """Multi-head latent attention: the latent as keys, its rotary part as values, one head."""
    text = text_config(config)
    rank, rotary = text["kv_lora_rank"], text["qk_rope_head_dim"]
    layers = range(text["num_hidden_layers"])
    return Layout(tuple(FullLayer(index, 1, rank, rotary, dtype) for index in layers))


def delta_net(text: Config, index: int, dtype: Dtype) -> RecurrentLayer:
    """A gated delta net: convolution over q, k and v, and a float32 state per value head."""
    value_heads, value_dim = text["linear_num_value_heads"], text["linear_value_head_dim"]
    key_heads, key_dim = text["linear_num_key_heads"], text["linear_key_head_dim"]
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return RecurrentLayer(
        index,
        (
            convolution(text["linear_conv_kernel_dim"], channels, dtype),
            StateArray("state", (value_heads, value_dim, key_dim), "float32"),
        ),
    )


def mamba(text: Config, index: int, dtype: Dtype) -> RecurrentLayer:
    """A Mamba-2 mixer: convolution over x, B and C, and a float32 state per head."""
    heads, dim, size = text["mamba_n_heads"], text["mamba_d_head"], text["mamba_d_state"]
    channels = heads * dim + 2 * text["mamba_n_groups"] * size
    return RecurrentLayer(
        index,
        (
            convolution(text["mamba_d_conv"], channels, dtype),
            StateArray("state", (heads, dim, size), "float32"),
        ),
    )


def short_convolution(text: Config, index: int, dtype: Dtype) -> RecurrentLayer:
    """A short convolution over the width, and nothing else."""
    return RecurrentLayer(index, (convolution(text["conv_L_cache"], text["hidden_size"], dtype),))


def layer_types(config: Config, known: Sequence[str], otherwise: Sequence[str] = ()) -> list[str]:
    """The file's ``layer_types``, or ``otherwise``; one per layer, each of ``known``.

    Raises ``ConfigError`` (``architecture_unsupported``) for another kind, by name.
    """
    text = text_config(config)
    found = list(text.get("layer_types") or otherwise)
    strange = next((kind for kind in found if kind not in known), None)
    if strange is not None or len(found) != text["num_hidden_layers"]:
        raise unsupported(
            config,
            "its layers are not all of a kind that carries over",
            field="layer_types",
            found=strange or f"{len(found)} for {text['num_hidden_layers']} layers",
        )
    return found


def interval(config: Config, types: Sequence[str], full: str = FULL) -> int:
    """``n`` where exactly every n-th layer is ``full``: the only stacks some models can build.

    Raises ``ConfigError`` (``architecture_unsupported``) for any other order.
    """
    step = types.index(full) + 1 if full in types else 0
    regular = step and all((kind == full) == ((i + 1) % step == 0) for i, kind in enumerate(types))
    if not regular:
        raise unsupported(
            config,
            "mlx-lm can only build stacks in which every n-th layer is full",
            field="layer_types",
            found=", ".join(types),
        )
    return step
