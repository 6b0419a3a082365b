"""A snapshot to change a little of, as a decoder at work tells it."""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.status.figures import UNAVAILABLE, Figure
from protocol.status.snapshot import (
    VERSION,
    Cache,
    Decoder,
    Door,
    Durable,
    Engine,
    Finished,
    InHand,
    Node,
    Nodes,
    Qualified,
    Recent,
    Requests,
    Resident,
    Served,
    Snapshot,
)

NOW = 1_780_000_000.0


def exactly(value: float) -> Figure:
    return Figure(value, "measured")


def about(value: float) -> Figure:
    return Figure(value, "estimated")


IN_HAND = InHand(
    id="chatcmpl-1",
    route="chat",
    streamed=True,
    began_at=NOW - 4,
    stage="prefilling_there",
    prompt_tokens=65_536,
    processed=29_491,
    total=65_535,
    generated_tokens=0,
    source=None,
    phases={},
    tokens_per_s=exactly(2100.0),
)

SERVED = Served(
    source="durable",
    reused_tokens=3_840,
    prefilled_tokens=160,
    computed_tokens=160,
    transferred_bytes=0,
    shared_tokens=3_900,
    parts_at=3_900,
    restore_ms=exactly(84.0),
    restore_bytes=3_932_160,
    staging_bytes=1 << 20,
    evicted_bytes=0,
    ttft_ms=exactly(240.0),
    phases={"verify": exactly(30.0), "queue": exactly(10.0), "compute": exactly(160.0)},
    fallback=False,
    reasons=("prompts_part", "between_blocks", "below_threshold"),
)

FINISHED = Finished(
    id="chatcmpl-0",
    route="chat",
    streamed=False,
    outcome="completed",
    code=None,
    ended_at=NOW - 70,
    prompt_tokens=4_001,
    generated_tokens=100,
    finish_reasons=("stop",),
    total_ms=exactly(2240.0),
    decode_ms=exactly(2000.0),
    tokens_per_s=exactly(49.5),
    served=SERVED,
)

READY = Node(
    name="wss://gb10.local:7431",
    called="gb10",
    state="ready",
    reason="",
    detail="",
    attempts=0,
    tile=2048,
    handoffs=12,
    resumed=1,
    failures={"connection_lost": 1},
    waiting=0,
    fetching=False,
    asked_from_tokens=512,
    compute_tokens_per_s=exactly(2100.4),
    wire_bytes_per_s=exactly(1.18e9),
    round_trip_ms=exactly(0.42),
    handoff_overhead_ms=UNAVAILABLE,
    qualified=Qualified(NOW - 7200, True, exactly(0.2), exactly(1.0), "layer 0"),
)

IDLE = Snapshot(
    version=VERSION,
    revision=7,
    decoder=Decoder(
        process="ab",
        model="a-model",
        started_at=NOW - 3600,
        address="http://127.0.0.1:8000",
        versions={"baton": "0.1.0"},
        identity=None,
        identity_digest=None,
        context_tokens=65_536,
        restarts=0,
        last_fault="",
        connections_missed=0,
    ),
    engine=Engine(
        doing="idle",
        ready=True,
        fault=None,
        open=0,
        open_limit=80,
        stages={"waiting": 0},
        waiting_for_producer=0,
        cache_bytes_reserved=0,
        cache_bytes_limit=8_000_000_000,
        generated_tokens=1_234,
        ended={"stop": 3},
        fallbacks={},
        asked_from_tokens=512,
        local_tokens_per_s=about(178.0),
        keeps_awake=False,
    ),
    requests=Requests((), {"completed": 3}),
    recent=Recent((FINISHED,)),
    nodes=Nodes((READY,)),
    cache=Cache(
        live=None,
        resident=Resident(3, 40, 1_200_000_000, 8_000_000_000, 2_000_000_000, 0, 0, 0),
        durable=Durable(
            9, 300, 3_400_000_000, 9_000_000_000, 100_000_000_000, 20_000_000_000, 0, 0, {}
        ),
        counters={"cache_hits": 5},
        hit_rate=exactly(5 / 6),
        seconds_saved=about(124.0),
        seconds_saved_today=about(123.6),
    ),
    door=Door(None, 0, False, 1, 1024, 1, 16, {}),
)


def with_engine(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return msgspec.structs.replace(
        snapshot, engine=msgspec.structs.replace(snapshot.engine, **changes)
    )


def with_node(snapshot: Snapshot, **changes: Any) -> Snapshot:
    return msgspec.structs.replace(
        snapshot, nodes=Nodes((msgspec.structs.replace(READY, **changes),))
    )


def with_requests(snapshot: Snapshot, doing: str, *requests: InHand) -> Snapshot:
    asked = msgspec.structs.replace(snapshot.requests, in_hand=requests)
    return with_engine(msgspec.structs.replace(snapshot, requests=asked), doing=doing)
