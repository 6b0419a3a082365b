"""What sequences leave to the tiers and take from them, and the accounts of it.

MLX thread only, but for :meth:`Sequences.status`. Cuts are taken here, from caches that stand
at a known position in canonical form; copying, comparing and writing them is the keeper's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mac_decoder.engine.admission import cache_bytes
from mac_decoder.engine.batch import Left
from mac_decoder.engine.live import MOST, LiveSequence, LiveTier
from mac_decoder.engine.request import Due, Request
from mac_decoder.keeper import Keeper, Kept, Line, Restored
from mac_decoder.kv.install import canonical, check_position, views
from mac_decoder.reuse.accounting import Accounts, Served
from mac_decoder.reuse.cut import clipped, extended
from mac_decoder.reuse.facts import Restore
from protocol.blocks import BLOCK
from protocol.layout import Dtype, Layout
from protocol.messages import History, Recipe


class Sequences:
    """Live tier, keeper and accounts of one engine."""

    def __init__(
        self,
        layout: Layout,
        dtype: Dtype,
        step: int,
        keeper: Keeper | None,
        room: Callable[[], int],
        active_parameters: int | None = None,
    ) -> None:
        """``room`` gives the bytes that nothing but the live tier takes; ``keeper`` ``None``
        keeps nothing.
        """
        device = "metal" if mx.metal.is_available() else "cpu"
        self._layout = layout
        self._prefill = Recipe("decoder_prefill", device, dtype, step)
        self._decode = Recipe("decoder_decode", device, dtype, 1)
        self._room = room
        self.keeper = keeper
        self.live = LiveTier()
        self.accounts = Accounts(active_parameters)

    # -- taking

    def continued(self, request: Request, key: Any, position: int) -> list[Any]:
        """The caches of a live sequence, which go on as the request's."""
        sequence = self.live.take(key)
        if self.keeper is not None:
            self.keeper.wake(sequence.line)
        reuse = request.reuse
        reuse.start, reuse.history, reuse.line = position, sequence.history, sequence.line
        request.source = "live"
        return sequence.caches

    def restored(self, request: Request, restored: Restored, action: Restore) -> None:
        """Note what a request goes on from."""
        reuse = request.reuse
        reuse.start, reuse.history, reuse.restored = action.position, restored.history, restored
        if restored.pinned is not None:
            reuse.line = Line(restored.pinned, action.position // BLOCK)

    def make_room(self, nbytes: int, request: Request) -> None:
        """Let go of ``nbytes`` of live sequences, of the one that ``request`` goes on from last."""
        prompt = np.array(request.generation.tokens, dtype=np.uint32)
        keep = self.live.continued_by(prompt)
        gone = self.live.evict(nbytes, keep=keep)
        request.reuse.evicted_bytes += sum(sequence.nbytes for sequence in gone)
        self._let_go(gone)

    def count(self, served: Served) -> None:
        """Book a request whose cache is installed."""
        self.accounts = self.accounts.after(served)

    # -- leaving

    def prefilled(self, request: Request, end: int) -> None:
        """Rows up to ``end`` were computed here, as they are in every prefill."""
        history = request.reuse.history
        first = history[-1].last if history else 0
        request.reuse.history = extended(history, History(first, end, self._prefill))

    def first_token_out(self, request: Request) -> None:
        """Keep what had to wait for the first token."""
        due, request.reuse.due = request.reuse.due, []
        for cut in due:
            self.keep(request, cut)

    def keep(self, request: Request, due: Due) -> None:
        """Keep a cut, adding to those of the same sequence what is new in it."""
        tokens = request.reuse.looked.tokens[: due.position]
        self._keep(request, due, tokens)

    def ended(self, request: Request, left: Left) -> None:
        """The turn is over: keep its end, and the sequence live where there is room."""
        reuse = request.reuse
        if self.keeper is None or not reuse.looked.space:
            return
        fed = np.array(left.fed, dtype=np.uint32)
        tokens = np.concatenate([reuse.looked.tokens[: request.end], fed])
        position = len(tokens)
        canonical(left.caches)
        check_position(left.caches, position)
        reuse.history = extended(reuse.history, History(request.end, position, self._decode))
        self._keep(request, Due(left.caches, position, "turn"), tokens)
        nbytes = cache_bytes(self._layout, position)
        room = self._room()
        if nbytes > room:
            self.dropped(request)
            return
        self._let_go(self.live.evict(nbytes + self.live.nbytes - room))
        self._let_go(self.live.evict_beyond(MOST - 1))
        # Evaluated, so that they hold on to nothing of the batch that they come from.
        mx.eval([cache.state for cache in left.caches])
        sequence = LiveSequence(
            reuse.looked.space, tokens, left.caches, reuse.history, reuse.line, nbytes
        )
        self.live.put(sequence)
        self.keeper.rest(reuse.line)

    def dropped(self, request: Request) -> None:
        """A request ended without leaving a sequence."""
        request.reuse.due.clear()
        if self.keeper is not None:
            self.keeper.let_go(request.reuse.line)

    def close(self) -> None:
        """Let go of every live sequence."""
        self._let_go(self.live.evict_beyond(0))

    def _keep(self, request: Request, due: Due, tokens: np.ndarray) -> None:
        reuse = request.reuse
        if self.keeper is None or not reuse.looked.space:
            return
        if reuse.line.broken:
            if due.role == "step":
                return
            self.keeper.let_go(reuse.line)
            reuse.line = Line()
        known = reuse.line.blocks
        rows = views(due.caches, self._layout, due.position, known * BLOCK)
        reuse.line.blocks = due.position // BLOCK
        self.keeper.keep(
            Kept(
                reuse.line,
                reuse.looked.space,
                tokens,
                rows,
                known,
                clipped(reuse.history, due.position),
                due.role,
                due.publish,
            )
        )

    def _let_go(self, gone: list[LiveSequence]) -> None:
        if self.keeper is not None:
            for sequence in gone:
                self.keeper.let_go(sequence.line)

    # -- for others to see

    def counters(self) -> dict[str, int]:
        """The accounts' counters. Any thread."""
        return self.accounts.counters()

    def status(self) -> dict[str, Any]:
        """Figures of all tiers, counters, and what is derived from them. Any thread."""
        accounts = self.accounts
        return {
            "live": {
                "sequences": len(self.live),
                "bytes": self.live.nbytes,
                "evicted": self.live.evicted,
            },
            **(self.keeper.status() if self.keeper is not None else {}),
            "counters": accounts.counters(),
            "derived": {name: figure._asdict() for name, figure in accounts.derived().items()},
        }
