"""Sleep: keeping the Mac awake while requests run, and noticing that it slept.

On other systems nothing is asserted. The two clocks part in sleep everywhere that the
monotonic clock stops, which macOS and Linux both do.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

log = logging.getLogger(__name__)

COMMAND: tuple[str, ...] = (
    ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())) if sys.platform == "darwin" else ()
)
"""What keeps this machine awake while it runs; with ``-w`` it ends when this process dies."""

SLEEP_TOLERANCE_S = 5.0
"""How far the clocks may part (adjusted time, a slow scheduler) before it counts as sleep."""


@dataclass(frozen=True)
class Clocks:
    """One reading of both clocks, in seconds."""

    wall: float
    monotonic: float

    @classmethod
    def now(cls) -> Clocks:
        """Both clocks, read one after the other."""
        return cls(time.time(), time.monotonic())


def slept(previous: Clocks, current: Clocks, tolerance_s: float = SLEEP_TOLERANCE_S) -> bool:
    """Whether the machine slept between two readings: the wall clock ran ahead of the other.

    A wall clock set back never counts as sleep; one set forward does, which costs a
    reconnect and nothing else.
    """
    wall = current.wall - previous.wall
    monotonic = current.monotonic - previous.monotonic
    return wall - monotonic > tolerance_s


class PowerAssertion:
    """Keeps the machine from idle sleep between :meth:`hold` and :meth:`release`.

    Both may be called any number of times and return at once: a thread starts and ends
    ``COMMAND``. One that cannot be started is logged, and the machine may then sleep.
    """

    def __init__(self) -> None:
        self._command = COMMAND
        self._wanted = False
        self._child: subprocess.Popen[bytes] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="baton-power")

    @property
    def held(self) -> bool:
        """Whether an assertion is in force."""
        return self._child is not None

    def hold(self) -> None:
        """Assert that the machine is in use; does nothing away from macOS."""
        if self._command and not self._wanted:
            self._wanted = True
            self._thread.submit(self._follow)

    def release(self) -> None:
        """Let the machine sleep again."""
        if self._wanted:
            self._wanted = False
            self._thread.submit(self._follow)

    def close(self) -> None:
        """Release for good; waits for the thread."""
        self.release()
        self._thread.shutdown()

    def _follow(self) -> None:
        """In the thread: make what is the case what is wanted."""
        if self._child is None and self._wanted:
            try:
                self._child = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                log.warning("this machine may fall asleep: %s (%s)", self._command[0], error)
        elif self._child is not None and not self._wanted:
            self._child.terminate()
            self._child.wait()
            self._child = None
