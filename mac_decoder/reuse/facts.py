"""What the ladder decides on, and what it decides: facts and plans, as immutable values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Literal

from mac_decoder.engine.rates import Speeds
from mac_decoder.reuse.radix import K, Match
from protocol.blocks import BLOCK
from protocol.layout import Layout
from protocol.messages import History

Lane = Literal["auto", "local", "remote"]
FetchedTier = Literal["resident", "durable"]
Publication = Literal["pending", "published", "superseded", "out_of_space", "refused", "invalid"]
"""What became of a resident cut's way to the durable tier.

``pending``: not ended. ``published``: committed. ``superseded``: a true extension is committed
in its place, and vouches for it. ``out_of_space``: the cap, the floor or the
queue left no room, or took it away again, or somebody deleted it who keeps house.
``refused``: the durable tier would not have it.
``invalid``: its bytes were found to differ from those that were authenticated.
"""


@dataclass(frozen=True)
class Offer:
    """A held cut that shares ``shared`` tokens with the prompt; ``key`` is its tier's name."""

    key: Hashable
    position: int
    shared: int
    history: tuple[History, ...]
    publication: Publication = "published"


@dataclass(frozen=True)
class Holding:
    """What a fetched tier holds of the prompt. A durable tier lists authenticated cuts only."""

    shared: int = 0
    parts_at: int | None = None
    offers: tuple[Offer, ...] = ()


NOTHING: Final = Holding()


@dataclass(frozen=True)
class Live:
    """A finished sequence in the engine, at ``position``, sharing ``shared`` tokens."""

    key: Hashable
    position: int
    shared: int


@dataclass(frozen=True)
class Remote:
    """The producer. ``reason`` is why it is not ready; ``holds`` how many of the prompt's first
    tokens it probably need not compute.

    ``tile`` is its tile in tokens, ``deltas`` whether this decoder can take one,
    ``fixed_threshold`` the configured prompt length from which to ask it; ``probe`` that rates
    which refuse it should be doubted now (see ``rates.Probing``).
    """

    ready: bool = True
    reason: str = "producer_down"
    tile: int = 512
    deltas: bool = False
    holds: int = 0
    backlog_tokens: int = 0
    fixed_threshold: int | None = None
    probe: bool = False
    speeds: Speeds = field(default_factory=Speeds)


@dataclass(frozen=True)
class Facts:
    """All that a plan depends on. ``tokens`` is the prompt's length N, at least 1.

    ``durable`` is ``None`` where there is no durable tier, ``remote`` where no producer is.
    ``reuse`` false: nobody was asked what is held, so that nothing can be missing.
    """

    tokens: int
    layout: Layout
    lane: Lane = "auto"
    live: tuple[Live, ...] = ()
    resident: Holding = NOTHING
    durable: Holding | None = None
    remote: Remote | None = None
    reuse: bool = True

    @property
    def end(self) -> int:
        """N-1: where the cache must be before the boundary step."""
        return self.tokens - 1


@dataclass(frozen=True)
class ContinueLive:
    """Go on from a live sequence's own caches, at ``position``."""

    key: Hashable
    position: int
    tier: Literal["live"] = "live"


@dataclass(frozen=True)
class Restore:
    """Build caches at ``position`` out of the cut ``key`` of ``tier``, which is at ``held``."""

    tier: FetchedTier
    key: Hashable
    held: int
    position: int


@dataclass(frozen=True)
class DeltaHandoff:
    """Ask the producer for ``[position, N-1)``; the cut ``key`` supplies what lies below."""

    source: FetchedTier
    key: Hashable
    held: int
    position: int
    tier: Literal["remote"] = "remote"


@dataclass(frozen=True)
class FullHandoff:
    """Ask the producer for ``[0, N-1)``."""

    position: int = 0
    tier: Literal["remote"] = "remote"


@dataclass(frozen=True)
class Local:
    """Compute everything here."""

    position: int = 0
    tier: Literal["local"] = "local"


Action = ContinueLive | Restore | DeltaHandoff | FullHandoff | Local
Base = ContinueLive | Restore | Local


@dataclass(frozen=True)
class Plan:
    """What to do, and why. Positions from ``action.position`` to N-1 are prefilled.

    ``shared`` is the longest prefix that any tier holds; ``parts_at`` where the tokens of the
    prompt and of that holding differ first, if they do. ``delta`` is the delta that arms,
    whether or not it was chosen. ``fallback``: the producer was wanted and cannot be asked.
    ``refused``: this request insists on it, so that nobody prefills.
    """

    action: Action
    reasons: tuple[str, ...]
    shared: int
    parts_at: int | None
    delta: DeltaHandoff | None = None
    fallback: bool = False
    refused: bool = False


def offers(
    match: Match[K],
    describe: Callable[[K], tuple[tuple[History, ...], Publication]],
) -> Holding:
    """The holding that an index's match stands for; ``describe`` tells of a cut by its key."""
    shares: dict[K, int] = {}
    positions: dict[K, int] = {}
    for boundary, cut in enumerate(match.nearest):
        shares[cut.key] = boundary * BLOCK
        positions[cut.key] = cut.position
    for cut in match.cuts:
        shares[cut.key] = positions[cut.key] = cut.position
    if match.witness is not None:
        shares[match.witness.key] = match.shared
        positions[match.witness.key] = match.witness.position
    found = (
        Offer(key, positions[key], shared, *describe(key))
        for key, shared in shares.items()
        if shared
    )
    return Holding(match.shared, match.parts_at, tuple(found))


def without(held: Holding, key: Hashable) -> Holding:
    """What is held without one cut: what a request plans with after that cut failed it."""
    kept = tuple(offer for offer in held.offers if offer.key != key)
    return Holding(max((offer.shared for offer in kept), default=0), held.parts_at, kept)
