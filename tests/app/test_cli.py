"""The command line's manners: exit statuses and one sentence instead of a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from app import cli
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
    def fail() -> None:
        raise raised

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == status


def test_planning_imports_neither_framework() -> None:
    script = (
        "import sys, app.cli; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'mlx', 'mlx_lm', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
