"""Stand-ins for the system's tools: real scripts on PATH that record how they were called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SCRIPT = """\
#!/bin/sh
record() {{ for word in "$@"; do printf '%s\\t' "$word"; done; printf '\\n'; }}
record "$@" >> {calls}
{body}
"""


class FakeTool:
    """One script. ``body`` is shell; it sees its arguments, and what it prints is its answer."""

    def __init__(self, directory: Path, name: str, body: str) -> None:
        self._calls = directory / f"{name}.calls"
        self._script = directory / name
        self.becomes(body)

    def becomes(self, body: str) -> None:
        """Answer in another way from here on."""
        self._script.write_text(_SCRIPT.format(calls=self._calls, body=body))
        self._script.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        """What it was called with, a line each."""
        if not self._calls.exists():
            return []
        return [line.strip().replace("\t", " ") for line in self._calls.read_text().splitlines()]


def put_on_path(
    directory: Path, monkeypatch: pytest.MonkeyPatch, **bodies: str
) -> dict[str, FakeTool]:
    """These tools, before all others on PATH."""
    directory.mkdir(exist_ok=True)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")
    return {name: FakeTool(directory, name, body) for name, body in bodies.items()}
