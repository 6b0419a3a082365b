"""How the tensors of a checkpoint become transformers' parameters: a pure table, no torch.

A checkpoint may be in transformers' form or in mlx-lm's (``mlx_lm.convert`` saves the decoder's
own parameters: experts stacked, convolutions channels-last, some norms shifted by one, the MLA
up-projection split). Which form a tensor has is told by the evidence that mlx-lm's loader itself
goes by, names and shapes, so that both sides read every file alike.

Names here are those of a text-only causal model (``model.layers.0...``); ``canonical_name`` strips
what a multimodal wrapper adds and drops what the decoder does not load.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

Shape = tuple[int, ...]


class Op(Enum):
    """What happens to the sources of a target, in the order of :class:`Rule.sources`."""

    SAME = "same"
    CONCAT_ROWS = "concat_rows"
    """Two ``(a, in)`` and ``(b, in)`` into ``(a + b, in)``."""
    CONCAT_EXPERTS = "concat_experts"
    """Two ``(experts, a, in)`` into ``(experts, 2a, in)``."""
    INTERLEAVE_EXPERTS = "interleave_experts"
    """Two ``(experts, a, in)`` into ``(experts, in, 2a)``, columns taken alternately."""
    INTERLEAVE_BIASES = "interleave_biases"
    """Two ``(experts, a)`` into ``(experts, 2a)``, taken alternately."""
    SWAP_LAST = "swap_last"
    """The last two axes swapped."""
    MINUS_ONE = "minus_one"
    """A norm's weight that mlx-lm stores with its offset of one added."""
    ROUNDED_NORM = "rounded_norm"
    """A norm's weight to which mlx-lm adds its offset of one in the weight's own dtype."""
    JOIN_MLA = "join_mla"
    """``(heads, rank, a)`` and ``(heads, b, rank)`` into ``(heads * (a + b), rank)``."""


@dataclass(frozen=True)
class Rule:
    """Tensors whose names end in ``sources`` (same stem) become one named stem + ``target``."""

    sources: tuple[str, ...]
    target: str
    op: Op


@dataclass(frozen=True)
class Target:
    """One tensor to load: its (canonical) name and the canonical names it is made from."""

    name: str
    op: Op
    sources: tuple[str, ...]


def _experts(inside: str, outside: str) -> tuple[Rule, ...]:
    """Rules for experts that mlx-lm stacks under ``inside`` and transformers under ``outside``."""
    gate_up = (f"{inside}.gate_proj.weight", f"{inside}.up_proj.weight")
    return (
        Rule(gate_up, f"{outside}.gate_up_proj", Op.CONCAT_EXPERTS),
        Rule((f"{inside}.down_proj.weight",), f"{outside}.down_proj", Op.SAME),
    )


_SWITCH = _experts(".mlp.switch_mlp", ".mlp.experts")
_MLA = Rule(
    (".self_attn.embed_q.weight", ".self_attn.unembed_out.weight"),
    ".self_attn.kv_b_proj.weight",
    Op.JOIN_MLA,
)
_DENSE_GRANITE = (
    Rule(
        (".mlp.gate_proj.weight", ".mlp.up_proj.weight"),
        ".shared_mlp.input_linear.weight",
        Op.CONCAT_ROWS,
    ),
    Rule((".mlp.down_proj.weight",), ".shared_mlp.output_linear.weight", Op.SAME),
)
_GPT_OSS = (
    Rule(
        (".mlp.experts.gate_proj.weight", ".mlp.experts.up_proj.weight"),
        ".mlp.experts.gate_up_proj",
        Op.INTERLEAVE_EXPERTS,
    ),
    Rule(
        (".mlp.experts.gate_proj.bias", ".mlp.experts.up_proj.bias"),
        ".mlp.experts.gate_up_proj_bias",
        Op.INTERLEAVE_BIASES,
    ),
    Rule((".mlp.experts.down_proj.weight",), ".mlp.experts.down_proj", Op.SWAP_LAST),
    Rule((".mlp.experts.down_proj.bias",), ".mlp.experts.down_proj_bias", Op.SAME),
)

RULES: Mapping[str, tuple[Rule, ...]] = {
    "qwen3_moe": _SWITCH,
    "afmoe": _experts(".mlp.experts", ".mlp.experts"),
    "gpt_oss": _GPT_OSS,
    "deepseek_v3": (*_SWITCH, _MLA),
    "glm4_moe": _SWITCH,
    "qwen3_next": _SWITCH,
    "granitemoehybrid": (
        *_experts(".block_sparse_moe.switch_mlp", ".block_sparse_moe.experts"),
        *_DENSE_GRANITE,
    ),
}
"""mlx-lm's parameters that are not transformers' own, per text model type."""

