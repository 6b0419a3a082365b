"""A producer's link without a producer: it fills the shadow from this decoder's own prefill.

A second real implementation of ``handoff.link.Link``. Rows are made once, by mlx-lm on the
calling thread, and kept by prompt; ``fetch`` then only copies them, slot by slot, in the order
of the schedule.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import numpy as np

from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.prefill import LocalPrefill
from mac_decoder.handoff.link import Destination, LinkState, Rates
from mac_decoder.kv.install import extract
from protocol.errors import BatonError, Cancelled, TransferError
from protocol.layout import Layout, payload_bytes, regions, schedule
from protocol.messages import NO_SPACE, History, Recipe

Rows = Mapping[tuple[int, int], np.ndarray]


@dataclass
class CopiedHandoff:
    """A handoff whose bytes are in the shadow; remembers how it ended."""

    transferred_bytes: int
    phases_ms: Mapping[str, float]
    manifest: Any = None
    ended: str = ""
    resumed: int = 0

    def committed(self) -> None:
        self.ended = self.ended or "committed"

    def discarded(self, reason: str) -> None:
        self.ended = self.ended or reason

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discarded("left")


@dataclass
class CopyingLink:
    """``raises`` is raised instead of a handoff; ``hold`` keeps a handoff from ending;
    ``sends_all`` answers a delta with everything. ``holds`` is what the producer holds of every
    prompt, if it is long enough.

    ``shadows`` are weak references to those that came, to see when they are let go.
    """

    layout: Layout
    tile: int = 64
    extra_cuts: int = 0
    qualified: None = None
    name: str = "copies"
    called: str = "a copier"
    state: LinkState = field(default_factory=lambda: LinkState("ready"))
    rates: Rates = field(default_factory=Rates)
    raises: BaseException | None = None
    hold: threading.Event | None = None
    corrupt: bool = False
    sends_all: bool = False
    holds: int = 0
    handoffs: list[CopiedHandoff] = field(default_factory=list)
    made: dict[tuple[int, ...], Rows] = field(default_factory=dict)
    cancellations: int = 0
    shadows: list[weakref.ref[Any]] = field(default_factory=list)

    def error(self) -> BatonError | None:
        if self.state.ready:
            return None
        return TransferError("not connected", reason=self.state.reason)

    def prepare(self, loaded: LoadedModel, tokens: Sequence[int]) -> None:
        """Compute the rows of a prompt, to be copied by ``fetch`` later."""
        prefill = LocalPrefill(loaded.model, tokens, self.tile)
        while prefill.remaining:
            prefill.advance()
        self.made[tuple(tokens)] = extract(prefill.caches, self.layout, prefill.end)

    def fetch(
        self,
        tokens: Sequence[int],
        shadow: Destination,
        *,
        request_id: str = "",
        space: bytes = NO_SPACE,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda processed, total: None,
    ) -> CopiedHandoff:
        self.shadows.append(weakref.ref(shadow))
        if self.raises is not None:
            raise self.raises
        rows = self.made[tuple(tokens)]
        began = time.perf_counter()
        cut = 0 if self.sends_all else shadow.cut
        shadow.begin(cut)
        shipped = {(r.index, r.role): r.nbytes for r in regions(self.layout, cut, shadow.end)}
        slots = list(schedule(self.layout, cut, shadow.end, self.tile))
        if self.corrupt:
            slots.pop()
        for slot in slots:
            target = np.frombuffer(shadow.place(slot), np.uint8)
            place = (slot.index, slot.role)
            at = rows[place].nbytes - shipped[place] + slot.offset
            target[:] = rows[place][at : at + slot.nbytes]
        while self.hold is not None and not self.hold.wait(0.01):
            if cancelled():
                self.cancellations += 1
                raise Cancelled("the request was withdrawn")
        progress(shadow.end, shadow.end)
        nbytes = payload_bytes(self.layout, cut, shadow.end)
        wire = (time.perf_counter() - began) * 1e3
        phases = {"queue": 0.0, "compute": 0.0, "wire": wire, "verify": 0.0}
        recipe = Recipe("producer", "copied", "float32", self.tile)
        manifest = SimpleNamespace(
            history=(History(cut, shadow.end, recipe),),
            computed_tokens=shadow.end - min(self.holds, shadow.end // self.tile * self.tile),
            tile=self.tile,
        )
        handoff = CopiedHandoff(nbytes, phases, manifest)
        self.handoffs.append(handoff)
        return handoff


class BrokenLink(CopyingLink):
    """A link with a defect: it fails with something that is no ``BatonError``."""

    def fetch(self, *args: Any, **kwargs: Any) -> CopiedHandoff:
        raise KeyError("a defect in the link")


def refused(error: BatonError, layout: Layout) -> CopyingLink:
    """A link whose every handoff ends with ``error``."""
    return CopyingLink(layout, raises=error)
