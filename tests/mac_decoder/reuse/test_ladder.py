"""The ladder's decisions, pinned one by one, and what holds for all of them."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mac_decoder.engine.rates import Speeds
from mac_decoder.reuse.cut import can_supply, replayable
from mac_decoder.reuse.facts import (
    NOTHING,
    Action,
    ContinueLive,
    DeltaHandoff,
    Facts,
    FullHandoff,
    Holding,
    Lane,
    Live,
    Local,
    Offer,
    Publication,
    Remote,
    Restore,
    offers,
    without,
)
from mac_decoder.reuse.ladder import SHORTFALLS, choose, plan, resume_position, served_depth
from mac_decoder.reuse.radix import Radix
from protocol.blocks import BLOCK
from protocol.layout import FullLayer, Layout, SlidingLayer
from protocol.messages import History, Recipe
from tests.mac_decoder.reuse.made import DECODE, FULL, LAYOUTS, PREFILL, RECURRENT, SLIDING, SPACE
from tests.ordinary import examples

TILE_512 = Recipe("producer", "cuda", "bfloat16", 512)
NONE = Facts(tokens=1001, layout=FULL)


def prefilled(position: int, recipe: Recipe = PREFILL) -> tuple[History, ...]:
    return (History(0, position, recipe),)


def offer(
    position: int,
    shared: int | None = None,
    *,
    key: str = "cut",
    publication: Publication = "published",
    recipe: Recipe = PREFILL,
) -> Offer:
    share = position if shared is None else shared
    return Offer(key, position, share, prefilled(position, recipe), publication)


def holding(*held: Offer, parts_at: int | None = None) -> Holding:
    return Holding(max((o.shared for o in held), default=0), parts_at, held)


# -- the table: one line per decision. No producer, so what is left is computed here.

RESUMED: list[tuple[str, Facts, Action, tuple[str, ...]]] = [
    ("cold", NONE, Local(), ("no_shared_prefix", "no_producer")),
    (
        "one token: nothing to prefill",
        replace(NONE, tokens=1, resident=holding(offer(1))),
        Local(),
        ("nothing_to_prefill",),
    ),
    (
        "a cut at N-1 serves the whole prompt",
        replace(NONE, resident=holding(offer(1000))),
        Restore("resident", "cut", 1000, 1000),
        ("cut_at_end",),
    ),
    (
        "the boundary token is never restored: full layers resume a block before it",
        replace(NONE, tokens=1024, resident=holding(offer(1024))),
        Restore("resident", "cut", 1024, 768),
        ("between_blocks", "no_producer"),
    ),
    (
        "a turn that goes on resumes at its cut",
        replace(NONE, resident=holding(offer(700))),
        Restore("resident", "cut", 700, 700),
        ("no_producer",),
    ),
    (
        "of several cuts the deepest",
        replace(NONE, resident=holding(offer(300, key="a"), offer(900, key="b"))),
        Restore("resident", "b", 900, 900),
        ("no_producer",),
    ),
    (
        "a branch of full layers resumes at the block before",
        replace(NONE, resident=holding(offer(900, 800), parts_at=800)),
        Restore("resident", "cut", 900, 768),
        ("prompts_part", "between_blocks", "no_producer"),
    ),
    (
        "a branch inside of a longer tile resumes where the tile began",
        replace(NONE, resident=holding(offer(1900, 800, recipe=TILE_512), parts_at=800)),
        Restore("resident", "cut", 1900, 512),
        ("prompts_part", "between_blocks", "no_producer"),
    ),
    (
        "a cut beats a block below it",
        replace(
            NONE, resident=holding(offer(900, 800, key="a"), offer(790, key="b"), parts_at=800)
        ),
        Restore("resident", "b", 790, 790),
        ("prompts_part", "between_blocks", "no_producer"),
    ),
    (
        "a branch that shares less than a block reuses nothing",
        replace(NONE, resident=holding(offer(900, 255), parts_at=255)),
        Local(),
        ("prompts_part", "between_blocks", "no_producer"),
    ),
    (
        "an unwrapped window resumes anywhere, on the tile grid",
        replace(NONE, layout=SLIDING, resident=holding(offer(300, 200), parts_at=200)),
        Restore("resident", "cut", 300, 192),
        ("prompts_part", "between_blocks", "no_producer"),
    ),
    (
        "a wrapped window is never trimmed",
        replace(NONE, layout=SLIDING, resident=holding(offer(301, 200), parts_at=200)),
        Local(),
        ("prompts_part", "window_wrapped", "no_producer"),
    ),
    (
        "a wrapped window resumes at its own cut",
        replace(NONE, layout=SLIDING, resident=holding(offer(900))),
        Restore("resident", "cut", 900, 900),
        ("no_producer",),
    ),
    (
        "a wrapped window one token too deep",
        replace(NONE, layout=SLIDING, resident=holding(offer(1001))),
        Local(),
        ("window_wrapped", "no_producer"),
    ),
    (
        "a recurrent state resumes at its own cut",
        replace(NONE, layout=RECURRENT, resident=holding(offer(512))),
        Restore("resident", "cut", 512, 512),
        ("no_producer",),
    ),
    (
        "a recurrent state is not rewound",
        replace(NONE, layout=RECURRENT, resident=holding(offer(900, 800), parts_at=800)),
        Local(),
        ("prompts_part", "state_not_captured", "no_producer"),
    ),
    (
        "a live sequence goes on",
        replace(NONE, live=(Live("chat", 800, 800),), resident=holding(offer(800))),
        ContinueLive("chat", 800),
        ("no_producer",),
    ),
    (
        "a live sequence at N-1",
        replace(NONE, live=(Live("chat", 1000, 1000),)),
        ContinueLive("chat", 1000),
        ("cut_at_end",),
    ),
    (
        "a branch does not take a live sequence away from its own turn",
        replace(NONE, live=(Live("chat", 800, 790),), resident=holding(offer(512))),
        Restore("resident", "cut", 512, 512),
        ("prompts_part", "live_branches", "no_producer"),
    ),
    (
        "a live sequence past N-1 is not cut back",
        replace(NONE, live=(Live("chat", 1001, 1001),)),
        Local(),
        ("live_branches", "no_producer"),
    ),
    (
        "a deeper resident cut beats a live sequence",
        replace(NONE, live=(Live("chat", 800, 800),), resident=holding(offer(900))),
        Restore("resident", "cut", 900, 900),
        ("no_producer",),
    ),
    (
        "equally deep: resident before durable",
        replace(NONE, resident=holding(offer(900)), durable=holding(offer(900, key="file"))),
        Restore("resident", "cut", 900, 900),
        ("no_producer",),
    ),
    (
        "durable where it is deeper",
        replace(NONE, resident=holding(offer(512)), durable=holding(offer(900, key="file"))),
        Restore("durable", "file", 900, 900),
        ("no_producer",),
    ),
    (
        "durable after a restart",
        replace(NONE, durable=holding(offer(900, key="file"))),
        Restore("durable", "file", 900, 900),
        ("no_producer",),
    ),
    (
        "where one tier's cut ends the prompt goes on from it: nothing parts",
        replace(
            NONE,
            resident=holding(offer(900, 600), parts_at=600),
            durable=holding(offer(600, key="file")),
        ),
        Restore("durable", "file", 600, 600),
        ("no_producer",),
    ),
]


@pytest.mark.parametrize(("what", "facts", "action", "reasons"), RESUMED, ids=lambda v: str(v)[:40])
def test_what_is_resumed(what: str, facts: Facts, action: Action, reasons: tuple[str, ...]) -> None:
    found = plan(facts)
    assert (found.action, found.reasons) == (action, reasons), what


# -- invariant 4

DEEP = 900
"""The resident cut's position."""