FLOAT32_OPS = (Op.MINUS_ONE, Op.ROUNDED_NORM)
"""Results that are exact in float32 only: the model keeps them so, whatever its dtype."""

FLOAT32_NAMES = (".A_log", ".D", ".dt_bias", ".e_score_correction_bias", ".expert_bias")
"""Parameters that both frameworks compute with in float32 where a file holds them so."""

_OFFSET_NORMS: Mapping[str, str] = {
    "gemma2": r"norm\.weight$",
    "gemma3_text": r"norm\.weight$",
    "qwen3_next": r"(?:layernorm|model\.norm|[qk]_norm)\.weight$",
    "qwen3_5": r"(?:layernorm|model\.norm|[qk]_norm)\.weight$",
}
"""Norms that multiply by one plus their weight, per architecture."""

_DROPPED = re.compile(
    r"^(?:model\.)?(?:vision_tower|visual|vision_adapter|vision_projection|multi_modal_projector"
    r"|mtp)\.|(?:^|\.)mtp\.|rotary_emb\.inv_freq$|^(?:language_model\.)?lm_head\."
)
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def canonical_name(name: str, hidden_layers: int) -> str | None:
    """``name`` as a text-only causal model has it, or None for what no prefill needs.

    Dropped are vision towers, the output head, rotary tables, and layers for multi-token
    prediction (``mtp`` or layers past ``hidden_layers``), as mlx-lm drops them.
    """
    if _DROPPED.search(name):
        return None
    for wrapper in ("model.language_model.", "language_model.model."):
        if name.startswith(wrapper):
            name = "model." + name.removeprefix(wrapper)
            break
    layer = _LAYER.match(name)
    if layer and int(layer.group(1)) >= hidden_layers:
        return None
    return name


def plan(architecture: str, shapes: Mapping[str, Shape]) -> list[Target]:
    """What to load, given the canonical names and (unpacked) shapes of all tensors.

    A rule applies where all its sources exist; every other tensor keeps its name, is brought
    into transformers' axis order where it is a channels-last convolution, and norms that add
    one to their weight are made to mean what mlx-lm's rounding makes of them. Each tensor is
    used exactly once.
    """
    targets: list[Target] = []
    used: set[str] = set()
    for rule in RULES.get(architecture, ()):
        for sources in _matches(rule, shapes):
            used.update(sources)
            stem = sources[0].removesuffix(rule.sources[0])
            targets.append(Target(stem + rule.target, rule.op, sources))
    norm = Op.MINUS_ONE if _norms_are_shifted(architecture, shapes) else Op.ROUNDED_NORM
    offset_norm = _OFFSET_NORMS.get(architecture)
    for name, shape in shapes.items():
        if name in used:
            continue
        op = Op.SAME
        if _channels_last(name, shape):
            op = Op.SWAP_LAST
        elif offset_norm and len(shape) == 1 and re.search(offset_norm, name):
            op = norm
        targets.append(Target(name, op, (name,)))
    return targets


def _matches(rule: Rule, names: Iterable[str]) -> list[tuple[str, ...]]:
    known = set(names)
    found: list[tuple[str, ...]] = []
    for name in sorted(known):
        if name.endswith(rule.sources[0]):
            stem = name.removesuffix(rule.sources[0])
            sources = tuple(stem + suffix for suffix in rule.sources)
            if known.issuperset(sources):
                found.append(sources)
    return found


def _channels_last(name: str, shape: Shape) -> bool:
    convolution = name.endswith((".conv1d.weight", ".conv.conv.weight"))
    return convolution and len(shape) == 3 and shape[-1] == 1 and shape[1] != 1


def _norms_are_shifted(architecture: str, shapes: Mapping[str, Shape]) -> bool:
    """Whether offset norms carry their one already: mlx-lm adds it for good exactly when it
    also stacks the experts (qwen3_next) or turns the convolutions (qwen3_5) of a file."""
    if architecture == "qwen3_next":
        return any(".switch_mlp." in name for name in shapes)
    if architecture == "qwen3_5":
        return any(_channels_last(name, shape) for name, shape in shapes.items())
    return False
