"""The index: transactions, damage, and how much a commit lets it grow."""

from __future__ import annotations

import hashlib
import sqlite3
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mac_decoder.store import index
from mac_decoder.store.index import Change, CutRow, Index, IndexDamaged, NodeRow

OWNER = "0" * 32


def name(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def node(number: int, parent: int = 0) -> NodeRow:
    return NodeRow(number, parent, name(number), name(-number), 1000)


def cut(number: int, at: int = 0) -> CutRow:
    return CutRow(
        name(number), name(number + 1), name(0), at, 300, 5000, "turn", b"", number, number % 2
    )


def filled(directory: Path) -> Index:
    opened = Index(directory, OWNER)
    opened.commit(
        Change(space=(name(0), "{}"), nodes=[node(1), node(2, 1)], cuts=[cut(5, 2), cut(3, 1)])
    )
    return opened


def test_what_was_committed_is_loaded_in_order(tmp_path: Path) -> None:
    filled(tmp_path).close()
    content = Index(tmp_path, OWNER).load()
    assert content.spaces == {name(0): "{}"}
    assert content.nodes == [node(1), node(2, 1)]
    assert content.cuts == [cut(3, 1), cut(5, 2)]
    assert (tmp_path / index.NAME).stat().st_mode & 0o777 == 0o600


def test_rows_go_and_are_replaced(tmp_path: Path) -> None:
    opened = filled(tmp_path)
    opened.commit(Change(dropped_cuts=[name(5)], dropped_nodes=[2], cuts=[cut(3, 0)]))
    assert opened.load().cuts == [cut(3, 0)]
    assert opened.load().nodes == [node(1)]


def test_a_failed_transaction_has_not_happened(tmp_path: Path) -> None:
    opened = filled(tmp_path)
    wrong = [cut(7), cut(8)._replace(file=None)]  # type: ignore[arg-type]
    with pytest.raises(sqlite3.Error):
        opened.commit(Change(cuts=wrong))
    assert [row.used for row in opened.load().cuts] == [3, 5]
    opened.commit(Change(cuts=[cut(7)]))
    assert [row.used for row in opened.load().cuts] == [3, 5, 7]


def test_between_commits_one_file_is_complete(tmp_path: Path) -> None:
    opened = filled(tmp_path)
    assert opened.nbytes() == (tmp_path / index.NAME).stat().st_size
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / index.NAME).write_bytes((tmp_path / index.NAME).read_bytes())
    assert Index(copy, OWNER).load() == opened.load()


def test_one_connection_owns_it(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(sqlite3.OperationalError):
        sqlite3.connect(tmp_path / index.NAME, timeout=0).execute("SELECT * FROM cut").fetchall()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE cut SET position = 301",
        "UPDATE cut SET sum = x'00'",
        "UPDATE node SET bytes = 1 WHERE id = 1",
        "UPDATE space SET identity = '{ }'",
        "DELETE FROM node WHERE id = 1",
        "DELETE FROM space",
        "UPDATE owner SET number = 'other'",
        "PRAGMA user_version = 1",
        "PRAGMA application_id = 1",
        "DROP TABLE cut",
        "ALTER TABLE cut ADD COLUMN more TEXT",
    ],
)
def test_what_this_version_did_not_write_is_damage(statement: str, tmp_path: Path) -> None:
    filled(tmp_path).close()
    database = sqlite3.connect(tmp_path / index.NAME)
    database.execute(statement)
    database.commit()
    database.close()
    with pytest.raises(IndexDamaged):
        Index(tmp_path, OWNER).load()


def test_another_keys_index_is_not_used(tmp_path: Path) -> None:
    filled(tmp_path).close()
    with pytest.raises(IndexDamaged):
        Index(tmp_path, "1" * 32)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_no_commit_grows_by_more_than_was_told(data: st.DataObject, tmp_path: Path) -> None:
    """Measured with the log at its longest: before the checkpoint gives it back."""
    index.remove(tmp_path)
    opened = Index(tmp_path, OWNER)
    most: list[int] = []
    checkpoint = opened._checkpoint

    def measured() -> None:
        most.append(opened.nbytes())
        checkpoint()
        most.append(opened.nbytes())

    opened._checkpoint = measured  # type: ignore[method-assign]
    numbers = iter(range(1, 10**6))
    held: list[int] = []
    for size in data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=8)):
        before = opened.nbytes()
        if data.draw(st.booleans()) and held:
            gone, held = held[:size], held[size:]
            change = Change(dropped_nodes=gone)
        else:
            fresh = [next(numbers) for _ in range(size)]
            held += fresh
            change = Change(nodes=[node(number) for number in fresh])
            change.cuts += [cut(next(numbers) + 10**7) for _ in range(size // 4)]
        most.clear()
        opened.commit(change)
        assert max(most) - before <= opened.growth(change.rows)
    assert opened.rows_within(opened.growth(17)) == 17
    opened.close()


def test_a_damaged_schema_is_told_as_damage(tmp_path: Path) -> None:
    """SQLite quotes it in its complaint, in bytes that need not be text."""
    filled(tmp_path).close()
    path = tmp_path / index.NAME
    whole = path.read_bytes()
    first = whole.index(b"CREATE TABLE")
    damaged = 0
    for at in range(first - 40, whole.rindex(b"CREATE TABLE", 0, 4096) + 200, 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        for name in ("-wal", "-shm"):
            (tmp_path / f"{index.NAME}{name}").unlink(missing_ok=True)
        try:
            opened = Index(tmp_path, OWNER)
        except IndexDamaged:
            damaged += 1
            continue
        try:
            opened.load()
        except (IndexDamaged, sqlite3.Error):
            damaged += 1
        finally:
            opened.close()
    assert damaged > 50
