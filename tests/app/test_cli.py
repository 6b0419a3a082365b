"""The command line's manners: exit statuses and one sentence instead of a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from app import commands
from protocol.errors import ConfigError, EngineFault, TransferError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app.cli", *arguments], capture_output=True, text=True, timeout=120
    )


def test_an_unknown_layout_is_a_sentence_and_status_78() -> None:
    done = run("plan", "--layout", "nothing", "--prompt", "5")
    assert done.returncode == 78
    assert "layout_unknown" in done.stderr
    assert "muse-glimmer" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_says_where_it_looked(tmp_path: Path) -> None:
    done = run("model", "import", str(tmp_path / "no.gguf"), "--to", str(tmp_path / "made"))
    assert done.returncode == 78
    assert "model_missing" in done.stderr
    assert not (tmp_path / "made").exists()


def test_a_decoder_that_is_not_there_is_status_1() -> None:
    done = run("status", "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "decoder_unreachable" in done.stderr


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (ConfigError("x"), 78),
        (TransferError("x"), 1),
        (EngineFault("x"), 75),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_kind_of_failure_has_its_status(
    raised: BaseException, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(commands, "app", fail)
    with pytest.raises(SystemExit) as ended:
        commands.run()
    assert ended.value.code == status


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["plan", "--x"], "baton plan: error: No such option: --x (usage)"),
        (["nonsense"], "baton: error: No such command 'nonsense' (usage)"),
        (["plan", "--layout", "x"], "baton: error: there is no layout called 'x' (layout_unknown)"),
        (["serve"], "baton serve: error: the following arguments are required: --model"),
        (["produce"], "baton produce: error: Give either --model DIR or --synthetic LAYOUT"),
    ],
)
def test_every_command_complains_in_the_same_layout(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))  # nobody is paired, nothing was received
    monkeypatch.setattr(sys, "argv", ["baton", *arguments])
    with pytest.raises(SystemExit) as ended:
        commands.run()
    assert ended.value.code in (2, 78)
    lines = capsys.readouterr().err.splitlines()
    told = [line for line in lines if ": error: " in line]
    assert len(told) == 1
    assert told[0].startswith(complaint)


def test_the_version_is_the_packages() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"baton {version('baton-llm')}\n")


def test_no_command_is_answered_by_help_alone() -> None:
    done = run()
    assert done.returncode == 2
    assert "Commands" in done.stdout
    assert "error" not in done.stderr


def test_both_sides_are_called_by_the_command_that_people_type() -> None:
    for side in ("serve", "produce"):
        assert run(side, "--help").stdout.startswith(f"usage: baton {side} ")


def test_no_command_imports_a_framework_nor_another_command() -> None:
    script = """
import json, sys
from typer.main import get_command
from app import commands
group = get_command(commands.app)
alone = [name for name in sys.modules if name in ("app.doctor", "app.node", "app.bench")]
group.get_command(None, "key")
alone += [name for name in sys.modules if name in ("app.doctor", "app.node", "app.bench")]
names = group.list_commands(None)
found = [group.get_command(None, name).name for name in names]
frameworks = [name for name in ("torch", "mlx", "mlx_lm", "transformers") if name in sys.modules]
print(json.dumps([alone, frameworks, names, found]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    alone, frameworks, names, found = json.loads(done.stdout)
    assert (alone, frameworks) == ([], [])
    assert len(names) > 10
    assert found == names


def test_what_is_similar_is_suggested() -> None:
    done = run("kee")
    assert done.returncode == 2
    assert "Did you mean 'key'?" in done.stderr
