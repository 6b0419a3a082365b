"""Entries of the table: stacks with recurrent layers among the attention."""

from __future__ import annotations

from protocol.architectures.definition import (
    Architecture,
    Config,
    Shapes,
    text_config,
    unsupported,
)
from protocol.architectures.layouts import (
    attention,
    delta_net,
    interval,
    layer_types,
    mamba,
    short_convolution,
)
from protocol.architectures.rope import FULL, flat, plain, rope
from protocol.layout import Dtype, Layout

LINEAR = "linear_attention"


def _qwen_types(config: Config) -> list[str]:
    text = text_config(config)
    step = int(text.get("full_attention_interval") or 4)
    layers = range(text["num_hidden_layers"])
    otherwise = [FULL if (index + 1) % step == 0 else LINEAR for index in layers]
    return layer_types(config, (FULL, LINEAR), otherwise)


def _qwen_layout(config: Config, dtype: Dtype) -> Layout:
    text = text_config(config)
    return Layout(
        tuple(
            attention(text, index, dtype) if kind == FULL else delta_net(text, index, dtype)
            for index, kind in enumerate(_qwen_types(config))
        )
    )


def _qwen3_next_fields(config: Config) -> Config:
    partial = rope(config).partial
    return flat()(config) | {
        "partial_rotary_factor": 0.25 if partial is None else partial,
        "full_attention_interval": interval(config, _qwen_types(config)),
    }


def _qwen3_5_fields(config: Config) -> Config:
    theta, partial = plain(config), rope(config).partial
    parameters = dict(text_config(config).get("rope_parameters") or {})
    # mlx-lm reads the nested form here, with other defaults than transformers'.
    parameters |= {
        "type": "default",
        "rope_theta": theta,
        "partial_rotary_factor": 0.25 if partial is None else partial,
    }
    fields = {
        "rope_parameters": parameters,
        "full_attention_interval": interval(config, _qwen_types(config)),
    }
    if text_config(config) is config:
        fields["model_type"] = "qwen3_5"
    return fields


def _lfm2_types(config: Config) -> list[str]:
    text = text_config(config)
    full = text.get("full_attn_idxs")
    layers = range(text["num_hidden_layers"])
    otherwise = [FULL if full is None or index in full else "conv" for index in layers]
    return layer_types(config, (FULL, "conv"), otherwise)


def _lfm2_layout(config: Config, dtype: Dtype) -> Layout:
    text = text_config(config)
    return Layout(
        tuple(
            attention(text, index, dtype) if kind == FULL else short_convolution(text, index, dtype)
            for index, kind in enumerate(_lfm2_types(config))
        )
    )


def _lfm2_fields(config: Config) -> Config:
    text = text_config(config)
    full = [index for index, kind in enumerate(_lfm2_types(config)) if kind == FULL]
    theta = plain(config, theta=1e6)
    return {
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta},
        "full_attn_idxs": full,
        "block_dim": text.get("block_dim", text["hidden_size"]),
    }


def _granite_types(config: Config) -> list[str]:
    """transformers' names for the kinds, or mlx-lm's, as mlx-lm's."""
    text = text_config(config)
    names = {LINEAR: "mamba", FULL: "attention"}
    found = [names.get(kind, kind) for kind in text.get("layer_types") or ()]
    otherwise = ["mamba"] * text["num_hidden_layers"]
    return layer_types({**text, "layer_types": found}, ("mamba", "attention"), otherwise)


def _granite_layout(config: Config, dtype: Dtype) -> Layout:
    text = text_config(config)
    return Layout(
        tuple(
            attention(text, index, dtype) if kind == "attention" else mamba(text, index, dtype)
            for index, kind in enumerate(_granite_types(config))
        )
    )


def _granite_fields(config: Config) -> Config:
    text = text_config(config)
    rotated = text.get("position_embedding_type") == "rope"
    fields = {
        "layer_types": _granite_types(config),
        "position_embedding_type": "rope" if rotated else "nope",
    }
    if not text.get("num_local_experts"):
        # The one feed-forward network of a dense model has the shared expert's width.
        fields["intermediate_size"] = text["shared_intermediate_size"]
    if rotated:
        theta = plain(config)
        fields |= {"rope_theta": theta, "rope_parameters": {"rope_theta": theta}}
    return fields


