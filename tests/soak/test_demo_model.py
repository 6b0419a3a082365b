"""The demo with its real model, as `make demo` runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.soak


def test_smollm2_answers_the_same_whoever_prefills() -> None:
    command = [sys.executable, "-m", "app.cli", "demo", "--compare-local", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == "remote"
    assert found["prompt_tokens"] >= 700
    assert found["same_tokens"] is True
    assert found["answer"].strip()
