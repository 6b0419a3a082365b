"""A checkpoint that recites: a real model whose next token is a table of its last one.

Embeddings are unit vectors, attention and feed-forward add nothing, so the output layer is the
table: row ``s``, column ``t`` is the logit of ``s`` after ``t``. What is served and sampled is
real; what is said is known. Each piece of a script is one token that occurs nowhere else.

A completion prompt that ends with ``[name]`` starts the script ``name``. After a chat prompt
all scripts' first tokens are equally likely; ``bias(name)`` makes the choice.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from tests.tiny_tokenizer import EOS, PAD, START, save_tokenizer

WIDTH = 704
CONTEXT = 2048
SURE, LIKELY, END = 60.0, 20.0, 40.0

SCRIPTS: dict[str, list[str | int]] = {
    "greeting": ["Good", " morning", ", runner", "!!"],
    "spaced": [" leading", " space"],
    # Bytes of characters that are split over tokens: an emoji of four, an accent of two.
    "emoji": ["smile ", *"😀".encode(), " end of smile"],
    "accent": ["e for ", *"\u0301".encode(), " accent"],
    "cut": ["half ", *"€".encode()[:2]],
    "stopped": ["alpha S", "TO", "P omega", " never"],
    "nearly": ["beta ST", "OLEN goods"],
    "ends_open": ["gamma ST"],
    "thoughtful": ["<think>", "pondering", " deeply", "</think>", "The answer"],
    "tool": [
        "I look. ",
        "<tool_call>",
        '\n{"name": "get_weather", "arguments": {"city": "Pa',
        'ris", "note": "ü"}}\n',
        "</tool_call>",
    ],
    "two_tools": [
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>\n',
    ],
    "bad_tool": ["<tool_call>no call at all</tool_call>", " sorry"],
    "begun_call": ['{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call> '],
    "given_name": [' {"city": "Rome"}}\n</tool_call>  '],
    "prose": ["Rather not", " a call"],
}

ENDLESS = ["la", " li", " lu"]
"""A script that never ends."""

GIVEN_NAME = '<tool_call>\n{"name": "get_weather", "arguments":'


@dataclass(frozen=True)
class Recital:
    """Where the checkpoint lies, and the first token of each script."""

    path: Path
    heads: dict[str, int]

    def bias(self, name: str) -> dict[str, int]:
        """A ``logit_bias`` that makes a chat answer recite ``name``."""
        return {str(self.heads[name]): 10}


def make_recital(path: Path) -> Recital:
    """Write the checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path, reasoning=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    pieces = [piece for script in SCRIPTS.values() for piece in script if isinstance(piece, str)]
    names = [f"[{name}]" for name in (*SCRIPTS, "endless")]
    tokenizer.add_tokens([*pieces, *ENDLESS, *names])
    tokenizer.save_pretrained(path)
    assert len(tokenizer) <= WIDTH, len(tokenizer)

    table = np.zeros((WIDTH, WIDTH), dtype=np.float32)
    table[EOS] = END
    chat_end = tokenizer.encode("assistant\n", add_special_tokens=False)[-1]
    # A turn without thoughts ends the prompt in another token.
    calm_end = tokenizer.encode("</think>\n\n", add_special_tokens=False)[-1]
    heads: dict[str, int] = {}
    for name, script in {**SCRIPTS, "endless": [*ENDLESS, ENDLESS[0]]}.items():
        tokens = [_token(tokenizer, piece) for piece in script]
        heads[name] = tokens[0]
        for before, after in pairwise(tokens):
            table[after, before] = SURE
        table[tokens[0], tokenizer.convert_tokens_to_ids(f"[{name}]")] = SURE
        table[tokens[0], [chat_end, calm_end]] = END + LIKELY
    given = tokenizer.encode(GIVEN_NAME, add_special_tokens=False)[-1]
    table[heads["given_name"], given] = SURE
    table[heads["prose"], given] = END + LIKELY
    _save(path, table)
    return Recital(path, heads)


def _token(tokenizer: object, piece: str | int) -> int:
    if isinstance(piece, str):
        return tokenizer.convert_tokens_to_ids(piece)  # type: ignore[attr-defined]
    from mac_decoder.engine.text import _BYTES

    letter = next(letter for letter, data in _BYTES.items() if data[0] == piece)
    return tokenizer.convert_tokens_to_ids(letter)  # type: ignore[attr-defined]


def _save(path: Path, table: np.ndarray) -> None:
    heads, groups, size, inner = 4, 2, 16, 32
    zeros, ones = (lambda *shape: np.zeros(shape, np.float32)), np.ones(WIDTH, np.float32)
    layer = "model.layers.0."
    # The norm of a unit vector is 1 / sqrt(WIDTH): the model multiplies by its inverse.
    tensors = {
        "model.embed_tokens.weight": np.eye(WIDTH, dtype=np.float32),
        "lm_head.weight": table / np.float32(WIDTH**0.5),
        "model.norm.weight": ones,
        f"{layer}input_layernorm.weight": ones.copy(),
        f"{layer}post_attention_layernorm.weight": ones.copy(),
        f"{layer}self_attn.q_proj.weight": zeros(heads * size, WIDTH),
        f"{layer}self_attn.k_proj.weight": zeros(groups * size, WIDTH),
        f"{layer}self_attn.v_proj.weight": zeros(groups * size, WIDTH),
        f"{layer}self_attn.o_proj.weight": zeros(WIDTH, heads * size),
        f"{layer}mlp.gate_proj.weight": zeros(inner, WIDTH),
        f"{layer}mlp.up_proj.weight": zeros(inner, WIDTH),
        f"{layer}mlp.down_proj.weight": zeros(WIDTH, inner),
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "vocab_size": WIDTH,
        "hidden_size": WIDTH,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": size,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-9,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "eos_token_id": EOS,
        "bos_token_id": START,
        "pad_token_id": PAD,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
