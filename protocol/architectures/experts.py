"""Entries of the table: attention in every layer, mixtures of experts."""

from __future__ import annotations

from protocol.architectures.definition import (
    Architecture,
    Config,
    require,
    text_config,
    unsupported,
)
from protocol.architectures.layouts import all_full, by_types, latent, layer_types
from protocol.architectures.rope import FULL, SLIDING, flat, plain, rope


def _qwen3_moe_fields(config: Config) -> Config:
    text = text_config(config)
    experts = text.get("num_experts", text.get("num_local_experts"))
    return {"rope_theta": plain(config), "rope_scaling": None, "num_experts": experts}


def _gpt_oss_types(config: Config) -> list[str]:
    layers = range(text_config(config)["num_hidden_layers"])
    otherwise = [FULL if index % 2 else SLIDING for index in layers]
    return layer_types(config, (FULL, SLIDING), otherwise)


def _gpt_oss_fields(config: Config) -> Config:
    return flat(theta=1.5e5)(config) | {"layer_types": _gpt_oss_types(config)}


def _gpt_oss_refusals(config: Config) -> None:
    types = _gpt_oss_types(config)
    if FULL not in types or SLIDING not in types:
        raise unsupported(
            config, "mlx-lm needs layers of both kinds", field="layer_types", found=types[0]
        )
    require(config, "mlx-lm clamps at 7", swiglu_limit=7.0)


def _afmoe_types(config: Config) -> list[str]:
    text = text_config(config)
    step = int(text.get("global_attn_every_n_layers") or 4)
    layers = range(text["num_hidden_layers"])
    otherwise = [FULL if (index + 1) % step == 0 else SLIDING for index in layers]
    return layer_types(config, (FULL, SLIDING), otherwise)


def _afmoe_fields(config: Config) -> Config:
    return flat()(config) | {"layer_types": _afmoe_types(config)}


def _afmoe_refusals(config: Config) -> None:
    require(
        config,
        "transformers routes in one way only",
        score_func="sigmoid",
        route_norm=True,
        n_group=1,
        topk_group=1,
    )


def _deepseek_refusals(config: Config) -> None:
    require(config, "mlx-lm always interleaves", rope_interleave=True)
    _routing_refusals(config)


def _routing_refusals(config: Config) -> None:
    why = "transformers routes in one way only"
    require(config, why, topk_method="noaux_tc", scoring_func="sigmoid")


def _glm4_fields(config: Config) -> Config:
    found = rope(config)
    return {
        "rope_theta": plain(config),
        "rope_scaling": None,
        "partial_rotary_factor": 0.5 if found.partial is None else found.partial,
    }


_UNTIED = {"tie_word_embeddings": False}

EXPERTS = (
    Architecture(
        "qwen3_moe",
        stack=all_full,
        fields=_qwen3_moe_fields,
        defaults=_UNTIED,
        torch_tweaks=("no_sliding_window",),
        note="mlx-lm ignores the window: so does the producer",
    ),
    Architecture(
        "gpt_oss",
        stack=by_types(_gpt_oss_types),
        fields=_gpt_oss_fields,
        refuse=_gpt_oss_refusals,
        defaults={"sliding_window": 128, "num_experts_per_tok": 4},
        torch_tweaks=("yarn_truncate",),
        mlx_weights=("split_experts",),
        note="mlx-lm rounds YaRN's range to whole dimensions: so does the producer",
    ),
    Architecture(
        "afmoe",
        stack=by_types(_afmoe_types),
        fields=_afmoe_fields,
        refuse=_afmoe_refusals,
        defaults={
            "sliding_window": 1024,
            "num_experts_per_tok": 6,
            "num_shared_experts": 2,
            "num_dense_layers": 1,
            "route_scale": 1.0,
            "mup_enabled": False,
        },
        torch_tweaks=("yarn_truncate",),
    ),
    Architecture(
        "deepseek_v3",
        stack=latent,
        fields=flat(),
        refuse=_deepseek_refusals,
        defaults={
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
        },
        torch_tweaks=("yarn_truncate",),
        row_transform="mla_interleave",
    ),
    Architecture(
        "glm4_moe",
        stack=all_full,
        fields=_glm4_fields,
        refuse=_routing_refusals,
    ),
)
"""Entries in the order of ``docs/models.md``."""
