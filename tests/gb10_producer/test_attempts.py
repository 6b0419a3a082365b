"""How often a load began without an end: what of it outlives a process, and what does not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gb10_producer.attempts import MARK, MOST, Attempt, forget, unended

LOADING = """
import sys
from pathlib import Path
from gb10_producer.attempts import Attempt

Attempt(Path(sys.argv[1])).begin()
print("loading", flush=True)
sys.stdin.read()
"""


def test_a_load_that_ends_leaves_nothing(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path)
    assert unended(tmp_path) == 0
    attempt.begin()
    assert unended(tmp_path) == 1
    attempt.end()
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_killed_is_counted(tmp_path: Path) -> None:
    for count in range(1, MOST + 1):
        child = subprocess.Popen(
            [sys.executable, "-c", LOADING, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"loading\n"
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
        assert unended(tmp_path) == count
    forget(tmp_path)
    assert unended(tmp_path) == 0


def test_one_that_is_withdrawn_was_never_begun(tmp_path: Path) -> None:
    for before in (0, 1):
        attempt = Attempt(tmp_path)
        attempt.begin()
        attempt.withdraw()
        assert unended(tmp_path) == before
        Attempt(tmp_path).begin()


def test_one_that_is_given_up_is_not_tried_again(tmp_path: Path) -> None:
    Attempt(tmp_path).give_up()
    assert unended(tmp_path) == MOST


def test_a_mark_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there: list[bool] = []
    monkeypatch.setattr(
        "gb10_producer.attempts.sync", lambda descriptor: there.append((tmp_path / MARK).exists())
    )
    Attempt(tmp_path).begin()
    assert there == [False, True], "the file, then the directory that has its name"


@pytest.mark.parametrize("content", [b"", b"x", b"\xff", b"-1"])
def test_what_is_no_mark_counts_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / MARK).write_bytes(content)
    assert unended(tmp_path) == 0


def test_a_mark_that_cannot_be_written_stops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    with caplog.at_level(logging.WARNING, "gb10_producer"):
        Attempt(gone).begin()
    assert "cannot be marked" in caplog.text
