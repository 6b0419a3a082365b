"""Start-up: directory, lock, index, books; an index that is lost or damaged is made anew.

Who only looks works on a copy of the index, and on a disk that takes nothing.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from mac_decoder.store import index, names
from mac_decoder.store.events import IndexRebuilt, Listener
from mac_decoder.store.files import Disk, ReadOnlyDisk
from mac_decoder.store.holdings import Holdings
from mac_decoder.store.index import Change, Content, Index, IndexDamaged, IndexForeign
from mac_decoder.store.limits import NO_CAP, check_cap
from mac_decoder.store.lock import WriterLock
from mac_decoder.store.manifest import StoreKeys
from mac_decoder.store.reading import Reader
from mac_decoder.store.recovery import Recovered, difference, recover
from mac_decoder.store.sweep import Sweeper

OpenIndex = Callable[[Path, str], Index]

_ROW_BYTES = 512
"""About what a row of the index takes, generously."""


class OpenedIndex(NamedTuple):
    """An index and what it says. ``rebuilt``: nothing, so files have to be asked; ``damaged``:
    because of damage, neither because it is new nor because it is another version's or key's."""

    index: Index
    content: Content
    rebuilt: bool
    damaged: bool


def open_holdings(
    directory: Path,
    store_key: bytes,
    cap_bytes: int,
    floor_bytes: int,
    disk: Disk,
    listener: Listener,
    open_index: OpenIndex,
) -> tuple[Holdings, Callable[[], None]]:
    """Everything that an open store shares, under the writer's lock, and what releases that.

    Deletes nothing but a crash's temporary files, and what a smaller cap asks for. Raises
    ``ConfigError``, ``OSError``, ``sqlite3.Error``.
    """
    check_cap(cap_bytes)
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk.make_directory(directory)
    with ExitStack() as undo:
        release = undo.enter_context(ExitStack())
        release.callback(WriterLock(directory).release)
        for folder in names.FOLDERS:
            disk.make_directory(directory / folder)
        disk.sync_directory(directory)
        _keep_out_of_backups(directory)
        keys = StoreKeys(store_key)
        opened = _open_index(directory, keys.number, open_index)
        undo.callback(opened.index.close)
        held, made = _read_in(undo, directory, disk, keys, opened, listener)
        held.cap_bytes, held.floor_bytes = cap_bytes, floor_bytes
        if opened.rebuilt and made.adopted:
            held.tell(IndexRebuilt(made.adopted))
        _settle(held, opened.content, made)
        undo.pop_all()
    return held, release.close


def look_at_holdings(
    directory: Path, store_key: bytes, listener: Listener
) -> tuple[Holdings, Callable[[], None]]:
    """The same as the files are, with nothing changed but the lock's own file.

    The books say what a start would make of the files; the index is a copy elsewhere. Raises
    as :func:`open_holdings`, and ``FileNotFoundError`` if there is no directory.
    """
    with ExitStack() as undo:
        release = undo.enter_context(ExitStack())
        release.callback(WriterLock(directory).release)
        scratch = Path(release.enter_context(TemporaryDirectory(prefix="baton-index-")))
        for name in index.FILES:
            with suppress(FileNotFoundError):
                shutil.copyfile(directory / name, scratch / name, follow_symlinks=False)
        keys = StoreKeys(store_key)
        opened = _open_index(scratch, keys.number, Index)
        undo.callback(opened.index.close)
        held, made = _read_in(undo, directory, ReadOnlyDisk(), keys, opened, listener)
        made.ledger.index_nbytes = index.nbytes_in(directory)
        undo.pop_all()
    return held, release.close


def _read_in(
    undo: ExitStack,
    directory: Path,
    disk: Disk,
    keys: StoreKeys,
    opened: OpenedIndex,
    listener: Listener,
) -> tuple[Holdings, Recovered]:
    """The books for the files as they are, without a cap."""
    reader = Reader(disk, directory, keys)
    undo.callback(reader.close)
    made = recover(reader, opened.content, disk.walk(directory), opened.index.nbytes())
    held = Holdings(
        directory=directory,
        disk=disk,
        keys=keys,
        reader=reader,
        index=opened.index,
        ledger=made.ledger,
        spaces=made.spaces,
        cap_bytes=NO_CAP,
        floor_bytes=0,
        listener=listener,
        index_damaged=opened.damaged,
    )
    held.counts.update(adopted=made.adopted, lost=made.lost, index_rebuilt=int(opened.rebuilt))
    return held, made


def _open_index(directory: Path, owner: str, open_index: OpenIndex) -> OpenedIndex:
    """The index and what it says; a new one where the old one cannot be read."""
    new = not (directory / index.NAME).exists()
    try:
        opened = open_index(directory, owner)
        try:
            return OpenedIndex(opened, opened.load(), new, damaged=False)
        except IndexDamaged:
            opened.close()
            raise
    except IndexDamaged as error:
        index.remove(directory)
        damaged = not isinstance(error, IndexForeign)
        return OpenedIndex(open_index(directory, owner), Content(), True, damaged)


def _settle(held: Holdings, content: Content, made: Recovered) -> None:
    """Bring the cap, the books and the index together.

    A disk that fails here still lets cuts be read: the index then says less than the files,
    which the next start finds out.
    """
    sweeper = Sweeper(held)
    try:
        for path, other in list(held.ledger.other.items()):
            if other.kind == "unfinished":
                sweeper.delete_other(path, "unfinished")
    except OSError:
        held.count("delete_failures")
    rows = sum(change.rows for change in difference(content, made))
    try:
        if held.room() < rows * _ROW_BYTES:
            # Cuts that the index never knew go without a trace in it.
            sweeper.delete(sweeper.plan(rows * _ROW_BYTES - held.room()), "room")
        for change in difference(content, made):
            _commit_in_steps(held, change)
    except OSError:
        held.count("delete_failures")
    except sqlite3.Error:
        held.count("index_failures")


def _commit_in_steps(held: Holdings, change: Change) -> None:
    nodes, cuts = change.nodes, change.cuts
    if change.dropped_cuts or change.dropped_nodes:
        held.forget_rows(change.dropped_cuts, change.dropped_nodes)
    if change.space:
        held.commit(Change(space=change.space))

    def step(rows: int) -> Change | None:
        part = Change(nodes=nodes[:rows])
        del nodes[:rows]
        if not part.rows:
            part = Change(cuts=cuts[:rows])
            del cuts[:rows]
        return part if part.rows else None

    held.commit_in_steps(step)


def _keep_out_of_backups(directory: Path) -> None:
    """Mark the directory as a cache, for programs that make backups."""
    tag = directory / names.CACHE_TAG
    if tag.exists():
        return
    tag.write_text(names.CACHE_TAG_TEXT)
    tag.chmod(0o600)
    if sys.platform == "darwin":
        # Time Machine reads an attribute that this tool sets. A cache in a backup is a waste of
        # space and no more, so a failure stops nothing.
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                ["/usr/bin/tmutil", "addexclusion", str(directory)],
                check=False,
                capture_output=True,
                timeout=30,
            )
