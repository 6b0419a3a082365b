"""Tokens that log in once: used, expired, forged, or left by somebody else."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import threading
from pathlib import Path

import pytest

from mac_decoder.api.once import DIRECTORY, MOST, VALID_S, Once
from protocol.errors import CapacityError, ConfigError

PORT = 8000


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def once(tmp_path: Path, clock: Clock) -> Once:
    return Once(tmp_path, PORT, clock)


def file_of(state: Path, token: str) -> Path:
    return state / DIRECTORY / hashlib.sha256(token.encode()).hexdigest()


def test_a_token_is_good_once(once: Once, tmp_path: Path) -> None:
    token = once.leave()
    assert once.waits(token)
    assert once.take(token)
    assert not file_of(tmp_path, token).exists()
    assert not once.waits(token)
    assert not once.take(token)


def test_of_many_who_bring_it_at_once_one_gets_in(once: Once) -> None:
    token = once.leave()
    gate, got = threading.Barrier(8), []

    def bring() -> None:
        gate.wait()
        got.append(once.take(token))

    threads = [threading.Thread(target=bring) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert sorted(got) == [False] * 7 + [True]


def test_it_is_nowhere_in_what_is_left(once: Once, tmp_path: Path) -> None:
    token = once.leave()
    path = file_of(tmp_path, token)
    assert token not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_it_expires_and_is_gone_all_the_same(once: Once, clock: Clock, tmp_path: Path) -> None:
    token = once.leave()
    clock.now += VALID_S
    assert not once.take(token)
    assert not file_of(tmp_path, token).exists()


def test_one_of_the_future_is_none(once: Once, clock: Clock) -> None:
    token = once.leave()
    clock.now -= 1
    assert not once.take(token)


def test_it_is_for_its_port_alone(once: Once, tmp_path: Path, clock: Clock) -> None:
    token = Once(tmp_path, PORT + 1, clock).leave()
    assert not once.take(token)


@pytest.mark.parametrize("token", ["", ".", "../api-keys/x", "\x00", "é" * 99, "\ud800", "A" * 43])
def test_what_was_never_left_is_refused(once: Once, token: str) -> None:
    once.leave()
    assert not once.take(token)


def test_the_name_of_a_file_is_no_token(once: Once, tmp_path: Path) -> None:
    path = file_of(tmp_path, once.leave())
    assert not once.take(path.name)
    assert path.exists()


def test_a_link_is_not_followed(once: Once, tmp_path: Path) -> None:
    good, forged = file_of(tmp_path, once.leave()), "x" * 43
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(good.read_bytes())
    elsewhere.chmod(0o600)
    file_of(tmp_path, forged).symlink_to(elsewhere)
    assert not once.take(forged)


def test_a_file_that_others_may_touch_is_refused(once: Once, tmp_path: Path) -> None:
    token = once.leave()
    file_of(tmp_path, token).chmod(0o644)
    assert not once.take(token)


def test_a_directory_that_others_may_enter_is_refused(once: Once, tmp_path: Path) -> None:
    token = once.leave()
    (tmp_path / DIRECTORY).chmod(0o755)
    assert not once.take(token)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"made_at":1e6}', b"x" * 10_000])
def test_a_file_of_another_form_is_refused(once: Once, tmp_path: Path, content: bytes) -> None:
    token = once.leave()
    file_of(tmp_path, token).write_bytes(content)
    assert not once.take(token)


def put(state: Path, kind: str, name: str) -> Path:
    """Something that is no plain file, or none of ours, in the directory of the tokens."""
    made = state / DIRECTORY / name
    match kind:
        case "directory":
            (made / "within").mkdir(parents=True)
        case "pipe":
            os.mkfifo(made)
        case "link":
            made.symlink_to(state / DIRECTORY)
        case "socket":
            # A path of a socket is short.
            with socket.socket(socket.AF_UNIX) as one, contextlib.chdir(made.parent):
                one.bind(made.name)
        case _:
            made.write_text("anything")
    return made


@pytest.mark.parametrize("kind", ["directory", "pipe", "link", "socket", "file"])
@pytest.mark.parametrize("name", ["0" * 64, "notes of mine", "x"])
def test_what_lies_there_and_is_no_token_keeps_nobody_out(
    once: Once, tmp_path: Path, kind: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    once.leave()
    strange = put(tmp_path, kind, name)
    for _ in range(MOST - 1):
        assert once.take(once.leave())
    once.sweep()
    # What is not of this class' making is not for it to remove.
    ours = name == "0" * 64 and kind != "directory"
    assert os.path.lexists(strange) is not ours
    said = [record.getMessage() for record in caplog.records]
    assert sum("no logins" in line for line in said) == (0 if ours else 1)
    assert not [line for line in said if "refused" in line]


def test_what_is_no_token_takes_no_place_of_one(once: Once, tmp_path: Path) -> None:
    once.leave()
    for number in range(2 * MOST):
        put(tmp_path, "directory", f"{number:064x}")
    assert once.take(once.leave())


def test_a_directory_that_bears_a_tokens_name_is_no_token(once: Once, tmp_path: Path) -> None:
    once.leave()
    file_of(tmp_path, "x" * 43).mkdir()
    assert not once.take("x" * 43)
    assert once.take(once.leave())


def test_expired_ones_are_swept_and_fresh_ones_kept(
    once: Once, clock: Clock, tmp_path: Path
) -> None:
    old = once.leave()
    clock.now += VALID_S - 1
    fresh = once.leave()
    clock.now += 1
    once.leave()
    assert len(os.listdir(tmp_path / DIRECTORY)) == 3  # two, and the lock
    assert not once.waits(old)
    assert once.take(fresh)


def test_they_are_few(once: Once, clock: Clock) -> None:
    for _ in range(MOST):
        once.leave()
    with pytest.raises(CapacityError) as caught:
        once.leave()
    assert caught.value.reason == "too_many_logins"
    clock.now += VALID_S
    once.leave()


def test_a_pipe_in_place_of_the_lock_is_told_and_not_waited_for(once: Once, tmp_path: Path) -> None:
    token = once.leave()
    lock = tmp_path / DIRECTORY / ".lock"
    lock.unlink()
    os.mkfifo(lock, 0o600)
    with pytest.raises(ConfigError) as refused:
        once.leave()
    assert refused.value.reason == "directory_unusable"
    assert not once.take(token)
    lock.unlink()
    assert once.take(token), "nobody has used it"
