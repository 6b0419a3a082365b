"""Variants of known architectures that do not carry over, and the reason each is refused with."""

from __future__ import annotations

from typing import Any, NamedTuple


class Case(NamedTuple):
    """``changes`` to the configuration of the tiny model ``base`` that make it refused.

    ``field`` is the field that the error names; ``title`` and ``why`` are for people.
    """

    base: str
    title: str
    field: str
    changes: dict[str, Any]
    why: str


def _rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 25000.0} | parameters}


_FULL = {"rope_type": "default", "rope_theta": 25000.0}
_LOCAL = {"rope_type": "default", "rope_theta": 5000.0}
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
_IRREGULAR = ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 5
_CHUNKED = ["chunked_attention"] * 3 + ["full_attention"] * 5
_ALL_SLIDING = ["sliding_attention"] * 8

_ONE_BASE = "mlx-lm has one RoPE base for all layers"
_NO_SCALING = "mlx-lm knows no RoPE scaling here"
_NOT_PROVEN = "the two frameworks are not proven to agree"

REFUSED_VARIANTS: tuple[Case, ...] = (
    Case("llama", "dynamic RoPE", "rope_type", _rope(rope_type="dynamic", factor=2.0), _NOT_PROVEN),
    Case("llama", "longrope", "rope_type", _rope(rope_type="longrope", factor=2.0), _NOT_PROVEN),
    Case(
        "llama",
        "YaRN with an attention factor of its own",
        "attention_factor",
        _rope(**_YARN, attention_factor=2.0),
        "mlx-lm does not read it",
    ),
    Case(
        "llama",
        "another activation",
        "hidden_act",
        {"hidden_act": "gelu"},
        "mlx-lm always computes silu",
    ),
    Case(
        "gemma3_text",
        "sliding layers in another order",
        "layer_types",
        {"layer_types": _IRREGULAR},
        "mlx-lm can only build stacks in which every n-th layer is full",
    ),
    Case(
        "gemma3_text",
        "chunked attention",
        "layer_types",
        {"layer_types": _CHUNKED},
        "its cache is of no kind that carries over",
    ),
    Case(
        "gemma3_text",
        "capped logits",
        "attn_logit_softcapping",
        {"attn_logit_softcapping": 50.0},
        "mlx-lm caps no logits",
    ),
    Case(
        "gemma3_text",
        "attention in both directions",
        "use_bidirectional_attention",
        {"use_bidirectional_attention": True},
        "mlx-lm attends backwards only",
    ),
    Case("gemma2", "any RoPE scaling", "rope_type", _rope(**_YARN), _NO_SCALING),
    Case("cohere2", "any RoPE scaling", "rope_type", _rope(**_YARN), _NO_SCALING),
    Case(
        "exaone4",
        "sliding layers only",
        "layer_types",
        {"layer_types": _ALL_SLIDING, "sliding_window_pattern": "L"},
        "mlx-lm needs a full layer",
    ),
    Case(
        "olmo3",
        "another RoPE base in sliding layers",
        "rope_theta",
        {"rope_parameters": {"full_attention": _FULL, "sliding_attention": _LOCAL}},
        _ONE_BASE,
    ),
    Case(
        "olmo3",
        "layers of one kind",
        "layer_types",
        {"layer_types": _ALL_SLIDING},
        "mlx-lm needs layers of both kinds",
    ),
    Case(
        "ministral3",
        "no `llama_4_scaling_beta`",
        "llama_4_scaling_beta",
        _rope(**_YARN),
        "mlx-lm reads this field",
    ),
    Case(
        "mistral3",
        "another language model inside",
        "text_config",
        {"text_config": {"model_type": "mistral4", "num_hidden_layers": 8}},
        "it is not in the table",
    ),
    Case(
        "muse_glimmer",
        "RoPE bases by layer",
        "layer_rope_theta",
        {"text_config.layer_rope_theta": [1e4, 2e4, 3e4, 0] * 2},
        _ONE_BASE,
    ),
    Case("qwen3_moe", "any RoPE scaling", "rope_type", _rope(**_YARN), _NO_SCALING),
    Case(
        "gpt_oss",
        "another clamp",
        "swiglu_limit",
        {"swiglu_limit": 10.0},
        "mlx-lm clamps at 7",
    ),
    Case(
        "gpt_oss",
        "layers of one kind",
        "layer_types",
        {"layer_types": _ALL_SLIDING},
        "mlx-lm needs layers of both kinds",
    ),
    Case(
        "afmoe",
        "another routing",
        "score_func",
        {"score_func": "softmax"},
        "transformers routes in one way only",
    ),
    Case(
        "deepseek_v3",
        "rotary parts in halves",
        "rope_interleave",
        {"rope_interleave": False},
        "mlx-lm always interleaves",
    ),
    Case(
        "deepseek_v3",
        "another routing",
        "topk_method",
        {"topk_method": "greedy"},
        "transformers routes in one way only",
    ),
    Case(
        "glm4_moe",
        "another routing",
        "scoring_func",
        {"scoring_func": "softmax"},
        "transformers routes in one way only",
    ),
    Case("glm4_moe", "any RoPE scaling", "rope_type", _rope(**_YARN), _NO_SCALING),
    Case(
        "qwen3_next",
        "full layers in another order",
        "layer_types",
        {"layer_types": ["linear_attention"] * 6 + ["full_attention"] * 2},
        "mlx-lm can only build stacks in which every n-th layer is full",
    ),
    Case("qwen3_5", "any RoPE scaling", "rope_type", _rope(**_YARN), _NO_SCALING),
    Case("lfm2", "any RoPE scaling", "rope_type", _rope(**_YARN), _NO_SCALING),
    Case(
        "granitemoehybrid",
        "more than one group",
        "mamba_n_groups",
        {"mamba_n_groups": 2},
        "mlx-lm normalises other channels than transformers",
    ),
    Case(
        "granitemoehybrid_rope",
        "any RoPE scaling",
        "rope_type",
        _rope(**_YARN),
        _NO_SCALING,
    ),
    Case(
        "falcon_h1_norm",
        "more than one group, with a norm",
        "mamba_n_groups",
        {"mamba_n_groups": 2},
        "mlx-lm normalises other channels than transformers",
    ),
    Case(
        "falcon_h1_multipliers",
        "multipliers and biases",
        "attention_bias",
        {"attention_bias": True},
        "mlx-lm multiplies weights but not biases",
    ),
)
