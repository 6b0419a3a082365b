"""The sections of a decoder's snapshot. Times of day are seconds since 1970, durations ms.

A section is replaced as a whole when anything in it changes; so what changes together stands
together. Plain integers are counts of this process and sizes that it set (``figures.Count``);
everything that has to be measured or estimated is a :class:`~protocol.status.figures.Figure`.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from protocol.identity import Identity
from protocol.status.figures import UNAVAILABLE, Count, Figure

VERSION: Final = 2
"""Of the shape of these sections and of the messages with them: another shape, another one."""

MOST_RECENT: Final = 200
"""How many finished requests are told of."""

MOST_EVENTS: Final = 50
"""How many events of the cache are told of."""

Source = Literal["live", "resident", "durable", "remote", "local", "mixed"]
"""Where a prompt's cache came from; ``mixed`` of a request with several prompts."""

Doing = Literal[
    "loading",
    "idle",
    "restoring",
    "prefilling_here",
    "prefilling_there",
    "decoding",
    "qualifying",
    "trouble",
]
"""What the engine does now. Of several things the one that others wait for: trouble, then
prefilling there, here, restoring, decoding. ``qualifying``: nobody's request, but a producer's
rows are compared with its own."""

AskedFromBy = Literal["set", "rates", "first_guess"]
"""Why a producer is asked from a certain prompt length on: somebody set it, the measured rates
say so, or they are not all known yet."""

Stage = Literal[
    "queued",
    "looking_up",
    "restoring",
    "prefilling_there",
    "prefilling_here",
    "decoding",
    "answering",
]
"""Where a request stands. ``prefilling_there`` includes waiting for the producer's turn;
``answering``: all was generated, and the client has not taken all of it."""

Outcome = Literal["completed", "refused", "failed", "cancelled"]

LinkName = Literal["off", "connecting", "qualifying", "ready", "unfit", "down", "refused"]


