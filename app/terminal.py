"""How the commands speak: one console for people on stderr or stdout, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from protocol.errors import BatonError, told

out = Console(highlight=False)
"""What a command answers."""

err = Console(stderr=True, highlight=False)
"""Progress and complaints: never mixed into an answer that is piped on."""


def complain(error: BatonError, program: str = "baton") -> None:
    """Print an error as a sentence, with what was found and what to do about it."""
    text = Text(told(error, program))
    text.stylize("bold red", len(program) + 2, len(program) + 7)
    err.print(text, soft_wrap=True)


def print_json(value: object) -> None:
    """Print one JSON value on stdout, indented."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    sys.stdout.flush()


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on stderr; they vanish when done and stay silent without a terminal."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=err,
        transient=True,
    ) as bars:
        yield bars


@contextmanager
def step(title: str) -> Iterator[None]:
    """Show that something of unknown length is going on, then that it is done."""
    with progress() as bars:
        bars.add_task(title, total=None, note="")
        yield
    err.print(f"[green]✓[/] {title}")


def human_bytes(count: float) -> str:
    """A byte count with a decimal unit: 954,190,848 becomes "954.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
