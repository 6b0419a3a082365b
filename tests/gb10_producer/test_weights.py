"""The decoder's checkpoint, in either form, means the same to torch; anything else is refused."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gb10_producer import model as torch_side
from gb10_producer import weights
from gb10_producer.mlx_format import Op, canonical_name, plan
from gb10_producer.weights import Packing, dequantise, open_weights
from mac_decoder.engine.model import load
from mac_decoder.kv import install
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from tests import crossing
from tests.ordinary import usual
from tests.tiny_models import FAMILIES, NAMES, REFUSED

pytestmark = pytest.mark.both_blas

Checkpoints = Callable[..., Path]

UNFOLDED = ("falcon_h1_multipliers",)
"""mlx-lm's conversion loses something here: refused in its form, on both sides."""

MLX_FORM = [name for name in NAMES if name not in REFUSED and name not in UNFOLDED]
CHUNKED_RULE = ("qwen3_next", "qwen3_5", "qwen3_5_vision")


def to_torch(array: mx.array) -> torch.Tensor:
    """An mlx array as a torch tensor of the same bits (``uint32`` as ``int32``)."""
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.uint16))).view(torch.bfloat16)
    found = np.array(array)
    return torch.from_numpy(found.view(np.int32) if array.dtype == mx.uint32 else found)


# --- dequantising ---------------------------------------------------------------------------


@pytest.mark.parametrize("bits", weights.AFFINE_BITS)
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_dequantised_values_are_mlxs(bits: int, group_size: int) -> None:
    original = mx.random.normal((3, 5, 256), key=mx.random.key(bits))
    packed, scales, biases = mx.quantize(original, group_size=group_size, bits=bits)
    expected = mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)
    found = dequantise(
        to_torch(packed),
        to_torch(scales),
        to_torch(biases),
        Packing(bits, group_size),
        torch.float32,
    )
    assert np.array_equal(found.numpy(), np.array(expected))


def test_dequantised_values_are_rounded_once() -> None:
    original = mx.random.normal((4, 128), key=mx.random.key(1)).astype(mx.bfloat16)
    packed, scales, biases = mx.quantize(original, group_size=32, bits=4)
    parts = to_torch(packed), to_torch(scales), to_torch(biases)
    exact = dequantise(*parts, Packing(4, 32), torch.float32)
    assert torch.equal(dequantise(*parts, Packing(4, 32), torch.bfloat16), exact.bfloat16())
    assert not torch.equal(exact, exact.bfloat16().float())


def test_a_large_weight_is_unpacked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    original = mx.random.normal((37, 64), key=mx.random.key(3))
    packed, scales, biases = mx.quantize(original, group_size=32, bits=6)
    parts = to_torch(packed), to_torch(scales), to_torch(biases)
    whole = dequantise(*parts, Packing(6, 32), torch.float32)
    monkeypatch.setattr(weights, "_CHUNK_VALUES", 64 * 5)
    assert torch.equal(dequantise(*parts, Packing(6, 32), torch.float32), whole)


# --- mlx-lm's form --------------------------------------------------------------------------


def parameters(path: Path) -> dict[str, torch.Tensor]:
    """Everything that the producer's model of ``path`` computes with."""
    loaded = torch_side.load(read_checkpoint(path), "cpu", threads=1, progress=False)
    return dict(loaded.decoder.named_parameters()) | dict(loaded.decoder.named_buffers())


