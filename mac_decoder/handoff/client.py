"""The link to one producer: handoffs over a pool of connections, and what they measured."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self
from urllib.parse import urlsplit

from mac_decoder.engine.rates import Average
from mac_decoder.handoff.connection import Connection, Producer
from mac_decoder.handoff.link import Destination, LinkState, Rates
from mac_decoder.handoff.pool import Pool
from mac_decoder.handoff.transfer import Measured, Order, Transfer
from protocol.errors import BatonError, Cancelled, TransferError
from protocol.handoff import Sealed
from protocol.messages import NO_SPACE, Begin, HelloAck, Recipe

MAX_CONNECTIONS: Final = 4
"""One may wait for its commit and others at the producer while one receives."""


class Numbers(Protocol):
    """Where generations come from: ``generations.Generations``."""

    @property
    def failure(self) -> BatonError | None: ...

    def take(self) -> int: ...

    def retry(self) -> None: ...


@dataclass(frozen=True)
class Received:
    """A sealed handoff; see ``link.Handoff``."""

    manifest: Begin
    phases_ms: Mapping[str, float]
    end: Callable[[BatonError | None], None]
    resumed: int = 0

    @property
    def transferred_bytes(self) -> int:
        """Payload bytes, the manifest's figure."""
        return self.manifest.payload_bytes

    def committed(self) -> None:
        """Say that the cut is installed. Never blocks; only the first ending counts."""
        self.end(None)

    def discarded(self, reason: str) -> None:
        """Say that the cut will not be used, and why. Never blocks."""
        self.end(Cancelled("the cut will not be installed", field=reason))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discarded("not_installed")


class ProducerLink:
    """See ``link.Link``. ``start`` begins to connect; ``close`` frees everything."""

    def __init__(
        self,
        producer: Producer,
        numbers: Numbers,
        *,
        max_connections: int = MAX_CONNECTIONS,
        called: str = "",
    ) -> None:
        """``called`` is the name that `baton node` knows it by, if any."""
        self._pool = Pool(producer, max_connections, numbers.retry, called)
        self._numbers = numbers
        self._lock = threading.Lock()
        self._compute = self._wire = Average()
        self.name = producer.url
        self._layout = producer.layout
        self._handoffs = self._resumed = 0
        self._failures: Counter[str] = Counter()

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._pool.start()

    def close(self) -> None:
        """End running fetches (``link_closed``), all connections and threads."""
        self._pool.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def called(self) -> str:
        """What people call it: by its address where nobody gave it a name."""
        return self._pool.called or urlsplit(self.name).netloc

    def rename(self, called: str) -> None:
        """`baton node` knows it by another name from here on. Any thread."""
        self._pool.called = called

    @property
    def state(self) -> LinkState:
        """Where the link stands now."""
        state, failure = self._pool.state, self._numbers.failure
        if failure is None or state.name == "off":
            return state
        return LinkState("down", failure.reason, failure.message)

    def error(self) -> BatonError | None:
        """Why the producer cannot be asked now; ``None`` when it can."""
        failure = self._numbers.failure
        return self._pool.error() if failure is None else copy.copy(failure)

    @property
    def producer(self) -> HelloAck | None:
        """What the producer said of itself (recipe, limits) when it was last reached."""
        return self._pool.ack

    @property
    def tile(self) -> int:
        """The producer's tile in tokens; 0 before it was reached."""
        ack = self._pool.ack
        return ack.recipe.tile if ack is not None else 0

    @property
    def extra_cuts(self) -> int:
        """How many extra cuts the producer brings with a handoff, at most."""
        ack = self._pool.ack
        return ack.limits.max_extra_cuts if ack is not None else 0

    @property
    def qualified(self) -> None:
        """Nothing: whoever qualifies producers stands before this link."""
        return None

    @property
    def rates(self) -> Rates:
        """What was measured so far."""
        with self._lock:
            return Rates(
                compute_tokens_per_s=self._compute.per_second,
                wire_bytes_per_s=self._wire.per_second,
                round_trip_ms=self._pool.round_trip_s * 1e3,
                handoffs=self._handoffs,
                resumed=self._resumed,
                failures=dict(self._failures),
            )

    def fetch(
        self,
        tokens: Sequence[int],
        shadow: Destination,
        *,
        request_id: str = "",
        space: bytes = NO_SPACE,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda processed, total: None,
        recipe: Recipe | None = None,
    ) -> Received:
        """See ``link.Link.fetch``; also raises ``TransferError`` (``producer_changed``) where
        whoever answers computes otherwise than by ``recipe``.
        """
        try:
            return self._fetch(tokens, shadow, request_id, space, cancelled, progress, recipe)
        except BatonError as error:
            if self._pool.closing and isinstance(error, Cancelled):
                error = TransferError("the link is closed", reason="link_closed")
            with self._lock:
                self._failures[error.reason] += 1
            raise error from error.__cause__

    def _fetch(
        self,
        tokens: Sequence[int],
        shadow: Destination,
        request_id: str,
        space: bytes,
        cancelled: Callable[[], bool],
        progress: Callable[[int, int], None],
        recipe: Recipe | None,
    ) -> Received:
        order = Order(
            tokens=tokens[: shadow.end],
            request_id=_word(request_id),
            space=space,
            generation=self._numbers.take,
            layout=self._layout,
            cancelled=lambda: self._pool.closing or cancelled(),
            progress=progress,
            recipe=recipe,
        )
        connection, sealed, measured = Transfer(self._pool, shadow, order).run()
        received: Received | None = None
        try:
            received = self._received(connection, sealed, measured)
            return received
        finally:
            self._pool.put_back(connection)
            if received is None:
                # What was sealed nobody will end otherwise.
                failed = Cancelled("this side failed")
                self._pool.finish(connection, sealed, failed)

    def _received(self, connection: Connection, sealed: Sealed, measured: Measured) -> Received:
        begin = sealed.begin
        now = time.monotonic()
        with self._lock:
            if replayed(begin) <= begin.computed_tokens:
                self._compute = self._compute.with_sample(
                    begin.computed_tokens, measured.compute, now
                )
            self._wire = self._wire.with_sample(begin.payload_bytes, measured.receiving, now)
            self._handoffs += 1
            self._resumed += measured.resumed
        phases = {
            "queue": (measured.waited + measured.queue) * 1e3,
            "compute": measured.compute * 1e3,
            "wire": measured.wire * 1e3,
            "verify": measured.verify * 1e3,
        }
        return Received(
            begin,
            phases,
            lambda error: self._pool.finish(connection, sealed, error),
            measured.resumed,
        )


def replayed(begin: Begin) -> int:
    """Tokens whose rows are sent without being computed. It takes a small part of the time that
    computing takes: where there are many, the rest's speed does not show.
    """
    return max(0, begin.end - begin.computed_tokens - begin.cut)


def _word(request_id: str) -> str:
    """The request's name in the alphabet of the wire."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "_.:-") else "-" for c in request_id)
    return kept[:64] or "request"
