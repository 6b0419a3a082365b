"""The ladder: what to do for a prompt, given what every tier holds of it. Pure.

Order: live, resident, durable, remote, local. :func:`plan` takes facts and returns a plan
with its reasons; it reads no clock, touches no memory and asks nobody. What a held cut may
serve has two limits, each a function of its own: :func:`resume_position` (the layout and the
history allow it) and :func:`served_depth` (invariant 4: the durable tier vouches for it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf, lcm
from typing import Final, NamedTuple

from mac_decoder.engine.rates import FIRST_GUESS, local_seconds, remote_seconds, threshold
from mac_decoder.reuse.cut import can_supply, replayable, supplies_delta
from mac_decoder.reuse.facts import (
    Base,
    ContinueLive,
    DeltaHandoff,
    Facts,
    FetchedTier,
    FullHandoff,
    Holding,
    Live,
    Local,
    Offer,
    Plan,
    Remote,
    Restore,
)
from protocol.blocks import BLOCK
from protocol.layout import Layout, RecurrentLayer, SlidingLayer, payload_bytes
from protocol.messages import History

HANDOFFS: Final = (DeltaHandoff, FullHandoff)
"""The actions that ask a producer."""

SHORTFALLS: Final[dict[str, str]] = {
    "no_shared_prefix": "No tier holds the beginning of this prompt.",
    "prompts_part": "The prompt and what is held have different tokens from a position on.",
    "between_blocks": "Held rows past the last whole block or tile are computed again.",
    "window_wrapped": "A sliding window has lost the rows that this position needs.",
    "state_not_captured": "A recurrent state is held at other positions than this one.",
    "live_branches": "A live sequence shares this prefix, but serves only its own continuation.",
    "capped_by_durable": "The resident tier holds more than the durable tier vouches for.",
    "full_for_delta": "The producer sent everything where only the rest was asked for.",
    "delta_not_available": "The whole prompt is handed over although a part of it is held.",
}
"""Why a plan reuses less than is held or less than the whole prompt, by reason code."""


def resume_position(layout: Layout, offer: Offer, limit: int) -> int:
    """The deepest position at or below ``limit`` that ``offer`` can give a cache for; 0: none.

    The cut itself, where it is a prefix of the prompt. Below it, full layers alone serve every
    block boundary, and a window that has not wrapped every position, where the history can be
    replayed to (on its tile grid and at its segment ends). A recurrent state serves none.
    """
    reach = min(offer.shared, limit)
    if offer.position <= reach:
        return offer.position
    if not can_supply(layout, offer.position, 1):
        return 0
    windows = any(isinstance(layer, SlidingLayer) for layer in layout.layers)
    return _replayable_at_or_below(offer.history, reach, 1 if windows else BLOCK)


def served_depth(offer: Offer, durable: Holding | None) -> int:
    """Invariant 4: how deep the resident tier may serve out of ``offer``.

    Without a durable tier as deep as it holds. With one, as deep as the deepest authenticated
    cut of the same chain, be it this one or what superseded it; the whole cut while its own
    publication is pending, and where space was all that was lacking, or it was deleted to make
    some; nothing of it once that ended as refused or invalid.
    """
    if durable is None:
        return offer.position
    match offer.publication:
        case "pending" | "out_of_space":
            return offer.position
        case "published" | "superseded":
            return min(offer.position, durable.shared)
        case "refused" | "invalid":
            return 0


def plan(facts: Facts) -> Plan:
    """The plan for a prompt: the deepest position that may be served, then who does the rest.

    Among equally deep ones the order of the tiers decides. Raises ``ValueError`` for a prompt
    without tokens.
    """
    if facts.tokens < 1:
        raise ValueError("a prompt has at least one token")
    shared, parts_at = _shared(facts)
    if facts.end == 0:
        return Plan(Local(), ("nothing_to_prefill",), shared, parts_at)
    base, reasons = _base(facts, shared, parts_at)
    delta = _delta(facts)
    if base.position == facts.end:
        return Plan(base, (*reasons, "cut_at_end"), shared, parts_at, delta)
    armed = delta if facts.remote is not None and facts.remote.deltas else None
    lane = _lane(facts, base, armed)
    why = lane.reasons
    if not lane.goes:
        return Plan(base, (*reasons, *why), shared, parts_at, delta, lane.fallback, lane.refused)
    if armed is not None:
        return Plan(armed, (*reasons, *why), shared, parts_at, delta)
    if base.position or delta is not None:
        why = (*why, "delta_not_available")
    return Plan(FullHandoff(), (*reasons, *why), shared, parts_at, delta)


def choose(choices: Sequence[Facts]) -> tuple[int, list[Plan]]:
    """The best of several producers for one prompt: its place in ``choices``, and each one's plan.

    ``choices`` differ in ``remote`` alone. Where producers would be asked, it is the one that is
    expected to be done first, behind its own backlog. One that rates refused for long is doubted
    first, one that was never measured is tried where nothing waits there. Where none would be
    asked, it is the plan of the first that says so for a reason of its own.
    """
    plans = [plan(facts) for facts in choices]
    asked = [n for n, found in enumerate(plans) if isinstance(found.action, HANDOFFS)]
    if asked:
        best = min(asked, key=lambda n: _promise(choices[n], plans[n]))
        return best, plans
    content = (n for n, found in enumerate(plans) if not (found.fallback or found.refused))
    return next(content, 0), plans


def _promise(facts: Facts, found: Plan) -> tuple[bool, float, int]:
    """What to compare producers by: less is better."""
    remote = facts.remote
    assert remote is not None
    seconds = _handoff_seconds(facts, remote, found.action.position)
    if seconds is None:
        seconds = inf if remote.backlog_tokens else 0.0
    return "producer_probe" not in found.reasons, seconds, remote.backlog_tokens


class _Lane(NamedTuple):
    """Whether to ask the producer, and why; see ``Plan`` for the rest."""

    goes: bool
    reasons: tuple[str, ...]
    fallback: bool = False
    refused: bool = False


def _shared(facts: Facts) -> tuple[int, int | None]:
    """The longest shared prefix, and where it ends in different tokens."""
    known = [(live.shared, _parts(live, facts.tokens)) for live in facts.live]
    known += [(held.shared, held.parts_at) for held in (facts.resident, facts.durable) if held]
    shared = max((length for length, _ in known), default=0)
    ends = [parts for length, parts in known if length == shared]
    # Where one tier has a cut that ends there, the prompt goes on from it: nothing parts.
    parted = shared > 0 and all(parts is not None for parts in ends)
    return shared, shared if parted else None


def _parts(live: Live, tokens: int) -> int | None:
    return live.shared if live.shared < min(live.position, tokens) else None


def _base(facts: Facts, shared: int, parts_at: int | None) -> tuple[Base, tuple[str, ...]]:
    """The deepest position that may be served without a handoff, and what fell short."""
    end, layout = facts.end, facts.layout
    best: Base = Local()
    for live in facts.live:
        # Only a true continuation: a branch would take the sequence away from its own turn.
        if live.shared == live.position <= end and live.position > best.position:
            best = ContinueLive(live.key, live.position)
    uncapped = best.position
    lacked_space = False
    for offer in facts.resident.offers:
        uncapped = max(uncapped, resume_position(layout, offer, end))
        limit = min(end, served_depth(offer, facts.durable))
        position = resume_position(layout, offer, limit)
        if position > best.position:
            best = Restore("resident", offer.key, offer.position, position)
            lacked_space = offer.publication == "out_of_space"
    for offer in facts.durable.offers if facts.durable else ():
        position = resume_position(layout, offer, end)
        if position > best.position:
            best = Restore("durable", offer.key, offer.position, position)
            lacked_space = False
    reasons: list[str] = []
    if shared == 0 and facts.reuse:
        reasons.append("no_shared_prefix")
    if parts_at is not None and parts_at < end:
        reasons.append("prompts_part")
    if best.position < uncapped:
        reasons.append("capped_by_durable")
    if max(best.position, uncapped) < min(shared, end):
        reasons.append(_rounding(facts, shared))
    if lacked_space and facts.durable is not None:
        reasons.append("durable_out_of_space")
    return best, tuple(reasons)


def _rounding(facts: Facts, shared: int) -> str:
    """Why the deepest shared position is not one to resume at."""
    deepest = [offer for _, offer in _fetched(facts) if offer.shared == shared]
    if not deepest:
        return "live_branches"
    if any(can_supply(facts.layout, offer.position, 1) for offer in deepest):
        return "between_blocks"
    kinds = {type(layer) for layer in facts.layout.layers}
    return "state_not_captured" if RecurrentLayer in kinds else "window_wrapped"


def _delta(facts: Facts) -> DeltaHandoff | None:
    """The deepest delta that a fetched cut can be the lower part of, on the producer's grid."""
    if facts.remote is None:
        return None
    best: DeltaHandoff | None = None
    for tier, offer in _fetched(facts):
        depth = offer.position if tier == "durable" else served_depth(offer, facts.durable)
        reach = min(offer.shared, depth, facts.end - 1)
        for limit in (reach, min(reach, _below_windows(facts))):
            position = _replayable_at_or_below(offer.history, limit, facts.remote.tile)
            if not position or not supplies_delta(
                facts.layout, offer.position, position, facts.end
            ):
                continue
            if best is None or position > best.position:
                best = DeltaHandoff(tier, offer.key, offer.position, position)
            break
    return best


