"""Real processes for the end-to-end tests, and waiting for what they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil


class RunningProducer:
    """``python -m gb10_producer`` with these arguments; its stdout's ready lines are awaited."""

    def __init__(self, state: Path, *args: str, key: bytes | None = None) -> None:
        self.log_path = state / "producer.log"
        command = [sys.executable, "-m", "gb10_producer", *args]
        inherited: tuple[int, ...] = ()
        if key is not None:
            reading, writing = os.pipe()
            os.write(writing, key)
            os.close(writing)
            inherited = (reading,)
            command += ["--key-fd", str(reading)]
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, pass_fds=inherited
            )
        for descriptor in inherited:
            os.close(descriptor)
        self.url = ""

    def await_ready(self) -> RunningProducer:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line.startswith("paired "):  # somebody may be faster than the model
            line = self.process.stdout.readline()
        assert line.startswith("ready ws"), self.log_path.read_text()
        self.url = line.split()[1]
        return self

    def kill_the_one_that_computes(self) -> None:
        psutil.Process(self.process.pid).children()[0].kill()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(15)
        assert self.process.stdout is not None
        self.process.stdout.close()


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
