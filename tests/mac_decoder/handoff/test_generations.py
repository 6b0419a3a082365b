"""No generation is ever given out twice, wherever the process dies."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.handoff import generations as module
from mac_decoder.handoff.generations import BLOCK, Generations
from protocol.errors import ConfigError, TransferError
from protocol.messages import MAX_GENERATION

KEY = bytes(range(32))
OTHER = bytes(32)


def test_counts_upwards_and_reserves_once_per_block(tmp_path, monkeypatch):
    writes = []
    write = module._write
    monkeypatch.setattr(module, "_write", lambda *args: (writes.append(1), write(*args)))
    source = Generations(tmp_path / "generations.json", KEY, 1)
    assert [source.take() for _ in range(BLOCK)] == list(range(1, BLOCK + 1))
    assert len(writes) == 1
    assert source.take() == BLOCK + 1
    assert len(writes) == 2


def test_reserving_ahead_costs_no_number(tmp_path):
    path = tmp_path / "generations.json"
    source = Generations(path, KEY, 1)
    source.reserve()
    source.reserve()
    assert source.take() == 1
    path.write_bytes(b"?")
    with pytest.raises(ConfigError):
        Generations(path, KEY, 1).reserve()


def test_a_restart_leaves_a_gap(tmp_path):
    path = tmp_path / "deep" / "generations.json"
    assert Generations(path, KEY, 1).take() == 1
    assert Generations(path, KEY, 1).take() == BLOCK + 1


def test_a_new_epoch_or_key_starts_over_and_the_old_one_goes_on(tmp_path):
    path = tmp_path / "generations.json"
    assert Generations(path, KEY, 1).take() == 1
    assert Generations(path, KEY, 2).take() == 1
    assert Generations(path, OTHER, 1).take() == 1
    assert Generations(path, KEY, 1).take() == BLOCK + 1


def test_the_series_in_use_survives_many_other_keys(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SERIES", 8)
    path = tmp_path / "generations.json"
    for number in range(12):
        Generations(path, number.to_bytes(32, "big"), 1).take()
        mine = Generations(path, KEY, 1).take()
        assert mine == number * BLOCK + 1
    assert len(module._read(path)) == 8


def test_the_file_is_private_and_holds_no_key(tmp_path):
    path = tmp_path / "state" / "generations.json"
    Generations(path, KEY, 1).take()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert KEY.hex() not in path.read_text()


def test_no_number_is_one_that_the_protocol_does_not_have(tmp_path):
    path = tmp_path / "generations.json"
    Generations(path, KEY, 1).take()
    last = path.read_bytes().replace(b'"reserved":1025', b'"reserved":%d' % (MAX_GENERATION - 1023))
    path.write_bytes(last)
    assert Generations(path, KEY, 1).take() == MAX_GENERATION - 1023
    with pytest.raises(TransferError) as caught:
        Generations(path, KEY, 1).take()
    assert caught.value.reason == "generations_used_up"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\x00" * 64,
        b'{"version":2,"series":[]}',
        b'{"version":1,"series":[{"key":"aa","epoch":1,"reserved":-5}]}',
        b'{"version":1,"series":[{"key":"aa","epoch":1,"reserved":9007199254740994}]}',
        b'{"version":1,"series":[],"more":1}',
        b'{"version":1,"series":[' + b" " * (1 << 17) + b"]}",
    ],
)
def test_a_file_that_is_not_ours_is_refused_and_kept(tmp_path, content):
    path = tmp_path / "generations.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Generations(path, KEY, 1).take()
    assert caught.value.reason == "generations_unreadable"
    assert path.read_bytes() == content


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, make):
    path = tmp_path / "generations.json"
    make(path)
    with pytest.raises(ConfigError) as caught:
        Generations(path, KEY, 1).take()
    assert caught.value.reason == "generations_unreadable"


def test_threads_and_instances_never_share_a_number(tmp_path):
    path = tmp_path / "generations.json"
    sources = [Generations(path, KEY, 1) for _ in range(3)]
    taken: list[list[int]] = [[] for _ in range(9)]

    def draw(number: int) -> None:
        for _ in range(2 * BLOCK // 3):
            taken[number].append(sources[number % 3].take())

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = [number for series in taken for number in series]
    assert len(set(numbers)) == len(numbers)


class _Died(BaseException):
    """Stands for the process ending at a system call."""


STEPS = ("open", "write", "_sync", "rename", "directory")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, BLOCK + 2), st.sampled_from((None, *STEPS)), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_no_crash_or_failed_system_call_gives_a_number_twice(lives):
    """Each life draws some numbers and then dies (or meets an error) inside a reservation."""
    seen: set[int] = set()
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = Path(directory) / "generations.json"
        for draws, step, dies in lives:
            fault = _Died() if dies else OSError(28, "No space left on device")
            source = Generations(path, KEY, 1)
            for _ in range(draws):
                number = source.take()
                assert number not in seen
                seen.add(number)
            if step is None:
                continue
            with patch.context() as inner:
                _break_at(inner, step, fault)
                # What is left of the block costs no system call; the next block does.
                with pytest.raises((_Died, TransferError)):
                    _exhaust(source, seen)
            if not dies:
                number = source.take()
                assert number not in seen
                seen.add(number)


def _exhaust(source: Generations, seen: set[int]) -> None:
    for _ in range(BLOCK + 1):
        number = source.take()
        assert number not in seen
        seen.add(number)


def _break_at(patch, step: str, fault: BaseException) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise fault

    if step == "rename":
        patch.setattr(module.Path, "rename", fail)
    elif step in ("_sync", "directory"):
        sync, calls = module._sync, []

        def sync_or_fail(descriptor: int) -> None:
            calls.append(descriptor)
            if len(calls) == (1 if step == "_sync" else 2):
                raise fault
            sync(descriptor)

        patch.setattr(module, "_sync", sync_or_fail)
    else:
        patch.setattr(module.os, step, fail)


def test_an_error_is_reported_by_reason(tmp_path, monkeypatch):
    _break_at(monkeypatch, "_sync", OSError(5, "Input/output error"))
    with pytest.raises(TransferError) as caught:
        Generations(tmp_path / "generations.json", KEY, 1).take()
    assert caught.value.reason == "generations_not_durable"
    assert list(tmp_path.glob("*.tmp")) == []


def test_killed_processes_never_repeat_a_number(tmp_path):
    """Real processes, killed while they reserve block after block."""
    path = tmp_path / "generations.json"
    program = (
        "import sys; from pathlib import Path; import mac_decoder.handoff.generations as g\n"
        "g.BLOCK = 2; s = g.Generations(Path(sys.argv[1]), bytes(range(32)), 1)\n"
        "while True: print(s.take(), flush=True)"
    )
    numbers: list[int] = []
    for lines in (1, 7, 20):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(lines):
            numbers.append(int(process.stdout.readline()))
        os.kill(process.pid, signal.SIGKILL)
        # A last line may have been cut off by the kill.
        rest = process.stdout.read()
        numbers.extend(int(line) for line in rest.splitlines(keepends=True) if line[-1] == "\n")
        process.wait()
        process.stdout.close()
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)


def _held(path: Path) -> int:
    """A descriptor that holds the lock, as a process that was stopped in the middle does."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_a_lock_that_is_never_released_is_told_of_and_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.1)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    path = tmp_path / "generations.json"
    source = Generations(path, KEY, 1)
    assert source.failure is None
    holder = _held(path)
    for attempt in (source.reserve, source.take):
        began = time.monotonic()
        with pytest.raises(TransferError) as caught:
            attempt()
        assert caught.value.reason == "state_dir_locked"
        assert time.monotonic() - began < 3.0
    source.retry()
    assert source.failure is not None
    assert source.failure.reason == "state_dir_locked"
    os.close(holder)
    source.retry()
    assert source.failure is None
    assert source.take() == 1


def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path):
    path = tmp_path / "generations.json"
    holder = _held(path)
    release = threading.Timer(0.1, os.close, (holder,))
    release.start()
    assert Generations(path, KEY, 1).take() == 1
    release.join()
