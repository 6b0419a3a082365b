"""Keeping house in a decoder that runs: what is kept, whether it is right, and letting go of it.

The functions are those of `baton cache`; what this adds is the other tiers, and company. Nothing
here waits on the event loop, and nothing takes the MLX thread for longer than a list of its live
sequences does. Requests wait for none of it: a restore goes on with the cut that it has pinned,
or finds a miss.

A deletion takes what had ended when it began, from all tiers and from the way to the disk.
A request that runs then is a use: what it leaves later is kept as ever.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, ParamSpec, TypeVar

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.live import LiveCut
from mac_decoder.housekeeping.conversations import Chosen, Conversations, Marks, chosen, seen
from mac_decoder.housekeeping.operations import Kind, Operation
from mac_decoder.keeper import Keeper
from mac_decoder.reporting import traced
from mac_decoder.store.catalogue import Footprint
from mac_decoder.store.ledger import Tally
from mac_decoder.store.store import Store
from mac_decoder.store.verify import Verified
from protocol.errors import BatonError, CapacityError, EngineFault, RequestError

log = logging.getLogger(__name__)

_PATIENCE_S: Final = 30.0
"""How long cuts that are being read are waited for."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Shared:
    """What a conversation needs and others need too, in bytes: it stays when that goes."""

    nbytes: int
    memory_bytes: int


@dataclass(frozen=True)
class Gone:
    """What was deleted, or would be.

    ``files`` and ``nbytes`` on disk; ``cuts`` and ``memory_bytes`` in memory, ``live`` sequences
    and ``live_bytes`` in the engine; ``publications`` that were given up before they began.
    ``left`` is what is on disk after it by the books, ``None`` without a disk; ``shared`` is
    told of one conversation.
    """

    files: int = 0
    nbytes: int = 0
    cuts: int = 0
    memory_bytes: int = 0
    live: int = 0
    live_bytes: int = 0
    publications: int = 0
    left: int | None = None
    shared: Shared | None = None