CLAUSES: list[tuple[str, Publication, Holding | None, int]] = [
    ("no durable tier: no cap", "pending", None, 900),
    ("no durable tier: no cap, published before it was turned off", "published", None, 900),
    ("no durable tier: refused and invalid have no meaning", "refused", None, 900),
    ("published: as deep as the authenticated cut", "published", holding(offer(900)), 900),
    ("published, but the authenticated cut is shallower", "published", holding(offer(512)), 512),
    ("published, but nothing is held any more", "published", NOTHING, 0),
    ("published: a deeper cut of the chain vouches for it", "published", holding(offer(950)), 900),
    (
        "published: a branch vouches up to where it parts",
        "published",
        holding(offer(980, 600)),
        600,
    ),
    ("superseded: what extends it vouches for it", "superseded", holding(offer(950, 900)), 900),
    ("superseded, and the extension is gone too", "superseded", holding(offer(512)), 512),
    ("pending serves by itself", "pending", NOTHING, 900),
    ("pending serves past the authenticated cut", "pending", holding(offer(512)), 900),
    ("out of space is not a cap", "out_of_space", NOTHING, 900),
    ("out of space is not a cap beside a shallower cut", "out_of_space", holding(offer(512)), 900),
    ("refused may not serve", "refused", NOTHING, 0),
    ("refused may not serve, however deep others are", "refused", holding(offer(900)), 0),
    ("invalid may not serve", "invalid", NOTHING, 0),
    ("invalid may not serve, however deep others are", "invalid", holding(offer(950)), 0),
]


