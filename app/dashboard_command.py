"""`baton dashboard`: the pages of this machine's decoder, in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cache_place import StateDir
from app.dashboard_login import open_logged_in, open_plainly
from app.status import DEFAULT_URL, base_url
from app.terminal import err
from mac_decoder.config import DecoderConfig


def dashboard(
    url: Annotated[
        str, typer.Argument(help="Where the decoder listens: HOST:PORT or a URL.")
    ] = DEFAULT_URL,
    print_only: Annotated[
        bool, typer.Option("--print", help="Print the address, and open nothing.")
    ] = False,
    no_login: Annotated[
        bool, typer.Option("--no-login", help="Open it without the right to change things.")
    ] = False,
    state_dir: StateDir = None,
) -> None:
    """Open the dashboard of a decoder of this machine, with the right to change things.

    Its address is a number of loopback (127.0.0.1, [::1]) or localhost; --no-login opens others.
    """
    address = base_url(url)
    if print_only:
        print(f"{address}/", flush=True)
        return
    if no_login:
        open_plainly(address)
        return
    err.print("[dim]opening the dashboard in your browser …[/]")
    open_logged_in(address, DecoderConfig(model="", state_dir=str(state_dir or "")).state_path)
