"""The store key: made once, private, and never replaced in silence."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mac_decoder.store.key import KEY_BYTES, key_number, load, load_or_make, manifest_key
from protocol.errors import ConfigError


def test_a_key_is_made_once_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "state/store.key"
    key = load_or_make(path)
    assert len(key) == KEY_BYTES
    assert load_or_make(path) == key
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_loading_makes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "state/store.key"
    assert load(path) is None
    assert list(tmp_path.iterdir()) == []
    key = load_or_make(path)
    assert load(path) == key


def test_two_keys_differ(tmp_path: Path) -> None:
    assert load_or_make(tmp_path / "a") != load_or_make(tmp_path / "b")


def test_whoever_makes_it_first_wins(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: keys.append(load_or_make(tmp_path / "k"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "k"
    load_or_make(path)
    path.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        load_or_make(path)
    assert caught.value.reason == "store_key_exposed"
    assert "chmod 600" in (caught.value.hint or "")


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_file_of_another_length_is_no_key(length: int, tmp_path: Path) -> None:
    path = tmp_path / "k"
    path.touch(0o600)
    path.write_bytes(bytes(length))
    with pytest.raises(ConfigError) as caught:
        load_or_make(path)
    assert caught.value.reason == "store_key_unreadable"
    assert path.read_bytes() == bytes(length)


def test_a_link_is_no_key(tmp_path: Path) -> None:
    load_or_make(tmp_path / "k")
    os.symlink(tmp_path / "k", tmp_path / "link")
    with pytest.raises(ConfigError) as caught:
        load_or_make(tmp_path / "link")
    assert caught.value.reason == "store_key_unreadable"


@pytest.mark.timeout(20)
def test_a_pipe_is_no_key_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k", 0o600)
    with pytest.raises(ConfigError) as caught:
        load_or_make(tmp_path / "k")
    assert caught.value.reason == "store_key_unreadable"


@pytest.mark.timeout(20)
def test_what_is_no_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "k", 0o600)
    other = os.open(tmp_path / "k", os.O_RDWR | os.O_NONBLOCK)
    try:
        os.write(other, bytes(KEY_BYTES))
        with pytest.raises(ConfigError) as caught:
            load(tmp_path / "k")
        assert caught.value.reason == "store_key_unreadable"
        assert os.read(other, KEY_BYTES) == bytes(KEY_BYTES)
    finally:
        os.close(other)


def test_a_directory_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert caught.value.reason == "store_key_unreadable"


def test_what_is_derived_is_apart_from_the_key() -> None:
    key = bytes(range(32))
    assert len({key, manifest_key(key), manifest_key(bytes(32))}) == 3
    assert len(key_number(key)) == 32
    assert key_number(key) != key_number(bytes(32))
