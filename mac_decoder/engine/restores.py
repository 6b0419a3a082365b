"""Restores: a held cut becomes the caches of a request, or the request goes one rung down.

MLX thread only, but for ``ended``. Bytes are copied or read by the keeper, into a shadow; this
thread only makes the shadow and, once all of it is there, the caches. What can refuse a cut
refuses it before: mlx failing here is the machine's fault, and the cut is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.request import Cut, Request, Stage
from mac_decoder.engine.sequences import Sequences
from mac_decoder.keeper import Restored
from mac_decoder.kv.install import build, canonical
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reporting import traced
from mac_decoder.reuse.facts import Restore
from protocol.errors import BatonError, IdentityMismatch, IntegrityError, LocalProtocolError

log = logging.getLogger(__name__)

Ended = Callable[[int, Future[Restored | None]], None]


@dataclass(frozen=True)
class _Restoring:
    """A restore that is under way; ``withdrawn`` may be set from any thread."""

    request: Request
    action: Restore
    shadow: Shadow
    withdrawn: Event = field(default_factory=Event)


class Restores:
    """Restores that are under way."""

    def __init__(
        self,
        loaded: LoadedModel,
        sequences: Sequences,
        ended: Ended,
        *,
        ready: Callable[[Request, list[Any]], None],
        failed: Callable[[Request], None],
    ) -> None:
        """``ended`` is called in another thread. ``ready`` gets caches at ``reuse.start``;
        ``failed`` a request that is to be planned anew, without the cut that failed it.
        """
        self._loaded = loaded
        self._sequences = sequences
        self._ended = ended
        self._ready = ready
        self._failed = failed
        self._running: dict[int, _Restoring] = {}

    def held(self) -> list[Request]:
        """The requests in here, those that were withdrawn included until their copies end."""
        return [restoring.request for restoring in self._running.values()]

    def withdraw(self, request: Request) -> None:
        """Let go of a request; what copies for it is told to stop."""
        if request.key in self._running:
            self._running[request.key].withdrawn.set()

    def close(self) -> None:
        """Tell everything to stop."""
        for restoring in self._running.values():
            restoring.withdrawn.set()

    def start(self, request: Request, action: Restore, phase: str) -> None:
        """Begin to place what ``action`` names; the time since the last stage is ``phase``."""
        keeper = self._sequences.keeper
        if keeper is None:
            raise LocalProtocolError("nothing is kept here", reason="cut_unknown")
        request.enter(Stage.RESTORE, time.perf_counter(), phase)
        shadow = Shadow(self._loaded.layout, 0, action.position)
        restoring = _Restoring(request, action, shadow)
        self._running[request.key] = restoring
        outcome = keeper.restore(action, shadow.place_piece, restoring.withdrawn.is_set)
        outcome.add_done_callback(lambda done: self._ended(request.key, done))

    def take(self, key: int, outcome: Future[Restored | None], *, wanted: bool) -> None:
        """A restore has ended: go on from it, or go one rung down.

        Raises ``EngineFault`` where mlx fails: that says nothing about the cut, which is kept.
        """
        restoring = self._running.pop(key)
        request, action, shadow = restoring.request, restoring.action, restoring.shadow
        del restoring
        raised = outcome.exception()
        restored = outcome.result() if raised is None else None
        if not wanted:
            if restored is not None and restored.pinned is not None:
                restored.pinned.release()
            return
        placed = time.perf_counter()
        caches: list[Any] = []
        if restored is not None:
            try:
                caches = build(self._loaded.model, self._loaded.layout, shadow)
                canonical(caches)
            except (IntegrityError, IdentityMismatch) as error:
                raised, restored = error, None
        # Whatever follows is to find this one's memory free.
        del shadow
        if restored is None:
            self._go_down(request, action, why(raised))
            return
        now = time.perf_counter()
        reuse = request.reuse
        reuse.restore_s = now - request.stage_began
        for name, seconds in (
            ("read", restored.read_s),
            ("verify", restored.verify_s),
            ("place", restored.place_s),
            ("swap", now - placed),
        ):
            request.add_phase(name, seconds * 1e3)
        request.stage_began = now
        request.source = action.tier
        self._sequences.restored(request, restored, action.position)
        if action.tier == "durable":
            # Views of the shadow's memory, copied elsewhere while this goes on.
            cut = Cut(caches, action.position, "turn", publish=False)
            self._sequences.keep(request, cut)
        self._ready(request, caches)

    def _go_down(self, request: Request, action: Restore, reason: str) -> None:
        """The rung failed: plan again without it, with its reason on record."""
        log.warning(
            "request %s: a cut of the %s tier could not be restored (%s)",
            request.generation.request_id,
            action.tier,
            reason,
        )
        request.add_phase("failed_restore", (time.perf_counter() - request.stage_began) * 1e3)
        request.stage_began = time.perf_counter()
        request.reuse.lost(action.tier, action.key, reason)
        self._failed(request)


def why(error: BaseException | None) -> str:
    """The reason of a failed restore; the error lets go of the frames that hold the shadow.

    A bug is logged with its place: it costs the request a rung, not everybody the process.
    """
    if error is None:
        return "cut_gone"
    if not isinstance(error, BatonError):
        log.error("a restore broke: %s", traced(error))
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error.reason if isinstance(error, BatonError) else "restore_broke"
