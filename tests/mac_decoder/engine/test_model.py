"""Loading: mlx-lm means what transformers means, without a change to any file, or refuses."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import quantize_model, save_model

from mac_decoder.engine.model import load
from mac_decoder.kv.install import layout_of
from protocol.architectures import ARCHITECTURES, text_config
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from tests import measured_models
from tests.measured_models import CARRIED, measure, recorded
from tests.ordinary import usual
from tests.tiny_models import FAMILIES, NAMES, THETA

Fixture = Callable[..., Path]

SLACK = 3.0
"""How far a measurement may be above the record, or above what torch differs from itself by:
another BLAS rounds otherwise."""
NOISE = 2e-5


@pytest.mark.parametrize("name", usual(CARRIED, FAMILIES))
def test_logits_are_those_of_transformers(name: str, checkpoint: Fixture) -> None:
    """And without what Baton tells mlx-lm they are not, silently or with an error."""
    path = checkpoint(name)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    found, record = measure(path, against_itself=False), recorded()[name]
    assert found.alone == record.alone
    assert found.short <= SLACK * max(record.short, record.torch_self) + NOISE
    assert found.long <= SLACK * max(record.long, record.torch_self) + NOISE
    if found.alone == "silent":
        assert found.alone_off > 1000 * found.long
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_theta", 10000.0), ("rope_scaling", {"rope_type": "linear", "factor": 2.0})],
)
def test_the_measurement_sees_another_rope(field: str, value: Any, checkpoint: Fixture) -> None:
    """A control: the comparison above can fail."""
    from mlx_lm.utils import load_model

    known = read_checkpoint(checkpoint("llama"))
    right = known.architecture.mlx_overrides(known.config)
    ids = mx.array([measured_models.prompt()])
    ours, _ = load_model(known.path, model_config=right)
    other, _ = load_model(known.path, model_config=right | {field: value})
    assert float(mx.abs(ours(ids) - other(ids)).max()) > measured_models.SILENT


def test_the_page_says_what_was_measured(checkpoint: Fixture) -> None:
    described = {name: read_checkpoint(checkpoint(name)) for name in CARRIED}
    assert measured_models.PAGE.read_text() == measured_models.page(recorded(), described)


@pytest.mark.parametrize("name", ["llama", "mistral3", "falcon_h1"])
def test_what_is_loaded(name: str, checkpoint: Fixture) -> None:
    known = read_checkpoint(checkpoint(name))
    loaded = load(known)
    assert layout_of(loaded.model) == known.layout == loaded.layout
    assert loaded.vocabulary == 512
    assert loaded.stop_token_ids == {1}


def test_a_layout_that_differs_is_refused(checkpoint: Fixture) -> None:
    known = read_checkpoint(checkpoint("muse_glimmer"))
    layers = list(known.layout.layers)
    layers[0] = dataclasses.replace(known).layout.layers[3]
    wrong = dataclasses.replace(known, layout=type(known.layout)(tuple(layers)))
    with pytest.raises(ConfigError) as caught:
        load(wrong)
    assert caught.value.reason == "layout_differs"


def test_weights_of_another_model_are_refused(checkpoint: Fixture, tmp_path: Path) -> None:
    path = _copy(checkpoint("llama"), tmp_path)
    shutil.copy(checkpoint("qwen3") / "model.safetensors", path)
    with pytest.raises(ConfigError) as caught:
        load(read_checkpoint(path))
    assert caught.value.reason == "model_unloadable"


def test_weights_that_are_not_finite_are_refused(checkpoint: Fixture, tmp_path: Path) -> None:
    path = _copy(checkpoint("llama"), tmp_path)
    weights = dict(mx.load(str(path / "model.safetensors")))
    weights["model.norm.weight"] = mx.full((64,), float("nan"))
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    with pytest.raises(ConfigError) as caught:
        load(read_checkpoint(path))
    assert caught.value.reason == "model_not_finite"


def test_more_weights_than_memory_are_refused(checkpoint: Fixture) -> None:
    known = dataclasses.replace(read_checkpoint(checkpoint("llama")), nbytes=1 << 60)
    with pytest.raises(ConfigError) as caught:
        load(known)
    assert (caught.value.reason, caught.value.expected) == ("not_enough_memory", 1 << 60)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "tokenizer_missing"),
        ("{}", "tokenizer_unloadable"),
        ("no json", "tokenizer_unloadable"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(
    text: str | None, reason: str, checkpoint: Fixture, tmp_path: Path
) -> None:
    path = _copy(checkpoint("llama"), tmp_path)
    (path / "tokenizer.json").unlink()
    if text is not None:
        (path / "tokenizer.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(read_checkpoint(path))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("llama", "bfloat16", 4),
        ("llama", "float16", 8),
        ("muse_glimmer", "bfloat16", 4),
        ("gpt_oss", "float32", 8),
        ("deepseek_v3_dense", "bfloat16", 8),
        ("qwen3_next", "float32", 4),
        ("qwen3_5", "bfloat16", 8),
        ("granitemoehybrid_dense", "bfloat16", 4),
        ("falcon_h1", "bfloat16", 4),
    ],
)
def test_models_saved_and_quantised_by_mlx_load(
    name: str, dtype: str, bits: int, checkpoint: Fixture, tmp_path: Path
) -> None:
    source = read_checkpoint(checkpoint(name, dtype))
    path = _copy(source.path, tmp_path)
    (path / "model.safetensors").unlink()
    model, config = quantize_model(
        load(source).model, dict(source.config), group_size=32, bits=bits
    )
    save_model(path, model)
    (path / "config.json").write_text(json.dumps(config))
    known = read_checkpoint(path)
    assert known.dtype == dtype
    assert known.layout == source.layout
    assert known.quantisation is not None
    assert known.identity != source.identity
    loaded, ids = load(known), mx.array([measured_models.prompt()[:50]])
    assert loaded.layout == source.layout
    assert mx.array_equal(loaded.model(ids), model(ids)).item()


def test_mlx_saved_falcon_with_multipliers_is_refused(checkpoint: Fixture, tmp_path: Path) -> None:
    source = read_checkpoint(checkpoint("falcon_h1_multipliers"))
    path = _copy(source.path, tmp_path)
    model = load(source).model
    (path / "model.safetensors").unlink()
    save_model(path, model)
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    assert caught.value.reason == "architecture_unsupported"


@pytest.mark.skipif(mx.metal.is_available(), reason="a GPU multiplies experts in any type")
def test_what_this_backend_cannot_run_is_refused(checkpoint: Fixture) -> None:
    with pytest.raises(ConfigError) as caught:
        load(read_checkpoint(checkpoint("qwen3_moe", "bfloat16")))
    assert caught.value.reason == "model_unrunnable"


MODULES = {name: "llama" if name == "mistral" else name for name in ARCHITECTURES}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_fields_that_a_file_leaves_out_mean_what_transformers_means(
    name: str, checkpoint: Fixture
) -> None:
    """mlx-lm's defaults differ from transformers'; the decoder passes transformers'."""
    if name == "mistral3":
        pytest.skip("its two language models are entries of their own")
    known = read_checkpoint(checkpoint(name))
    text = text_config(known.config)
    defaults = _transformers_defaults(text["model_type"])
    for field in _arguments(MODULES[name]):
        # without a default mlx-lm refuses, or sees from the weights that something is missing
        silent_default = field.default not in (dataclasses.MISSING, None)
        if not silent_default or _is_shape(field.name) or field.name not in defaults:
            continue
        if defaults[field.name] in (None, field.default):
            continue
        silent = {key: value for key, value in text.items() if key != field.name}
        passed = text_config(known.architecture.mlx_overrides(silent))
        assert passed.get(field.name) == defaults[field.name], field.name


