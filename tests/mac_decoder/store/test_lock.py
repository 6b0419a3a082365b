"""One writer, and a message that says who it is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mac_decoder.store.lock import WriterLock
from mac_decoder.store.store import Store
from protocol.errors import ConfigError
from tests.mac_decoder.store.made import KEY


def test_a_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    held = WriterLock(tmp_path)
    with pytest.raises(ConfigError) as caught:
        WriterLock(tmp_path)
    assert caught.value.reason == "store_locked"
    assert f"process {os.getpid()}" in caught.value.message
    assert "--cache-dir" in (caught.value.hint or "")
    held.release()
    held.release()
    WriterLock(tmp_path).release()


def test_another_process_is_locked_out_until_this_one_dies(tmp_path: Path) -> None:
    script = (
        "import sys, pathlib, time\n"
        "from mac_decoder.store.lock import WriterLock\n"
        "lock = WriterLock(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == "held\n"
            with pytest.raises(ConfigError) as caught:
                WriterLock(tmp_path)
            assert f"process {child.pid}" in caught.value.message
        finally:
            child.kill()
    WriterLock(tmp_path).release()


def test_a_store_gives_the_lock_back(tmp_path: Path) -> None:
    with Store.open(tmp_path, KEY, 1 << 30, 0), pytest.raises(ConfigError):
        Store.open(tmp_path, KEY, 1 << 30, 0)
    Store.open(tmp_path, KEY, 1 << 30, 0).close()


def test_a_start_that_fails_gives_the_lock_back(tmp_path: Path) -> None:
    (tmp_path / "blocks").write_text("in the way")
    with pytest.raises(ConfigError) as caught:
        Store.open(tmp_path, KEY, 1 << 30, 0)
    assert caught.value.reason == "cache_dir_unusable"
    (tmp_path / "blocks").unlink()
    Store.open(tmp_path, KEY, 1 << 30, 0).close()
