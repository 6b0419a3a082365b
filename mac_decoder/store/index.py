"""The index: what exists, how recently it was used and how many bytes it has, in SQLite.

The index can be lost: files say the same, and win where they differ. It is not authenticated;
what it says is a proposal that a cut's manifest has yet to confirm. One connection owns the
database (WAL, exclusive locking), and every commit is followed by a checkpoint, so between
commits the one file is complete.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self, get_args

from mac_decoder.store.manifest import Role
from protocol.pairing import length_prefixed

NAME: Final = "index.sqlite"
FILES: Final = (NAME, f"{NAME}-wal", f"{NAME}-shm", f"{NAME}-journal")

_APPLICATION: Final = 0x4241544E
_VERSION: Final = 2
_PAGE: Final = 4096
_FRAME: Final = _PAGE + 24
_TREE_PAGES: Final = 24
_SUM_BYTES: Final = 8
_TABLES: Final = """
CREATE TABLE owner (number TEXT NOT NULL);
CREATE TABLE space (
    namespace BLOB PRIMARY KEY, identity TEXT NOT NULL, sum BLOB NOT NULL
) WITHOUT ROWID;
CREATE TABLE node (
    id INTEGER PRIMARY KEY, parent INTEGER NOT NULL, block BLOB NOT NULL,
    file BLOB NOT NULL, bytes INTEGER NOT NULL, sum BLOB NOT NULL
);
CREATE TABLE cut (
    name BLOB PRIMARY KEY, file BLOB NOT NULL, namespace BLOB NOT NULL, node INTEGER NOT NULL,
    position INTEGER NOT NULL, bytes INTEGER NOT NULL, role TEXT NOT NULL,
    parent BLOB NOT NULL, used INTEGER NOT NULL, mixed INTEGER NOT NULL, sum BLOB NOT NULL
) WITHOUT ROWID;
"""


class NodeRow(NamedTuple):
    """A block in its chain: ``parent`` is 0 for the first, ``file`` empty without a file."""

    id: int
    parent: int
    block: bytes
    file: bytes
    nbytes: int


class CutRow(NamedTuple):
    """A held cut; ``node`` 0 and ``parent`` empty stand for none, ``mixed`` 1 for yes."""

    name: bytes
    file: bytes
    space: bytes
    node: int
    position: int
    nbytes: int
    role: Role
    parent: bytes
    used: int
    mixed: int


@dataclass
class Content:
    """Everything in the index; nodes by ascending id, cuts the least recently used first."""

    spaces: dict[bytes, str] = field(default_factory=dict)
    nodes: list[NodeRow] = field(default_factory=list)
    cuts: list[CutRow] = field(default_factory=list)


@dataclass
class Change:
    """One transaction: rows that go, then rows that come or replace others."""

    space: tuple[bytes, str] | None = None
    nodes: list[NodeRow] = field(default_factory=list)
    cuts: list[CutRow] = field(default_factory=list)
    dropped_cuts: list[bytes] = field(default_factory=list)
    dropped_nodes: list[int] = field(default_factory=list)

    @property
    def rows(self) -> int:
        """Rows that change."""
        lists = (self.nodes, self.cuts, self.dropped_cuts, self.dropped_nodes)
        return sum(map(len, lists)) + (self.space is not None)


class IndexDamaged(Exception):
    """The file is no index that this version wrote; it can be rebuilt from the files."""


class IndexForeign(IndexDamaged):
    """The index of another version, or made under another store key: it need not be damaged."""


@contextlib.contextmanager
def _readable() -> Iterator[None]:
    """SQLite quotes a damaged schema in its complaint, which Python then cannot decode."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise sqlite3.DatabaseError("the database is damaged, and so is what says so") from error


class _Cursor(sqlite3.Cursor):
    """A cursor whose every failure is a ``sqlite3.Error``."""

    def execute(self, sql: str, parameters: Any = (), /) -> Self:
        with _readable():
            return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> Self:
        with _readable():
            return super().executemany(sql, parameters)

    def executescript(self, sql_script: str, /) -> sqlite3.Cursor:
        with _readable():
            return super().executescript(sql_script)

    def fetchone(self) -> Any:
        with _readable():
            return super().fetchone()

    def fetchall(self) -> list[Any]:
        with _readable():
            return super().fetchall()

    def __next__(self) -> Any:
        with _readable():
            return super().__next__()


class _Connection(sqlite3.Connection):
    """A connection of such cursors."""

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        return self.cursor(_Cursor).execute(sql, parameters)

    def executemany(self, sql: str, parameters: Any, /) -> sqlite3.Cursor:
        return self.cursor(_Cursor).executemany(sql, parameters)

    def executescript(self, sql_script: str, /) -> sqlite3.Cursor:
        return self.cursor(_Cursor).executescript(sql_script)


