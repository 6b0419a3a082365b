"""Entries of the table: attention in every layer, one feed-forward network per layer."""

from __future__ import annotations

from protocol.architectures.definition import (
    GELU_TANH,
    Architecture,
    Config,
    require,
    text_config,
    unsupported,
)
from protocol.architectures.layouts import all_full, by_types, interval, layer_types
from protocol.architectures.rope import FULL, SLIDING, flat, plain, rope

_WINDOW_IGNORED = "mlx-lm ignores the window: so does the producer"


def every_nth(config: Config, step: int) -> list[str]:
    """Sliding layers with every ``step``-th one full, counted from the first."""
    layers = range(text_config(config)["num_hidden_layers"])
    return [FULL if (index + 1) % step == 0 else SLIDING for index in layers]


def _full_and_sliding(config: Config, step: int) -> list[str]:
    return layer_types(config, (FULL, SLIDING), every_nth(config, step))


def _llama_fields(config: Config) -> Config:
    # mlx-lm's llama would build sliding layers where transformers' has none.
    return flat()(config) | {"layer_types": None, "sliding_window": None}


def _gemma3_types(config: Config) -> list[str]:
    step = int(text_config(config).get("sliding_window_pattern") or 6)
    return _full_and_sliding(config, step)


def _gemma3_fields(config: Config) -> Config:
    text = text_config(config)
    full = rope(config, FULL, theta=1e6)
    local = text.get("rope_local_base_freq", 1e4)
    if isinstance(text.get("rope_parameters"), dict):
        local = plain(config, theta=1e4, layer_type=SLIDING)
    return {
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "rope_local_base_freq": local,
        "sliding_window_pattern": interval(config, _gemma3_types(config)),
    }


def _gemma3_refusals(config: Config) -> None:
    require(
        config, "mlx-lm caps no logits", attn_logit_softcapping=None, final_logit_softcapping=None
    )
    require(config, "mlx-lm attends backwards only", use_bidirectional_attention=False)


def _cohere2_types(config: Config) -> list[str]:
    step = int(text_config(config).get("sliding_window_pattern") or 4)
    return _full_and_sliding(config, step)


def _cohere2_fields(config: Config) -> Config:
    return {
        "rope_theta": plain(config),
        "sliding_window_pattern": interval(config, _cohere2_types(config)),
    }


def _exaone4_types(config: Config) -> list[str]:
    text = text_config(config)
    pattern = text.get("sliding_window_pattern") or "LLLG"
    if text.get("sliding_window") is None:
        return [FULL] * text["num_hidden_layers"]
    if isinstance(pattern, int):
        return _full_and_sliding(config, pattern)
    layers = range(text["num_hidden_layers"])
    named = [
        SLIDING if (pattern or "LLLG")[i % len(pattern or "LLLG")] == "L" else FULL for i in layers
    ]
    return layer_types(config, (FULL, SLIDING), named)


def _exaone4_fields(config: Config) -> Config:
    types = _exaone4_types(config)
    letters = "".join("L" if kind == SLIDING else "G" for kind in types)
    # No pattern at all means full layers with RoPE; among sliding ones they have none.
    pattern = letters if SLIDING in types else None
    return flat()(config) | {"sliding_window_pattern": pattern}


def _exaone4_refusals(config: Config) -> None:
    types = _exaone4_types(config)
    if SLIDING in types and FULL not in types:
        raise unsupported(config, "mlx-lm needs a full layer", field="layer_types", found="none")


def _olmo3_types(config: Config) -> list[str]:
    return _full_and_sliding(config, 4)


def _olmo3_fields(config: Config) -> Config:
    full = rope(config, FULL, theta=5e5)
    return {
        "rope_theta": full.theta,
        "rope_scaling": full.scaling,
        "layer_types": _olmo3_types(config),
    }


def _olmo3_refusals(config: Config) -> None:
    types = _olmo3_types(config)
    if FULL not in types or SLIDING not in types:
        raise unsupported(
            config, "mlx-lm needs layers of both kinds", field="layer_types", found=types[0]
        )
    if not isinstance(text_config(config).get("rope_parameters"), dict):
        return
    sliding, full = plain(config, theta=5e5, layer_type=SLIDING), rope(config, FULL, theta=5e5)
    if sliding != full.theta:
        raise unsupported(
            config, "mlx-lm has one RoPE base for all layers", field="rope_theta", found=sliding
        )


def _smollm3_fields(config: Config) -> Config:
    text = text_config(config)
    step = int(text.get("no_rope_layer_interval") or 4)
    layers = range(text["num_hidden_layers"])
    rotated = text.get("no_rope_layers") or [int((i + 1) % step != 0) for i in layers]
    fields = {"no_rope_layers": rotated, "layer_types": None, "sliding_window": None}
    return flat(theta=2e6)(config) | fields


