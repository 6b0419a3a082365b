"""A file that somebody has named: whatever lies there, it is let go of again."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mac_decoder.config import config_from
from protocol.errors import ConfigError
from tests.patience import soon
from trust import plain_file

MOST = 16


def nothing(path: Path) -> None:
    """There is no such file."""


def a_directory(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def without_end(path: Path) -> None:
    path.symlink_to("/dev/zero")


def too_long(path: Path) -> None:
    path.write_bytes(b"x" * (MOST + 1))


WRONG = [nothing, a_directory, a_pipe, without_end, too_long]


def open_files() -> int:
    gc.collect()  # what other tests left
    return psutil.Process().num_fds()


def test_it_is_read_whole_with_its_mode_and_through_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"x" * MOST)
    path.chmod(0o640)
    link.symlink_to(path)
    before = open_files()
    for named in (path, link):
        found = plain_file.read(named, MOST)
        assert (found.content, found.mode & 0o777) == (b"x" * MOST, 0o640)
    assert open_files() == before


@pytest.mark.parametrize("lies_there", WRONG)
def test_what_is_none_is_refused_at_once_and_left_closed(
    tmp_path: Path, lies_there: Callable[[Path], None]
) -> None:
    path = tmp_path / "named"
    lies_there(path)
    before = open_files()
    for _ in range(3):
        with soon(), pytest.raises((OSError, ValueError)) as caught:
            plain_file.read(path, MOST)
    # While the error is still held, too.
    assert open_files() == before
    if lies_there in (a_directory, a_pipe, without_end):
        assert str(caught.value) == "it is no file"


@pytest.mark.parametrize("lies_there", WRONG)
def test_a_decoders_file_of_keys_is_left_closed_as_well(
    tmp_path: Path, lies_there: Callable[[Path], None]
) -> None:
    path = tmp_path / "keys"
    lies_there(path)
    before = open_files()
    with soon(), pytest.raises(ConfigError) as caught:
        config_from(["--model", "m", "--api-keys-file", str(path)])
    assert open_files() == before
    assert caught.value.reason in ("api_keys_invalid", "api_keys_exposed")