class Housekeeping:
    """One for each decoder; on the event loop. One operation at a time, any number of looks."""

    def __init__(self, keeper: Keeper, engine: Engine) -> None:
        self._keeper = keeper
        self._engine = engine
        self._secret = secrets.token_bytes(32)
        self._marks = Marks(self._secret)
        # A walk of a large directory keeps nobody from looking at anything else.
        self._looks = ThreadPoolExecutor(2, thread_name_prefix="baton-look-over")
        self._works = ThreadPoolExecutor(1, thread_name_prefix="baton-house")
        self._closing = threading.Event()
        self._task: asyncio.Task[None] | None = None
        self.latest: Operation[Any] | None = None
        """The operation that runs, or ran last."""

    @property
    def durable(self) -> bool:
        """Whether caches are kept on disk."""
        return self._keeper.store is not None

    # -- looking

    async def conversations(self) -> Conversations:
        """The conversations that were used last, of all tiers."""
        live = await self._engine.live()
        return await self._look(seen, self._keeper, live, self._secret, self._marks)

    async def footprint(self) -> Footprint:
        """Every file below the directory, counted now.

        Raises as :meth:`verify`, and ``ConfigError`` (``cache_dir_unusable``) if the disk fails.
        """
        return await self._look(self._store().footprint, self._closing.is_set)

    async def would_prune(self, to_bytes: int) -> Gone:
        """What :meth:`prune` would delete now. Raises as that does."""
        store = self._store()
        tally = await self._look(partial(store.prune, to_bytes=to_bytes, dry_run=True))
        return Gone(*tally, left=await self._look(self._left, tally.nbytes))

    async def would_forget(self, conversation: str) -> Gone:
        """What :meth:`forget` would delete now. Raises as that does."""
        live = await self._engine.live()
        found = await self._look(self._chosen, live, conversation)
        return await self._look(self._weighed, found, partial(Store.forget, cuts=found.cuts))

    async def would_clear(self, *, foreign: bool = False) -> Gone:
        """What :meth:`clear` would delete now."""
        identity = None if foreign else self._keeper.identity
        everything = Chosen(frozenset(), await self._engine.live())
        return await self._look(
            self._weighed, everything, partial(Store.clear, identity=identity), all_cuts=True
        )

    # -- doing: each returns at once, and raises ``CapacityError`` (``housekeeping_busy``) while
    # -- another one runs

    def verify(self) -> Operation[Verified]:
        """Read and authenticate every file; what is wrong is set aside, and told as an event.

        Raises ``RequestError`` (``no_durable_tier``).
        """
        store = self._store()

        async def work(operation: Operation[Verified]) -> Verified:
            return await self._work(
                partial(store.verify, operation.tell, cancelled=operation.stopped)
            )

        return self._begin("verify", work)

    def prune(self, to_bytes: int) -> Operation[Gone]:
        """Delete until ``to_bytes`` are on disk, the least recently used first, whoever's it is.

        Memory goes on serving what it has. Raises as :meth:`verify`.
        """
        store = self._store()
        if to_bytes < 0:
            raise RequestError("a size is not negative", field="to_bytes", found=to_bytes)

        async def work(operation: Operation[Gone]) -> Gone:
            tally = await self._work(partial(store.prune, to_bytes=to_bytes, pace=operation.pace()))
            return Gone(*tally, left=await self._work(self._left))

        return self._begin("prune", work)

    def forget(self, conversation: str) -> Operation[Gone]:
        """Delete what only this conversation has, in all tiers; others keep what they share.

        The operation fails of ``RequestError`` (``conversation_unknown``) where the conversation
        has gone on or is gone.
        """

        async def work(operation: Operation[Gone]) -> Gone:
            # Two walks of the disk may have all threads that look.
            sequences = await self._engine.live()
            found = await self._work(partial(self._chosen, sequences, conversation))
            self._marks.forget(found)
            live = frozenset(one.key for one in found.live)
            shared = await self._work(partial(self._shared, found))
            gone = await self._delete(
                operation, live, found.cuts, partial(Store.forget, cuts=found.cuts)
            )
            return replace(gone, shared=shared)

        return self._begin("forget", work)

    def clear(self, *, foreign: bool = False) -> Operation[Gone]:
        """Delete everything in all tiers; with ``foreign`` also what other models, versions and
        store keys have on disk.
        """
        identity = None if foreign else self._keeper.identity

        async def work(operation: Operation[Gone]) -> Gone:
            return await self._delete(
                operation, None, None, partial(Store.clear, identity=identity)
            )

        return self._begin("clear", work)

    async def close(self) -> None:
        """Cancel what runs, and end the threads; before the keeper is closed.

        The engine may have been closed by then, or be dead: it has nothing to look at any more.
        """
        self._closing.set()
        if self.latest is not None:
            self.latest.cancel()
        if self._task is not None:
            await asyncio.wait([self._task])
        await asyncio.to_thread(self._looks.shutdown, cancel_futures=True)
        await asyncio.to_thread(self._works.shutdown)

    # -- within

    async def _delete(
        self,
        operation: Operation[Gone],
        live: Collection[int] | None,
        cuts: Collection[bytes] | None,
        on_disk: Callable[..., Tally],
    ) -> Gone:
        """First what is in memory and on the way to the disk, so that it does not come there."""
        sequences, nbytes, forgetting = await self._engine.forget(live, cuts)
        if forgetting is None:
            forgetting = self._keeper.forget(cuts)
        forgotten = await asyncio.wrap_future(forgetting)
        gone = Gone(
            cuts=forgotten.cuts,
            memory_bytes=forgotten.nbytes,
            live=sequences,
            live_bytes=nbytes,
            publications=forgotten.publications,
        )
        store = self._keeper.store
        if store is None:
            return gone
        await self._work(partial(self._keeper.finish_publication, operation.stopped))
        files = freed = 0
        if not operation.stopped():
            pace = operation.pace(_PATIENCE_S)
            files, freed = await self._work(partial(on_disk, store, pace=pace))
        return replace(gone, files=files, nbytes=freed, left=await self._work(self._left))

    def _left(self, freed: int = 0) -> int | None:
        """What is on disk by the books, once ``freed`` bytes of it are gone."""
        store = self._keeper.store
        return None if store is None else store.stats().on_disk - freed

    def _shared(self, found: Chosen) -> Shared:
        """What of a conversation stays when it goes."""
        store, resident = self._keeper.store, self._keeper.resident
        memory = resident.weigh(found.line, found.cuts)
        disk = None if store is None else store.catalogue.weigh(found.line, found.cuts)
        return Shared(
            0 if disk is None else max(0, disk.referenced - disk.own),
            max(0, memory.referenced - memory.own),
        )

    def _weighed(
        self, found: Chosen, on_disk: Callable[..., Tally], *, all_cuts: bool = False
    ) -> Gone:
        store, resident = self._keeper.store, self._keeper.resident
        held = {cut.name for cut in resident.cuts()}
        going = held if all_cuts else held & found.cuts
        waiting = [job.name for job in self._keeper.unpublished()]
        tally = on_disk(store, dry_run=True) if store is not None else Tally()
        return Gone(
            *tally,
            cuts=len(going),
            memory_bytes=resident.weigh((), going).own,
            live=len(found.live),
            live_bytes=sum(one.nbytes for one in found.live),
            publications=sum(all_cuts or name in found.cuts for name in waiting),
            left=self._left(tally.nbytes),
            shared=self._shared(found) if found.line else None,
        )

    def _chosen(self, live: Sequence[LiveCut], conversation: str) -> Chosen:
        found = chosen(self._keeper, live, self._secret, conversation)
        if found is None:
            raise RequestError(
                "no such conversation is kept",
                reason="conversation_unknown",
                field="conversation",
                hint="it has gone on, or is gone: look again",
            )
        return found

    def _store(self) -> Store:
        store = self._keeper.store
        if store is None:
            raise RequestError(
                "caches are not kept on disk",
                reason="no_durable_tier",
                hint="start the decoder without --no-disk",
            )
        return store

    def _begin(self, kind: Kind, work: Callable[[Operation[R]], Awaitable[R]]) -> Operation[R]:
        if self._closing.is_set():
            raise EngineFault("the decoder is stopping", reason="engine_stopping")
        if self.latest is not None and self.latest.state == "running":
            raise CapacityError(
                "another operation on the caches runs",
                reason="housekeeping_busy",
                found=self.latest.kind,
                hint="wait until it has ended, or cancel it",
            )
        operation: Operation[R] = Operation(kind)
        self.latest = operation
        self._task = asyncio.create_task(self._carry_out(operation, work))
        return operation

    async def _carry_out(
        self, operation: Operation[R], work: Callable[[Operation[R]], Awaitable[R]]
    ) -> None:
        working = asyncio.ensure_future(work(operation))
        await asyncio.wait([working])
        error = working.exception()
        if error is None:
            operation.end(working.result())
        elif isinstance(error, BatonError):
            operation.end(error=error)
        else:
            log.error("%s of the caches broke: %s", operation.kind, traced(error))
            operation.end(
                error=EngineFault(
                    "the operation broke", reason="internal_error", found=type(error).__name__
                )
            )
        log.info("%s of the caches: %s", operation.kind, operation.state)

    async def _look(self, function: Callable[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        if self._closing.is_set():
            raise EngineFault("the decoder is stopping", reason="engine_stopping")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._looks, partial(function, *arguments, **named))

    async def _work(self, function: Callable[[], R]) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._works, function)
