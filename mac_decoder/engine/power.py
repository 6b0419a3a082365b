"""Sleep: keeping the Mac awake while requests run, and noticing that it slept.

On other systems nothing is asserted. The two clocks part in sleep everywhere that the
monotonic clock stops, which macOS and Linux both do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass

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
    """Keeps macOS from idle sleep between :meth:`hold` and :meth:`release`.

    ``caffeinate -i -w PID`` ends by itself when this process dies. Both methods may be
    called any number of times.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether an assertion is in force."""
        return self._child is not None

    def hold(self) -> None:
        """Assert that the machine is in use; does nothing away from macOS."""
        if sys.platform != "darwin" or self._child is not None:
            return
        self._child = subprocess.Popen(
            ["/usr/bin/caffeinate", "-i", "-w", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def release(self) -> None:
        """Let the machine sleep again."""
        if self._child is None:
            return
        self._child.terminate()
        self._child.wait()
        self._child = None
