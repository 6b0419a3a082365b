"""What a source of rows looks like to the rest of the producer, and the loop over the tile grid.

Rows and states leave here in the decoder's form (``protocol/architectures``): rows are
position-major ``(positions, heads, width)``, states have the decoder's shape without its batch
axis, all in the layout's dtype. The sender only cuts them into frames.

This module imports no torch: a synthetic source for the bench and the server's tests use its
types alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gb10_producer.memory import Ledger
from protocol.errors import Cancelled, CapacityError, ConfigError, EngineFault
from protocol.layout import Layout, payload_bytes, tiles
from protocol.messages import Recipe

if TYPE_CHECKING:
    from gb10_producer.model import ProducerModel
    from gb10_producer.prefix_cache import Chain, Footprint, PrefixCache
    from gb10_producer.tap import Pass

_TILE: Final = {"cpu": 512, "cuda": 2048}
_EAGER_TILE: Final = 512

SYNTHETIC: Final = "synthetic"
"""The recipe's device where rows are random bytes and stand for no model's."""


def default_tile(device: str, eager: bool) -> int:
    """Positions per tile: on cuda small tiles would reread all experts of an MoE too often.

    ``eager`` says that attention writes out all its scores, heads times tile times rows: a
    large tile would then take more memory than the cache itself.
    """
    return min(_TILE[device], _EAGER_TILE) if eager else _TILE[device]


class Rows(NamedTuple):
    """Keys and values of positions ``[first, last)`` of ``layout.layers[index]``.

    ``key`` and ``value`` are C-contiguous bytes in host memory, position-major, in the layout's
    dtype; the receiver may keep them, nobody writes to them again. A role whose rows are empty
    (width 0) has an empty view.
    """

    index: int
    first: int
    last: int
    key: memoryview
    value: memoryview


class State(NamedTuple):
    """State ``number`` of the recurrent ``layout.layers[index]``, valid at ``position`` only."""

    index: int
    number: int
    position: int
    data: memoryview


Emit = Callable[[Rows | State], None]
Tokens = Sequence[int] | NDArray[np.uint32]


class Prefiller(Protocol):
    """A source of rows for one layout: a torch model, or synthetic rows for the bench.

    Not thread-safe: one job at a time, all calls from the device thread.
    """

    @property
    def layout(self) -> Layout:
        """What the rows are rows of."""
        ...

    @property
    def tile(self) -> int:
        """Positions per tile; tiles end at absolute multiples of it."""
        ...

    @property
    def recipe(self) -> Recipe:
        """How rows are computed: device, dtype and tile."""
        ...

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        ...

    def keep_prefixes(self, ledger: Ledger, budget: int) -> None:
        """Keep what later prefills may begin with, in at most ``budget`` bytes of ``ledger``;
        what was kept before is dropped.
        """
        ...

    def turn_to(self, space: bytes) -> None:
        """From now on use and keep what belongs to ``space``, 32 bytes; ``NO_SPACE``: nothing."""
        ...

    def recall(self, tokens: Tokens, end: int, extra: Sequence[int] = ()) -> int:
        """How many of ``tokens[:end]`` a prefill would not compute now; whoever needs memory
        takes it from what is kept of others first.
        """
        ...

    def prefill(
        self,
        tokens: Sequence[int],
        cut: int,
        end: int,
        emit: Emit,
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
        extra: Sequence[int] = (),
    ) -> int:
        """Compute what a handoff over ``[cut, end)`` ships and hand it to ``emit``; return the
        number of tokens computed: ``end`` less what :meth:`recall` said just before.

        ``tokens`` holds at least ``end`` token ids. ``emit`` gets rows tile by tile and within a
        tile in the layout's order (the order of ``protocol.layout.schedule``), then every state
        at ``end``, and in between those at ``extra``, as ``protocol.layout.extra_cuts`` found
        them; only what lies inside ``protocol.layout.spans``. It may block to hold the
        computation back, is called from one thread at a time (not always the caller's), and what
        it raises ends the prefill and is raised here. ``cancelled`` is asked before each tile;
        ``progress`` gets the position reached after each tile, counted from 0.

        Raises ``Cancelled``; ``CapacityError`` (reason ``memory_exceeded``) when the rows
        do not fit; ``EngineFault`` when the device failed, after which nothing must run on it.
        """
        ...


class TorchPrefiller:
    """The :class:`Prefiller` of a torch model; what it keeps is in ``prefix_cache``."""

    def __init__(self, model: ProducerModel, tile: int | None = None) -> None:
        """Compute two tokens to prove that torch's cache has the layout's shapes.

        ``tile`` is in positions, by default :func:`default_tile`. Raises ``ConfigError``
        (``layout_differs``) and what :meth:`prefill` raises.
        """
        self._model = model
        self._device = model.device.type
        self._tile = tile or default_tile(self._device, model.attends_eagerly)
        self._recipe = Recipe(
            who="producer", device=self._device, dtype=model.checkpoint.dtype, tile=self._tile
        )
        self._form = self._prove_layout()
        self._prefixes = self._kept_in(Ledger(0), 0)

    @property
    def layout(self) -> Layout:
        """What the rows are rows of."""
        return self._model.checkpoint.layout

    @property
    def tile(self) -> int:
        """Positions per tile."""
        return self._tile

    @property
    def recipe(self) -> Recipe:
        """Device, dtype and tile."""
        return self._recipe

    @property
    def device(self) -> str:
        """``cuda`` or ``cpu``."""
        return self._device

    def keep_prefixes(self, ledger: Ledger, budget: int) -> None:
        """See :meth:`Prefiller.keep_prefixes`."""
        self._prefixes.clear()
        self._prefixes = self._kept_in(ledger, budget)

    def turn_to(self, space: bytes) -> None:
        """See :meth:`Prefiller.turn_to`."""
        self._prefixes.turn_to(space)

    def recall(self, tokens: Tokens, end: int, extra: Sequence[int] = ()) -> int:
        """See :meth:`Prefiller.recall`."""
        return self._held(tokens, end, extra).position

    def prefill(
        self,
        tokens: Sequence[int],
        cut: int,
        end: int,
        emit: Emit,
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
        extra: Sequence[int] = (),
    ) -> int:
        """See :meth:`Prefiller.prefill`; ``ValueError`` for positions outside the tokens."""
        if not 0 <= cut <= end <= len(tokens):
            raise ValueError(f"need 0 <= cut <= end <= {len(tokens)}, got cut={cut}, end={end}")
        if cut == end:
            return 0
        chain = self._held(tokens, end, extra)
        start, stops = chain.position, (*extra, end)
        try:
            with self._model.open_pass(cut, end, emit, extra) as running:
                self._begin(running, chain, cut, cancelled, progress)
                if start in stops:
                    running.emit_states(start)
                for first, last in tiles(start, end, self._tile, extra):
                    _require_wanted(cancelled)
                    with self._prefixes.recording(chain, first) as recording:
                        running.compute(tokens[first:last], first, recording)
                    progress(last)
                    if last in stops:
                        running.emit_states(last)
        except (CapacityError, EngineFault):
            # Memory that nobody had counted was needed, or the device is not to be believed.
            self._prefixes.clear()
            raise
        return end - start

    def _held(self, tokens: Tokens, end: int, extra: Sequence[int]) -> Chain:
        """The tiles held of a prompt. A tile that an extra cut divides is none of them, nor will
        it be kept: its rows are those of this prompt alone.
        """
        return self._prefixes.find(tokens, extra[0] if extra else end)

    def _kept_in(self, ledger: Ledger, budget: int) -> PrefixCache:
        from gb10_producer.prefix_cache import PrefixCache

        return PrefixCache(self._form, ledger, budget)

    def _begin(
        self,
        running: Pass,
        chain: Chain,
        cut: int,
        cancelled: Callable[[], bool],
        progress: Callable[[int], None],
    ) -> None:
        """Emit what is held and shipped, and go on from there."""
        if not chain.tiles:
            return
        for tile in chain.tiles:
            if tile.last > cut:
                _require_wanted(cancelled)
                running.replay(tile)
            progress(tile.last)
        running.resume(self._prefixes, chain)

    def _prove_layout(self) -> Footprint:
        emitted: list[Rows | State] = []
        with self._model.open_pass(0, 2, emitted.append) as running:
            running.compute((0, 1), 0)
            running.emit_states(2)
            form = running.footprint(self._tile)
        views = (item[-2:] if isinstance(item, Rows) else item[-1:] for item in emitted)
        found = sum(view.nbytes for pair in views for view in pair)
        expected = payload_bytes(self.layout, 0, 2)
        if found != expected:
            raise ConfigError(
                "torch's cache has other rows or states than the layout",
                reason="layout_differs",
                field="bytes of two positions",
                found=found,
                expected=expected,
            )
        return form


def _require_wanted(cancelled: Callable[[], bool]) -> None:
    if cancelled():
        raise Cancelled("the prefill was withdrawn")
