"""A pairing file that the user named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.pairing.record import encode_record
from tests.trust.machines import peer
from trust.pairing_file import load_record


def reason(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_record(path, "producer")
    return caught.value.reason


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "producer.pairing"
    path.write_bytes(encode_record(peer().record))
    path.chmod(0o600)
    return path


def test_it_is_read(path: Path) -> None:
    assert load_record(path, "producer").role == "producer"


def test_a_link_that_the_user_made_is_followed(path: Path) -> None:
    link = path.with_name("link")
    link.symlink_to(path)
    assert load_record(link, "producer") == load_record(path, "producer")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_one_that_others_have_access_to_is_refused(path: Path, mode: int) -> None:
    path.chmod(mode)
    assert reason(path) == "pairing_exposed"


def test_one_without_end_is_not_read_to_it(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert reason(path) == "pairing_unreadable"


def test_what_is_no_file_is_refused_at_once(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)
    assert reason(path) == "pairing_unreadable"
    path.unlink()
    path.mkdir(0o700)
    assert reason(path) == "pairing_unreadable"


def test_one_that_is_missing(path: Path) -> None:
    assert reason(path.with_name("nowhere")) == "pairing_missing"


def test_the_other_sides_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_record(path, "decoder")
    assert caught.value.reason == "pairing_of_other_side"