@pytest.mark.parametrize(("what", "publication", "durable", "depth"), CLAUSES, ids=lambda v: str(v))
def test_how_deep_the_resident_tier_may_serve(
    what: str, publication: Publication, durable: Holding | None, depth: int
) -> None:
    assert served_depth(offer(DEEP, publication=publication), durable) == depth, what


def test_every_publication_state_has_its_clause() -> None:
    assert {clause[1] for clause in CLAUSES} == set(get_args(Publication))


CAPPED: list[tuple[str, Publication, Holding | None, Action, tuple[str, ...]]] = [
    (
        "the cut itself is too deep, a block below the authenticated cut is not",
        "published",
        holding(offer(700, key="file")),
        Restore("durable", "file", 700, 700),
        ("capped_by_durable", "no_producer"),
    ),
    (
        "up to the cap the resident tier serves",
        "published",
        holding(offer(768, key="file")),
        Restore("resident", "cut", 900, 768),
        ("capped_by_durable", "no_producer"),
    ),
    (
        "nothing vouches",
        "published",
        NOTHING,
        Local(),
        ("capped_by_durable", "no_producer"),
    ),
    ("refused", "refused", NOTHING, Local(), ("capped_by_durable", "no_producer")),
    (
        "invalid: one rung down",
        "invalid",
        holding(offer(512, key="file")),
        Restore("durable", "file", 512, 512),
        ("capped_by_durable", "no_producer"),
    ),
    ("pending", "pending", NOTHING, Restore("resident", "cut", 900, 900), ("no_producer",)),
    (
        "out of space is shown",
        "out_of_space",
        NOTHING,
        Restore("resident", "cut", 900, 900),
        ("durable_out_of_space", "no_producer"),
    ),
    (
        "without a durable tier there is nothing to show",
        "out_of_space",
        None,
        Restore("resident", "cut", 900, 900),
        ("no_producer",),
    ),
]


@pytest.mark.parametrize(
    ("what", "publication", "durable", "action", "reasons"), CAPPED, ids=lambda v: str(v)[:40]
)
def test_the_cap_in_a_plan(
    what: str,
    publication: Publication,
    durable: Holding | None,
    action: Action,
    reasons: tuple[str, ...],
) -> None:
    held = holding(offer(DEEP, publication=publication))
    found = plan(replace(NONE, resident=held, durable=durable))
    assert (found.action, found.reasons) == (action, reasons), what


def test_a_cap_is_for_the_resident_tier_alone() -> None:
    """A live sequence is the engine's own; what it computed itself needs no voucher."""
    facts = replace(NONE, live=(Live("chat", 900, 900),), durable=NOTHING)
    assert plan(facts).action == ContinueLive("chat", 900)


