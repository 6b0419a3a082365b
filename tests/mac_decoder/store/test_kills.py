"""SIGKILL at random moments, against a ledger outside of the store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def kill(directory: Path, lives: int, seed: int, timeout_s: float) -> tuple[int, int]:
    """How many published cuts were held in the end, and how many were published."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.mac_decoder.store.killed", directory, str(lives), str(seed)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    held, published = map(int, done.stdout.split())
    return held, published


def test_published_cuts_survive_a_few_kills(tmp_path: Path) -> None:
    held, published = kill(tmp_path / "cache", 8, 1, 150)
    assert 0 < held <= published


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_published_cuts_survive_a_thousand_kills(tmp_path: Path) -> None:
    held, published = kill(tmp_path / "cache", 1000, 2, 3500)
    assert 0 < held <= published
