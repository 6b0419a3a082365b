"""What sequences leave to the tiers and take from them, and the accounts of it.

MLX thread only, but for :meth:`Sequences.status`. Cuts are taken here, from caches that stand
at a known position in canonical form; copying, comparing and writing them is the keeper's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from concurrent.futures import Future
from datetime import date
from typing import Any

import mlx.core as mx
import numpy as np

from mac_decoder.engine.admission import cache_bytes
from mac_decoder.engine.live import MOST, LiveSequence, LiveTier
from mac_decoder.engine.member import Left
from mac_decoder.engine.request import Cut, Request
from mac_decoder.keeper import Forgotten, Keeper, Kept, Line, Restored
from mac_decoder.kv.install import allocated, canonical, check_position, detach, views
from mac_decoder.reuse.accounting import UNAVAILABLE, Accounts, Served
from mac_decoder.reuse.cut import clipped, extended
from protocol.blocks import BLOCK
from protocol.errors import IntegrityError
from protocol.layout import Dtype, Layout
from protocol.messages import History, Recipe

log = logging.getLogger(__name__)


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
        today: Callable[[], date] = date.today,
    ) -> None:
        """``room`` gives the bytes that nothing but the live tier takes; ``keeper`` ``None``
        keeps nothing. ``today`` is the day by which savings are told.
        """
        device = "metal" if mx.metal.is_available() else "cpu"
        self._layout = layout
        self._prefill = Recipe("decoder_prefill", device, dtype, step)
        self._decode = Recipe("decoder_decode", device, dtype, 1)
        self._room = room
        self.keeper = keeper
        self.live = LiveTier()
        self._promised: dict[int, int] = {}
        self.accounts = Accounts(active_parameters)
        self._calendar = today
        self._began = self._today = today()

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

    def restored(self, request: Request, restored: Restored, position: int) -> None:
        """Note what a request goes on from: a held cut's rows below ``position``."""
        reuse = request.reuse
        reuse.start, reuse.history, reuse.restored = position, restored.history, restored
        reuse.line = Line(restored.pinned, position // BLOCK, restored.files)

    def promise(self, request: Request) -> None:
        """Set aside the live sequence that an admitted request is likely to go on from."""
        generation = request.generation
        if self.keeper is None or not generation.reuse or generation.lane == "remote":
            return
        prompt = request.reuse.looked.tokens
        key = self.live.continued_by(self.keeper.space(generation.salt), prompt)
        if key is not None and key not in self._promised.values():
            self._promised[request.key] = key

    def planned(self, request: Request) -> None:
        """What a request does is decided: nothing is set aside for it any more."""
        self._promised.pop(request.key, None)

    @property
    def evictable(self) -> int:
        """Bytes of live sequences that are not set aside for a request whose own reservation
        counts them already.
        """
        return self.live.nbytes - sum(map(self.live.bytes_of, self._promised.values()))

    def make_room(self, nbytes: int, request: Request | None = None) -> None:
        """Let go of ``nbytes`` of live sequences, for ``request`` if it is one that asks."""
        gone = self.live.evict(nbytes, keep=frozenset(self._promised.values()))
        if request is not None:
            request.reuse.evicted_bytes += sum(sequence.nbytes for sequence in gone)
        self._let_go(gone)

    def count(self, served: Served) -> None:
        """Book a request whose cache is installed."""
        today = self._calendar()
        if self._today != today:
            # In this order: whoever sees the day sees no sum of the one before.
            self.accounts = self.accounts.on_a_new_day()
            self._today = today
        self.accounts = self.accounts.after(served)

    # -- leaving

    def prefilled(self, request: Request, end: int) -> None:
        """Rows up to ``end`` were computed here, as they are in every prefill."""
        history = request.reuse.history
        first = history[-1].last if history else 0
        request.reuse.history = extended(history, History(first, end, self._prefill))

    def keep_later(self, request: Request, cut: Cut, *, finite: bool = False) -> None:
        """Take a cut now, from caches that go on elsewhere; keep it once a token came of it.

        ``finite``: as :meth:`keep`.
        """
        tokens = request.reuse.looked.tokens[: cut.position]
        kept = self._taken(request, cut, tokens, finite=finite)
        if kept is not None:
            request.reuse.due.append(kept)

    def first_token_out(self, request: Request) -> None:
        """Keep what had to wait for the first token, which was a good one."""
        due, request.reuse.due = request.reuse.due, []
        for kept in due:
            self._hand_over(kept)

    def keep(self, request: Request, cut: Cut, *, finite: bool = False) -> None:
        """Keep a cut, adding to those of the same sequence what is new in it.

        ``finite``: no token came of it yet, so its rows are looked at; where one is no number
        nothing of this sequence is kept any more.
        """
        tokens = request.reuse.looked.tokens[: cut.position]
        kept = self._taken(request, cut, tokens, finite=finite)
        if kept is not None:
            self._hand_over(kept)

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
        kept = self._taken(request, Cut(left.caches, position, "turn"), tokens)
        if kept is not None:
            self._hand_over(kept)
        nbytes = max(cache_bytes(self._layout, position), allocated(left.caches))
        room = self._room()
        if nbytes > room:
            self.dropped(request)
            return
        promised = frozenset(self._promised.values())
        self._let_go(self.live.evict(nbytes + self.live.nbytes - room, keep=promised))
        self._let_go(self.live.evict_beyond(MOST - 1, keep=promised))
        detach(left.caches)
        sequence = LiveSequence(
            reuse.looked.space, tokens, left.caches, reuse.history, reuse.line, nbytes
        )
        self._let_go(self.live.put(sequence))
        self.keeper.rest(reuse.line)

    def dropped(self, request: Request) -> None:
        """A request ended without leaving a sequence."""
        self._promised.pop(request.key, None)
        request.reuse.due.clear()
        if self.keeper is not None:
            self.keeper.let_go(request.reuse.line)

    def forget(
        self, keys: Collection[int] | None, cuts: Collection[bytes] | None
    ) -> tuple[int, int, Future[Forgotten] | None]:
        """Let go of live sequences and of cuts that are kept, or of all of them: what has ended
        by now; how many sequences that were, their bytes, and what becomes of the cuts.
        """
        gone = self.live.forget(keys)
        self._let_go(gone)
        kept = self.keeper.forget(cuts) if self.keeper is not None else None
        return len(gone), sum(sequence.nbytes for sequence in gone), kept

    def close(self) -> None:
        """Let go of every live sequence."""
        self._let_go(self.live.evict_beyond(0))

    def _taken(
        self, request: Request, cut: Cut, tokens: np.ndarray, *, finite: bool = False
    ) -> Kept | None:
        """The cut's rows beyond those that are kept already; ``None`` if it is not to be kept."""
        reuse = request.reuse
        if self.keeper is None or not reuse.looked.space or reuse.poisoned:
            return None
        ready = self.keeper.ready(reuse.line, cut.position, cut.role, publish=cut.publish)
        if ready is None:
            return None
        line, known = ready
        reuse.line = line
        try:
            rows = views(cut.caches, self._layout, cut.position, known * BLOCK, finite=finite)
        except IntegrityError as error:
            log.error("nothing of request %s is kept: %s", request.generation.request_id, error)
            reuse.poisoned = True
            return None
        line.blocks = cut.position // BLOCK
        history = clipped(reuse.history, cut.position)
        return Kept(line, reuse.looked.space, tokens, rows, known, history, cut.role, cut.publish)

    def _hand_over(self, kept: Kept) -> None:
        if self.keeper is not None:
            self.keeper.keep(kept)

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
        today, accounts = self._calendar(), self.accounts
        derived = accounts.derived()
        derived["seconds_saved_today"] = (
            # One span of time has one figure: that of the start is valued anew, a later day's not.
            derived["seconds_saved"]
            if today == self._began
            else accounts.saved_today
            if today == self._today
            else UNAVAILABLE
        )
        return {
            "live": {
                "sequences": len(self.live),
                "bytes": self.live.nbytes,
                "evicted": self.live.evicted,
            },
            **(self.keeper.status() if self.keeper is not None else {}),
            "counters": accounts.counters(),
            "derived": {name: figure._asdict() for name, figure in derived.items()},
        }