def test_recurrent_cuts_are_capped_whole() -> None:
    held = holding(offer(512, key="a"), offer(900, key="b"))
    found = plan(
        replace(NONE, layout=RECURRENT, resident=held, durable=holding(offer(700, key="f")))
    )
    assert found.action == Restore("durable", "f", 700, 700)
    found = plan(
        replace(NONE, layout=RECURRENT, resident=held, durable=holding(offer(950, 600, key="f")))
    )
    assert found.action == Restore("resident", "a", 512, 512)
    assert "capped_by_durable" in found.reasons


# -- who does the rest

FAST = Speeds(local=100.0, producer=10_000.0, link=1e9, overhead_s=0.1)
SLOW_LINK = Speeds(local=100.0, producer=10_000.0, link=1e2, overhead_s=0.1)
PRODUCER = Remote(speeds=FAST)
DELTAS = replace(PRODUCER, deltas=True)
BEGUN = replace(
    NONE, resident=holding(offer(900)), remote=Remote(speeds=replace(FAST, producer=500.0))
)
LONG = replace(NONE, tokens=8193, resident=holding(offer(1024)), remote=PRODUCER)
TALK = replace(LONG, resident=NOTHING, live=(Live("chat", 1024, 1024),))

LANES: list[tuple[str, Facts, Action, str]] = [
    ("cold", replace(NONE, remote=PRODUCER), FullHandoff(), "above_threshold"),
    ("cold, local lane", replace(NONE, remote=PRODUCER, lane="local"), Local(), "lane_local"),
    (
        "cold, remote lane",
        replace(NONE, remote=PRODUCER, lane="remote"),
        FullHandoff(),
        "lane_remote",
    ),
    (
        "cold, no producer, remote lane",
        replace(NONE, lane="remote"),
        Local(),
        "no_producer",
    ),
    (
        "producer down",
        replace(NONE, remote=Remote(ready=False, reason="connection_lost")),
        Local(),
        "connection_lost",
    ),
    (
        "a short rest is computed here",
        BEGUN,
        Restore("resident", "cut", 900, 900),
        "reuse_favoured",
    ),
    (
        "a rest below the threshold",
        replace(BEGUN, remote=replace(PRODUCER, fixed_threshold=101)),
        Restore("resident", "cut", 900, 900),
        "below_threshold",
    ),
    ("a long rest: handing over all of it is faster", LONG, FullHandoff(), "delta_not_available"),
    (
        "a long rest, local lane",
        replace(LONG, lane="local"),
        Restore("resident", "cut", 1024, 1024),
        "lane_local",
    ),
    (
        "a long rest, nothing measured: else nothing ever would be",
        replace(LONG, remote=Remote()),
        FullHandoff(),
        "delta_not_available",
    ),
    (
        "a rest that is the smaller part, nothing measured: what is held is kept",
        replace(LONG, remote=Remote(), resident=holding(offer(4608))),
        Restore("resident", "cut", 4608, 4608),
        "reuse_favoured",
    ),
    (
        "a long rest, the link too slow",
        replace(LONG, remote=Remote(speeds=SLOW_LINK)),
        Restore("resident", "cut", 1024, 1024),
        "rates_favour_local",
    ),
    (
        "a long rest as a delta",
        replace(LONG, remote=DELTAS),
        DeltaHandoff("resident", "cut", 1024, 1024),
        "above_threshold",
    ),
    (
        "a delta before anything was measured",
        replace(LONG, remote=Remote(deltas=True)),
        DeltaHandoff("resident", "cut", 1024, 1024),
        "above_threshold",
    ),
    ("a live sequence, and a handoff is faster", TALK, FullHandoff(), "delta_not_available"),
    (
        "a live sequence, nothing measured",
        replace(TALK, remote=Remote(deltas=True)),
        ContinueLive("chat", 1024),
        "reuse_favoured",
    ),
    (
        "remote lane: the producer prefills what is missing",
        replace(BEGUN, lane="remote", remote=DELTAS),
        DeltaHandoff("resident", "cut", 900, 512),
        "lane_remote",
    ),
    (
        "remote lane without deltas",
        replace(BEGUN, lane="remote"),
        FullHandoff(),
        "delta_not_available",
    ),
    (
        "remote lane, nothing missing",
        replace(NONE, lane="remote", remote=PRODUCER, resident=holding(offer(1000))),
        Restore("resident", "cut", 1000, 1000),
        "cut_at_end",
    ),
    (
        "a busy producer",
        replace(NONE, remote=replace(PRODUCER, backlog_tokens=200_000)),
        Local(),
        "producer_backlog",
    ),
]


