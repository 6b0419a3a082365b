"""`baton demo` as a user runs it: real processes, real sockets, a tiny random checkpoint."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from app import commands
from tests.e2e.running import until

DEMO = [sys.executable, "-m", "app.cli", "demo"]


def offspring(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def all_gone(processes: list[psutil.Process], within_s: float = 20.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not alive


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("document") / "document.txt"
    made.write_text("The ferry leaves at nine. It carries letters, bicycles and bread. " * 6)
    return made


def test_the_demo_answers_the_same_remotely_and_locally(checkpoint, document: Path) -> None:
    arguments = ["--model", str(checkpoint("llama")), "--document", str(document)]
    arguments += ["--question", "When does it leave?", "--max-tokens", "12"]
    done = subprocess.run(
        [*DEMO, *arguments, "--compare-local", "--json"],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == "remote"
    assert found["prompt_tokens"] > 64
    assert found["transferred_bytes"] > 0
    assert found["same_tokens"] is True
    assert found["ttft_ms"] > 0
    assert found["local_ttft_ms"] > 0
    assert {"compute", "wire", "verify", "install", "boundary_decode"} <= set(found["phases"])
    assert found["answer"]


def test_a_table_is_printed_and_ctrl_c_ends_everything(checkpoint, document: Path) -> None:
    demo, children, told = serving(checkpoint("llama"), document)
    os.kill(demo.pid, signal.SIGINT)
    printed, last = demo.communicate(timeout=60)
    assert demo.returncode == 0
    assert all_gone(children)
    for title in ("prompt tokens", "who prefilled", "remote", "bytes shipped", "tokens/s"):
        assert title in printed
    assert "finish_reason length" in printed
    assert "the decoder computed the last prompt token itself" in printed
    assert "curl http://127.0.0.1:" in told
    assert "stopping…" in last


def test_it_says_at_once_what_it_does_and_leaves_soon_while_it_loads(
    checkpoint, document: Path
) -> None:
    arguments = ["--model", str(checkpoint("llama")), "--document", str(document)]
    demo = subprocess.Popen([*DEMO, *arguments], stderr=subprocess.PIPE, text=True)
    assert demo.stderr is not None
    assert "producer" in demo.stderr.readline()
    assert "start the producer" in demo.stderr.readline()
    until(lambda: len(offspring(demo.pid)) > 0)
    children = offspring(demo.pid)
    os.kill(demo.pid, signal.SIGINT)
    assert demo.stderr.readline() == "stopping…\n"
    _, last = demo.communicate(timeout=60)
    assert "loads the model (" not in last, "a producer that loads is not waited for"
    assert demo.returncode == 130
    assert all_gone(children)


@pytest.mark.soak
def test_children_end_even_when_the_demo_is_killed(checkpoint, document: Path) -> None:
    demo, children, _ = serving(checkpoint("llama"), document)
    os.kill(demo.pid, signal.SIGKILL)
    demo.communicate(timeout=60)
    assert all_gone(children)


def serving(model: Path, document: Path) -> tuple[subprocess.Popen[str], list[psutil.Process], str]:
    """A demo that has answered and keeps serving, all its descendants, and what it told."""
    arguments = ["--model", str(model), "--document", str(document), "--max-tokens", "4"]
    demo = subprocess.Popen(
        [*DEMO, *arguments, "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert demo.stderr is not None
    told = ""
    while "Ctrl-C ends both" not in told:
        line = demo.stderr.readline()
        assert line, told
        told += line
    children = offspring(demo.pid)
    assert len(children) >= 4
    return demo, children, told


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff\xfe\x00\x81", "document_unreadable"), (b"  \n", "document_empty")],
)
def test_a_document_without_text_is_a_sentence_before_anything_starts(
    content: bytes,
    reason: str,
    checkpoint,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = tmp_path / "document"
    document.write_bytes(content)
    arguments = ["--model", str(checkpoint("llama")), "--document", str(document)]
    monkeypatch.setattr(sys, "argv", ["baton", "demo", *arguments])
    before = offspring(os.getpid())
    with pytest.raises(SystemExit) as ended:
        commands.run()
    assert ended.value.code == 78
    assert reason in capsys.readouterr().err
    assert offspring(os.getpid()) == before


def test_a_missing_model_is_a_sentence_and_leaves_nothing_running(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--model", str(tmp_path / "none")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 78
    assert "model_missing" in done.stderr
