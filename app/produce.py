"""`baton produce`: the producer on this machine. The same as ``python -m gb10_producer``."""

from __future__ import annotations

import typer

from app.interrupts import at_once


def produce(context: typer.Context) -> None:
    """Run the producer (torch) on this machine; the options are listed by --help."""
    with at_once():
        from gb10_producer.__main__ import main

        raise typer.Exit(main(context.args))