def _ministral3_refusals(config: Config) -> None:
    given = text_config(config).get("rope_parameters") or {}
    for name in ("rope_theta", "original_max_position_embeddings", "llama_4_scaling_beta"):
        if name not in given:
            raise unsupported(config, "mlx-lm reads this field", field=name, found="none")
    rope(config)


def _mistral3_fields(config: Config) -> Config:
    if text_config(config).get("model_type") == "ministral3":
        return {"layer_types": None, "sliding_window": None}
    return _llama_fields(config)


def _mistral3_refusals(config: Config) -> None:
    inner = text_config(config).get("model_type", "mistral")
    if inner == "ministral3":
        _ministral3_refusals(config)
    elif inner != "mistral":
        raise unsupported(
            config, "its language model is not in the table", field="text_config", found=inner
        )


def _muse_types(config: Config) -> list[str]:
    text = text_config(config)
    count = text["num_hidden_layers"]
    # transformers counts from the last layer, mlx-lm from the first.
    otherwise = [FULL if (count - 1 - index) % 4 == 0 else SLIDING for index in range(count)]
    return layer_types(config, (FULL, SLIDING), otherwise)


def _muse_fields(config: Config) -> Config:
    text, types = text_config(config), _muse_types(config)
    theta = plain(config)
    count = len(types)
    otherwise = [0 if (count - 1 - index) % 4 == 0 else theta for index in range(count)]
    return {
        "rope_theta": theta,
        "layer_types": types,
        "layer_rope_theta": text.get("layer_rope_theta") or otherwise,
    }


def _muse_refusals(config: Config) -> None:
    fields = _muse_fields(config)
    if any(theta not in (0, fields["rope_theta"]) for theta in fields["layer_rope_theta"]):
        raise unsupported(
            config,
            "mlx-lm has one RoPE base for all layers",
            field="layer_rope_theta",
            found=fields["layer_rope_theta"],
        )


_UNTIED = {"tie_word_embeddings": False}

DENSE = (
    Architecture(
        "llama",
        stack=all_full,
        fields=_llama_fields,
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate",),
    ),
    Architecture(
        "qwen2",
        stack=all_full,
        fields=flat(),
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate", "no_sliding_window"),
        note=_WINDOW_IGNORED,
    ),
    Architecture(
        "qwen3",
        stack=all_full,
        fields=flat(),
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate", "no_sliding_window"),
        note=_WINDOW_IGNORED,
    ),
    Architecture(
        "gemma3_text",
        stack=by_types(_gemma3_types),
        fields=_gemma3_fields,
        refuse=_gemma3_refusals,
        defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
        activations=GELU_TANH,
        torch_tweaks=("yarn_truncate", "round_embed_scale"),
        note="mlx-lm rounds the embedding's scale to bfloat16: so does the producer",
    ),
    Architecture(
        "gemma2",
        stack=all_full,
        fields=lambda config: {"rope_theta": plain(config)},
        defaults={"query_pre_attn_scalar": 256},
        activations=GELU_TANH,
        torch_tweaks=("no_sliding_window",),
        note=_WINDOW_IGNORED,
    ),
    Architecture(
        "cohere2",
        stack=by_types(_cohere2_types),
        fields=_cohere2_fields,
    ),
    Architecture(
        "exaone4",
        stack=by_types(_exaone4_types),
        fields=_exaone4_fields,
        refuse=_exaone4_refusals,
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate",),
    ),
    Architecture(
        "smollm3",
        stack=all_full,
        fields=_smollm3_fields,
        defaults={"tie_word_embeddings": True},
        torch_tweaks=("yarn_truncate", "no_sliding_window"),
        note=_WINDOW_IGNORED,
    ),
    Architecture(
        "olmo3",
        stack=by_types(_olmo3_types),
        fields=_olmo3_fields,
        refuse=_olmo3_refusals,
        torch_tweaks=("yarn_truncate",),
    ),
    Architecture(
        "mistral",
        stack=all_full,
        fields=_llama_fields,
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate", "no_sliding_window"),
        note=_WINDOW_IGNORED,
    ),
    Architecture(
        "ministral3",
        stack=all_full,
        fields=_mistral3_fields,
        refuse=_ministral3_refusals,
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate", "no_sliding_window"),
        note=_WINDOW_IGNORED,
    ),
    Architecture(
        "mistral3",
        stack=all_full,
        fields=_mistral3_fields,
        refuse=_mistral3_refusals,
        defaults=_UNTIED,
        torch_tweaks=("yarn_truncate", "no_sliding_window"),
        note=f"text only: the vision tower is left out; {_WINDOW_IGNORED}",
    ),
    Architecture(
        "muse_glimmer",
        stack=by_types(_muse_types),
        fields=_muse_fields,
        refuse=_muse_refusals,
        mlx_weights=("drop_vision",),
        note="text only: the vision tower is left out",
    ),
)
"""Entries in the order of ``docs/models.md``."""
