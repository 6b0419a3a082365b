"""The table of architectures: what is declared, what is told to mlx-lm, what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol.architectures import ARCHITECTURES, REFUSED, resolve, text_config
from protocol.architectures.rope import rope
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray
from tests import tiny_models
from tests.refused_models import REFUSED_VARIANTS, Case

Fixture = Callable[..., Path]

LETTERS = {FullLayer: "K", SlidingLayer: "R", RecurrentLayer: "A"}

STACKS = {
    "llama": "KKKKKKKK",
    "mistral_window": "KKKKKKKK",
    "gemma2": "KKKKKKKK",
    "gemma3_text": "RRRRRKRR",
    "gemma3_text_every_4th": "RRRKRRRK",
    "cohere2": "RRRKRRRK",
    "exaone4": "RRRKRRRK",
    "exaone4_full": "KKKKKKKK",
    "olmo3": "RRRKRRRK",
    "gpt_oss": "RKRKRKRK",
    "afmoe": "RRRKRRRK",
    "muse_glimmer": "RRRKRRRK",
    "deepseek_v3": "KKKKKKKK",
    "qwen3_next": "AAAKAAAK",
    "qwen3_5": "AAAKAAAK",
    "lfm2": "AAKAAAKA",
    "granitemoehybrid": "AAKAAAKA",
    "falcon_h1": "AKAKAKAKAKAKAKAK",
}
"""Kind of each cache in order: K all rows, R the last window, A a state."""


def _config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def _layout(path: Path) -> Layout:
    return read_checkpoint(path).layout


@pytest.mark.parametrize("name", STACKS)
def test_layers_are_of_the_declared_kinds(name: str, checkpoint: Fixture) -> None:
    layout = _layout(checkpoint(name))
    assert "".join(LETTERS[type(layer)] for layer in layout.layers) == STACKS[name]
    windows = [layer.window for layer in layout.layers if isinstance(layer, SlidingLayer)]
    assert set(windows) <= {tiny_models.WINDOW}


def test_dimensions_of_rows_and_states(checkpoint: Fixture) -> None:
    assert _layout(checkpoint("llama")).layers[3] == FullLayer(3, 2, 16, 16, "float32")
    # the latent counts as keys, its rotary part as values, both with one head
    assert _layout(checkpoint("deepseek_v3")).layers[0] == FullLayer(0, 1, 16, 8, "float32")
    delta = (
        StateArray("conv", (3, 2 * 2 * 16 + 4 * 32), "bfloat16"),
        StateArray("state", (4, 32, 16), "float32"),
    )
    assert _layout(checkpoint("qwen3_next", "bfloat16")).layers[0] == RecurrentLayer(0, delta)
    mamba = (
        StateArray("conv", (3, 128 + 2 * 16), "bfloat16"),
        StateArray("state", (8, 16, 16), "float32"),
    )
    layers = _layout(checkpoint("falcon_h1", "bfloat16")).layers
    assert layers[2] == RecurrentLayer(1, mamba, member=0)
    assert layers[3] == FullLayer(1, 2, 16, 16, "bfloat16", member=1)
    short = (StateArray("conv", (2, 64), "float32"),)
    assert _layout(checkpoint("lfm2")).layers[1] == RecurrentLayer(1, short)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_entry_has_a_tiny_model(name: str, checkpoint: Fixture) -> None:
    assert resolve(_config(checkpoint(name))).name == name


@pytest.mark.parametrize("name", ["jamba", "granitemoehybrid_groups", "falcon_h1_norm_groups"])
def test_refused_models_are_refused_before_anything_is_read(name: str, checkpoint: Fixture) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(_config(checkpoint(name)))
    assert caught.value.reason == "architecture_unsupported"


def test_a_refusal_says_why() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({"model_type": "jamba"})
    assert REFUSED["jamba"] in caught.value.message
    with pytest.raises(ConfigError) as caught:
        resolve({"model_type": "rwkv7"})
    assert (caught.value.reason, caught.value.field, caught.value.found) == (
        "architecture_unsupported",
        "model_type",
        "rwkv7",
    )


@pytest.mark.parametrize("case", REFUSED_VARIANTS, ids=lambda c: f"{c.base}: {c.title}")
def test_variants_are_refused_by_field(case: Case, checkpoint: Fixture) -> None:
    config = _config(checkpoint(case.base))
    resolve(config)
    changed = copy.deepcopy(config)
    for name, value in case.changes.items():
        place = changed
        *outer, last = name.split(".")
        for part in outer:
            place = place[part]
        place[last] = value
    with pytest.raises(ConfigError) as caught:
        resolve(changed)
    assert (caught.value.reason, caught.value.field) == ("architecture_unsupported", case.field)


def test_a_missing_field_is_named(checkpoint: Fixture) -> None:
    config = _config(checkpoint("granitemoehybrid"))
    del config["mamba_d_state"]
    with pytest.raises(ConfigError) as caught:
        resolve(config).layout(config, "float32")
    assert (caught.value.reason, caught.value.field) == ("config_incomplete", "mamba_d_state")


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("llama", {"rope_theta": tiny_models.THETA}),
        ("qwen2", {"rope_theta": tiny_models.THETA, "rope_scaling": None}),
        (
            "llama_yarn",
            {
                "rope_theta": tiny_models.THETA,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 128,
                },
            },
        ),
        (
            "gemma3_text",
            {"rope_theta": tiny_models.THETA, "rope_local_base_freq": tiny_models.LOCAL_THETA},
        ),
        ("olmo3", {"rope_theta": tiny_models.THETA}),
    ],
)
def test_both_generations_of_files_mean_the_same(
    name: str, old: dict[str, Any], checkpoint: Fixture
) -> None:
    new = _config(checkpoint(name))
    older = {key: value for key, value in new.items() if key != "rope_parameters"} | old
    ours, theirs = resolve(new).mlx_overrides(new), resolve(older).mlx_overrides(older)
    for overrides in (ours, theirs):
        # written by transformers 5 alone, and no mlx-lm reads it
        (overrides["rope_scaling"] or {}).pop("truncate", None)
    assert ours == theirs


def test_the_newer_spelling_wins_as_it_does_in_transformers() -> None:
    both = {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 7.0}
    assert rope(both).theta == 5.0
    assert rope({"rope_theta": 7.0}).theta == 7.0
    assert rope({}, theta=9.0).theta == 9.0


def test_overrides_are_nested_where_the_language_model_is(checkpoint: Fixture) -> None:
    config = _config(checkpoint("mistral3_mistral"))
    overrides = resolve(config).mlx_overrides(config)
    assert list(overrides) == ["text_config"]
    assert overrides["text_config"]["rope_theta"] == tiny_models.THETA
    # what is not overridden stays
    assert overrides["text_config"]["hidden_size"] == text_config(config)["hidden_size"]


def test_mlx_converted_falcon_with_multipliers_is_refused(checkpoint: Fixture) -> None:
    config = _config(checkpoint("falcon_h1_multipliers"))
    entry, name = resolve(config), "model.layers.0.mamba.conv1d.weight"
    entry.refuse_tensors(config, {name: (160, 1, 4)})
    with pytest.raises(ConfigError) as caught:
        entry.refuse_tensors(config, {name: (160, 4, 1)})
    assert caught.value.field == "attention_in_multiplier"
    plain = _config(checkpoint("falcon_h1"))
    resolve(plain).refuse_tensors(plain, {name: (160, 4, 1)})
