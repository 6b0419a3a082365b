"""What the rest of the decoder knows about the producer: its state, its rates, a handoff.

``ProducerLink`` in ``client`` implements :class:`Link` over a socket. The engine names only
the types of this file, so that it never sees a socket, a thread or a message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self

from protocol.errors import BatonError
from protocol.layout import Slot
from protocol.messages import NO_SPACE

LinkName = Literal["off", "connecting", "qualifying", "ready", "unfit", "down", "refused"]
"""``off``: no producer configured, or closed. ``connecting``: first attempt under way.
``qualifying``, ``unfit``: connected, but not known, or known not, to compute what this decoder
would. ``ready``: a PREFILL may be sent. ``down``: not reachable, being retried.
``refused``: reachable, but of another version, identity or key; retried slowly."""


@dataclass(frozen=True)
class LinkState:
    """Where the link stands. ``reason`` is a stable code ("" when ready).

    ``detail`` is for people: what went wrong and what helps, or how a ready producer computes.
    """

    name: LinkName
    reason: str = ""
    detail: str = ""
    attempts: int = 0
    retry_in_s: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether a fetch may be tried now."""
        return self.name == "ready"


@dataclass(frozen=True)
class Rates:
    """Measured rates, moving averages over recent handoffs; 0.0 where nothing was measured.

    ``compute_tokens_per_s`` is the producer's prefill, ``wire_bytes_per_s`` the payload rate
    from first to last frame, ``round_trip_ms`` the last ping; ``resumed`` counts connections
    that were lost while a handoff ran, which went on over another.
    """

    compute_tokens_per_s: float = 0.0
    wire_bytes_per_s: float = 0.0
    round_trip_ms: float = 0.0
    handoffs: int = 0
    resumed: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)


class Destination(Protocol):
    """Where the rows of a handoff over ``[cut, end)`` go: ``mac_decoder.kv.shadow.Shadow``."""

    @property
    def cut(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def extra(self) -> tuple[int, ...]:
        """Positions at which cuts are wanted too; of no use to a producer with another tile."""
        ...

    def begin(self, cut: int) -> None:
        """The producer will send ``[cut, end)``: what was asked for, or all of it. May wait."""
        ...

    def place(self, slot: Slot) -> memoryview:
        """The writable bytes of ``slot``, slots in their order. Any thread, no MLX call."""
        ...

    def prefault(self, cancelled: Callable[[], bool]) -> None:
        """Touch the pages that nothing was placed into yet; ends soon once ``cancelled``."""
        ...


class Handoff(Protocol):
    """A sealed handoff whose bytes are in the shadow. Exactly one of the two ends it.

    As a context manager it discards itself unless :meth:`committed` was called inside.
    """

    @property
    def manifest(self) -> Any:
        """The producer's BEGIN message (``protocol.messages.Begin``)."""
        ...

    @property
    def phases_ms(self) -> Mapping[str, float]:
        """Milliseconds of ``queue``, ``compute``, ``wire`` and ``verify``, measured apart."""
        ...

    @property
    def resumed(self) -> int:
        """How many connections were lost on the way."""
        ...

    @property
    def transferred_bytes(self) -> int:
        """Payload bytes, the manifest's figure."""
        ...

    def committed(self) -> None:
        """Say that the cut is installed. Any thread, never blocks; idempotent."""
        ...

    def discarded(self, reason: str) -> None:
        """Say that the cut will not be used, and why. Any thread, never blocks."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...


class Link(Protocol):
    """The remote tier: one producer. All methods may be called from any thread."""

    @property
    def name(self) -> str:
        """The producer's address, which no other has."""
        ...

    @property
    def called(self) -> str:
        """What people call it."""
        ...

    @property
    def state(self) -> LinkState: ...

    @property
    def rates(self) -> Rates: ...

    @property
    def tile(self) -> int:
        """The producer's tile in tokens; 0 while nothing is known of it."""
        ...

    @property
    def extra_cuts(self) -> int:
        """How many extra cuts the producer brings with a handoff, at most."""
        ...

    @property
    def qualified(self) -> Mapping[str, object] | None:
        """What its qualification found last, in plain types; ``None``: there was none."""
        ...

    def error(self) -> BatonError | None:
        """Why the producer cannot be asked now; ``None`` when it can."""
        ...

    def fetch(
        self,
        tokens: Sequence[int],
        shadow: Destination,
        *,
        request_id: str = "",
        space: bytes = NO_SPACE,
        cancelled: Callable[[], bool] = lambda: False,
        progress: Callable[[int, int], None] = lambda processed, total: None,
    ) -> Handoff:
        """Have the producer prefill ``tokens`` and receive ``[shadow.cut, shadow.end)``.

        ``tokens`` is the whole prompt of N tokens, boundary token included, and
        ``shadow.end == N - 1``. ``space`` names who shares what the producer keeps. Blocks until
        the seal is verified. ``cancelled`` is polled at least every 100 ms; ``progress(processed,
        total)`` is called in this thread.
        The shadow's bytes are worthless after any error, and may be freed then.

        Raises ``TransferError`` (producer away, died, too slow: ``producer_down``,
        ``connection_lost``, ``deadline_exceeded``, …), ``IdentityMismatch``,
        ``PeerProtocolError``, ``IntegrityError``, ``CapacityError``, ``Cancelled``.
        """
        ...


def described(link: Link) -> dict[str, object]:
    """State and rates in plain types, for ``/status``."""
    state, rates = link.state, link.rates
    return {
        "name": link.name,
        "called": link.called,
        "state": state.name,
        "reason": state.reason,
        "detail": state.detail,
        "attempts": state.attempts,
        "retry_in_s": round(state.retry_in_s, 1),
        "tile": link.tile,
        "compute_tokens_per_s": round(rates.compute_tokens_per_s, 1),
        "wire_bytes_per_s": round(rates.wire_bytes_per_s),
        "round_trip_ms": round(rates.round_trip_ms, 2),
        "handoffs": rates.handoffs,
        "resumed": rates.resumed,
        "failures": dict(rates.failures),
        "qualified": link.qualified,
    }