def _is_shape(name: str) -> bool:
    """Whether weights of another shape, or the table itself, would give the field away."""
    ends = ("_size", "_dim", "_rank", "_heads", "_layers", "_experts", "_types", "_idxs", "_cache")
    shapes = ("head_dim", "mamba_d_", "mamba_expand", "mamba_n_", "rope_", "layer_rope")
    named = ("max_position_embeddings", "model_type")
    return name.endswith(ends) or name.startswith(shapes) or name in named


def _arguments(module: str) -> tuple[dataclasses.Field[Any], ...]:
    found = importlib.import_module(f"mlx_lm.models.{module}")
    return dataclasses.fields(getattr(found, "TextModelArgs", found.ModelArgs))


def _transformers_defaults(model_type: str) -> dict[str, Any]:
    import transformers

    return transformers.CONFIG_MAPPING[model_type]().to_dict()


def test_tiny_models_depend_on_position_and_history(checkpoint: Fixture) -> None:
    """Else equality of tokens would show nothing."""
    assert THETA not in (1e4, 5e5, 1e6)
    assert set(CARRIED) < set(NAMES)
    for name in ("llama", "muse_glimmer"):
        model = load(read_checkpoint(checkpoint(name))).model
        prompt = measured_models.prompt()[:90]
        swapped = [*prompt[:60], prompt[61], prompt[60], *prompt[62:]]
        left, right = (np.array(model(mx.array([p]))[0, -1]) for p in (prompt, swapped))
        assert np.abs(left - right).max() > 0.05


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target / "copy"))
