"""API keys: what is stored of them, who may change it when, and what a server knows of it."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mac_decoder.api import keys as keys_module
from mac_decoder.api.keys import PREFIX, KeyFiles, Keys, digest
from protocol.errors import ConfigError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(doing: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        doing()
    return caught.value.reason


def test_a_key_is_random_told_once_and_kept_as_a_digest_in_private(tmp_path: Path) -> None:
    files = KeyFiles(tmp_path / "decoder")
    first, second = files.create("laptop"), files.create("desk", shares_caches=True)
    assert first != second
    assert all(key.startswith(PREFIX) and len(key) == len(PREFIX) + 43 for key in (first, second))
    desk, laptop = files.all()
    assert (laptop.name, laptop.digest, laptop.shares_caches) == ("laptop", digest(first), False)
    assert (desk.name, desk.digest, desk.shares_caches) == ("desk", digest(second), True)
    assert laptop.salt != desk.salt
    assert laptop.digest not in (laptop.salt, desk.salt)
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert len(kept) == 2
    for path in kept:
        raw = path.read_bytes()
        assert first[len(PREFIX) :].encode() not in raw
        assert second[len(PREFIX) :].encode() not in raw
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for shown in (repr(laptop), str(desk)):
        assert "salt" not in shown
        assert "digest" not in shown


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".hidden", "a b", "ä", "x" * 65, "a\n"])
def test_what_is_no_name_is_refused(tmp_path: Path, name: str) -> None:
    files = KeyFiles(tmp_path)
    assert refused(lambda: files.create(name)) == "key_name_invalid"
    assert refused(lambda: files.revoke(name)) == "key_unknown"
    assert files.all() == []


def test_a_name_is_taken_until_its_key_is_revoked(tmp_path: Path) -> None:
    files = KeyFiles(tmp_path)
    first = files.create("laptop")
    assert refused(lambda: files.create("laptop")) == "key_name_taken"
    assert [key.digest for key in files.all()] == [digest(first)]
    files.revoke("laptop")
    assert refused(lambda: files.revoke("laptop")) == "key_unknown"
    assert files.create("laptop") != first


def test_there_is_an_end_to_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys_module, "MOST_KEYS", 2)
    files = KeyFiles(tmp_path)
    files.create("one")
    files.create("two")
    assert refused(lambda: files.create("three")) == "too_many_keys"


MAKE = """
import sys
from pathlib import Path
from mac_decoder.api.keys import KeyFiles
from protocol.errors import ConfigError
files, made = KeyFiles(Path(sys.argv[1])), 0
for number in range(20):
    files.create(f"{sys.argv[2]}-{number}")
    try:
        files.create(f"shared-{number}")
        made += 1
    except ConfigError as error:
        assert error.reason == "key_name_taken", error.reason
print(made)
"""


def test_two_processes_at_once_lose_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, str(tmp_path), name],
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for name in ("here", "there")
    ]
    made = [int(process.communicate(timeout=60)[0]) for process in running]
    assert sum(made) == 20, "each of the names that both wanted went to one of them"
    assert len(KeyFiles(tmp_path).all()) == 60


def test_a_server_notices_what_is_made_and_revoked_within_a_second(tmp_path: Path) -> None:
    """It does not look more often, however many requests come."""
    files, clock, looks = KeyFiles(tmp_path), Clock(), 0
    looked = files.stamp

    def stamp() -> object:
        nonlocal looks
        looks += 1
        return looked()

    files.stamp = stamp
    known = Keys(("given-key-of-long-standing",), files, clock)
    assert (known.salt_of("nothing"), len(known)) == (None, 1)
    key = KeyFiles(tmp_path).create("laptop")
    clock.now = 0.99
    assert known.salt_of(key) is None
    clock.now = 1.0
    salt = known.salt_of(key)
    assert salt == files.all()[0].salt
    assert len(known) == 2
    KeyFiles(tmp_path).revoke("laptop")
    for _ in range(100):
        known.salt_of(key)
    clock.now = 2.0
    assert known.salt_of(key) is None
    assert known.salt_of("given-key-of-long-standing") == digest("given-key-of-long-standing")
    assert looks == 3


def test_a_key_that_shares_caches_has_no_salt(tmp_path: Path) -> None:
    files = KeyFiles(tmp_path)
    key = files.create("laptop", shares_caches=True)
    assert Keys((), files).salt_of(key) == b""


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.chmod(0o640), "api_keys_exposed"),
        (lambda path: path.parent.chmod(0o750), "directory_exposed"),
        (lambda path: path.write_bytes(b"{}"), "api_keys_invalid"),
        (lambda path: path.write_bytes(b"x" * 5000), "api_keys_invalid"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b"=", b"")), "api_keys_invalid"),
    ],
    ids=["file", "directory", "form", "length", "encoding"],
)
def test_what_others_may_have_read_or_written_is_no_key(
    tmp_path: Path,
    spoil: Callable[[Path], object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A running server then takes none of the stored keys, says so once, and recovers."""
    files, clock = KeyFiles(tmp_path / "decoder"), Clock()
    key = files.create("laptop")
    known = Keys((), files, clock)
    assert known.salt_of(key)
    (path,) = (tmp_path / "decoder").rglob("laptop.json")
    kept = path.read_bytes()
    spoil(path)
    assert refused(files.all) == reason
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.now += 1
            assert known.salt_of(key) is None
    assert [reason in record.getMessage() for record in caplog.records] == [True]
    assert key not in caplog.text
    path.parent.chmod(0o700)
    if stat.S_IMODE(path.stat().st_mode) != 0o600:
        path.chmod(0o600)
    if path.read_bytes() != kept:
        path.write_bytes(kept)
    clock.now += 1
    assert known.salt_of(key)
