"""The producer's model means what mlx-lm makes of the same checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gb10_producer.model import ProducerModel, choose_device, compute_exactly, load
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from tests.tiny_models import NAMES, REFUSED

Checkpoints = Callable[..., Path]

CARRIED = [name for name in NAMES if name not in REFUSED]


def loaded(path: Path) -> ProducerModel:
    return load(read_checkpoint(path), "cpu", threads=1, progress=False)


@pytest.mark.parametrize("name", CARRIED)
def test_a_text_model_without_its_head_is_built(name: str, checkpoint: Checkpoints) -> None:
    model = loaded(checkpoint(name))
    names = [parameter for parameter, _ in model.decoder.named_parameters()]
    assert names
    assert not [name for name in names if "lm_head" in name or "vision" in name]
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert not any(parameter.is_meta for parameter in model.decoder.parameters())
    assert not any(buffer.is_meta for buffer in model.decoder.buffers())
    assert not model.decoder.training


@pytest.mark.parametrize(
    "fields",
    [
        {"pad_token_id": "vocab_size"},
        {"rms_norm_eps": "a"},
        {"intermediate_size": "many"},
        {"layer_types": ["no_attention"] * 4},
        {"vocab_size": 1 << 60},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_configuration_that_transformers_cannot_build_is_refused_with_a_reason(
    fields: dict[str, Any], checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """All of these are read as a checkpoint: whoever sends one must not end the process."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    config = json.loads((path / "config.json").read_text())
    fields = {
        name: config.get(value, value) if isinstance(value, str) else value
        for name, value in fields.items()
    }
    (path / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError) as caught:
        loaded(path)
    assert caught.value.reason == "model_not_buildable"
    assert caught.value.hint


def test_a_checkpoint_does_not_choose_how_it_is_computed(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """The name of a kernel would be fetched from a hub, or be one that this machine has not."""
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    config = json.loads((path / "config.json").read_text())
    kernel = "kernels-community/flash-attn"
    config |= {"attn_implementation": kernel, "_attn_implementation": kernel}
    config |= {"experts_implementation": kernel, "auto_map": {"AutoModel": "code.Model"}}
    (path / "config.json").write_text(json.dumps(config))
    chosen = loaded(path).decoder.config
    assert (
        chosen._attn_implementation
        == loaded(checkpoint("llama")).decoder.config._attn_implementation
    )
    assert "kernels" not in json.dumps(chosen.to_dict(), default=str)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_model_computes_in_the_checkpoints_dtype(dtype: str, checkpoint: Checkpoints) -> None:
    model = loaded(checkpoint("llama", dtype=dtype))
    expected = getattr(torch, dtype)
    assert model.dtype == expected
    assert {parameter.dtype for parameter in model.decoder.parameters()} == {expected}
    # the rotary table stays exact
    assert model.decoder.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "qwen3_next", "qwen3_5"])
def test_offset_norms_round_as_in_mlx(name: str, checkpoint: Checkpoints) -> None:
    """mlx-lm adds one to a norm's weight in bfloat16; torch would in float32."""
    wide = dict(loaded(checkpoint(name, dtype="bfloat16")).decoder.named_parameters())
    norms = [key for key in wide if key.endswith("layers.3.input_layernorm.weight")]
    assert norms
    for key in norms:
        effective = 1.0 + wide[key]
        assert wide[key].dtype == torch.float32
        assert torch.equal(effective, effective.bfloat16().float())


@pytest.mark.parametrize("name", ["mistral_window", "gemma2", "qwen2_window"])
def test_windows_that_mlx_ignores_are_ignored(name: str, checkpoint: Checkpoints) -> None:
    config = loaded(checkpoint(name)).decoder.config
    kinds = getattr(config, "layer_types", None)
    assert config.sliding_window is None or config.sliding_window >= 1 << 20
    assert kinds is None or set(kinds) == {"full_attention"}


def test_windows_that_mlx_heeds_are_heeded(checkpoint: Checkpoints) -> None:
    config = loaded(checkpoint("muse_glimmer")).decoder.config
    assert config.sliding_window == 32
    assert "sliding_attention" in config.layer_types


@pytest.mark.parametrize("name", ["gpt_oss", "llama_yarn"])
def test_yarn_rounds_its_correction_range(name: str, checkpoint: Checkpoints) -> None:
    path = checkpoint(name)
    assert json.loads((path / "config.json").read_text())["rope_parameters"]["truncate"] is False
    assert loaded(path).decoder.config.rope_parameters["truncate"] is True


def test_gemma3_scales_embeddings_by_a_rounded_root(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    model = loaded(checkpoint("gemma3_text_every_4th"))
    exact = torch.tensor(96.0).sqrt()
    scale = model.decoder.embed_tokens.embed_scale
    assert scale == exact.bfloat16().float()
    assert scale != exact


def edited(source: Path, target: Path, **fields: Any) -> Path:
    """A copy of the checkpoint ``source`` with other fields in its ``config.json``."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | fields))
    return target


def test_what_config_says_about_dtype_and_quantisation_is_not_believed(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    """Activations have the dtype of the stored embedding, as in mlx-lm."""
    path = edited(checkpoint("llama"), tmp_path / "edited", dtype="bfloat16")
    assert loaded(path).dtype == torch.float32


def test_an_architecture_that_transformers_lacks_is_refused(checkpoint: Checkpoints) -> None:
    known = read_checkpoint(checkpoint("llama"))
    newer = replace(known, config=known.config | {"model_type": "llama_of_tomorrow"})
    with pytest.raises(ConfigError) as refused:
        load(newer, "cpu", threads=1, progress=False)
    assert refused.value.reason == "architecture_unsupported"
    assert refused.value.found == "llama_of_tomorrow"


def test_a_device_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        assert choose_device("auto").type == "cuda"
        return
    assert choose_device("auto").type == "cpu"
    with pytest.raises(ConfigError) as refused:
        choose_device("cuda")
    assert refused.value.reason == "device_unavailable"


def test_what_trades_bits_for_speed_is_off() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    compute_exactly(torch.device("cpu"), threads=1)
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
    assert torch.get_num_threads() == 1
