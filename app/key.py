"""`baton key`: the API keys of this machine's decoder, which notices every change by itself."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from app.cache_place import StateDir
from app.terminal import err, out, print_json
from mac_decoder.api.keys import KeyFiles
from mac_decoder.config import DecoderConfig

app = typer.Typer(no_args_is_help=True, help="Make, list and revoke API keys of the decoder.")

Name = Annotated[str, typer.Argument(help="Whose key it is, or what for.")]


@app.command()
def create(
    name: Name,
    share_caches: Annotated[
        bool,
        typer.Option(
            "--share-caches",
            help="Reuse what is computed for other such keys, and for those without a key.",
        ),
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Make a key and print it, this once: only its digest is kept."""
    print(_files(state_dir).create(name, shares_caches=share_caches), flush=True)
    err.print("[dim]This is not shown again. A running decoder knows it within two seconds.[/]")


@app.command("list")
def list_keys(
    state_dir: StateDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the keys: names, when they were made, and whether they share caches."""
    keys = _files(state_dir).all()
    if as_json:
        print_json(
            [
                {"name": key.name, "created": key.created, "shares_caches": key.shares_caches}
                for key in keys
            ]
        )
    elif keys:
        table = Table()
        for title in ("name", "made", "caches"):
            table.add_column(title)
        for key in keys:
            made = datetime.fromtimestamp(key.created, UTC).astimezone()
            caches = "shared" if key.shares_caches else "its own"
            table.add_row(escape(key.name), f"{made:%Y-%m-%d %H:%M}", caches)
        out.print(table)
    else:
        err.print("there are no keys; `baton key create NAME` makes one")


@app.command()
def revoke(name: Name, state_dir: StateDir = None) -> None:
    """Remove a key: what a running decoder is asked with it two seconds later is refused."""
    _files(state_dir).revoke(name)
    err.print(f"{escape(name)} is revoked")


def _files(state_dir: StateDir) -> KeyFiles:
    return KeyFiles(DecoderConfig(model="", state_dir=str(state_dir or "")).state_path)
