"""`baton produce`: the producer on this machine. As ``python -m gb10_producer``, with the
settings of this machine's file before.
"""

from __future__ import annotations

import typer

from app import install, settings
from app.interrupts import at_once


def produce(context: typer.Context) -> None:
    """Run the producer (torch) on this machine; the options are listed by --help."""
    with at_once():
        asked = install.asked(context.args)
        if asked.action == "uninstall":
            return install.uninstall("producer")
        from gb10_producer.config import parser

        arguments = settings.arguments("produce", parser(), asked.arguments)
        if asked.action == "install":
            return install.install("producer", arguments)
        from gb10_producer.__main__ import main

        with install.told_in_help(arguments):
            raise typer.Exit(main(arguments))
