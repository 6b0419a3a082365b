"""A producer's link that nobody asks before it is known to compute what this decoder would."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.link import Destination, Handoff, LinkState, Rates
from mac_decoder.qualify.verdicts import Verdict
from protocol.errors import BatonError, TransferError
from protocol.messages import NO_SPACE, Recipe

QUALIFYING: Final = LinkState(
    "qualifying",
    "producer_qualifying",
    "its rows are being compared with this decoder's own",
)


@dataclass(frozen=True)
class Standing:
    """What is known of a producer: ``verdict`` if there is one, ``note`` what goes on now."""

    verdict: Verdict | None = None
    note: str = ""


class Gate:
    """See ``link.Link``. The link as it is where no qualification is asked for."""

    def __init__(self, link: ProducerLink, fingerprint: bytes | None) -> None:
        """``fingerprint`` is that of the producer's certificate; ``None``: it needs no verdict."""
        self.link = link
        self.fingerprint = fingerprint
        self.name = link.name
        self._lock = threading.Lock()
        self._standing = Standing()

    def start(self) -> None:
        """Begin to connect, in the background."""
        self.link.start()

    def close(self) -> None:
        """End running fetches, all connections and threads."""
        self.link.close()

    @property
    def called(self) -> str:
        """What people call it."""
        return self.link.called

    @property
    def recipe(self) -> Recipe | None:
        """How the producer computes; ``None`` before it was reached."""
        ack = self.link.producer
        return None if ack is None else ack.recipe

    @property
    def standing(self) -> Standing:
        """What is known of it."""
        with self._lock:
            return self._standing

    def judge(self, verdict: Verdict | None, note: str = "") -> None:
        """From here on the link serves as ``verdict`` says. Any thread."""
        with self._lock:
            self._standing = Standing(verdict, note)

    @property
    def state(self) -> LinkState:
        """Where the link stands; ``ready`` only with a verdict that says so."""
        state = self.link.state
        if not state.ready or self.fingerprint is None:
            return state
        standing, recipe = self.standing, self.recipe
        verdict = standing.verdict
        if verdict is None or verdict.recipe != recipe:
            return replace(QUALIFYING, detail=standing.note or QUALIFYING.detail)
        if not verdict.fit:
            return LinkState("unfit", "producer_unfit", unfit(verdict))
        return state

    def error(self) -> BatonError | None:
        """Why the producer cannot be asked now; ``None`` when it can."""
        known, state = self.link.error(), self.state
        if known is not None or state.ready:
            return known
        return TransferError(state.detail, reason=state.reason)

    @property
    def tile(self) -> int:
        """The producer's tile in tokens; 0 before it was reached."""
        return self.link.tile

    @property
    def extra_cuts(self) -> int:
        """How many extra cuts the producer brings with a handoff, at most."""
        return self.link.extra_cuts

    @property
    def qualified(self) -> dict[str, object] | None:
        """The latest comparison: when (seconds since 1970), whether fit, how far apart."""
        verdict = self.standing.verdict
        return None if verdict is None else msgspec.structs.asdict(verdict.past[-1])

    @property
    def rates(self) -> Rates:
        """What was measured: since the connection was made, or else when it was qualified."""
        rates, verdict = self.link.rates, self.standing.verdict
        if rates.handoffs or verdict is None:
            return rates
        return replace(
            rates,
            compute_tokens_per_s=verdict.tokens_per_s,
            wire_bytes_per_s=verdict.link_bytes_per_s,
        )

    def fetch(
        self,
        tokens: Sequence[int],
        shadow: Destination,
        *,
        request_id: str = "",
        space: bytes = NO_SPACE,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda processed, total: None,
    ) -> Handoff:
        """See ``link.Link.fetch``; also raises ``TransferError`` (``producer_qualifying``,
        ``producer_unfit``).
        """
        if (refusal := self.error()) is not None and not self.state.ready:
            raise refusal
        verdict = self.standing.verdict
        return self.link.fetch(
            tokens,
            shadow,
            request_id=request_id,
            space=space,
            cancelled=cancelled,
            progress=progress,
            # Whoever answers on the connection that is used may be another producer by then.
            recipe=verdict.recipe if verdict is not None else None,
        )


def unfit(verdict: Verdict) -> str:
    """Why a producer is not asked, for people."""
    last = verdict.past[-1]
    return (
        f"its rows are not this decoder's: {last.where} is off by {last.apart:.2g}, of which "
        f"rounding explains {last.allowed:.2g}; see `baton doctor` there, then "
        "`baton node qualify`. What it sent since it was compared before is still kept: "
        "`baton cache clear`"
    )
