"""Each machine needs only its own half, and a command says which half it lacks."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from app import halves
from app.cli import app
from protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("command", "lacking", "extra"),
    [
        (["serve", "--model", "x"], "mlx", "decoder"),
        (["produce", "--model", "x"], "torch", "producer"),
        (["demo", "--model", "x"], "torch", "both"),
        (["model", "import", "x", "--to", "y"], "mlx_lm", "both"),
        (["bench", "ttft", "--model", "x"], "mlx", "both"),
    ],
)
def test_a_command_without_its_half_says_what_to_install(
    command: list[str], lacking: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = halves.find_spec
    monkeypatch.setattr(halves, "find_spec", lambda name: None if name == lacking else real(name))
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert refused.value.reason == "half_not_installed"
    assert lacking in str(refused.value.found)
    assert f"[{extra}]" in str(refused.value.hint)