@pytest.mark.parametrize(("what", "facts", "action", "reason"), LANES, ids=lambda v: str(v)[:40])
def test_who_does_the_rest(what: str, facts: Facts, action: Action, reason: str) -> None:
    found = plan(facts)
    assert found.action == action, what
    assert found.reasons[-1] == reason, what
    assert found.fallback == (facts.remote is not None and not facts.remote.ready)


speeds = st.builds(
    Speeds,
    local=st.sampled_from((0.0, 10.0, 1000.0)),
    producer=st.sampled_from((0.0, 500.0, 50_000.0)),
    link=st.sampled_from((0.0, 1e4, 1e9)),
    overhead_s=st.sampled_from((0.0, 0.05, 5.0)),
)

MEASURED = Remote(speeds=Speeds(18.0, 600.0, 1e9, 0.2))
"""The producer wins from 4 tokens."""

CRAWLING = Speeds(18.0, 600.0, 1.0, 0.2)
"""A link on which no length of prompt is worth a handoff."""

SLOW = Speeds(18.0, 600.0, 1e9, 1000.0)
"""As after a handoff that waited for something long: it wins from thousands of tokens."""


def away(reason: str) -> dict:
    return {"ready": False, "reason": reason}


@pytest.mark.parametrize(
    ("lane", "uncached", "change", "expected"),
    [
        ("local", 900, {}, ("local", "lane_local")),
        ("auto", 900, None, ("local", "no_producer")),
        ("remote", 900, None, ("refused", "no_producer")),
        ("auto", 900, away("producer_down"), ("fallback", "producer_down")),
        ("remote", 900, away("weights_differ"), ("refused", "weights_differ")),
        ("auto", 900, away("producer_connecting"), ("fallback", "producer_connecting")),
        ("remote", 1, {}, ("remote", "lane_remote")),
        ("auto", 900, {}, ("remote", "above_threshold")),
        ("auto", 3, {}, ("local", "below_threshold")),
        ("auto", 4, {}, ("remote", "above_threshold")),
        ("auto", 255, {"speeds": Speeds()}, ("local", "below_threshold")),
        ("auto", 256, {"speeds": Speeds()}, ("remote", "above_threshold")),
        ("auto", 99, {"fixed_threshold": 100}, ("local", "below_threshold")),
        ("auto", 100, {"fixed_threshold": 100}, ("remote", "above_threshold")),
        ("auto", 900, {"speeds": CRAWLING}, ("local", "rates_favour_local")),
        ("auto", 256, {"speeds": CRAWLING, "probe": True}, ("remote", "producer_probe")),
        ("auto", 255, {"speeds": CRAWLING, "probe": True}, ("local", "rates_favour_local")),
        (
            "auto",
            900,
            {"speeds": CRAWLING, "probe": True, "backlog_tokens": 1},
            ("local", "rates_favour_local"),
        ),
        ("auto", 900, {"speeds": SLOW, "probe": True}, ("remote", "producer_probe")),
        ("auto", 900, {"speeds": SLOW}, ("local", "below_threshold")),
        ("auto", 900, {"probe": True}, ("remote", "above_threshold")),
        ("auto", 900, {"fixed_threshold": 901, "probe": True}, ("local", "below_threshold")),
        ("auto", 20, {"backlog_tokens": 100_000}, ("local", "producer_backlog")),
        (
            "auto",
            20,
            {"backlog_tokens": 100_000, "fixed_threshold": 10},
            ("remote", "above_threshold"),
        ),
        ("remote", 20, {"backlog_tokens": 100_000}, ("remote", "lane_remote")),
    ],
)
def test_who_is_asked_where_nothing_is_held(
    lane: Lane, uncached: int, change: dict | None, expected: tuple[str, str]
) -> None:
    remote = None if change is None else replace(MEASURED, **change)
    verdict, reason = expected
    found = plan(Facts(uncached + 1, FULL, lane, remote=remote))
    assert found.action.tier == ("remote" if verdict == "remote" else "local")
    assert found.reasons == ("no_shared_prefix", reason)
    assert (found.fallback, found.refused) == (verdict == "fallback", verdict == "refused")


