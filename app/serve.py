"""`baton serve`: the decoder on this machine. As ``python -m app.decoder``, with the
settings of this machine's file before.
"""

from __future__ import annotations

import typer

from app import install, settings
from app.interrupts import at_once


def serve(context: typer.Context) -> None:
    """Run the decoder (MLX) and its OpenAI endpoint; the options are listed by --help."""
    with at_once():
        asked = install.asked(context.args)
        if asked.action == "uninstall":
            return install.uninstall("decoder")
        from mac_decoder.config import parser

        arguments = settings.arguments("serve", parser(), asked.arguments)
        if asked.action == "install":
            return install.install("decoder", arguments)
        from app.decoder import main

        with install.told_in_help(arguments):
            raise typer.Exit(main(arguments))
