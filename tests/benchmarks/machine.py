"""What benchmarks ask of the operating system: the page cache, the device, resident memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil


def forget(directory: Path) -> None:
    """Take every file below ``directory`` out of the page cache.

    Only clean pages can go, so each file is synced first. What a hypervisor keeps of the
    device stays where it is.
    """
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def device_bytes() -> tuple[int, int]:
    """Bytes that this process has had read from and written to block devices so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return found["read_bytes"], found["write_bytes"]


class Memory:
    """Resident bytes of this process, looked at every millisecond until :meth:`end`."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._seen: list[tuple[float, int]] = []
        self._look()
        self._thread.start()

    @property
    def start(self) -> int:
        """Bytes when it began."""
        return self._seen[0][1]

    def end(self) -> None:
        """Look once more, and no more after that."""
        self._stop.set()
        self._thread.join()
        self._look()

    def growth(self, since: float = 0.0, until: float = float("inf")) -> int:
        """The most bytes beyond the start between two readings of ``time.perf_counter``."""
        return max(rss for when, rss in self._seen if since <= when <= until) - self.start

    def _watch(self) -> None:
        while not self._stop.wait(0.001):
            self._look()

    def _look(self) -> None:
        self._seen.append((time.perf_counter(), self._process.memory_info().rss))


def alone(module: str, *arguments: object) -> dict[str, Any]:
    """A part of a benchmark in a process of its own; the JSON object that it prints."""
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