def test_where_nobody_was_asked_nothing_is_missing() -> None:
    assert plan(replace(NONE, reuse=False)).reasons == ("no_producer",)


@pytest.mark.parametrize(
    ("holds", "asks"),
    [(0, False), (1536, False), (2048, True), (6656, True), (1 << 30, True)],
)
def test_what_the_producer_holds_it_does_not_compute(holds: int, asks: bool) -> None:
    """5,000 tokens of 8,000 are missing: 50 s here, 20 s and 40 s for all of them there. So the
    producer is faster where it holds 2,000, be that below the delta's start at 2,560 or above.
    """
    slow = Speeds(local=100.0, producer=200.0, link=1e9, overhead_s=20.0)
    remote = replace(DELTAS, speeds=slow, holds=holds)
    facts = Facts(8001, FULL, resident=holding(offer(3000)), remote=remote)
    found = plan(facts)
    expected = DeltaHandoff("resident", "cut", 3000, 2560)
    assert (found.action == expected, found.delta) == (asks, expected)
    assert found.reasons[-1] == ("above_threshold" if asks else "rates_favour_local")


# -- deltas

WINDOWED = Layout((FullLayer(0, 1, 1, 1, "float32"), SlidingLayer(1, 1, 1, 1, "float32", 1000)))


@pytest.mark.parametrize(
    ("what", "layout", "end", "held", "expected"),
    [
        ("the grid below what is shared", FULL, 4000, offer(1500, 1400), 1024),
        ("exactly on the grid", FULL, 4000, offer(1024), 1024),
        ("less than a tile", FULL, 4000, offer(511), None),
        ("never at the end itself", FULL, 1024, offer(1024), 512),
        ("states travel whole: no cut is needed there", RECURRENT, 4000, offer(1500, 1400), 1024),
        ("the window is sent whole", WINDOWED, 4000, offer(3500, 2900), 2560),
        ("the window reaches into what is held", WINDOWED, 4000, offer(3900, 3600), 3584),
        ("a deeper cut lost the rows: down to where the window is sent", WINDOWED, 4000,
         offer(4500, 3600), 2560),
        ("a longer tile below", FULL, 4000,
         offer(3000, 2900, recipe=Recipe("producer", "cuda", "bfloat16", 2048)), 2048),
    ],
)  # fmt: skip
def test_where_a_delta_arms(
    what: str, layout: Layout, end: int, held: Offer, expected: int | None
) -> None:
    facts = Facts(end + 1, layout, resident=holding(held), remote=Remote(deltas=True))
    delta = plan(facts).delta
    assert (delta.position if delta else None) == expected, what


def test_no_delta_of_what_may_not_be_served() -> None:
    held = holding(offer(1500, publication="invalid"))
    facts = Facts(4001, FULL, resident=held, durable=NOTHING, remote=DELTAS)
    assert plan(facts).delta is None
    assert plan(replace(facts, durable=None)).delta is not None


def test_no_delta_without_a_producer() -> None:
    assert plan(replace(NONE, resident=holding(offer(900)))).delta is None


# -- for all facts

recipes = st.sampled_from((PREFILL, DECODE, TILE_512))