@pytest.mark.parametrize(
    ("name", "dtype"),
    usual(
        itertools.product(MLX_FORM, ("float32", "bfloat16")),
        [(name, "bfloat16") for name in MLX_FORM if name in FAMILIES],
    ),
)
def test_both_forms_of_a_checkpoint_are_one_model(
    name: str, dtype: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint(name, dtype=dtype)
    theirs = parameters(crossing.save_as_mlx(source, tmp_path / "saved"))
    ours = parameters(source)
    assert ours.keys() == theirs.keys()
    assert [key for key in ours if not torch.equal(ours[key], theirs[key])] == []
    assert [key for key in ours if ours[key].dtype != theirs[key].dtype] == []


def worst_error(path: Path, prompt_tokens: int = 70) -> float:
    """The largest relative error of torch's rows against mlx-lm's own prefill."""
    prefiller, loaded = crossing.producer(path), load(read_checkpoint(path))
    prompt = crossing.tokens(prompt_tokens)
    rows = crossing.collect(prefiller, prompt, 0, prompt_tokens)
    own = crossing.own_prefill(loaded.model, prompt, prompt_tokens)
    expected = install.extract(own, loaded.layout, prompt_tokens)
    return max(crossing.errors(loaded.layout, rows, expected).values())


@pytest.mark.parametrize("name", MLX_FORM)
def test_a_quantised_checkpoint_means_what_mlx_makes_of_it(
    name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = crossing.save_as_mlx(checkpoint(name), tmp_path / "quantised", bits=4)
    # the chunked rule against the sequential one: see tests/e2e/test_architectures.py
    assert worst_error(path) <= (2e-3 if name in CHUNKED_RULE else 5e-5)


def save_mixed(source: Path, target: Path, widths: tuple[int, ...]) -> Path:
    """As ``save_as_mlx``, with another width and group size from one tensor to the next."""
    count = 0

    def choose(_path: str, module: Any) -> bool | dict[str, Any]:
        nonlocal count
        count += 1
        if count % (len(widths) + 1) == 0:
            return False
        wide = module.weight.shape[-1] % 64 == 0 and count % 2 == 0
        return {"bits": widths[count % len(widths)], "group_size": 64 if wide else 32}

    return crossing.save_as_mlx(source, target, bits=4, choose=choose)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "mistral3"])
