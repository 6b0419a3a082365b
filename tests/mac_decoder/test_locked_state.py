"""A state directory whose lock another process holds for ever, as one that was stopped does."""

from __future__ import annotations

import fcntl
import os
import time

from tests.mac_decoder.test_node import decoder

__all__ = ["decoder"]


def test_it_starts_serves_locally_says_why_and_stops(decoder, checkpoint, tmp_path):
    directory = tmp_path / "decoder"
    directory.mkdir()
    holder = os.open(directory / "generations.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    producer = ("--producer", "ws://127.0.0.1:9")
    model = ("--model", str(checkpoint("llama")), "--port", "0")
    running = decoder(*model, *producer, key=bytes(range(32)))
    os.set_blocking(running.process.stdout.fileno(), False)
    deadline = time.monotonic() + 60
    while not (line := running.process.stdout.readline()):
        assert time.monotonic() < deadline, running.log
        assert running.process.poll() is None, running.log
        time.sleep(0.05)
    running.url = line.split()[1]
    assert "state_dir_locked" in running.log
    answer = running.chat(max_tokens=3).json()
    assert answer["baton"]["source"] == "local"
    link = running.get("/status").json()["engine"]["links"][0]
    assert (link["state"], link["reason"]) == ("down", "state_dir_locked")
    began = time.monotonic()
    assert running.stop() == 0
    assert time.monotonic() - began < 6
    os.close(holder)
