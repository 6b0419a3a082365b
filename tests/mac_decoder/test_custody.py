"""What the supervisor knows of its child's connections; both sides in one process."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest

from mac_decoder import custody
from mac_decoder.custody import Custody, Duplicates, Owed, inherited


def sides(duplicates: Duplicates) -> tuple[Custody, Duplicates]:
    """The child's side of ``duplicates``, beside it."""
    child = inherited(os.dup(duplicates.theirs.fileno()), os.dup(duplicates.page_fd))
    duplicates.passed_on()
    return child, duplicates


def ended(child: Custody, duplicates: Duplicates) -> None:
    duplicates.close()
    if child._channel is not None:
        child._channel.close()


@pytest.fixture
def pair() -> Iterator[tuple[Custody, Duplicates]]:
    made = sides(Duplicates(8))
    yield made
    ended(*made)


@pytest.fixture
def client() -> Iterator[Callable[[], tuple[socket.socket, socket.socket]]]:
    """Makes pairs of connected sockets."""
    with ExitStack() as closing:

        def connect() -> tuple[socket.socket, socket.socket]:
            ours, theirs = socket.socketpair()
            closing.enter_context(ours)
            closing.enter_context(theirs)
            return ours, theirs

        yield connect


def test_what_is_left_is_what_was_not_closed_and_what_is_owed_is_the_last_word(pair, client):
    child, duplicates = pair

    async def main() -> None:
        sockets = [client() for _ in range(4)]
        entries = [child.opened(ours.fileno()) for ours, _ in sockets]
        entries[0].owe(Owed.ANSWER)
        entries[1].owe(Owed.ANSWER)
        entries[1].owe(Owed.END)
        entries[2].owe(Owed.ANSWER)
        child.closed(entries[2])
        for ours, _ in sockets:
            ours.close()
        assert duplicates.hear()
        left = duplicates.taken()
        assert [owed for _, owed in left] == [Owed.ANSWER, Owed.END, Owed.NOTHING]
        for (duplicate, _), number in zip(left, (0, 1, 3), strict=True):
            with duplicate:
                duplicate.send(b"%d" % number)
            assert sockets[number][1].recv(10) == b"%d" % number
        assert sockets[2][1].recv(10) == b"", "nobody holds what was closed"

    asyncio.run(main())


def test_no_more_are_known_than_there_are_slots_and_slots_come_back(pair, client, caplog):
    child, duplicates = pair

    async def main() -> None:
        ours, _ = client()
        entries = [child.opened(ours.fileno()) for _ in range(8)]
        assert child.opened(ours.fileno()) is None
        assert child.opened(ours.fileno()) is None
        assert child.missed == 2
        child.closed(entries[3])
        again = child.opened(ours.fileno())
        assert again.slot == entries[3].slot
        again.owe(Owed.ANSWER)
        # A task that outlives its connection says nothing about the slot's next one.
        entries[3].owe(Owed.END)
        assert duplicates.hear()
        left = duplicates.taken()
        assert [owed for _, owed in left].count(Owed.ANSWER) == 1
        for duplicate, _ in left:
            duplicate.close()

    asyncio.run(main())
    assert len([line for line in caplog.records if "does not know" in line.message]) == 1


def test_a_full_pair_loses_no_closing_and_misses_new_connections(client):
    duplicates = Duplicates(4096)
    duplicates.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    child, _ = sides(duplicates)
    before = psutil.Process().num_fds()

    async def main() -> None:
        ours, _ = client()
        entries = []
        while (entry := child.opened(ours.fileno())) is not None:
            entries.append(entry)
        assert 0 < len(entries) < 4096
        for entry in entries:
            child.closed(entry)
        assert child.opened(ours.fileno()) is None, "it waits its turn"
        while child._unsent:
            assert duplicates.hear()
            await asyncio.sleep(0.001)
        assert duplicates.hear()
        assert duplicates.taken() == []
        again = child.opened(ours.fileno())
        assert again is not None
        child.closed(again)
        duplicates.hear()
        assert psutil.Process().num_fds() == before + 2 + 3, "the client, the loop, nothing else"

    asyncio.run(main())
    ended(child, duplicates)


def test_a_supervisor_that_has_left_is_not_told_again(pair, client, caplog):
    child, duplicates = pair

    async def main() -> None:
        ours, _ = client()
        known = child.opened(ours.fileno())
        duplicates.channel.close()
        assert child.opened(ours.fileno()) is None
        assert child.opened(ours.fileno()) is None
        child.closed(known)
        assert child.missed == 2

    asyncio.run(main())


@pytest.mark.parametrize("record", [b"\x01\x00", b"\x07\x00\x00\x00", b"\x01\x00\x00\x08"])
def test_what_is_no_record_ends_the_listening_and_keeps_what_is_held(client, record):
    duplicates = Duplicates(8)
    ours, _ = client()
    with duplicates.theirs as theirs:
        socket.send_fds(theirs, [b"\x01\x00\x00\x00"], [ours.fileno()])
        socket.send_fds(theirs, [record], [ours.fileno()])
    before = psutil.Process().num_fds()
    assert duplicates.hear() is False
    assert psutil.Process().num_fds() == before + 1
    duplicates.close()
    assert psutil.Process().num_fds() == before - 1 - 1, "the duplicate, the pair, the page"
    os.close(duplicates.page_fd)


def test_a_process_that_may_open_no_more_loses_the_feature_alone(pair, client, caplog):
    child, duplicates = pair
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def main() -> None:
        ours, _ = client()
        assert child.opened(ours.fileno()) is not None
        assert child.opened(ours.fileno()) is not None
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            assert duplicates.hear()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert duplicates.taken() == []

    asyncio.run(main())
    assert [line.message for line in caplog.records if "no descriptor" in line.message]


def test_two_children_s_connections_leave_room_for_everything_else(monkeypatch):
    for soft, slots in ((256, 64), (1024, 448), (1 << 20, 512), (100, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert custody._affordable() == slots
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert custody._affordable() == 512


def test_a_platform_without_anonymous_memory_uses_a_file_without_a_name(
    monkeypatch, tmp_path, client
):
    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    child, duplicates = sides(Duplicates(8))
    assert list(tmp_path.iterdir()) == []

    async def main() -> None:
        child.opened(client()[0].fileno()).owe(Owed.HEAD)

    asyncio.run(main())
    duplicates.hear()
    [(duplicate, owed)] = duplicates.taken()
    duplicate.close()
    assert owed is Owed.HEAD
    ended(child, duplicates)