class Index:
    """An open index. Not thread-safe: the store's writer lock guards it.

    Methods raise ``sqlite3.Error`` when the disk fails or is full; the transaction has then
    not happened.
    """

    synchronous: ClassVar[str] = "FULL"

    def __init__(self, directory: Path, owner: str) -> None:
        """Open or create, for the store key whose public number is ``owner``.

        Raises ``IndexDamaged``, also for the index of another key.
        """
        self._directory = directory
        path = directory / NAME
        # SQLite's own files take their mode from this one.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self._database = sqlite3.connect(
            path, isolation_level=None, check_same_thread=False, factory=_Connection
        )
        try:
            self._prepare(owner)
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise IndexDamaged(str(error)) from error
        except IndexDamaged:
            self._database.close()
            raise

    def _prepare(self, owner: str) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode = EXCLUSIVE")
        run(f"PRAGMA page_size = {_PAGE}")
        run("PRAGMA journal_mode = WAL")
        run(f"PRAGMA synchronous = {self.synchronous}")
        # Pages reach the disk at commits only, so that their number is known before.
        run("PRAGMA wal_autocheckpoint = 0")
        run("PRAGMA cache_spill = OFF")
        run("PRAGMA secure_delete = ON")
        (application,) = run("PRAGMA application_id").fetchone()
        (version,) = run("PRAGMA user_version").fetchone()
        (tables,) = run("SELECT count(*) FROM sqlite_master").fetchone()
        if (application, version, tables) == (0, 0, 0):
            self._database.executescript(
                f"BEGIN; PRAGMA application_id = {_APPLICATION}; "
                f"PRAGMA user_version = {_VERSION}; {_TABLES} "
                f"INSERT INTO owner VALUES ('{owner}'); COMMIT;"
            )
        elif application != _APPLICATION:
            raise IndexDamaged("another application")
        elif version != _VERSION:
            raise IndexForeign("another version")
        elif run("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise IndexDamaged("quick_check")
        elif run("SELECT number FROM owner").fetchall() != [(owner,)]:
            raise IndexForeign("another store key")
        self._checkpoint()

    def load(self) -> Content:
        """All rows. Raises ``IndexDamaged`` where they do not fit together."""
        run = self._database.execute
        try:
            spaces = _summed(run("SELECT * FROM space"))
            content = Content(
                dict(spaces),
                [NodeRow(*row) for row in _summed(run("SELECT * FROM node ORDER BY id"))],
                [CutRow(*row) for row in _summed(run("SELECT * FROM cut ORDER BY used"))],
            )
        except sqlite3.DatabaseError as error:
            raise IndexDamaged(str(error)) from error
        _check(content)
        return content

    def commit(self, change: Change) -> None:
        """Make ``change`` durable, as one transaction."""
        if not change.rows:
            return
        run, many = self._database.execute, self._database.executemany
        run("BEGIN IMMEDIATE")
        try:
            many("DELETE FROM cut WHERE name = ?", [(name,) for name in change.dropped_cuts])
            many("DELETE FROM node WHERE id = ?", [(number,) for number in change.dropped_nodes])
            for table, rows in (
                ("space", [change.space] if change.space else []),
                ("node", change.nodes),
                ("cut", change.cuts),
            ):
                for row in rows:
                    marks = ", ".join("?" * (len(row) + 1))
                    run(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", (*row, _sum(row)))
            run("COMMIT")
        except sqlite3.Error:
            if self._database.in_transaction:
                run("ROLLBACK")
            raise
        # The commit stands even if this fails; the next one tries again.
        with contextlib.suppress(sqlite3.Error):
            self._checkpoint()

    def growth(self, rows: int) -> int:
        """The most bytes by which a commit of ``rows`` rows lets the files grow.

        A row dirties at most three pages of its table besides a few of the whole tree, and no
        commit writes a page twice; each goes to the log and then perhaps to the file's end.
        """
        return 2 * (_TREE_PAGES + 3 * rows) * _FRAME

    def rows_within(self, nbytes: int) -> int:
        """The most rows of one commit for which ``growth`` is at most ``nbytes``."""
        return max(0, (nbytes // (2 * _FRAME) - _TREE_PAGES) // 3)

    def nbytes(self) -> int:
        """Bytes of the index's files."""
        return nbytes_in(self._directory)

    def intact(self) -> bool:
        """Whether SQLite finds nothing wrong in the whole file."""
        try:
            return self._database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",)
        except sqlite3.DatabaseError:
            return False

    def compact(self) -> None:
        """Give unused pages back to the file system."""
        self._database.execute("VACUUM")
        self._checkpoint()

    def close(self) -> None:
        """Close the database; may be called again."""
        self._database.close()

    def _checkpoint(self) -> None:
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()


def _sum(row: Sequence[object]) -> bytes:
    """Of a row's values: finds what the database's own checks do not, a changed value."""
    parts = (value if isinstance(value, bytes) else str(value).encode() for value in row)
    return hashlib.sha256(length_prefixed(*parts)).digest()[:_SUM_BYTES]


def _summed(rows: Iterable[tuple[object, ...]]) -> Iterator[tuple[Any, ...]]:
    """The rows without their sums. Raises ``IndexDamaged`` where a sum is another."""
    for *values, found in rows:
        if _sum(values) != found:
            raise IndexDamaged("sum")
        yield tuple(values)


def nbytes_in(directory: Path) -> int:
    """Bytes of the index's files in ``directory``."""
    total = 0
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            total += (directory / name).stat().st_size
    return total


def remove(directory: Path) -> None:
    """Remove a closed index."""
    for name in FILES:
        (directory / name).unlink(missing_ok=True)


def _check(content: Content) -> None:
    """Raise ``IndexDamaged`` unless rows have their types and refer to rows that exist."""
    known: set[int] = {0}
    for node in content.nodes:
        whole = all(isinstance(value, bytes) for value in (node.block, node.file))
        numbers = all(isinstance(value, int) for value in (node.parent, node.nbytes))
        # A parent comes before its children: chains cannot run in circles.
        if not whole or not numbers or node.parent not in known or node.nbytes < 0:
            raise IndexDamaged("node")
        known.add(node.id)
    for cut in content.cuts:
        if cut.node not in known or not _well_formed(cut) or cut.space not in content.spaces:
            raise IndexDamaged("cut")


def _well_formed(cut: CutRow) -> bool:
    names: Iterable[object] = (cut.name, cut.file, cut.space, cut.parent)
    numbers: Iterable[object] = (cut.position, cut.nbytes, cut.used, cut.mixed)
    return (
        all(isinstance(value, bytes) for value in names)
        and all(isinstance(value, int) and value >= 0 for value in numbers)
        and cut.role in get_args(Role)
    )
