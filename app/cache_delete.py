"""Deleting from the cache directory: asked first where it is everything, counted to the byte."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import typer
from rich.markup import escape

from app.cache_figures import bar, say_if_empty
from app.cache_place import Place
from app.terminal import out, print_json
from app.view.exact import exactly
from mac_decoder.config import size
from mac_decoder.store.events import PassedOver
from mac_decoder.store.ledger import Tally
from mac_decoder.store.store import Store
from mac_decoder.store.sweep import AT_ONCE, Pace
from protocol.errors import RequestError
from protocol.identity import Identity

Delete = Callable[[Store, bool, Pace], Tally]
"""``(store, dry_run, pace)``: delete, or say what would go."""


def confirm(question: Callable[[], str]) -> None:
    """Ask on the terminal; RequestError ``not_confirmed`` for no, or where nobody can answer."""
    if not sys.stdin.isatty():
        raise RequestError(
            "this deletes everything, and there is no terminal to ask on",
            reason="not_confirmed",
            hint="give --yes if that is meant, or --dry-run to see what would go",
        )
    if not typer.confirm(question(), err=True):
        raise RequestError("nothing was deleted", reason="not_confirmed")


def carry_out(
    place: Place, delete: Delete, title: str, dry_run: bool, as_json: bool, *, needs_key: bool
) -> None:
    """Carry out a deletion, or say what it would be, and report exact files and bytes."""
    done, on_disk, unknown = Tally(), 0, Tally()
    passed_over: list[PassedOver] = []
    empty = place.is_empty()
    if empty:
        pass
    elif dry_run:
        with place.look(needs_key=needs_key) as store:
            done = delete(store, True, AT_ONCE)
            on_disk, unknown = store.stats().on_disk, store.stats().kinds["unknown"]
    else:
        with bar(title) as advance, place.keep_house(needs_key=needs_key) as store:
            delete(store, False, Pace(advance, passed_over=passed_over.append))
            after = store.stats()
            counts = after.counts
            # Since the opening: that removes what a crash left, which goes too.
            done = Tally(counts.get("deleted_files", 0), counts.get("deleted_bytes", 0))
            on_disk, unknown = after.on_disk, after.kinds["unknown"]
    if as_json:
        print_json(
            {
                "directory": str(place.directory),
                "dry_run": dry_run,
                "files": done.files,
                "bytes": done.nbytes,
                "on_disk": on_disk,
                "passed_over": [{"file": one.path, "reason": one.reason} for one in passed_over],
            }
        )
        return
    if empty:
        say_if_empty(place)
        return
    verb = "would delete" if dry_run else "deleted"
    out.print(f"{verb} {done.files} files, {exactly(done.nbytes)}")
    for one in passed_over:
        out.print(
            f"passed over: {escape(one.path)} cannot be removed ({one.reason})", soft_wrap=True
        )
    out.print(f"on_disk {'is' if dry_run else 'now'} {exactly(on_disk)}")
    if unknown.files:
        out.print(f"left alone: {unknown.files} files that are not Baton's")


def identity_of(model: Path, place: Place) -> Identity:
    """The identity of a checkpoint; its weights' digests as a decoder remembered them."""
    from protocol.checkpoint import read_checkpoint

    remembered = place.state / "digests.json" if place.state.is_dir() else None
    with bar(f"read {model.name}") as advance:
        return read_checkpoint(model, remembered, advance).identity


def parsed_size(text: str) -> int:
    """A size as people write it, for an option."""
    try:
        return size(text)
    except argparse.ArgumentTypeError as error:
        raise typer.BadParameter(str(error)) from error
