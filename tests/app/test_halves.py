"""Each machine needs only its own half, and a command says which half it lacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from app.commands import app
from protocol import halves
from protocol.errors import ConfigError


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a module look as if it was not installed."""

    def remove(lacking: str) -> None:
        real = halves.find_spec
        monkeypatch.setattr(
            halves, "find_spec", lambda name: None if name == lacking else real(name)
        )

    return remove


@pytest.mark.parametrize(
    ("command", "lacking", "extra"),
    [
        (["demo", "--model", "x"], "torch", "both"),
        (["demo", "--model", "x"], "fastapi", "both"),
        (["model", "import", "x", "--to", "y"], "mlx_lm", "both"),
        (["bench", "ttft", "--model", "x"], "mlx", "both"),
    ],
)
def test_a_command_without_its_half_says_what_to_install(
    command: list[str], lacking: str, extra: str, without: Callable[[str], None]
) -> None:
    without(lacking)
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, command, catch_exceptions=False)
    assert refused.value.reason == "half_not_installed"
    assert lacking in str(refused.value.found)
    assert f"pip install -c constraints.txt '.[{extra}]'" in str(refused.value.hint)


PRODUCE = ["produce", "--pairing", "x", "--model", "x"]


@pytest.mark.parametrize(
    ("command", "lacking", "extra"),
    [(["serve", "--model", "x"], "uvicorn", "decoder"), (PRODUCE, "torch", "producer")],
)
def test_a_side_without_its_half_says_so_and_still_explains_itself(
    command: list[str],
    lacking: str,
    extra: str,
    without: Callable[[str], None],
) -> None:
    without(lacking)
    refused = CliRunner().invoke(app, command, catch_exceptions=False)
    assert refused.exit_code == 78
    assert "half_not_installed" in refused.stderr
    assert f"pip install -c constraints.txt '.[{extra}]'" in refused.stderr
    asked = CliRunner().invoke(app, [command[0], "--help"], catch_exceptions=False)
    assert asked.exit_code == 0
    assert f"usage: baton {command[0]}" in asked.output


@pytest.mark.parametrize(
    ("side", "words"),
    [("mac_decoder", ["--model", "x"]), ("gb10_producer", PRODUCE[1:])],
)
def test_a_side_can_be_run_where_only_the_core_is_installed(side: str, words: list[str]) -> None:
    """No traceback: what the other packages would bring is not imported before it is looked for."""
    script = f"""
import importlib.util, runpy, sys
gone = {sorted({*halves.MODULES["both"], "starlette", "pydantic", "tokenizers"})!r}
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in gone:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Nothing())
found = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in gone else found(name)
sys.argv = ["x", *{words!r}]
runpy.run_module({side!r}, run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert "half_not_installed" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 78