def _fetched(facts: Facts) -> Iterator[tuple[FetchedTier, Offer]]:
    for offer in facts.resident.offers:
        yield "resident", offer
    if facts.durable is not None:
        for offer in facts.durable.offers:
            yield "durable", offer


def _below_windows(facts: Facts) -> int:
    """The deepest start of a delta for which every window is sent whole."""
    layers = facts.layout.layers
    windows = [layer.window for layer in layers if isinstance(layer, SlidingLayer)]
    return max(facts.end - max(windows, default=0), 0)


def _replayable_at_or_below(history: Sequence[History], limit: int, step: int) -> int:
    """The deepest multiple of ``step`` up to ``limit`` to which a history can be replayed."""
    for span in reversed(history):
        if span.first >= limit:
            continue
        reach = min(limit, span.last)
        if reach % step == 0 and replayable((span,), reach):
            return reach
        grid = lcm(step, span.recipe.tile)
        if reach // grid * grid > span.first:
            return reach // grid * grid
    return 0


def _lane(facts: Facts, base: Base, delta: DeltaHandoff | None) -> _Lane:
    """Choose the lane for what no cache holds.

    ``local`` never asks the producer; ``remote`` asks it whatever the rates say; ``auto`` asks
    it where that is expected to be faster. A producer that cannot be asked leaves an ``auto``
    prompt to this machine and refuses a ``remote`` one.
    """
    remote, insists = facts.remote, facts.lane == "remote"
    if facts.lane == "local":
        return _Lane(False, ("lane_local",))
    if remote is None:
        return _Lane(False, ("no_producer",), refused=insists)
    if not remote.ready:
        return _Lane(False, (remote.reason,), fallback=not insists, refused=insists)
    if insists:
        return _Lane(True, ("lane_remote",))
    uncached = facts.end - base.position
    if remote.fixed_threshold is not None and uncached < remote.fixed_threshold:
        return _Lane(False, ("below_threshold",))
    here = local_seconds(uncached, remote.speeds)
    there = _handoff_seconds(facts, remote, delta.position if delta else 0)
    faster = here is not None and there is not None and there < here
    slower = here is not None and there is not None and here < there
    if remote.fixed_threshold is None:
        limit = threshold(payload_bytes(facts.layout, 0, facts.end) / facts.end, remote.speeds)
        if limit is None or uncached < limit:
            if remote.probe and uncached >= FIRST_GUESS and not remote.backlog_tokens:
                return _Lane(True, ("producer_probe",))
            return _Lane(False, ("rates_favour_local" if limit is None else "below_threshold",))
    keeps = base.position > 0 and (delta is None or isinstance(base, ContinueLive))
    if here is None or there is None:
        # Not even a first handoff would be measured, did the beginning that all prompts share
        # keep them here. What is asked for again then is at most as much as is missing.
        faster = not isinstance(base, ContinueLive) and 2 * uncached >= facts.end
    if keeps and not faster:
        return _Lane(False, ("reuse_favoured",))
    if remote.fixed_threshold is None and slower:
        return _Lane(
            False, ("producer_backlog" if remote.backlog_tokens else "rates_favour_local",)
        )
    return _Lane(True, ("above_threshold",))


def _handoff_seconds(facts: Facts, remote: Remote, start: int) -> float | None:
    """Expected time of a handoff over ``[start, end)`` behind the producer's backlog.

    What the producer holds, below ``start`` or beyond, it sends without computing it; what it
    does not hold below, it computes without sending it. ``None`` where nothing was measured.
    """
    speeds, end = remote.speeds, facts.end
    computed = end - min(remote.holds, end)
    alone = remote_seconds(computed, payload_bytes(facts.layout, start, end), speeds)
    if alone is None:
        return None
    each = max(1 / speeds.producer, payload_bytes(facts.layout, 0, end) / end / speeds.link)
    return alone + remote.backlog_tokens * each