@st.composite
def histories(draw: st.DrawFn, position: int) -> tuple[History, ...]:
    ends = sorted({*draw(st.lists(st.integers(1, position), max_size=3)), position})
    firsts = [0, *ends[:-1]]
    return tuple(
        History(first, last, draw(recipes)) for first, last in zip(firsts, ends, strict=True)
    )


@st.composite
def some_offers(draw: st.DrawFn, key: int) -> Offer:
    position = draw(st.integers(1, 1500))
    shared = draw(st.one_of(st.just(position), st.integers(1, position)))
    publication = draw(st.sampled_from(get_args(Publication)))
    return Offer(key, position, shared, draw(histories(position)), publication)


@st.composite
def holdings(draw: st.DrawFn) -> Holding:
    return holding(*(draw(some_offers(key)) for key in range(draw(st.integers(0, 3)))))


@examples(150)
@given(st.sampled_from(LAYOUTS), some_offers(0), st.integers(0, 1500))
def test_the_resume_position_is_the_deepest_that_the_rule_allows(
    layout: Layout, held: Offer, limit: int
) -> None:
    windows = any(isinstance(layer, SlidingLayer) for layer in layout.layers)

    def allowed(position: int) -> bool:
        if position > held.shared or not can_supply(layout, held.position, position):
            return False
        if position == held.position:
            return True
        on_step = windows or position % BLOCK == 0
        return on_step and replayable(held.history, position)

    expected = max((p for p in range(1, limit + 1) if allowed(p)), default=0)
    assert resume_position(layout, held, limit) == expected


@examples(200)
@given(
    tokens=st.integers(1, 1500),
    layout=st.sampled_from((*LAYOUTS, WINDOWED)),
    lane=st.sampled_from(("auto", "local", "remote")),
    resident=holdings(),
    durable=st.one_of(st.none(), holdings()),
    remote=st.one_of(
        st.none(), st.builds(Remote, deltas=st.booleans(), speeds=speeds, ready=st.booleans())
    ),
)
def test_no_plan_serves_what_it_may_not(
    tokens: int,
    layout: Layout,
    lane: str,
    resident: Holding,
    durable: Holding | None,
    remote: Remote | None,
) -> None:
    facts = Facts(tokens, layout, lane, (), resident, durable, remote)
    found = plan(facts)
    action, end = found.action, tokens - 1
    assert 0 <= action.position <= end
    assert plan(facts) == found
    if lane == "local":
        assert action.tier != "remote"
    if isinstance(action, Restore):
        held = resident if action.tier == "resident" else durable
        assert held is not None
        source = held.offers[int(str(action.key))]
        assert action.held == source.position
        assert action.position <= source.shared
        assert can_supply(layout, source.position, action.position)
        if action.tier == "resident":
            assert action.position <= served_depth(source, durable)
    for delta in (found.delta, action):
        if isinstance(delta, DeltaHandoff):
            assert remote is not None
            assert delta.position % remote.tile == 0
            assert 0 < delta.position < end
            for layer in layout.layers:
                if isinstance(layer, SlidingLayer):
                    needed = range(max(0, end - layer.window), delta.position)
                    rows = range(max(0, delta.held - layer.window), delta.held)
                    assert all(row in rows for row in needed)
    for reason in found.reasons:
        assert reason.replace("_", "").isalnum()


@settings(max_examples=60, deadline=None)
@given(resident=holdings(), durable=holdings(), layout=st.sampled_from(LAYOUTS))
def test_after_every_failed_restore_there_is_a_rung_below(
    resident: Holding, durable: Holding, layout: Layout
) -> None:
    facts = Facts(1201, layout, "local", (), resident, durable)
    deepest = facts.end
    for _ in range(len(resident.offers) + len(durable.offers)):
        action = plan(facts).action
        assert action.position <= deepest
        if not isinstance(action, Restore):
            break
        deepest = action.position
        held = facts.resident if action.tier == "resident" else facts.durable
        assert held is not None
        facts = replace(facts, **{action.tier: without(held, action.key)})
    assert plan(facts).action == Local() or isinstance(plan(facts).action, Restore)


