"""Makes checkpoints that both frameworks read: GGUF to safetensors, casts, MLX quantisation.

The only file of `app` that imports torch, transformers and mlx_lm: it runs where both are
installed. Whatever it writes is an ordinary transformers checkpoint (config.json,
safetensors, tokenizer.json, chat template); quantised ones are in MLX's format.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path
from typing import Any, Final, Literal

from protocol.architectures import resolve
from protocol.checkpoint import read_checkpoint, read_config
from protocol.errors import ConfigError

CheckpointDtype = Literal["float32", "bfloat16", "float16"]

GROUP_SIZE: Final = 64
"""Weights that share one scale in a quantised checkpoint."""

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files that belong to a checkpoint beside its config and weights."""


def from_gguf(source: Path, to: Path, dtype: CheckpointDtype) -> None:
    """Write the model in a GGUF file, dequantised and cast to ``dtype``, into directory ``to``.

    GGUF blocks are unpacked in fp32, so that a cast is the only rounding. Raises ConfigError
    ``gguf_unreadable`` when transformers cannot read the file, ``architecture_unsupported``
    when the model inside cannot be carried over.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(**where)
    except (ValueError, KeyError, OSError) as error:
        raise ConfigError(
            "transformers cannot read this GGUF file",
            reason="gguf_unreadable",
            field="gguf",
            found=source.name,
            hint=str(error).splitlines()[0] if str(error) else None,
        ) from error
    resolve(config.to_dict())
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(
        **where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.to(getattr(torch, dtype))
    model.config.dtype = getattr(torch, dtype)
    model.save_pretrained(to)
    tokenizer.save_pretrained(to)


def from_directory(source: Path, to: Path, dtype: CheckpointDtype | None) -> None:
    """Copy a transformers checkpoint into ``to``, cast to ``dtype`` unless that is None.

    Raises ConfigError ``safetensors_missing`` when the weights are in another format, and
    ``architecture_unsupported`` when the model cannot be carried over.
    """
    config = json.loads((source / "config.json").read_text())
    resolve(config)
    weights = sorted(source.glob("model*.safetensors"))
    if not weights:
        raise ConfigError(
            "the checkpoint has no safetensors files",
            reason="safetensors_missing",
            field="model",
            found=str(source),
        )
    if dtype is not None:
        if "quantization" in config:
            raise ConfigError(
                "a quantised checkpoint cannot be cast", reason="cast_of_quantised", field="dtype"
            )
        _set_dtype(config, dtype)
    (to / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in (*COPIED, "model.safetensors.index.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)
    for file in weights:
        if dtype is None:
            shutil.copyfile(file, to / file.name)
        else:
            _cast(file, to / file.name, dtype)


def quantise(source: Path, to: Path, bits: int) -> None:
    """Write the checkpoint in ``source`` into ``to``, weights quantised to ``bits`` by MLX.

    The config keeps its words; only the ``quantization`` entries are added. Norms, scales and
    with them the KV cache keep the dtype of ``source``. Tensors are those that the decoder
    computes with. Raises ConfigError, before anything is written, as ``load_network`` does,
    and ``architecture_unsupported`` where MLX's form of the model could not be read back.
    """
    from mlx_lm.utils import quantize_model, save_config, save_model

    from mac_decoder.engine.model import load_network, stored_shapes

    checkpoint = read_checkpoint(source)
    config = read_config(source)
    model, _ = load_network(checkpoint, lazy=True)
    checkpoint.architecture.refuse_tensors(checkpoint.config, stored_shapes(model))
    with contextlib.redirect_stdout(io.StringIO()):  # mlx_lm prints what nobody asked for
        model, config = quantize_model(model, config, GROUP_SIZE, bits)
    save_model(to, model, donate_model=True)
    save_config(config, to / "config.json")
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, to / name)


def _cast(source: Path, to: Path, dtype: CheckpointDtype) -> None:
    """Copy one safetensors file, its floating-point tensors cast to ``dtype``."""
    import torch
    from safetensors.torch import load_file, save_file

    target = getattr(torch, dtype)
    tensors = {
        name: tensor.to(target) if tensor.is_floating_point() else tensor
        for name, tensor in load_file(source).items()
    }
    save_file(tensors, to, metadata={"format": "pt"})


def _set_dtype(config: dict[str, Any], dtype: CheckpointDtype) -> None:
    """Write ``dtype`` wherever the config names the weights' type."""
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    for part in config.values():
        if isinstance(part, dict) and ("dtype" in part or "torch_dtype" in part):
            part.pop("torch_dtype", None)
            part["dtype"] = dtype
