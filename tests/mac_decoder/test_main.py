"""What the command refuses before it starts a child."""

from __future__ import annotations

import shutil

import pytest

from mac_decoder.__main__ import look_ahead
from mac_decoder.config import DecoderConfig
from protocol import releases
from protocol.errors import ConfigError


def test_a_release_that_was_not_measured_is_refused_first(monkeypatch):
    monkeypatch.setattr(releases, "installed", lambda names: {"mlx-lm": "0.33.0"})
    with pytest.raises(ConfigError) as caught:
        look_ahead(DecoderConfig(model="nowhere"))
    assert caught.value.reason == "release_not_measured"


def test_another_patch_release_is_told_of_and_served(monkeypatch, checkpoint, caplog):
    monkeypatch.setattr(releases, "installed", lambda names: {"mlx-lm": "0.32.99"})
    look_ahead(DecoderConfig(model=str(checkpoint("llama"))))
    assert "0.32.99" in caplog.text


def test_a_broken_checkpoint_is_refused_before_a_child_is_started(checkpoint, tmp_path):
    """A child imports MLX first, which takes seconds."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    config = DecoderConfig(model=str(path))
    look_ahead(config)
    for name, reason in (
        ("tokenizer.json", "tokenizer_unloadable"),
        ("model.safetensors", "weights_truncated"),
    ):
        with (path / name).open("r+b") as file:
            file.truncate((path / name).stat().st_size - 7)
        with pytest.raises(ConfigError) as caught:
            look_ahead(config)
        assert caught.value.reason == reason


def test_a_checkpoint_without_its_tokenizer_names_the_file(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("llama"), tmp_path / "model")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as caught:
        look_ahead(DecoderConfig(model=str(path)))
    assert caught.value.reason == "tokenizer_missing"
    assert "tokenizer.json" in caught.value.message