def test_widths_may_differ_from_tensor_to_tensor(
    name: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = save_mixed(checkpoint(name), tmp_path / "mixed", (3, 8, 6, 5, 2))
    assert worst_error(path) <= 5e-5


def test_a_quantised_model_has_the_dtype_of_its_scales(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = checkpoint("llama", dtype="bfloat16")
    path = crossing.save_as_mlx(source, tmp_path / "quantised", bits=8)
    assert read_checkpoint(path).dtype == "bfloat16"
    found = parameters(path)
    assert {tensor.dtype for tensor in found.values() if tensor.dim() > 1} == {torch.bfloat16}


# --- the plan -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.3.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.weight", None),
        ("language_model.lm_head.weight", None),
        ("model.vision_tower.blocks.0.weight", None),
        ("model.visual.blocks.0.weight", None),
        ("mtp.layers.0.mlp.up_proj.weight", None),
        ("model.layers.8.mlp.up_proj.weight", None),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_names_are_those_of_a_text_model(name: str, expected: str | None) -> None:
    assert canonical_name(name, hidden_layers=8) == expected


def test_every_tensor_is_used_once() -> None:
    shapes = {
        "model.layers.0.mlp.switch_mlp.gate_proj.weight": (4, 32, 16),
        "model.layers.0.mlp.switch_mlp.up_proj.weight": (4, 32, 16),
        "model.layers.0.mlp.switch_mlp.down_proj.weight": (4, 16, 32),
        "model.layers.1.mlp.switch_mlp.gate_proj.weight": (4, 32, 16),
        "model.layers.1.linear_attn.conv1d.weight": (16, 4, 1),
        "model.layers.1.input_layernorm.weight": (16,),
        "model.layers.1.linear_attn.norm.weight": (16,),
    }
    targets = plan("qwen3_next", shapes)
    used = [source for target in targets for source in target.sources]
    assert sorted(used) == sorted(shapes)
    ops = {target.name: target.op for target in targets}
    assert ops["model.layers.0.mlp.experts.gate_up_proj"] is Op.CONCAT_EXPERTS
    # a pair without its other half keeps its name, and is then refused by it
    assert ops["model.layers.1.mlp.switch_mlp.gate_proj.weight"] is Op.SAME
    assert ops["model.layers.1.linear_attn.conv1d.weight"] is Op.SWAP_LAST
    assert ops["model.layers.1.input_layernorm.weight"] is Op.MINUS_ONE
    assert ops["model.layers.1.linear_attn.norm.weight"] is Op.SAME


# --- refusals -------------------------------------------------------------------------------


def changed(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of the checkpoint ``source`` with ``change`` done to its tensors."""
    shutil.copytree(source, target)
    (file,) = target.glob("model*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "mlx" if "quantised" in source.name else "pt"})
    return target


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as refused:
        torch_side.load(read_checkpoint(path), "cpu", threads=1, progress=False)
    return refused.value


LOST = "model.layers.5.mlp.up_proj.weight"


def lose(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[LOST]


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.5.mlp.sideways_proj.weight"] = tensors[LOST].clone()


def crop(tensors: dict[str, torch.Tensor]) -> None:
    tensors[LOST] = tensors[LOST][:-1].clone()


@pytest.mark.parametrize(
    ("change", "reason", "field"),
    [
        (lose, "weights_incomplete", "layers.5.mlp.up_proj.weight"),
        (rename, "weights_unexpected", "layers.5.mlp.sideways_proj.weight"),
        (crop, "weights_shape_differs", "layers.5.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_too_few_or_too_many_is_refused_by_name(
    change: Callable[[dict[str, torch.Tensor]], None],
    reason: str,
    field: str,
    checkpoint: Checkpoints,
    tmp_path: Path,
) -> None:
    found = refusal(changed(checkpoint("llama"), tmp_path / "changed", change))
    assert found.reason == reason
    assert field in str(found.field)


def test_an_unknown_tensor_of_mlxs_form_is_refused_by_name(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    source = crossing.save_as_mlx(checkpoint("qwen3_moe"), tmp_path / "quantised", bits=4)

    def unpair(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("weight", "scales", "biases"):
            stem = "model.layers.2.mlp.switch_mlp"
            tensors[f"{stem}.north_proj.{part}"] = tensors.pop(f"{stem}.up_proj.{part}")

    found = refusal(changed(source, tmp_path / "changed", unpair))
    assert found.reason == "mlx_format_unsupported"
    assert "layers.2.mlp.switch_mlp" in str(found.field)


def opened(path: Path, config: dict[str, Any]) -> list[str]:
    files = sorted(path.glob("model*.safetensors"))
    with open_weights(
        files, config, architecture="llama", hidden_layers=8, dtype=torch.float32
    ) as tensors:
        return list(tensors)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"quant_method": "fp8"}}, "fp8"),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, "awq"),
        ({"quantize_activations": True}, "quantize_activations"),
    ],
)
def test_foreign_quantisation_is_refused_by_name(
    config: dict[str, Any], field: str, checkpoint: Checkpoints
) -> None:
    with pytest.raises(ConfigError) as refused:
        opened(checkpoint("llama"), config)
    assert refused.value.reason == "quantisation_unsupported"
    assert refused.value.found == field


QUERY = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("override", "reason", "field"),
    [
        ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, "quantisation_unsupported", QUERY),
        ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, "quantisation_unsupported", QUERY),
        ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, "quantisation_unsupported", QUERY),
        ({"bits": 7, "group_size": 32}, "quantisation_unsupported", QUERY),
        ({"bits": 8, "group_size": 32}, "quantisation_inconsistent", QUERY),
    ],
)
def test_a_packing_that_is_not_the_files_is_refused(
    override: dict[str, Any], reason: str, field: str, checkpoint: Checkpoints, tmp_path: Path
) -> None:
    path = crossing.save_as_mlx(checkpoint("llama"), tmp_path / "quantised", bits=4)
    config = {"quantization": {"bits": 4, "group_size": 32, QUERY: override}}
    with pytest.raises(ConfigError) as refused:
        opened(path, config)
    assert refused.value.reason == reason
    assert refused.value.field == field


def test_scales_without_their_biases_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    source = crossing.save_as_mlx(checkpoint("llama"), tmp_path / "quantised", bits=4)
    path = changed(source, tmp_path / "changed", lambda tensors: tensors.pop(f"{QUERY}.biases"))
    with pytest.raises(ConfigError) as refused:
        opened(path, {"quantization": {"bits": 4, "group_size": 32}})
    assert (refused.value.reason, refused.value.field) == (
        "weights_incomplete",
        f"{QUERY}.biases",
    )


def test_weights_that_are_not_floats_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    def pack(tensors: dict[str, torch.Tensor]) -> None:
        tensors[LOST] = tensors[LOST].to(torch.int8)

    path = changed(checkpoint("llama"), tmp_path / "changed", pack)
    with pytest.raises(ConfigError) as refused:
        opened(path, {})
    assert (refused.value.reason, refused.value.field) == ("weights_dtype_unsupported", LOST)


def test_nothing_is_read_before_the_model_asks(checkpoint: Checkpoints) -> None:
    files = sorted(checkpoint("llama").glob("model*.safetensors"))
    with open_weights(
        files, {}, architecture="llama", hidden_layers=8, dtype=torch.float32
    ) as tensors:
        assert tensors[LOST][...].shape == (128, 64)
        with pytest.raises(IndexError):
            tensors[LOST][0]
