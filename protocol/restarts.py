"""When a process that ended is started again, and when it is not: one policy, both machines.

A process that ends before it was ready has failed to start; a few of those in a row will not
be cured by another. One that was ready and died started well: it is started again after a
pause, and given up only if it dies soon after many starts in a row. Pure.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Policy:
    """The bounds; times in seconds.

    ``failed_starts`` in a row, or ``quick_deaths`` without a service of ``settled_s`` between
    them, latch the process off. Pauses double from ``first_pause_s`` to ``longest_pause_s``.
    """

    failed_starts: int = 3
    quick_deaths: int = 10
    settled_s: float = 60.0
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0


@dataclass(frozen=True)
class Restarts:
    """The faults so far.

    ``failed`` counts starts in a row that never became ready, ``deaths`` all faults in a row
    without a settled service between them; ``total`` and ``last_fault`` are for people.
    """

    policy: Policy = field(default_factory=Policy)
    failed: int = 0
    deaths: int = 0
    total: int = 0
    last_fault: str = ""

    def after(self, status: int, served_s: float | None) -> Restarts:
        """The count after a process ended with ``status`` (negative: a signal's number).

        ``served_s`` is how long it had been ready, ``None`` if it never was.
        """
        settled = served_s is not None and served_s >= self.policy.settled_s
        return replace(
            self,
            failed=self.failed + 1 if served_s is None else 0,
            deaths=1 if settled else self.deaths + 1,
            total=self.total + 1,
            last_fault=described(status),
        )

    @property
    def latched(self) -> bool:
        """Whether no further start is tried: only a person can help now."""
        return self.failed >= self.policy.failed_starts or self.deaths >= self.policy.quick_deaths

    @property
    def pause_s(self) -> float:
        """Seconds before the next start."""
        doublings = min(max(0, self.deaths - 1), 32)
        return min(self.policy.first_pause_s * 2.0**doublings, self.policy.longest_pause_s)


def described(status: int) -> str:
    """How a process ended, in a few stable words."""
    if status < 0:
        try:
            return f"signal {signal.Signals(-status).name}"
        except ValueError:
            return f"signal {-status}"
    return f"exit {status}"
