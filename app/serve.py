"""`baton serve`: the decoder on this machine. The same as ``python -m mac_decoder``."""

from __future__ import annotations

import typer

from app import install
from app.interrupts import at_once


def serve(context: typer.Context) -> None:
    """Run the decoder (MLX) and its OpenAI endpoint; the options are listed by --help."""
    with at_once():
        asked = install.asked(context.args)
        if asked.action == "install":
            return install.install("decoder", asked.arguments)
        if asked.action == "uninstall":
            return install.uninstall("decoder")
        from mac_decoder.__main__ import main

        with install.told_in_help(asked.arguments):
            raise typer.Exit(main(list(asked.arguments)))
