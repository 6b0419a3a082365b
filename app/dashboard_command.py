"""`baton dashboard`: the pages of this machine's decoder, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cache_place import StateDir
from app.dashboard_login import logged_in_address, open_logged_in, open_plainly
from app.status import AS_SET, base_url, decoders_address
from app.terminal import err
from mac_decoder.config import DecoderConfig


def dashboard(
    url: Annotated[
        str | None,
        typer.Argument(help="Where the decoder listens: HOST:PORT or a URL.", show_default=AS_SET),
    ] = None,
    print_only: Annotated[
        bool,
        typer.Option(
            "--print",
            help="Print an address that logs in once, within a minute; open nothing.",
        ),
    ] = False,
    no_login: Annotated[
        bool,
        typer.Option("--no-login", help="Open or print it without the right to change things."),
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Open the dashboard of a decoder of this machine, with the right to change things.

    Its address is a number of loopback (127.0.0.1, [::1]) or localhost; --no-login opens others.
    """
    address = base_url(decoders_address(url))
    state = DecoderConfig(model="", state_dir=str(state_dir or "")).state_path
    if print_only:
        print(f"{address}/" if no_login else logged_in_address(address, state), flush=True)
    elif no_login:
        open_plainly(address)
    else:
        err.print("[dim]opening the dashboard in your browser …[/]")
        open_logged_in(address, state)
