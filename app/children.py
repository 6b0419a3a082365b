"""The two processes of a demo or benchmark: started, waited for until ready, always ended.

Each child runs under :mod:`app.lifeline`, so that it ends with this process however this
process ends. Secrets go through inherited pipes, never through arguments or environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import IO, Final

from protocol.errors import ConfigError

GRACE_S: Final = 50.0
"""More than the supervisors' own grace, so that they end their children themselves."""

_LOGGED: Final = re.compile(r"\S+ (?:\S+ )?[A-Z]+ [\w.]+: (.*)")
"""A line of either side's log: time, level, place, and what it says."""

TAIL_LINES: Final = 40
"""How much of a child's log is kept for the message when it fails."""


@dataclass
class Child:
    """A running ``command``; ``url`` is what it printed after ``ready`` on stdout."""

    name: str
    process: subprocess.Popen[str]
    lifeline: int
    url: str = ""
    log: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _ready: threading.Event = field(default_factory=threading.Event)
    _readers: list[threading.Thread] = field(default_factory=list)

    def last_words(self) -> str:
        """The last line of its log, without time and place; empty where there is none."""
        line = self.log[-1] if self.log else ""
        found = _LOGGED.match(line)
        return found.group(1) if found else line

    def wait_ready(self, timeout_s: float) -> str:
        """Wait until the child says ``ready URL``, and return that URL.

        Raises ConfigError ``child_failed`` with the child's last words when it ends or
        stays silent for ``timeout_s``.
        """
        self._ready.wait(timeout_s)
        if not self.url:
            # Its end of stdout is seen a moment before its status and its last words.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0)
                for reader in self._readers:
                    reader.join(1.0)
            ended = self.process.poll() is not None
            found = "it ended" if ended else f"not ready after {timeout_s:.0f} s"
            raise self._failed("did not start", found)
        return self.url

    def require_running(self) -> None:
        """Raise ConfigError ``child_failed`` with the child's last words once it has ended."""
        status = self.process.poll()
        if status is not None:
            raise self._failed("ended", f"exit {status}")

    def _failed(self, what: str, found: str) -> ConfigError:
        return ConfigError(
            f"the {self.name} {what}",
            reason="child_failed",
            field=self.name,
            found=found,
            hint="\n".join(self.log).strip() or None,
        )

    def ask_to_end(self) -> None:
        """Have the child and everything it started end; returns at once."""
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    def hurry(self) -> None:
        """Ask a second time: supervisors then do not wait for their own children."""
        self.process.terminate()

    def end(self) -> None:
        """End the child and everything it started; returns when it is gone."""
        self.ask_to_end()
        self.process.wait()
        for reader in self._readers:
            reader.join()

    def _read_stdout(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                if line.startswith("ready ") and not self.url:
                    self.url = line.split()[1]
                    self._ready.set()
                else:
                    self.log.append(line.rstrip())
        self._ready.set()

    def _read_stderr(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                self.log.append(line.rstrip())


def start(
    name: str, command: list[str], secret: bytes | None = None, *, grace_s: float = GRACE_S
) -> Child:
    """Start ``command`` under a lifeline; at its end it has ``grace_s`` until it is killed.

    ``{key_fd}`` in ``command`` is replaced by the number of an inherited pipe from which
    ``secret`` can be read once.
    """
    lifeline, held = os.pipe()
    kept: list[int] = []
    if secret is not None:
        reading, writing = os.pipe()
        os.write(writing, secret)
        os.close(writing)
        kept.append(reading)
        command = [word.replace("{key_fd}", str(reading)) for word in command]
    environment = os.environ | {"BATON_KEEP_FDS": ",".join(str(fd) for fd in kept)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.lifeline", str(lifeline), str(grace_s), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[lifeline, *kept],
            start_new_session=True,
            env=environment,
            text=True,
            errors="replace",
        )
    finally:
        for descriptor in (lifeline, *kept):
            os.close(descriptor)
    child = Child(name, process, held)
    assert process.stdout is not None
    assert process.stderr is not None
    child._readers = [
        threading.Thread(target=child._read_stdout, args=(process.stdout,), daemon=True),
        threading.Thread(target=child._read_stderr, args=(process.stderr,), daemon=True),
    ]
    for reader in child._readers:
        reader.start()
    return child
