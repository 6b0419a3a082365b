"""`baton serve`: the decoder on this machine. The same as ``python -m mac_decoder``."""

from __future__ import annotations

import typer

from app.interrupts import at_once


def serve(context: typer.Context) -> None:
    """Run the decoder (MLX) and its OpenAI endpoint; the options are listed by --help."""
    with at_once():
        from mac_decoder.__main__ import main

        raise typer.Exit(main(context.args))
