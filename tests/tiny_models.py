"""Untrained tiny models of every architecture, and of the variants that differ in their caches.

All have 8 layers of width 64, a vocabulary of 512, and a RoPE base that is no framework's
default, so that a base that is not read shows. Sliding layers have a window of 32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.tiny_tokenizer import EOS, PAD, START, VOCABULARY

WINDOW = 32
THETA = 25000.0
LOCAL_THETA = 5000.0

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
_TIED = {"tie_word_embeddings": True}
_PLAIN = {"rope_type": "default", "rope_theta": THETA}
_LOCAL = {"rope_type": "default", "rope_theta": LOCAL_THETA}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": THETA,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": THETA,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_ROPE = {"rope_parameters": _PLAIN}
_SLIDING = {"sliding_window": WINDOW}
_TWO_BASES = {"rope_parameters": {"full_attention": _PLAIN, "sliding_attention": _LOCAL}}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
_LLLG = (["sliding_attention"] * 3 + ["full_attention"]) * 2
_SMALL_VISION = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}


def _config(name: str, *parts: dict[str, Any], without: str = "", **fields: Any) -> Any:
    """A configuration class of transformers, made with the shared sizes, parts and fields."""
    import transformers

    merged: dict[str, Any] = dict(_SIZES)
    for part in (*parts, fields):
        merged |= part
    for dropped in without.split():
        merged.pop(dropped)
    return getattr(transformers, name)(**merged)


def _causal(name: str, *parts: dict[str, Any], without: str = "", **fields: Any) -> Any:
    """The causal language model of ``_config(...)``."""
    import transformers

    config = _config(name, *parts, without=without, **fields)
    return transformers.AutoModelForCausalLM.from_config(config)


def _llama(**fields: Any) -> Any:
    return _causal("LlamaConfig", _HEAD, _ROPE, **fields)


def _gemma3(**fields: Any) -> Any:
    return _causal(
        "Gemma3TextConfig", _HEAD, _TIED, _SLIDING, _TWO_BASES, query_pre_attn_scalar=16, **fields
    )


def _gemma2() -> Any:
    return _causal("Gemma2Config", _HEAD, _TIED, _SLIDING, _ROPE, query_pre_attn_scalar=16)


def _olmo3(full: dict[str, Any]) -> Any:
    bases = {"full_attention": full, "sliding_attention": _PLAIN}
    return _causal("Olmo3Config", _SLIDING, rope_parameters=bases)


def _ministral3_parts() -> tuple[dict[str, Any], ...]:
    yarn = _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    return _HEAD, {"rope_parameters": yarn, "sliding_window": None}


def _mistral3(text: Any) -> Any:
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PixtralVisionConfig

    vision = PixtralVisionConfig(
        **_SMALL_VISION, num_attention_heads=2, head_dim=16, image_size=28, patch_size=14
    )
    config = Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Mistral3ForConditionalGeneration(config)


def _muse_glimmer(**fields: Any) -> Any:
    from transformers import MuseGlimmerConfig, MuseGlimmerForConditionalGeneration

    text = {name: value for name, value in _SIZES.items() if name != "pad_token_id"}
    text |= _HEAD | _ROPE | _SLIDING | {"output_multiplier": 2.0} | fields
    vision = _SMALL_VISION | {"num_attention_heads": 2}
    # The projector's widths are no use to a text model; the defaults would weigh 100 MB.
    small: dict[str, Any] = {"projector_hidden_size": 32, "out_hidden_size": 32}
    config = MuseGlimmerConfig(text_config=text, vision_config=vision, **small)
    return MuseGlimmerForConditionalGeneration(config)


def muse_glimmer_in_depth() -> Any:
    """Muse Glimmer with its own number of layers, window and heads: its bytes, tiny weights."""
    return _muse_glimmer(
        num_hidden_layers=52,
        sliding_window=2048,
        num_attention_heads=2,
        head_dim=128,
        intermediate_size=64,
        max_position_embeddings=1 << 17,
    )


def _gpt_oss(**fields: Any) -> Any:
    yarn = _YARN | {"rope_theta": 150000.0, "factor": 32.0, "truncate": False}
    yarn["original_max_position_embeddings"] = 4096
    return _causal(
        "GptOssConfig",
        _HEAD,
        _SLIDING,
        rope_parameters=yarn,
        num_local_experts=8,
        num_experts_per_tok=2,
        **fields,
    )


def _afmoe() -> Any:
    return _causal(
        "AfmoeConfig",
        _HEAD,
        _ROPE,
        _SLIDING,
        _EXPERTS,
        num_shared_experts=1,
        num_dense_layers=1,
        mup_enabled=True,
        route_scale=2.0,
    )


def _deepseek_v3(parameters: dict[str, Any], **fields: Any) -> Any:
    return _causal(
        "DeepseekV3Config",
        _ROUTED | fields,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_group=2,
        topk_group=1,
        rope_parameters=parameters,
    )


def _glm4_moe() -> Any:
    return _causal(
        "Glm4MoeConfig",
        _HEAD,
        _ROUTED,
        n_group=1,
        topk_group=1,
        use_qk_norm=True,
        norm_topk_prob=True,
        rope_parameters=_PLAIN | {"partial_rotary_factor": 0.5},
    )


def _qwen3_moe() -> Any:
    return _causal(
        "Qwen3MoeConfig",
        _HEAD,
        _ROPE,
        _EXPERTS,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
    )


def _qwen3_next() -> Any:
    return _causal(
        "Qwen3NextConfig",
        _HEAD,
        _DELTA,
        _EXPERTS,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        mlp_only_layers=[],
        rope_parameters=_PLAIN | {"partial_rotary_factor": 0.5},
    )


_QWEN3_5_ROPE = _PLAIN | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}


def _qwen3_5() -> Any:
    return _causal("Qwen3_5TextConfig", _HEAD, _DELTA, rope_parameters=_QWEN3_5_ROPE)


def _qwen3_5_vision() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = _SIZES | _HEAD | _DELTA | {"rope_parameters": _QWEN3_5_ROPE}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }
    config = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return Qwen3_5ForConditionalGeneration(config)


def _lfm2() -> Any:
    return _causal(
        "Lfm2Config",
        _TIED,
        _ROPE,
        conv_L_cache=3,
        block_ff_dim=128,
        block_multiple_of=32,
        layer_types=["conv", "conv", "full_attention", "conv"] * 2,
    )


def _granite(**fields: Any) -> Any:
    defaults = {
        "layer_types": ["mamba", "mamba", "attention", "mamba"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "embedding_multiplier": 2.0,
        "attention_multiplier": 0.25,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "position_embedding_type": "nope",
    }
    return _causal("GraniteMoeHybridConfig", _TIED, _MAMBA, defaults, **fields)


def _falcon_h1(**fields: Any) -> Any:
    return _causal("FalconH1Config", _HEAD, _MAMBA, _ROPE, mamba_d_ssm=128, **fields)


_MULTIPLIERS = {
    "key_multiplier": 0.39,
    "attention_in_multiplier": 0.7,
    "attention_out_multiplier": 0.9,
    "embedding_multiplier": 5.6,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.88, 0.58],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.23,
    "ssm_multipliers": [0.35, 0.25, 0.35, 0.5, 0.35],
}


def _jamba() -> Any:
    return _causal(
        "JambaConfig",
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=4,
    )


NAMES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama_llama3": lambda: _llama(rope_parameters=_LLAMA3),
    "llama_yarn": lambda: _llama(rope_parameters=_YARN | {"truncate": False}),
    "llama_linear": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": THETA, "factor": 4.0}
    ),
    "qwen2": lambda: _causal("Qwen2Config", _ROPE),
    "qwen2_window": lambda: _causal(
        "Qwen2Config", _ROPE, _SLIDING, use_sliding_window=True, max_window_layers=4
    ),
    "qwen3": lambda: _causal("Qwen3Config", _HEAD, _ROPE),
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "gemma3_text_every_4th": lambda: _gemma3(hidden_size=96, layer_types=_LLLG),
    "gemma2": _gemma2,
    "cohere2": lambda: _causal("Cohere2Config", _HEAD, _TIED, _SLIDING, _ROPE),
    "exaone4": lambda: _causal(
        "Exaone4Config",
        _HEAD,
        _SLIDING,
        _ROPE,
        sliding_window_pattern="LLLG",
        layer_types=_LLLG,
    ),
    "exaone4_full": lambda: _causal(
        "Exaone4Config",
        _HEAD,
        _ROPE,
        sliding_window=None,
        sliding_window_pattern=None,
        layer_types=["full_attention"] * 8,
    ),
    "smollm3": lambda: _causal("SmolLM3Config", _ROPE),
    "olmo3": lambda: _olmo3(_PLAIN),
    "olmo3_yarn": lambda: _olmo3(_YARN),
    "mistral": lambda: _causal("MistralConfig", _HEAD, _ROPE, sliding_window=None),
    "mistral_window": lambda: _causal("MistralConfig", _HEAD, _ROPE, _SLIDING),
    "ministral3": lambda: _causal("Ministral3Config", *_ministral3_parts()),
    "mistral3": lambda: _mistral3(_config("Ministral3Config", *_ministral3_parts())),
    "mistral3_mistral": lambda: _mistral3(
        _config("MistralConfig", _HEAD, _ROPE, sliding_window=None)
    ),
    "gpt_oss": _gpt_oss,
    "gpt_oss_wide_heads": lambda: _gpt_oss(head_dim=64),
    "afmoe": _afmoe,
    "muse_glimmer": _muse_glimmer,
    "deepseek_v3": lambda: _deepseek_v3(_PLAIN),
    "deepseek_v3_yarn": lambda: _deepseek_v3(
        _YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    ),
    "deepseek_v3_dense": lambda: _deepseek_v3(_PLAIN, first_k_dense_replace=8),
    "glm4_moe": _glm4_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_vision": _qwen3_5_vision,
    "lfm2": _lfm2,
    "granitemoehybrid": _granite,
    "granitemoehybrid_dense": lambda: _granite(num_local_experts=0, num_experts_per_tok=0),
    "granitemoehybrid_rope": lambda: _granite(
        position_embedding_type="rope", rope_parameters=_PLAIN
    ),
    "granitemoehybrid_groups": lambda: _granite(mamba_n_groups=2),
    "falcon_h1": _falcon_h1,
    "falcon_h1_multipliers": lambda: _falcon_h1(**_MULTIPLIERS),
    "falcon_h1_groups": lambda: _falcon_h1(mamba_n_groups=2),
    "falcon_h1_norm": lambda: _falcon_h1(mamba_rms_norm=True),
    "falcon_h1_norm_groups": lambda: _falcon_h1(mamba_rms_norm=True, mamba_n_groups=2),
    "jamba": _jamba,
}
"""Name of a checkpoint (an architecture, or an architecture and a variant) -> its model."""

REFUSED = ("granitemoehybrid_groups", "falcon_h1_norm_groups", "jamba")
"""Names that Baton refuses."""

_VARIANTS = (
    *("qwen2_window", "gemma3_text_every_4th", "exaone4_full", "olmo3_yarn", "ministral3"),
    *("mistral3_mistral", "gpt_oss_wide_heads", "deepseek_v3_yarn", "deepseek_v3_dense"),
    *("qwen3_5_vision", "granitemoehybrid_dense", "granitemoehybrid_rope", "falcon_h1_groups"),
    "falcon_h1_norm",
)
FAMILIES = tuple(name for name in NAMES if name not in (*_VARIANTS, *REFUSED))
"""One of each architecture, kind of RoPE and of window; others only have other parameters."""
