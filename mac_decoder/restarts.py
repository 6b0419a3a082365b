"""When a child that ended is started again, and when it is not. Pure."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Final

MOST_IN_A_ROW: Final = 3
"""After so many faults without a stable time between them, only a person can help."""

STABLE_S: Final = 60.0
"""A child that was ready for so long had no failed start."""

_FIRST_PAUSE_S: Final = 0.5
_GROWTH: Final = 4.0


@dataclass(frozen=True)
class Restarts:
    """The faults so far: ``in_a_row`` decides, ``total`` is shown."""

    in_a_row: int = 0
    total: int = 0
    last_fault: str = ""

    def after(self, status: int, ready_for_s: float) -> Restarts:
        """The count after a child ended with ``status`` (negative: a signal's number).

        ``ready_for_s`` is how long it had been ready, 0.0 if it never was.
        """
        before = 0 if ready_for_s >= STABLE_S else self.in_a_row
        return Restarts(before + 1, self.total + 1, described(status))

    @property
    def latched(self) -> bool:
        """Whether no further start is tried."""
        return self.in_a_row >= MOST_IN_A_ROW

    @property
    def pause_s(self) -> float:
        """Seconds before the next start."""
        return _FIRST_PAUSE_S * _GROWTH ** max(0, self.in_a_row - 1)


def described(status: int) -> str:
    """How a child ended, in a few stable words."""
    if status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"exit {status}"
