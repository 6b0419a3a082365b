"""Has each producer prefill the probes, compares its rows with this decoder's, and judges.

Tasks of the event loop. What they compute here waits among the requests (``Engine.rows``);
handoffs, comparisons and files are other threads' work. A producer that cannot be asked at the
moment is asked again later; only rows that differ make it unfit.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from mac_decoder.qualify.compare import Distance, Rows, distance
from mac_decoder.qualify.gate import Gate, unfit
from mac_decoder.qualify.probes import Probe, probes
from mac_decoder.qualify.received import Received
from mac_decoder.qualify.verdicts import MOST_PAST, Past, Verdict, Verdicts
from mac_decoder.reporting import traced
from protocol.errors import BatonError, ConfigError
from protocol.identity import Identity
from protocol.layout import Layout
from protocol.messages import Recipe

log = logging.getLogger(__name__)

DAY_S: Final = 86_400.0
_LOOK_S: Final = 1.0
_RETRY_S: Final = 30.0


class Computing(Protocol):
    """What is asked of the engine: ``facade.Engine``."""

    def rows(self, tokens: Sequence[int]) -> Awaitable[Rows]: ...


@dataclass(frozen=True)
class Subject:
    """The model that is qualified for; ``most`` is the longest probe in tokens, ``here`` what
    computes it on this machine: another release may compute otherwise.
    """

    identity: Identity
    layout: Layout
    vocabulary: int
    most: int
    here: str = ""


class Qualifier:
    """Looks after all gates that need a verdict."""

    def __init__(
        self,
        engine: Computing,
        subject: Subject,
        gates: Callable[[], Sequence[Gate]],
        verdicts: Verdicts,
        *,
        every_s: float = DAY_S,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``every_s``: how old a verdict may be, in seconds of ``now``; 0: as old as it likes."""
        self._engine = engine
        self._subject = subject
        self._digest = subject.identity.digest()
        self._gates = gates
        self._verdicts = verdicts
        self._every_s = every_s
        self._now = now
        self._computing = asyncio.Lock()
        self._not_before: dict[Gate, float] = {}
        self._judged: dict[bytes, Verdict] = {}
        """Verdicts of this process that could not be written down; they count until it ends."""

    async def run(self) -> None:
        """Look after the gates until cancelled, each for itself: one that does not answer, or
        cannot be asked, keeps no other waiting.
        """
        tasks: dict[Gate, asyncio.Task[None]] = {}
        try:
            while True:
                gates = self._gates()
                self._not_before = {
                    gate: when for gate, when in self._not_before.items() if gate in gates
                }
                for gate in [*tasks]:
                    if tasks[gate].done():
                        self._ended(gate, tasks.pop(gate))
                    elif gate not in gates:
                        tasks[gate].cancel()  # its producer was removed, or has another key
                for gate in gates:
                    if gate not in tasks and gate.fingerprint and gate.link.state.ready:
                        looking = self._look_after(gate, gate.fingerprint)
                        tasks[gate] = asyncio.create_task(looking)
                await asyncio.sleep(_LOOK_S)
        finally:
            for task in tasks.values():
                task.cancel()

    def _ended(self, gate: Gate, task: asyncio.Task[None]) -> None:
        """Nothing is known by what went wrong: the link was lost, this machine is busy or full.

        Not even a bug in here takes more from anybody than this producer.
        """
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._not_before[gate] = time.monotonic() + _RETRY_S
        known = isinstance(error, BatonError)
        reason = error.reason if isinstance(error, BatonError) else "qualification_broke"
        gate.judge(gate.standing.verdict, f"it could not be qualified yet ({reason})")
        log.log(
            logging.WARNING if known else logging.ERROR,
            "producer %s could not be qualified (%s)",
            gate.name,
            reason if known else traced(error),
        )

    async def _look_after(self, gate: Gate, fingerprint: bytes) -> None:
        recipe = gate.recipe
        if recipe is None:
            return
        known = self._judged.get(fingerprint)
        if known is None:
            known = await asyncio.to_thread(self._verdicts.of, fingerprint)
        if known is not None and not known.holds_for(self._digest, self._subject.here, recipe):
            known = None
        if known is None or known != gate.standing.verdict:
            gate.judge(known, gate.standing.note)
        if time.monotonic() < self._not_before.get(gate, 0.0):
            return
        if known is None:
            await self._judge(gate, fingerprint, recipe, self._probes(gate), None)
        elif known.fit and self._every_s and self._now() - known.at >= self._every_s:
            every = self._probes(gate)
            one = every[known.turn % len(every)]
            await self._judge(gate, fingerprint, recipe, (one,), known)

    async def _judge(
        self,
        gate: Gate,
        fingerprint: bytes,
        recipe: Recipe,
        prompts: Sequence[Probe],
        before: Verdict | None,
    ) -> None:
        began = time.monotonic()
        worst: Distance | None = None
        for number, prompt in enumerate(prompts, 1):
            gate.judge(gate.standing.verdict, f"probe {number} of {len(prompts)} is compared")
            found = await self._compared(gate, prompt, recipe)
            if worst is None or found.excess > worst.excess:
                worst = found
            if not found.explained:
                break
        assert worst is not None
        fit, rates = worst.explained, gate.link.rates
        latest = Past(int(self._now()), fit, *worst)
        verdict = Verdict(
            version=1,
            identity=self._digest,
            recipe=recipe,
            here=self._subject.here,
            turn=0 if before is None else before.turn + 1,
            past=(*(before.past if before is not None else ()), latest)[-MOST_PAST:],
            tokens_per_s=rates.compute_tokens_per_s,
            link_bytes_per_s=rates.wire_bytes_per_s,
            round_trip_ms=rates.round_trip_ms,
        )
        if fit:
            log.info("producer %s is qualified in %.1f s", gate.name, time.monotonic() - began)
        else:
            log.error("producer %s is taken out: %s", gate.name, unfit(verdict))
        await self._keep(gate, fingerprint, verdict)

    async def _keep(self, gate: Gate, fingerprint: bytes, verdict: Verdict) -> None:
        """Write a verdict down; it counts from now on whether or not that succeeds."""
        try:
            await asyncio.to_thread(self._verdicts.put, fingerprint, verdict)
            self._judged.pop(fingerprint, None)
        except ConfigError as error:
            # An older one that lies there must not answer in its place.
            self._judged[fingerprint] = verdict
            log.warning("the verdict on %s cannot be kept (%s)", gate.name, error.reason)
        gate.judge(verdict)

    def _probes(self, gate: Gate) -> Sequence[Probe]:
        """The prompts that both sides take."""
        subject, ack = self._subject, gate.link.producer
        most = subject.most if ack is None else min(subject.most, ack.limits.max_tokens)
        return probes(subject.layout, self._digest, subject.vocabulary, most)

    async def _compared(self, gate: Gate, prompt: Probe, recipe: Recipe) -> Distance:
        async with self._computing:
            expected = await self._engine.rows(prompt)
        return await asyncio.to_thread(self._fetched, gate, prompt, recipe, expected)

    def _fetched(self, gate: Gate, prompt: Probe, recipe: Recipe, expected: Rows) -> Distance:
        received = Received(self._subject.layout, len(prompt) - 1)
        handoff = gate.link.fetch(prompt, received, request_id="qualification", recipe=recipe)
        handoff.discarded("qualification")
        return distance(self._subject.layout, received.rows, expected)