class _Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A value of the snapshot: unchangeable, and nothing in it that is not listed."""


class Decoder(_Section, frozen=True):
    """Who answers. ``process`` is drawn at random when the process starts, so that a client
    notices a restart; ``identity`` and ``context_tokens`` are ``null`` while a model is loaded.
    ``versions`` are of Baton and what computes, by package. ``restarts`` and ``last_fault`` are
    what its supervisor has seen.
    """

    process: str
    model: str
    started_at: float
    address: str | None
    versions: dict[str, str]
    identity: Identity | None
    identity_digest: str | None
    context_tokens: Count | None
    restarts: Count
    last_fault: str
    connections_missed: Count


class Engine(_Section, frozen=True):
    """The engine and its queue. ``fault`` is the reason of what ended it. ``stages`` counts
    requests; ``cache_bytes_reserved`` of ``cache_bytes_limit`` are promised to them. ``ended``
    counts how requests ended, ``fallbacks`` why prompts were prefilled here although a producer
    was meant to. ``asked_from_tokens``: from which prompt length a producer is asked, where
    one is; ``asked_from_by`` why. ``local_tokens_per_s`` is the moving average that is weighed.
    """

    doing: Doing
    ready: bool
    fault: str | None
    open: Count
    open_limit: Count | None
    stages: dict[str, Count]
    waiting_for_producer: Count
    cache_bytes_reserved: Count | None
    cache_bytes_limit: Count | None
    generated_tokens: Count
    ended: dict[str, Count]
    fallbacks: dict[str, Count]
    asked_from_tokens: Count | None
    local_tokens_per_s: Figure
    keeps_awake: bool
    asked_from_by: AskedFromBy | None = None


class InHand(_Section, frozen=True):
    """A request that is being answered. ``processed`` of ``total`` prompt positions are in its
    cache, as far as was told; ``source`` and ``phases`` (as in ``Served``) are known from the
    first token on. ``tokens_per_s`` is the rate of the stage it is in.
    """

    id: str
    route: str
    streamed: bool
    began_at: float
    stage: Stage
    prompt_tokens: Count
    processed: Count | None
    total: Count | None
    generated_tokens: Count
    source: Source | None
    phases: dict[str, Figure]
    tokens_per_s: Figure


class Requests(_Section, frozen=True):
    """What is in hand, the oldest first, and how the others ended, counted."""

    in_hand: tuple[InHand, ...]
    outcomes: dict[Outcome, Count]


class Served(_Section, frozen=True):
    """Where a request's prompt came from and what it cost: the answer's ``baton`` object.

    ``phases`` are up to the first token (see ``docs/cache.md``). ``parts_at`` is where this
    prompt and what is held have different tokens; with ``reasons`` it says why not more was
    reused.
    """

    source: Source
    reused_tokens: Count
    prefilled_tokens: Count
    computed_tokens: Count
    transferred_bytes: Count
    shared_tokens: Count
    parts_at: Count | None
    restore_ms: Figure
    restore_bytes: Count
    staging_bytes: Count
    evicted_bytes: Count
    ttft_ms: Figure
    phases: dict[str, Figure]
    fallback: bool
    reasons: tuple[str, ...]


class Finished(_Section, frozen=True):
    """A request that has ended. ``code`` is the reason of its error; ``served`` is ``null``
    where it ended before its first token. ``decode_ms`` goes from the first to the last token.
    """

    id: str
    route: str
    streamed: bool
    outcome: Outcome
    code: str | None
    ended_at: float
    prompt_tokens: Count
    generated_tokens: Count
    finish_reasons: tuple[str, ...]
    total_ms: Figure
    decode_ms: Figure
    tokens_per_s: Figure
    served: Served | None


class Recent(_Section, frozen=True):
    """Requests that have ended, the latest first; at most ``MOST_RECENT``."""

    finished: tuple[Finished, ...]


class Qualified(_Section, frozen=True):
    """The latest comparison of a producer's rows with this decoder's own."""

    at: float
    fit: bool
    apart: Figure
    allowed: Figure
    where: str


class Node(_Section, frozen=True):
    """A producer. ``called`` is what people call it, ``name`` its address, which no other has.
    ``reason`` is a stable code, empty when ready; ``detail`` is for people.
    ``asked_from_tokens`` is the prompt length from which it is worth asking, ``null`` if none;
    ``asked_from_by`` says why.
    """

    name: str
    called: str
    state: LinkName
    reason: str
    detail: str
    attempts: Count
    tile: Count | None
    handoffs: Count
    resumed: Count
    failures: dict[str, Count]
    waiting: Count
    fetching: bool
    asked_from_tokens: Count | None
    compute_tokens_per_s: Figure
    wire_bytes_per_s: Figure
    round_trip_ms: Figure
    handoff_overhead_ms: Figure
    qualified: Qualified | None
    asked_from_by: AskedFromBy | None = None


class Nodes(_Section, frozen=True):
    """The producers, in the order in which they came."""

    producers: tuple[Node, ...]


class Live(_Section, frozen=True):
    """Finished sequences that are still in the engine."""

    sequences: Count
    bytes: Count
    evicted: Count


class Resident(_Section, frozen=True):
    """Cuts in memory. ``used_bytes`` counts shared blocks once and is what ``budget_bytes``
    bounds; ``referenced_bytes`` counts them once for every cut.
    """

    cuts: Count
    blocks: Count
    used_bytes: Count
    budget_bytes: Count
    referenced_bytes: Count
    pinned_bytes: Count
    evicted_cuts: Count
    evicted_bytes: Count


class Durable(_Section, frozen=True):
    """Cuts on disk. ``on_disk`` is every byte below the directory, as a walk counts it, and what
    ``cap_bytes`` bounds; ``referenced`` counts each conversation whole. ``withheld`` cuts lack a
    block that was set aside; ``publishing`` wait to be written.
    """

    cuts: Count
    blocks: Count
    on_disk: Count
    referenced: Count
    cap_bytes: Count
    floor_bytes: Count
    withheld: Count
    publishing: Count
    counts: dict[str, Count]


class CacheEvent(_Section, frozen=True):
    """``files`` files in a row of the same kind and reason: ``deleted``, ``invalid``,
    ``index_rebuilt``. ``at`` is the latest; ``cuts`` are not held any more, or are again.
    """

    at: float
    kind: Literal["deleted", "invalid", "index_rebuilt"]
    reason: str
    files: Count
    cuts: Count
    bytes: Count


class Cache(_Section, frozen=True):
    """The tiers that keep caches, ``null`` where there is none, and what reuse gave.

    ``counters`` are those of ``docs/cache.md``; ``events`` the latest, the newest first.
    ``seconds_saved_today``: since midnight by the decoder's clock, or since its start.
    """

    live: Live | None
    resident: Resident | None
    durable: Durable | None
    counters: dict[str, Count]
    hit_rate: Figure = UNAVAILABLE
    restore_speedup: Figure = UNAVAILABLE
    seconds_saved: Figure = UNAVAILABLE
    seconds_saved_today: Figure = UNAVAILABLE
    gflops_avoided: Figure = UNAVAILABLE
    joules_saved: Figure = UNAVAILABLE
    events: tuple[CacheEvent, ...] = ()


class Door(_Section, frozen=True):
    """The HTTP endpoint: what it asks for, how many are there, whom it has refused."""

    certificate_sha256: str | None
    keys: Count
    keys_demanded: bool
    connections: Count
    connections_limit: Count
    streams: Count
    streams_limit: Count
    refused: dict[str, Count]


class Snapshot(_Section, frozen=True):
    """A decoder at one moment. ``revision`` counts within its process; equal ones are equal."""

    version: Literal[2]
    revision: Count
    decoder: Decoder
    engine: Engine
    requests: Requests
    recent: Recent
    nodes: Nodes
    cache: Cache
    door: Door


SECTIONS: Final = ("decoder", "engine", "requests", "recent", "nodes", "cache", "door")
"""The fields of :class:`Snapshot` that are sections."""
