"""Has each producer prefill the probes, compares its rows with this decoder's, and judges.

A task of the event loop. What it computes here waits among the requests (``Engine.rows``);
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

from mac_decoder.qualify.compare import Distance, Rows, bound_of, distance
from mac_decoder.qualify.gate import Gate, unfit
from mac_decoder.qualify.probes import Probe, probes
from mac_decoder.qualify.received import Received
from mac_decoder.qualify.verdicts import MOST_PAST, Past, Verdict, Verdicts
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
    """The model that is qualified for; ``most`` is the longest probe in tokens."""

    identity: Identity
    layout: Layout
    vocabulary: int
    most: int


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
        self._probes = probes(subject.layout, self._digest, subject.vocabulary, subject.most)
        self._bound = bound_of(subject.layout)
        self._gates = gates
        self._verdicts = verdicts
        self._every_s = every_s
        self._now = now
        self._not_before: dict[bytes, float] = {}
        self._unwritten: set[bytes] = set()
        """Producers whose verdict could not be written down."""

    async def run(self) -> None:
        """Look after the gates until cancelled."""
        while True:
            for gate in self._gates():
                if gate.fingerprint is not None and gate.link.state.ready:
                    await self._look_after(gate, gate.fingerprint)
            await asyncio.sleep(_LOOK_S)

    async def _look_after(self, gate: Gate, fingerprint: bytes) -> None:
        recipe = gate.recipe
        if recipe is None or time.monotonic() < self._not_before.get(fingerprint, 0.0):
            return
        try:
            known = await asyncio.to_thread(self._verdicts.of, fingerprint)
            if known is None and fingerprint in self._unwritten:
                known = gate.standing.verdict
            if known is not None and not known.holds_for(self._digest, recipe):
                known = None
            if known is None or known != gate.standing.verdict:
                gate.judge(known)
            if known is None:
                await self._judge(gate, fingerprint, recipe, self._probes, ())
            elif known.fit and self._every_s and self._now() - known.at >= self._every_s:
                # One a day, another one each day.
                one = self._probes[int(self._now() // DAY_S) % len(self._probes)]
                await self._judge(gate, fingerprint, recipe, (one,), known.past)
        except BatonError as error:
            # Nothing is known by that: the link was lost, this machine is busy, the disk full.
            self._not_before[fingerprint] = time.monotonic() + _RETRY_S
            gate.judge(gate.standing.verdict, f"it could not be qualified yet ({error.reason})")
            log.warning("producer %s could not be qualified (%s)", gate.name, error.reason)

    async def _judge(
        self,
        gate: Gate,
        fingerprint: bytes,
        recipe: Recipe,
        prompts: Sequence[Probe],
        past: tuple[Past, ...],
    ) -> None:
        began = time.monotonic()
        worst: Distance | None = None
        for number, prompt in enumerate(prompts, 1):
            gate.judge(gate.standing.verdict, f"probe {number} of {len(prompts)} is compared")
            found = await self._compared(gate, prompt)
            if worst is None or found.worst > worst.worst:
                worst = found
            if not found.within(self._bound):
                worst = found
                break
        assert worst is not None
        fit, rates = worst.within(self._bound), gate.link.rates
        latest = Past(int(self._now()), fit, *worst)
        verdict = Verdict(
            version=1,
            identity=self._digest,
            recipe=recipe,
            past=(*past, latest)[-MOST_PAST:],
            tokens_per_s=rates.compute_tokens_per_s,
            link_bytes_per_s=rates.wire_bytes_per_s,
            round_trip_ms=rates.round_trip_ms,
        )
        if fit:
            log.info("producer %s is qualified in %.1f s", gate.name, time.monotonic() - began)
        else:
            log.error("producer %s is taken out: %s", gate.name, unfit(verdict))
        try:
            await asyncio.to_thread(self._verdicts.put, fingerprint, verdict)
            self._unwritten.discard(fingerprint)
        except ConfigError as error:
            # It counts all the same, until this process ends.
            self._unwritten.add(fingerprint)
            log.warning("the verdict on %s cannot be kept (%s)", gate.name, error.reason)
        gate.judge(verdict)

    async def _compared(self, gate: Gate, prompt: Probe) -> Distance:
        expected = await self._engine.rows(prompt)
        return await asyncio.to_thread(self._fetched, gate, prompt, expected)

    def _fetched(self, gate: Gate, prompt: Probe, expected: Rows) -> Distance:
        received = Received(self._subject.layout, len(prompt) - 1)
        handoff = gate.link.fetch(prompt, received, request_id="qualification")
        handoff.discarded("qualification")
        return distance(self._subject.layout, received.rows, expected)
