"""How this process speaks: one structured line per event on stderr, one sentence for errors.

No log line holds prompt text, tokens or secrets: callers pass counts, names and reason codes.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from protocol.errors import BatonError, told

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_PATIENCE_S = 1.0


class _KeyValue(logging.Formatter):
    """``time LEVEL module: message key=value …``; values with blanks are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname} {record.name}: "
        line += record.getMessage()
        for key, value in record.__dict__.items():
            if key not in _PLAIN:
                text = str(value)
                line += f' {key}="{text}"' if " " in text else f" {key}={text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def configure(level: str) -> None:
    """Send the logs of this process to stderr from ``level`` on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_KeyValue())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for package in ("gb10_producer", "trust"):
        logging.getLogger(package).setLevel(level)


def complain(error: BatonError) -> None:
    """Tell a person what is wrong and what can be done, on stderr."""
    print(told(error, "baton produce"), file=sys.stderr, flush=True)


class Report(Protocol):
    """Called with what is done so far and the total, in one unit."""

    def __call__(self, done: int, total: int, /) -> None: ...


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """A bar on a terminal's stderr once the work takes longer than a second; else log lines."""
    console = Console(stderr=True)
    log = logging.getLogger("gb10_producer.progress")
    began, said = time.monotonic(), time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        task = bars.add_task(title, total=None, visible=False)

        def report(done: int, total: int) -> None:
            nonlocal said
            now = time.monotonic()
            bars.update(task, completed=done, total=total, visible=now - began > _PATIENCE_S)
            if not console.is_terminal and now - said > 5.0:
                said = now
                log.info(title, extra={"percent": round(100 * done / max(1, total))})

        yield report
