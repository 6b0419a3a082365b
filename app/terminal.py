"""How the commands speak: one console for people on stderr or stdout, JSON for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from protocol.errors import BatonError, told

out = Console(highlight=False, emoji=False)
"""What a command answers."""

err = Console(stderr=True, highlight=False, emoji=False)
"""Progress and complaints: never mixed into an answer that is piped on."""


def complain(error: BatonError, program: str = "baton") -> None:
    """Print an error as a sentence, with what was found and what to do about it."""
    text = Text(told(error, program))
    text.stylize("bold red", len(program) + 2, len(program) + 7)
    err.print(text, soft_wrap=True)


def print_json(value: object) -> None:
    """Print one JSON value on stdout, indented."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    # Halves of characters (of a file's name that is no UTF-8) as JSON writes them: ``\udcff``.
    text = text.encode(errors="backslashreplace").decode()
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class _Note(ProgressColumn):
    """What is told beside a bar: a task's ``note``, or what that says now if it can be called."""

    def render(self, task: Task) -> Text:
        note = task.fields["note"]
        said = str(note() if callable(note) else note)
        return Text(said, "dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on stderr; they vanish when done and stay silent without a terminal."""
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        _Note(),
        TimeElapsedColumn(),
        console=err,
        transient=True,
        disable=not err.is_terminal,
    ) as bars:
        yield bars


@contextmanager
def step(title: str, note: str | Callable[[], str] = "") -> Iterator[None]:
    """Show that something of unknown length is going on, then that it is done.

    ``note`` is told beside it while it lasts. Where there is no terminal, the beginning is a
    line of its own.
    """
    began = time.monotonic()
    if not err.is_terminal:
        err.print(f"… {escape(title)}")
    with progress() as bars:
        bars.add_task(escape(title), total=None, note=note)
        yield
    err.print(f"[green]✓[/] {escape(title)} [dim]({time.monotonic() - began:.1f} s)[/]")


class Words:
    """Text as it comes, in pieces of any length, in lines of at most ``width`` characters.

    Lines part between words; a word that is longer than a line stays whole. :meth:`add` and
    :meth:`end` return what can be written by now.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._blanks = ""
        self._word = ""

    def add(self, text: str) -> str:
        """What ``text`` completes."""
        written: list[str] = []
        for character in text:
            if not character.isspace():
                self._word += character
                continue
            written.append(self._flush())
            if character == "\n":
                written.append(character)
                self._column, self._blanks = 0, ""
            else:
                self._blanks += character
        return "".join(written)

    def end(self) -> str:
        """The last word."""
        return self._flush()

    def _flush(self) -> str:
        word, blanks = self._word, self._blanks
        if not word:
            return ""
        self._word = self._blanks = ""
        if self._column and self._column + len(blanks) + len(word) > self._width:
            self._column = len(word)
            return "\n" + word
        self._column += len(blanks) + len(word)
        return blanks + word
