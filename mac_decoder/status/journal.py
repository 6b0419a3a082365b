"""The requests in hand, and the latest that have ended. Belongs to the event loop's thread.

Nothing is measured here: streams and reports have it from the engine, and what is told of an
answer is what the answer itself told.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from mac_decoder.engine.facade import Stream
from mac_decoder.status.told import merged, source
from protocol.status.figures import UNAVAILABLE, Figure, measured
from protocol.status.snapshot import (
    MOST_RECENT,
    Finished,
    InHand,
    Outcome,
    Recent,
    Requests,
    Served,
    Source,
    Stage,
)

STAGES: Final[Mapping[str, Stage]] = {
    "waiting": "queued",
    "lookup": "looking_up",
    "restore": "restoring",
    "remote": "prefilling_there",
    "prefill": "prefilling_here",
    "decode": "decoding",
}
"""The engine's stages by what people are told; in the order in which a request goes on."""

_ORDER: Final[Sequence[Stage]] = (*STAGES.values(), "answering")


@dataclass(frozen=True)
class Begun:
    """A request that the engine was given; ``streams`` has one for each of its choices."""

    id: str
    route: str
    streamed: bool
    began_at: float
    prompt_tokens: int
    streams: Sequence[Stream]


@dataclass(frozen=True)
class Ending:
    """How a request ended; ``told`` is its answer's ``baton`` object, ``None`` without one."""

    outcome: Outcome
    code: str | None
    ended_at: float
    total_ms: float
    prompt_tokens: int
    generated_tokens: int
    finish_reasons: tuple[str, ...]
    told: Mapping[str, Any] | None


class Journal:
    """Bounded by how many requests may be in hand, and by ``MOST_RECENT``."""

    def __init__(self) -> None:
        self._in_hand: dict[str, Begun] = {}
        self._finished: deque[Finished] = deque(maxlen=MOST_RECENT)
        self._recent = Recent(())
        self._outcomes: Counter[Outcome] = Counter()

    def began(self, request: Begun) -> None:
        """The engine has the request."""
        self._in_hand[request.id] = request

    def ended(self, name: str, route: str, streamed: bool, ending: Ending) -> Finished | None:
        """A request has ended, whether or not the engine had it.

        What was refused before it came to the engine is counted, and takes nobody's place:
        then ``None`` is returned.
        """
        self._outcomes[ending.outcome] += 1
        begun = self._in_hand.pop(name, None)
        if begun is None and ending.outcome != "failed":
            return None
        streams = () if begun is None else begun.streams
        decode_ms, speed = _decoding(streams)
        finished = Finished(
            id=name,
            route=route,
            streamed=streamed,
            outcome=ending.outcome,
            code=ending.code,
            ended_at=round(ending.ended_at, 3),
            prompt_tokens=ending.prompt_tokens,
            generated_tokens=ending.generated_tokens,
            finish_reasons=ending.finish_reasons,
            total_ms=measured(round(ending.total_ms, 3)),
            decode_ms=decode_ms,
            tokens_per_s=speed,
            served=None if ending.told is None else served(ending.told),
        )
        self._finished.appendleft(finished)
        self._recent = Recent(tuple(self._finished))
        return finished

    def recent(self) -> Recent:
        """The requests that have ended; the same object while none has ended since."""
        return self._recent

    def requests(self, stages: Mapping[int, str]) -> Requests:
        """What is in hand. ``stages`` are the engine's, by the keys of streams."""
        return Requests(
            tuple(_in_hand(one, stages) for one in self._in_hand.values()),
            {name: self._outcomes[name] for name in sorted(self._outcomes)},
        )


def served(told: Mapping[str, Any]) -> Served:
    """A ``baton`` object (``told.merged``) as a part of the snapshot."""
    return Served(
        source=told["source"],
        reused_tokens=told["reused_tokens"],
        prefilled_tokens=told["prefilled_tokens"],
        computed_tokens=told["computed_tokens"],
        transferred_bytes=told["transferred_bytes"],
        shared_tokens=told["shared_tokens"],
        parts_at=told["parts_at"],
        # Nothing was restored where nothing was read.
        restore_ms=measured(told["restore_ms"]) if told["restore_bytes"] else UNAVAILABLE,
        restore_bytes=told["restore_bytes"],
        staging_bytes=told["staging_bytes"],
        evicted_bytes=told["evicted_bytes"],
        ttft_ms=measured(told["ttft_ms"]),
        phases=_phases(told),
        fallback=told["fallback"],
        reasons=tuple(told["reasons"]),
    )


def _phases(told: Mapping[str, Any]) -> dict[str, Figure]:
    return {name: measured(milliseconds) for name, milliseconds in told["phases"].items()}


def _in_hand(request: Begun, stages: Mapping[int, str]) -> InHand:
    streams = request.streams
    standing: list[Stage] = [_stage(stream, stages) for stream in streams]
    stage = min(standing, key=_ORDER.index)
    told = [stream.progress for stream in streams if stream.progress is not None]
    prefilling = stage in ("prefilling_there", "prefilling_here")
    reports = [stream.report for stream in streams if stream.report is not None]
    return InHand(
        id=request.id,
        route=request.route,
        streamed=request.streamed,
        began_at=round(request.began_at, 3),
        stage=stage,
        prompt_tokens=request.prompt_tokens,
        processed=sum(progress.processed for progress in told) if told else None,
        total=sum(progress.total for progress in told) if told else None,
        generated_tokens=sum(stream.generated for stream in streams),
        source=cast(Source, source(reports)) if reports else None,
        phases=_phases(merged(reports)) if reports else {},
        tokens_per_s=_prefill_speed(streams) if prefilling else _decoding(streams)[1],
    )


def _stage(stream: Stream, stages: Mapping[int, str]) -> Stage:
    if stream.ended:
        return "answering"
    known = stages.get(stream.key)
    if known is not None:
        return STAGES[known]
    # The engine has not taken it yet, or is done with it while its last events are on the way.
    return "queued" if stream.report is None else "answering"


def _prefill_speed(streams: Sequence[Stream]) -> Figure:
    """Positions per second between the first and the last progress of what is prefilled now."""
    spans = [stream.prefilled for stream in streams if stream.prefilled is not None]
    positions = sum(amount for amount, _ in spans)
    seconds = max((seconds for _, seconds in spans), default=0.0)
    return measured(round(positions / seconds, 1)) if positions > 0 < seconds else UNAVAILABLE


def _decoding(streams: Sequence[Stream]) -> tuple[Figure, Figure]:
    """Milliseconds from the first to the last token, and tokens per second in that time."""
    told = [stream for stream in streams if stream.generated]
    if not told:
        return UNAVAILABLE, UNAVAILABLE
    first = min(stream.first_token_at for stream in told)
    seconds = max(stream.last_token_at for stream in told) - first
    following = sum(stream.generated for stream in told) - 1
    lasted = measured(round(seconds * 1e3, 3))
    if not following or seconds <= 0:
        return lasted, UNAVAILABLE
    return lasted, measured(round(following / seconds, 1))
