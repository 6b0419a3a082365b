"""The decision table of docs/ladder.md, row by row: the page is the test."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, cast, get_args

import pytest

from mac_decoder.engine.rates import Speeds
from mac_decoder.reuse import ladder
from mac_decoder.reuse.facts import (
    NOTHING,
    ContinueLive,
    DeltaHandoff,
    Facts,
    FullHandoff,
    Holding,
    Lane,
    Live,
    Local,
    Offer,
    Plan,
    Publication,
    Remote,
    Restore,
    without,
)
from mac_decoder.reuse.ladder import plan
from protocol.layout import FullLayer, LayerLayout, Layout, RecurrentLayer, SlidingLayer
from protocol.messages import History, Recipe
from tests.mac_decoder.reuse.made import DECODE, PREFILL, STATES

PAGE: Final = Path(__file__).parents[3] / "docs" / "ladder.md"
COLUMNS: Final = ("case", "N", "layers", "held", "producer", "lane", "plan", "reasons")
RATES: Final = {
    "fast": Speeds(local=100, producer=2000, link=1e9, overhead_s=0.05),
    "slow": Speeds(local=2000, producer=100, link=1e9, overhead_s=0.05),
}
TILE: Final = 512


class Row(NamedTuple):
    """One line of a table, as it is written."""

    case: str
    tokens: str
    layers: str
    held: str
    producer: str
    lane: str
    plan: str
    reasons: str


def rows() -> Iterator[Row]:
    """All lines of the tables that have the decision table's columns."""
    inside = False
    for line in PAGE.read_text().splitlines():
        cells = tuple(cell.strip() for cell in line.strip("|").split("|"))
        if not line.startswith("|"):
            inside = False
        elif cells == COLUMNS:
            inside = True
        elif inside and not set(line) <= set("|-"):
            yield Row(*cells)


ROWS: Final = list(rows())


def number(text: str) -> int:
    return int(text.replace(",", ""))


def after(word: str, text: str) -> int | None:
    """The number behind a word."""
    found = re.search(rf"\b{word} ([\d,]*\d)", text)
    return number(found.group(1)) if found else None


def layout_of(text: str) -> Layout:
    kind, _, window = text.partition(" ")
    other: dict[str, LayerLayout] = {
        "full": FullLayer(1, 2, 8, 8, "bfloat16"),
        "sliding": SlidingLayer(1, 2, 8, 8, "bfloat16", number(window or "1")),
        "recurrent": RecurrentLayer(1, STATES),
    }
    return Layout((FullLayer(0, 2, 8, 8, "bfloat16"), other[kind]))


def history_of(text: str, position: int) -> tuple[History, ...]:
    tile, decoded = after("tile", text), after("decoded from", text)
    made = Recipe("producer", "cuda", "bfloat16", tile) if tile else PREFILL
    if decoded is None:
        return (History(0, position, made),)
    return (History(0, decoded, made), History(decoded, position, DECODE))


def facts_of(row: Row) -> Facts:
    live: list[Live] = []
    offers: dict[str, list[Offer]] = {"resident": [], "durable": []}
    gone: list[tuple[str, str]] = []
    for text in () if row.held == "nothing" else row.held.split("; "):
        tier, position = text.split()[0], number(text.split()[1].rstrip(","))
        shared = after("shares", text)
        share = position if shared is None else shared
        if tier == "live":
            live.append(Live(text, position, share))
            continue
        publication: Publication = "published"
        if "invalid" in text:
            publication = "invalid"
        elif "out of space" in text:
            publication = "out_of_space"
        history = history_of(text, position)
        offers[tier].append(Offer(text, position, share, history, publication))
        if "let go" in text:
            gone.append((tier, text))
    tokens = number(row.tokens)
    held = {tier: holding(found, tokens) for tier, found in offers.items()}
    for tier, key in gone:
        held[tier] = without(held[tier], key)
    # Only where the row speaks of a disk is there one.
    on_disk = any(word in row.held for word in ("durable", "invalid", "out of space"))
    durable = held["durable"] if on_disk else None
    lane = cast(Lane, row.lane)
    assert lane in get_args(Lane)
    return Facts(
        tokens,
        layout_of(row.layers),
        lane,
        tuple(live),
        held["resident"],
        durable,
        remote_of(row.producer),
    )


def holding(offers: list[Offer], tokens: int) -> Holding:
    if not offers:
        return NOTHING
    deepest = max(offers, key=lambda offer: offer.shared)
    parts = deepest.shared < min(deepest.position, tokens)
    return Holding(deepest.shared, deepest.shared if parts else None, tuple(offers))


def remote_of(text: str) -> Remote | None:
    if text == "none":
        return None
    rates = [speeds for name, speeds in RATES.items() if name in text]
    return Remote(
        ready="down" not in text,
        tile=TILE,
        deltas=True,
        holds=after("holds", text) or 0,
        backlog_tokens=after("backlog", text) or 0,
        fixed_threshold=after("threshold", text),
        probe="probe" in text,
        speeds=rates[0] if rates else Speeds(),
    )


def written(found: Plan) -> str:
    """A plan as the page writes it."""
    match found.action:
        case DeltaHandoff(source=source, position=position):
            text = f"delta at {position:,} ({source})"
        case FullHandoff():
            text = "full handoff"
        case ContinueLive(position=position) | Local(position=position):
            text = f"{found.action.tier} at {position:,}"
        case Restore(tier=tier, position=position):
            text = f"{tier} at {position:,}"
    text += ", fallback" if found.fallback else ""
    return text + (", refused" if found.refused else "")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_a_row_is_what_the_ladder_does(row: Row) -> None:
    found = plan(facts_of(row))
    reasons = ", ".join(f"`{reason}`" for reason in found.reasons)
    assert (written(found), reasons) == (row.plan, row.reasons)


def test_the_page_has_every_lane_and_every_way() -> None:
    assert {row.lane for row in ROWS} == set(get_args(Lane))
    ways = {row.plan.split()[0] for row in ROWS}
    assert ways == {"live", "resident", "durable", "delta", "full", "local"}
    assert {row.layers.split()[0] for row in ROWS} == {"full", "sliding", "recurrent"}
    assert {row.producer.split()[0] for row in ROWS} == {"none", "down", "ready"}


def test_the_page_has_every_reason() -> None:
    told = {reason for row in ROWS for reason in re.findall(r"`(\w+)`", row.reasons)}
    words = set(re.findall(r'"([a-z]+(?:_[a-z]+)+)"', inspect.getsource(ladder)))
    # Whether everything is sent in place of a delta is the producer's decision.
    assert words - set(get_args(Publication)) - {"full_for_delta"} <= told
    assert set(ladder.SHORTFALLS) <= words


def test_the_cases_have_names_of_their_own() -> None:
    assert len({row.case for row in ROWS}) == len(ROWS)
