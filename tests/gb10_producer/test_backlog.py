"""Rows between tap and sockets: bounded by bytes, read by several, never lost silently."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gb10_producer.backlog import Backlog, Pool
from gb10_producer.prefill import Rows
from protocol.errors import Cancelled, LocalProtocolError

EMPTY = memoryview(b"")


def item(number: int, nbytes: int = 10) -> Rows:
    return Rows(number, 0, 1, memoryview(bytes(nbytes)), EMPTY)


def backlog(pool: Pool, gone: list[int] | None = None, abandoned: threading.Event | None = None):
    dropped = gone if gone is not None else []
    flag = abandoned or threading.Event()
    return Backlog(pool, abandoned=flag.is_set, rows_are_gone=lambda: dropped.append(1))


def test_items_are_read_in_order_and_kept_for_a_late_reader() -> None:
    pool, gone = Pool(100), []
    rows = backlog(pool, gone)
    first = rows.reader(lambda: None)
    for number in range(3):
        rows.put(item(number))
    assert [first.wait_for(index).index for index in range(3)] == [0, 1, 2]  # type: ignore[union-attr]
    first.pass_to(3)
    late = rows.reader(lambda: None)
    assert late.wait_for(0) == item(0)
    assert (pool.used, gone) == (30, [])


def test_rows_that_all_have_read_make_room_and_say_so_once() -> None:
    pool, gone = Pool(25), []
    rows = backlog(pool, gone)
    reader = rows.reader(lambda: None)
    for number in range(4):
        rows.put(item(number))
        reader.pass_to(number + 1)
    assert gone == [1]
    assert pool.peak <= 25
    with pytest.raises(LocalProtocolError):
        rows.reader(lambda: None)


def test_a_put_waits_for_the_slowest_reader() -> None:
    pool = Pool(20)
    rows = backlog(pool)
    fast, slow = rows.reader(lambda: None), rows.reader(lambda: None)
    rows.put(item(0))
    rows.put(item(1))
    fast.pass_to(2)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (rows.put(item(2)), done.set()))
    thread.start()
    assert not done.wait(0.1)
    slow.pass_to(1)
    assert done.wait(2.0)
    thread.join()
    assert rows.blocked_s > 0.05


def test_a_blocked_put_ends_when_nobody_wants_the_job() -> None:
    pool, abandoned = Pool(10), threading.Event()
    rows = backlog(pool, abandoned=abandoned)
    reader = rows.reader(lambda: None)
    rows.put(item(0))
    abandoned.set()
    reader.close()
    with pytest.raises(Cancelled):
        rows.put(item(1))
    assert pool.used == 0, "what nobody reads is not kept"


def test_an_item_above_the_limit_passes_alone() -> None:
    pool = Pool(10)
    rows = backlog(pool)
    reader = rows.reader(lambda: None)
    rows.put(item(0, 50))
    reader.pass_to(1)
    rows.put(item(1, 50))
    assert pool.used == 50


def test_the_end_frees_what_was_read_and_the_last_reader_the_rest() -> None:
    pool = Pool(100)
    rows = backlog(pool)
    reader = rows.reader(lambda: None)
    rows.put(item(0))
    rows.put(item(1))
    reader.pass_to(1)
    rows.end()
    assert pool.used == 10
    reader.close()
    assert pool.used == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 3))
def test_whatever_the_sizes_all_readers_see_all_items_within_the_limit(
    sizes: list[int], readers: int
) -> None:
    pool = Pool(40)
    rows = backlog(pool)
    seen: list[list[int]] = [[] for _ in range(readers)]

    def read(reader, found: list[int]) -> None:
        while len(found) < len(sizes):
            got = rows_at(reader, len(found))
            if got is not None:
                found.append(got.index)
                reader.pass_to(len(found))

    cursors = [rows.reader(lambda: None) for _ in range(readers)]
    threads = [threading.Thread(target=read, args=pair) for pair in zip(cursors, seen, strict=True)]
    for thread in threads:
        thread.start()
    for number, size in enumerate(sizes):
        rows.put(item(number, size))
    rows.end()
    for thread in threads:
        thread.join(5.0)
    assert seen == [list(range(len(sizes)))] * readers
    assert pool.peak <= 40
    assert pool.used == 0


def rows_at(reader, index: int):
    return reader.wait_for(index, 0.5)
