"""`baton doctor`: what this machine has, what Baton needs, and what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import psutil
import typer
from rich.table import Table

from app.demo_model import cache_root
from app.terminal import human_bytes, out, print_json
from protocol.errors import BatonError
from protocol.halves import Half, install_command, missing

Verdict = Literal["ok", "note", "problem"]
MARKS: dict[Verdict, str] = {
    "ok": "[green]ok[/]",
    "note": "[yellow]note[/]",
    "problem": "[red]problem[/]",
}

LOW_DISK_BYTES = 5_000_000_000
PACKAGES = ("baton-llm", "mlx", "mlx-lm", "torch", "transformers", "websockets", "msgspec")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``what_to_do`` is empty unless the verdict is a problem."""

    subject: str
    verdict: Verdict
    found: str
    what_to_do: str = ""


def doctor(
    model: Annotated[Path | None, typer.Option(help="A checkpoint to look at.")] = None,
    port: Annotated[int, typer.Option(help="The port that the decoder would use.")] = 8000,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Check versions, halves, memory, disk, port and, with --model, the checkpoint's identity."""
    findings = list(examine(model, port))
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table()
        for title in ("", "verdict", "found", "what to do"):
            table.add_column(title, overflow="fold")
        for finding in findings:
            table.add_row(
                finding.subject, MARKS[finding.verdict], finding.found, finding.what_to_do
            )
        out.print(table)
    if any(finding.verdict == "problem" for finding in findings):
        raise typer.Exit(1)


def examine(model: Path | None, port: int) -> Iterator[Finding]:
    """Everything that is looked at, in the order in which it is shown."""
    yield Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        yield _package(name)
    yield from _halves()
    memory = psutil.virtual_memory()
    yield Finding(
        "memory", "ok", f"{human_bytes(memory.available)} of {human_bytes(memory.total)} available"
    )
    yield _disk()
    yield _port(port)
    if model is not None:
        yield from _checkpoint(model, memory.available)


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "note", "not installed")


def _halves() -> Iterator[Finding]:
    """Which of the two sides this machine can run."""
    sides: tuple[Half, ...] = ("decoder", "producer")
    able = [name for name in sides if not missing(name)]
    if able:
        yield Finding("can run", "ok", " and ".join(able))
    else:
        yield Finding("can run", "problem", "neither side", install_command("decoder"))


def _disk() -> Finding:
    place = cache_root(None)
    existing = next(path for path in (place, *place.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < LOW_DISK_BYTES:
        return Finding("disk", "problem", f"{human_bytes(free)} free", "free some space")
    return Finding("disk", "ok", f"{human_bytes(free)} free for {place}")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        if sys.platform != "win32":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Finding(
                f"port {port}", "note", "taken", "fine if a decoder runs; else choose --port"
            )
    return Finding(f"port {port}", "ok", "free")


def _checkpoint(model: Path, available: int) -> Iterator[Finding]:
    """Whether the checkpoint is whole, can be carried over, and fits; and what it is."""
    from protocol.checkpoint import read_checkpoint

    try:
        checkpoint = read_checkpoint(model)
    except BatonError as error:
        yield Finding("model", "problem", error.message, error.hint or error.reason)
        return
    yield Finding("model", "ok", f"{checkpoint.config['model_type']}, {checkpoint.dtype} cache")
    fits = checkpoint.nbytes < available
    yield Finding(
        "model fits",
        "ok" if fits else "problem",
        f"{human_bytes(checkpoint.nbytes)} of weights",
        "" if fits else "close other programs, or choose a smaller or quantised model",
    )
    yield Finding("identity", "ok", checkpoint.identity.digest().hex()[:16])
