"""`baton bench`: two of the figures of docs/performance.md, measured on this machine."""

from __future__ import annotations

import typer

from app import bench_handoff, bench_ttft

app = typer.Typer(
    no_args_is_help=True,
    help="Measure handoffs and the time to first token; `make bench` measures more.",
)
app.command("handoff")(bench_handoff.handoff)
app.command("ttft")(bench_ttft.ttft)
