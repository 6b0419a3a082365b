"""`baton produce`: the producer on this machine. The same as ``python -m gb10_producer``."""

from __future__ import annotations

import typer

from app import install
from app.interrupts import at_once


def produce(context: typer.Context) -> None:
    """Run the producer (torch) on this machine; the options are listed by --help."""
    with at_once():
        asked = install.asked(context.args)
        if asked.action == "install":
            return install.install("producer", asked.arguments)
        if asked.action == "uninstall":
            return install.uninstall("producer")
        from gb10_producer.__main__ import main

        with install.told_in_help(asked.arguments):
            raise typer.Exit(main(list(asked.arguments)))
