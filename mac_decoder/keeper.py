"""The fetched tiers as the engine sees them: looked up, restored from, kept in. No mlx.

One thread keeps, in the order in which it was asked (``tiers/keeping``); others look up
(``tiers/lookups``), others again copy and read what is restored (``tiers/restores``). Nothing
here waits for a device, and the MLX thread waits for none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Final

from mac_decoder.reuse.cut import delta_pieces, pieces
from mac_decoder.reuse.facts import DeltaHandoff, FetchedTier, Restore
from mac_decoder.reuse.line import Line
from mac_decoder.reuse.resident import Pinned, Resident
from mac_decoder.store.events import Event
from mac_decoder.store.manifest import Role
from mac_decoder.store.publisher import Job
from mac_decoder.store.store import Store, log_event
from mac_decoder.tiers import restores
from mac_decoder.tiers.keeping import Forgotten, Keeping, Kept
from mac_decoder.tiers.lookups import Looked, Lookups, nothing
from mac_decoder.tiers.noted import Noted
from mac_decoder.tiers.restores import Into, Restored, Wanted
from mac_decoder.tiers.waiting import Waiting
from protocol.blocks import namespace
from protocol.identity import Identity
from protocol.layout import Layout

__all__ = ["Forgotten", "Keeper", "Kept", "Line", "Looked", "Restored", "nothing"]

_RESTORES: Final = 2


class Keeper:
    """Resident and durable tier of one model. Any thread may call."""

    def __init__(
        self, identity: Identity, layout: Layout, store_key: bytes, ram_bytes: int = 0
    ) -> None:
        """Without a durable tier until :meth:`attach`."""
        self._identity = identity
        self._layout = layout
        self._store_key = store_key
        self._resident = Resident(ram_bytes)
        self._waiting = Waiting()
        self._noted = Noted()
        self._store: Store | None = None
        self._keeping = Keeping(identity, layout, self._resident, self._waiting)
        self._lookups = Lookups(self._resident, self._waiting)
        self._restores = ThreadPoolExecutor(_RESTORES, thread_name_prefix="baton-restore")

    def attach(self, store: Store) -> None:
        """Keep on disk from now on; the store is closed with this keeper."""
        self._store = self._lookups.store = store
        self._keeping.attach(store)

    def heard(self, event: Event) -> None:
        """The store's listener."""
        log_event(event)
        self._noted.note(event)
        self._keeping.heard(event)

    def resize(self, ram_bytes: int) -> None:
        """Change the budget of the resident tier."""
        self._resident.resize(ram_bytes)

    # -- finding and restoring

    def space(self, salt: bytes = b"") -> bytes:
        """The namespace of this model's cuts under ``salt``."""
        return namespace(self._store_key, self._identity.digest(), salt)

    def look(self, tokens: tuple[int, ...], salt: bytes = b"") -> Future[Looked]:
        """What is held of a prompt, after everything of it that was to be kept before."""
        return self._lookups.look(self.space(salt), tokens)

    def restore(
        self, action: Restore, into: Into, cancelled: Callable[[], bool]
    ) -> Future[Restored | None]:
        """Place the bytes of a held cut; ``None`` if it is not held any more.

        The future raises ``IntegrityError`` for a damaged cut, which is then not offered again,
        and ``Cancelled``. The memory is void after an error, and nobody writes to it.
        """
        parts = pieces(self._layout, action.held, action.position)
        wanted = Wanted(action.key, action.position, parts)
        return self._restores.submit(self._restore, action.tier, wanted, into, cancelled)

    def compose(
        self,
        delta: DeltaHandoff,
        end: int,
        extra: Sequence[int],
        into: Into,
        cancelled: Callable[[], bool],
    ) -> Future[Restored | None]:
        """Place what caches at ``end`` and ``extra`` need below a delta; otherwise as
        :meth:`restore`.
        """
        parts = delta_pieces(self._layout, delta.held, delta.position, end, extra)
        wanted = Wanted(delta.key, delta.position, parts)
        return self._restores.submit(self._restore, delta.source, wanted, into, cancelled)

    def arm(self, delta: DeltaHandoff) -> Pinned | None:
        """Hold the resident cut of a delta that has to wait for its turn."""
        if delta.source != "resident" or not isinstance(delta.key, bytes):
            return None
        return self._resident.pin(delta.key, serving=True)

    def _restore(
        self, tier: FetchedTier, wanted: Wanted, into: Into, cancelled: Callable[[], bool]
    ) -> Restored | None:
        if tier == "resident":
            return restores.from_memory(self._resident, wanted, into, cancelled)
        if self._store is None:
            return None
        return restores.from_disk(self._store, wanted, into, cancelled)

    # -- keeping

    def ready(
        self, line: Line, position: int, role: Role, *, publish: bool = True
    ) -> tuple[Line, int] | None:
        """The line that a cut at ``position`` is to be handed over for, and how many whole blocks
        need not be; ``None``: nothing is wanted of it.

        To be asked before its rows are made: only the MLX thread hands over.
        """
        return self._keeping.ready(line, position, role, publish=publish)

    def keep(self, kept: Kept) -> None:
        """Queue a cut."""
        self._keeping.keep(kept)

    def let_go(self, line: Line) -> None:
        """The sequence is not gone on with; its kept cuts may be evicted."""
        self._keeping.let_go(line)

    def rest(self, line: Line) -> None:
        """The sequence may be gone on with later; until then its kept cuts may be evicted."""
        self._keeping.rest(line)

    def wake(self, line: Line) -> None:
        """The sequence is gone on with, on what is still there of its kept cuts."""
        self._keeping.wake(line)

    # -- for whoever keeps house

    @property
    def identity(self) -> Identity:
        """Whose caches these are."""
        return self._identity

    @property
    def store(self) -> Store | None:
        """The durable tier, if there is one."""
        return self._store

    @property
    def resident(self) -> Resident:
        """The resident tier."""
        return self._resident

    def forget(self, cuts: Collection[bytes] | None = None) -> Future[Forgotten]:
        """Let go of ``cuts``, by their names, or of all that was handed over before this call:
        in memory, and on the way to the disk. What is on disk stays there.
        """
        return self._keeping.forget(cuts)

    def unpublished(self) -> tuple[Job, ...]:
        """The cuts whose publication has not ended."""
        return self._keeping.unpublished()

    def finish_publication(self, stopped: Callable[[], bool]) -> None:
        """Wait for the publication that is in progress, if any, or to be stopped."""
        self._keeping.finish_publication(stopped)

    # -- for others to see, and the end

    def status(self) -> dict[str, Any]:
        """Figures of both tiers, in plain types."""
        durable = None
        if self._store is not None:
            durable = asdict(self._store.stats()) | {"publishing": self._keeping.publishing()}
        return {
            "resident": asdict(self._resident.stats()),
            "durable": durable,
            "keeping_bytes": self._waiting.nbytes,
            "brought_bytes": self._waiting.brought,
            "kept": self._keeping.counts(),
            "events": self._noted.latest(),
        }

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was to be kept is, and published; whether that was reached."""
        return self._keeping.drain(timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Keep and publish what waits, then let go of everything; whether all was published.

        ``timeout_s`` bounds the publishing; what is being copied or read is finished first.
        """
        self._lookups.close()
        self._restores.shutdown(wait=True, cancel_futures=True)
        drained = self._keeping.close(timeout_s)
        if self._store is not None:
            self._store.close()
        return drained
