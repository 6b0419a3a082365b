"""How long each side waits, and for what; seconds everywhere.

Each machine owns two deadlines. The *idle* deadline runs while the peer owes something and
starts anew with everything valid that it sends. The *total* deadline of a handoff grows
with the prompt's length, since prefilling does, and nothing the peer sends moves it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """All waiting times of one connection, in seconds; the defaults suit two real machines.

    ``handshake_s``: for each message of the handshake. ``idle_s``: for the peer's next
    sign of life, or for credit. ``abort_s``: for ABORTED (a producer finishes its tile
    first). ``commit_s``: for COMMITTED after SEAL. ``heartbeat_s``: the producer sends
    PROGRESS at least this often. ``base_s`` and ``per_token_s``: see :meth:`total_s`.
    """

    handshake_s: float = 10.0
    idle_s: float = 30.0
    abort_s: float = 60.0
    commit_s: float = 60.0
    heartbeat_s: float = 5.0
    base_s: float = 120.0
    per_token_s: float = 0.05

    def total_s(self, tokens: int) -> float:
        """The longest a handoff of ``tokens`` tokens may take: ``base_s + tokens * per_token_s``.

        The default allows 20 tokens per second beyond two minutes, so that a slow producer
        with a deep prompt is waited for and a stuck one is not waited for all day.
        """
        return self.base_s + tokens * self.per_token_s
