"""`baton cache`: what is kept on disk, whether it is whole, and how to make it smaller."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from app.cache_delete import carry_out, confirm, identity_of, parsed_size
from app.cache_figures import bar, figures, print_figures, print_section, say_if_empty
from app.cache_place import CacheDir, Place, StateDir
from app.status import AS_SET, decoders_address, fetch_status
from app.terminal import complain, err, out, print_json
from app.view.exact import exactly
from mac_decoder.store.ledger import Tally
from mac_decoder.store.store import Store
from mac_decoder.store.sweep import Pace
from mac_decoder.store.verify import Verified
from protocol.errors import ConfigError, TransferError

app = typer.Typer(no_args_is_help=True, help="Look at the caches on disk, check and delete them.")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be done, and change nothing.")
]


@app.command()
def stats(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="A running decoder.", show_default=AS_SET)] = None,
    cache_dir: CacheDir = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Show what is kept: as a running decoder says, else as the directory is."""
    # A directory that was typed is the one that is meant, whoever listens where the decoder does.
    directory_meant = any(map(partial(_typed, context), ("cache_dir", "state_dir")))
    asked = url if url is not None or directory_meant else _known_address()
    section = _section_of(asked) if asked else None
    if section is not None:
        if as_json:
            print_json({"source": "decoder", "at": asked, "cache": section})
        else:
            print_section(f"decoder at {asked}", section)
        return
    if url:
        err.print(f"no decoder at {escape(url)} tells of a cache; this is the directory:")
    place = Place(cache_dir, state_dir)
    if place.is_empty():
        found = figures(place, None)
    else:
        with place.look() as store:
            found = figures(place, store.stats())
    if as_json:
        print_json({"source": "directory", "at": str(place.directory), "cache": found})
        return
    say_if_empty(place)
    print_figures(str(place.directory), found)


@app.command()
def verify(
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Read and authenticate every byte; exit status 1 if one is wrong.

    Files that are wrong are named, and go to quarantine unless it is a dry run.
    """
    place = Place(cache_dir, state_dir)
    empty = place.is_empty()
    if empty:
        found, kinds = Verified(), {}
    else:
        opened = place.look(needs_key=True) if dry_run else place.keep_house()
        with opened as store, bar("verify") as advance:
            found = store.verify(advance, dry_run=dry_run)
            kinds = store.stats().kinds
    left = {kind: tally for kind, tally in kinds.items() if tally.files and kind in UNVERIFIED}
    if as_json:
        print_json(
            {
                "directory": str(place.directory),
                "dry_run": dry_run,
                "files": found.files,
                "bytes": found.nbytes,
                "mixed_histories": found.mixed,
                "bad": [{"file": bad.path, "reason": bad.reason} for bad in found.bad],
                "not_verified": {
                    kind: {"files": tally.files, "bytes": tally.nbytes}
                    for kind, tally in left.items()
                },
            }
        )
    elif empty:
        say_if_empty(place)
    else:
        _print_verified(found, left, dry_run)
    if found.bad:
        raise typer.Exit(1)


UNVERIFIED = {
    "foreign_key": "made under another store key",
    "stale_format": "of another version",
    "quarantined": "in quarantine since an earlier time",
    "unknown": "not Baton's",
}
"""Kinds of files that no verification reads, and why."""


def _print_verified(found: Verified, left: dict[str, Tally], dry_run: bool) -> None:
    for bad in found.bad:
        out.print(f"[red]wrong[/]  {escape(bad.path)}  {bad.reason}", soft_wrap=True)
    if found.bad:
        fate = "left where they are" if dry_run else "set aside, and nothing of them is served"
        out.print(f"wrong files: {len(found.bad)}, {fate}")
    out.print(f"{found.files - len(found.bad)} files are as they were written")
    out.print(f"{exactly(found.nbytes)} read")
    if found.mixed:
        out.print(f"{found.mixed} cuts have rows of more than one recipe")
    for kind, tally in left.items():
        out.print(f"not verified: {tally.files} files {UNVERIFIED[kind]} ({exactly(tally.nbytes)})")


@app.command()
def prune(
    to: Annotated[
        int | None,
        typer.Option(
            parser=parsed_size, metavar="SIZE", help="Delete until this is on disk: 20GB."
        ),
    ] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Delete other versions, other keys and damage.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="With --stale: and all that this checkpoint cannot use.")
    ] = None,
    dry_run: DryRun = False,
    cache_dir: CacheDir = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete the least recently used down to a size, or what is stale."""
    if (to is None) == (not stale):
        raise typer.BadParameter("give either --to SIZE or --stale")
    if model is not None and not stale:
        raise typer.BadParameter("--model goes with --stale")
    place = Place(cache_dir, state_dir)
    identity = None if model is None or place.is_empty() else identity_of(model, place)

    def delete(store: Store, dry: bool, pace: Pace) -> Tally:
        return store.prune(to_bytes=to, stale=stale, identity=identity, dry_run=dry, pace=pace)

    carry_out(place, delete, "prune", dry_run, as_json, needs_key=True)


@app.command()
def clear(
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    cache_dir: CacheDir = None,
    state_dir: StateDir = None,
    as_json: AsJson = False,
) -> None:
    """Delete everything that is kept on disk. No answer is lost, only time."""
    place = Place(cache_dir, state_dir)

    def delete(store: Store, dry: bool, pace: Pace) -> Tally:
        return store.clear(dry_run=dry, pace=pace)

    def question() -> str:
        with place.look() as store:
            going = store.clear(dry_run=True)
        return f"delete {going.files} files, {exactly(going.nbytes)}, in {place.directory}?"

    if not (dry_run or yes or place.is_empty()):
        confirm(question)
    carry_out(place, delete, "clear", dry_run, as_json, needs_key=False)


def _typed(context: typer.Context, parameter: str) -> bool:
    source = context.get_parameter_source(parameter)
    return source is not None and source.name == "COMMANDLINE"


def _known_address() -> str | None:
    """Where the decoder is; ``None``, and that is said, where the settings do not tell."""
    try:
        return decoders_address(None)
    except ConfigError as error:
        complain(error, "baton cache stats")
        return None


def _section_of(url: str) -> dict[str, Any] | None:
    """What a decoder there says about its cache; ``None`` if none answers or it has none."""
    try:
        found = fetch_status(url)
    except TransferError:
        return None
    # Something else may listen there.
    section = found.get("cache") if isinstance(found, dict) else None
    return section if isinstance(section, dict) else None
