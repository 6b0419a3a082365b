"""All producers: which of them is asked for a prompt, and the next one where that fails.

MLX thread only. Each producer has its own queue, lane and rates (``handoffs``); what is best for
a prompt is ``reuse/ladder``'s decision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from mac_decoder.engine.handoffs import Emit, Handoffs, rates_of
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.rates import Speeds
from mac_decoder.engine.remote import Arrived
from mac_decoder.engine.request import Request
from mac_decoder.engine.sequences import Sequences
from mac_decoder.handoff.link import Link
from mac_decoder.reuse import facts, ladder
from mac_decoder.reuse.facts import Facts, Plan
from protocol.errors import BatonError, RequestError, TransferError

Fetched = Callable[[int, int, Future[Arrived]], None]
"""Called with a producer's number, a request's key and what became of its handoff."""


class Producers:
    """None, one or several; they are known by their numbers, in the order they came.

    One whose link is closed (``off``) keeps its number, and is not there any more.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        fixed_threshold: int | None,
        links: Sequence[Link],
        sequences: Sequences,
        fetched: Fetched,
        progress: Emit,
        *,
        ready: Callable[[Request, list[Any]], None],
        failed: Callable[[Request, BatonError, str], None],
        lost: Callable[[Request, str], None],
    ) -> None:
        """See ``Handoffs``. ``failed`` is told once it is noted that this producer did."""
        self._tell = failed
        self._made = lambda number, link: Handoffs(
            loaded,
            fixed_threshold,
            link,
            sequences,
            partial(fetched, number),
            progress,
            ready=ready,
            failed=partial(self._failed, number),
            lost=lost,
        )
        self._each: list[Handoffs] = []
        for link in links:
            self.add(link)

    def add(self, link: Link) -> None:
        """One more producer."""
        for each in self._each:
            if each.off and not each.held():
                each.close()  # its thread; nothing comes to it any more
        self._each.append(self._made(len(self._each), link))

    def plan(
        self, request: Request, known: Facts, local: float, now: float
    ) -> tuple[Handoffs | None, Plan]:
        """The best plan, and the producer that it asks or would have asked.

        Those that have failed this request are not asked again: it knows more than their links.
        """
        left = self._left(request)
        if not left or (request.reuse.without and not self.another(request)):
            away = facts.Remote(ready=False, reason=request.reuse.away) if self._present else None
            return None, ladder.plan(replace(known, remote=away))
        choices = [replace(known, remote=each.facts(request, local, now)) for each in left]
        best, plans = ladder.choose(choices)
        for number, (each, plan) in enumerate(zip(left, plans, strict=True)):
            # A probe is one only where it happens.
            if number == best or "producer_probe" not in plan.reasons:
                each.planned(plan, request.end, now)
        return left[best], plans[best]

    def another(self, request: Request) -> bool:
        """Whether a producer that has not failed ``request`` could be asked now."""
        return any(each.ready for each in self._left(request))

    def unavailable(self, chosen: Handoffs | None, reason: str) -> BatonError:
        """Why a request that insists on a producer cannot have one."""
        if not self._present:
            return RequestError(
                "this decoder has no producer", reason="no_producer", field="baton.lane"
            )
        error = None if chosen is None else chosen.error()
        return error or TransferError("the producer is not connected", reason=reason)

    def take(self, number: int, outcome: Future[Arrived], *, wanted: bool) -> None:
        """See ``Handoffs.take``."""
        self._each[number].take(outcome, wanted=wanted)

    def held(self) -> list[Request]:
        """The requests in here, those that were withdrawn in mid-handoff included."""
        return [request for each in self._each for request in each.held()]

    def withdraw(self, request: Request) -> None:
        """Let go of a request; a handoff under way is told to stop."""
        for each in self._each:
            each.withdraw(request)

    def close(self) -> None:
        """Withdraw everything and end the handoff threads."""
        for each in self._each:
            each.close()

    def status(self, local: float) -> dict[str, Any]:
        """Counts over all producers, rates of the first, and each one's own, in plain types."""
        each = [producer.status(local) for producer in self._present]
        nobody = {"rates": rates_of(Speeds(local)), "remote_threshold": None, "threshold_by": None}
        first = each[0] if each else nobody
        return {
            "waiting_for_producer": sum(one["waiting_for_producer"] for one in each),
            "fetching": any(one["fetching"] for one in each),
            "handoffs": sum(one["handoffs"] for one in each),
            "rates": first["rates"],
            "remote_threshold": first["remote_threshold"],
            "threshold_by": first["threshold_by"],
            "producers": each,
        }

    @property
    def _present(self) -> list[Handoffs]:
        return [each for each in self._each if not each.off]

    def _left(self, request: Request) -> list[Handoffs]:
        without = request.reuse.without
        return [
            each for number, each in enumerate(self._each) if number not in without and not each.off
        ]

    def _failed(self, number: int, request: Request, error: BatonError, phase: str) -> None:
        request.reuse.without.add(number)
        self._tell(request, error, phase)