def test_what_is_left_without_a_cut_is_the_rest() -> None:
    near, far = offer(256, key="near"), offer(900, 700, key="far")
    held = Holding(700, 700, (near, far))
    assert without(held, "far") == Holding(256, 700, (near,))
    assert without(without(held, "far"), "near") == Holding(0, 700, ())
    assert without(held, "another") == held


def test_a_prompt_has_tokens() -> None:
    with pytest.raises(ValueError):
        plan(replace(NONE, tokens=0))


def test_a_match_becomes_offers() -> None:
    radix: Radix[str] = Radix()
    radix.insert(SPACE, "turn", range(300))
    radix.insert(SPACE, "branch", [*range(700), 9, 9])
    radix.insert(SPACE, "deep", range(2000))
    match = radix.match(SPACE, range(1001))
    held = offers(match, lambda key: (prefilled(5000), "pending" if key == "turn" else "published"))
    shares = {o.key: (o.position, o.shared, o.publication) for o in held.offers}
    assert shares == {
        "turn": (300, 300, "pending"),
        "branch": (702, 512, "published"),
        "deep": (2000, 1001, "published"),
    }
    assert (held.shared, held.parts_at) == (1001, None)
    assert plan(replace(NONE, resident=held)).action == Restore("resident", "deep", 2000, 768)


def test_a_miss_becomes_no_offers() -> None:
    radix: Radix[str] = Radix()
    radix.insert(SPACE, "other", range(300))
    held = offers(radix.match(SPACE, [7] * 300), lambda key: (prefilled(300), "published"))
    assert held == NOTHING


def test_every_shortfall_is_explained() -> None:
    given_in_tables = {r for line in (*RESUMED, *CAPPED) for r in line[-1]}
    given_in_tables |= {line[-1] for line in LANES}
    # Whether everything is sent in place of a delta is the producer's decision.
    assert set(SHORTFALLS) - {"full_for_delta"} <= given_in_tables


# -- several producers

QUICK = replace(FAST, producer=20_000.0)
UNKNOWN = Speeds(local=100.0)


@pytest.mark.parametrize(
    ("remotes", "chosen"),
    [
        ((Remote(speeds=FAST), Remote(speeds=QUICK)), 1),
        ((Remote(speeds=FAST), Remote(speeds=QUICK, ready=False)), 0),
        ((Remote(speeds=FAST), Remote(speeds=QUICK, backlog_tokens=100_000)), 0),
        ((Remote(speeds=FAST, holds=4096), Remote(speeds=QUICK)), 0),
        ((Remote(speeds=FAST), Remote(speeds=FAST)), 0),
        ((Remote(speeds=FAST), Remote(speeds=UNKNOWN)), 1),
        ((Remote(speeds=FAST), Remote(speeds=UNKNOWN, backlog_tokens=9)), 0),
        ((Remote(speeds=FAST), Remote(speeds=replace(FAST, producer=50.0), probe=True)), 1),
        ((Remote(speeds=UNKNOWN, backlog_tokens=9), Remote(speeds=UNKNOWN)), 1),
        ((Remote(ready=False), Remote(ready=False)), 0),
    ],
)
def test_the_producer_that_is_expected_to_be_done_first(
    remotes: tuple[Remote, ...], chosen: int
) -> None:
    known = [replace(NONE, tokens=4609, remote=remote) for remote in remotes]
    number, plans = choose(known)
    assert number == chosen
    assert plans == [plan(each) for each in known]


def test_where_none_would_be_asked_a_reason_of_its_own_counts_before_one_that_is_away() -> None:
    short = [replace(NONE, tokens=20, remote=Remote(speeds=FAST, ready=ready)) for ready in (0, 1)]
    number, plans = choose(short)
    assert number == 1
    assert not plans[number].fallback
    insists = [replace(each, lane="remote") for each in short]
    number, plans = choose(insists)
    assert number == 1
    assert plans[number].action == FullHandoff()
