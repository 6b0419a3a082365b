"""`baton status`: what a running decoder says about itself."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape
from rich.tree import Tree

from app.terminal import out, print_json
from protocol.errors import TransferError

DEFAULT_URL = "http://127.0.0.1:8000"


def status(
    url: Annotated[str, typer.Argument(help="Where the decoder listens.")] = DEFAULT_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decoder's JSON.")] = False,
) -> None:
    """Show what a running decoder says about itself, its producer and its queue."""
    found = fetch_status(url)
    if as_json:
        print_json(found)
        return
    tree = Tree(f"[bold]{url}[/]")
    _grow(tree, found)
    out.print(tree)


def fetch_status(url: str, timeout_s: float = 5.0) -> dict[str, Any]:
    """The JSON of ``GET /status``; TransferError ``decoder_unreachable`` when there is none."""
    try:
        response = httpx.get(f"{url.rstrip('/')}/status", timeout=timeout_s)
        response.raise_for_status()
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise TransferError(
            f"no decoder answers at {url}",
            reason="decoder_unreachable",
            field="url",
            found=type(error).__name__,
            hint="start one with `baton serve`, or give its address: baton status URL",
        ) from error


def _grow(tree: Tree, value: dict[str, Any]) -> None:
    """Hang a JSON object below a branch: objects become branches, everything else a line."""
    for name, inner in value.items():
        if isinstance(inner, dict) and inner:
            _grow(tree.add(f"[bold]{name}[/]"), inner)
        else:
            tree.add(f"{name}  [dim]{escape(str(inner))}[/]")
