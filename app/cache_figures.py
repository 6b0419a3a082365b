"""The figures of the durable tier, as JSON and as people read them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.markup import escape
from rich.table import Table

from app.cache_place import Place
from app.terminal import out, progress
from app.view.exact import exactly
from app.view.words import human_bytes
from mac_decoder.store.ledger import Tally
from mac_decoder.store.limits import default_limits
from mac_decoder.store.store import StoreStats

_DIGEST = re.compile("[0-9a-f]{64}")
_MEANINGS = {
    "on_disk": "all files, as a walk counts them",
    "referenced": "every conversation counted whole, what they share in each",
    "cap": "where `baton serve` is given no --cache-max",
    "floor": "of the volume that stay free",
    "withheld": "cuts that are not served: a file of theirs is missing or wrong",
}


def figures(place: Place, stats: StoreStats | None) -> dict[str, Any]:
    """The figures of a directory, as plain values; zeros where there is no cache.

    Sizes in bytes. ``cap`` and ``floor`` are those that hold where nobody chose any.
    """
    limits = default_limits(place.directory)
    return {
        "entries": stats.cuts if stats else 0,
        "withheld": stats.withheld if stats else 0,
        "blocks": stats.blocks if stats else 0,
        "on_disk": stats.on_disk if stats else 0,
        "referenced": stats.referenced if stats else 0,
        "cap": limits.cap_bytes,
        "floor": limits.floor_bytes,
        "identities": _tallies(stats.identities if stats else {}, "entries"),
        "other_files": _tallies(stats.kinds if stats else {}, "files"),
    }


def _tallies(tallies: Mapping[str, Tally], counted: str) -> dict[str, dict[str, int]]:
    return {
        name: {counted: tally.files, "bytes": tally.nbytes}
        for name, tally in tallies.items()
        if tally.files
    }


def print_figures(title: str, found: Mapping[str, Any]) -> None:
    """Show what :func:`figures` gives."""
    table = _table(title)
    for name in ("entries", "withheld", "blocks"):
        table.add_row(name, f"{found[name]:,}", _MEANINGS.get(name, ""))
    for name in ("on_disk", "referenced", "cap", "floor"):
        table.add_row(name, exactly(found[name]), _MEANINGS[name])
    for digest, tally in found["identities"].items():
        table.add_row(
            f"identity {digest[:12]}", f"{tally['entries']:,} entries", exactly(tally["bytes"])
        )
    for kind, tally in found["other_files"].items():
        table.add_row(kind, f"{tally['files']:,} files", exactly(tally["bytes"]))
    out.print(table)


def print_section(title: str, section: Mapping[str, Any]) -> None:
    """Show a decoder's own section, whatever figures it has."""
    table = _table(title)
    _add(table, "", section)
    if not section:
        table.add_row("no figures yet", "the decoder is still starting")
    out.print(table)


def _add(table: Table, prefix: str, section: Mapping[str, Any]) -> None:
    for key, value in section.items():
        # Digests: their beginning tells them apart, as in the directory's own figures.
        name = f"{prefix}{key[:12] if _DIGEST.fullmatch(key) else key}"
        match value:
            case {"value": figure, "tag": tag}:
                table.add_row(escape(name), "-" if figure is None else f"{figure:,.3g}", tag)
            case Mapping():
                _add(table, f"{name} ", value)
            case [int(count), int(nbytes)]:
                table.add_row(escape(name), f"{count:,}", exactly(nbytes))
            case int() if key.endswith("bytes") or key in ("on_disk", "referenced"):
                table.add_row(escape(name), exactly(value))
            case _:
                table.add_row(escape(name), escape(str(value)))


def _table(title: str) -> Table:
    table = Table(title=escape(title), title_justify="left", show_header=False, box=None)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style="dim", overflow="fold")
    return table


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of bytes on a terminal, to be told bytes done and bytes in all."""
    with progress() as bars:
        task = bars.add_task(title, total=None, note="")

        def advance(done: int, total: int) -> None:
            note = f"{human_bytes(done)} of {human_bytes(total)}"
            bars.update(task, completed=done, total=total, note=note)

        yield advance


def say_if_empty(place: Place) -> None:
    """Say that there is nothing, if so."""
    if place.is_empty():
        out.print(f"no cache at {escape(str(place.directory))}", soft_wrap=True)