def _granite_refusals(config: Config) -> None:
    groups = text_config(config).get("mamba_n_groups", 1)
    if groups != 1:
        raise unsupported(
            config,
            "with more than one group mlx-lm normalises other channels than transformers",
            field="mamba_n_groups",
            found=groups,
        )


def _falcon_layout(config: Config, dtype: Dtype) -> Layout:
    text = text_config(config)
    layers = []
    for index in range(text["num_hidden_layers"]):
        layers += [mamba(text, index, dtype), attention(text, index, dtype, member=1)]
    return Layout(tuple(layers))


_FALCON_MULTIPLIERS = (
    "attention_in_multiplier",
    "attention_out_multiplier",
    "embedding_multiplier",
    "key_multiplier",
    "lm_head_multiplier",
    "mlp_multipliers",
    "ssm_in_multiplier",
    "ssm_multipliers",
    "ssm_out_multiplier",
)
_FALCON_BIASES = ("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias")


def _falcon_multiplier(config: Config) -> str | None:
    """The first multiplier that is not one."""
    text = text_config(config)
    for name in _FALCON_MULTIPLIERS:
        value = text.get(name, 1.0)
        if any(part != 1.0 for part in (value if isinstance(value, list) else [value])):
            return name
    return None


def _falcon_refusals(config: Config) -> None:
    text = text_config(config)
    groups = text.get("mamba_n_groups", 1)
    if text.get("mamba_rms_norm") and groups != 1:
        raise unsupported(
            config,
            "with more than one group mlx-lm normalises other channels than transformers",
            field="mamba_n_groups",
            found=groups,
        )
    biased = next((name for name in _FALCON_BIASES if text.get(name)), None)
    if biased is not None and _falcon_multiplier(config) is not None:
        raise unsupported(
            config, "mlx-lm multiplies weights but not biases", field=biased, found=True
        )


def _falcon_tensors(config: Config, shapes: Shapes) -> None:
    """Multipliers can only be folded in while the weights are in transformers' form."""
    multiplier = _falcon_multiplier(config)
    for name, shape in shapes.items():
        if name.endswith("mamba.conv1d.weight") and shape[-1] <= shape[1] and multiplier:
            raise unsupported(
                config,
                "mlx-lm's conversion leaves multipliers out of its weights",
                field=multiplier,
                found=text_config(config)[multiplier],
            )


RECURRENT = (
    Architecture(
        "qwen3_next",
        stack=_qwen_layout,
        fields=_qwen3_next_fields,
        defaults={"norm_topk_prob": True},
        torch_tweaks=("yarn_truncate",),
        state_transform="delta_net",
    ),
    Architecture(
        "qwen3_5",
        stack=_qwen_layout,
        fields=_qwen3_5_fields,
        defaults={"linear_num_value_heads": 32, "linear_key_head_dim": 128, "head_dim": 256},
        state_transform="delta_net",
        note="text only: the vision tower is left out",
    ),
    Architecture(
        "lfm2",
        stack=_lfm2_layout,
        fields=_lfm2_fields,
        state_transform="short_conv",
    ),
    Architecture(
        "granitemoehybrid",
        stack=_granite_layout,
        fields=_granite_fields,
        refuse=_granite_refusals,
        defaults={"time_step_limit": [0.0, float("inf")], "tie_word_embeddings": False},
        state_transform="mamba",
    ),
    Architecture(
        "falcon_h1",
        stack=_falcon_layout,
        fields=flat(),
        refuse=_falcon_refusals,
        refuse_tensors=_falcon_tensors,
        defaults={"tie_word_embeddings": False, "mamba_norm_before_gate": True}
        | {name: 1.0 for name in _FALCON_MULTIPLIERS if not name.endswith("multipliers")}
        | {"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * 5},
        torch_tweaks=("yarn_truncate",),
        mlx_weights=("fold_multipliers",),
        state_transform="mamba",
        note="with multipliers only in transformers' form: mlx-lm's conversion leaves two out",
    ),
)
"""Entries in the order of ``docs/models.md``."""
