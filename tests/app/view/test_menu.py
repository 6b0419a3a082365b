"""The menu and the icon, for every way in which a decoder can be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given

from app.view.icon import Icon, icon
from app.view.menu import ELSEWHERE, Around, Item, menu
from app.view.overview import about
from app.view.standing import Standing
from protocol.status.snapshot import Snapshot
from tests.app.view.snapshots import IDLE, IN_HAND, NOW, with_engine, with_node, with_requests
from tests.protocol.status.made import few, snapshots

URL = "http://127.0.0.1:8000"
HERE = Standing("connected", URL)


def texts(items: tuple[Item, ...]) -> list[str]:
    return [item.text for item in items]


def by_action(items: tuple[Item, ...]) -> dict[str, Item]:
    return {item.action: item for item in items if item.action}


def test_an_idle_decoder() -> None:
    assert texts(menu(IDLE, HERE, Around(ours=True, login_item=False), NOW)) == [
        "Idle",
        "a-model on port 8000",
        "",
        "gb10: ready, 2,100 tokens/s, 1.2 GB/s",
        "Add a node…",
        "",
        "Memory 1.2 GB of 8.0 GB, disk 3.4 GB of 100.0 GB",
        "Hit rate 83 %",
        next(text for text in texts(menu(IDLE, HERE, Around(), NOW)) if text.startswith("Saved")),
        "",
        "Stop the decoder",
        "Restart the decoder",
        "Change the model…",
        "",
        "Copy base URL",
        "Copy client configuration",
        "",
        "Open dashboard",
        "Check-up…",
        "Launch at login",
        "Logs",
        "",
        "Quit Baton",
    ]


def test_many_requests_do_not_fill_the_screen() -> None:
    busy = with_requests(IDLE, "prefilling_there", *[IN_HAND] * 9)
    found = texts(menu(busy, HERE, Around(), NOW))
    assert found.count("Prefilling there, 45 % of 65,535 tokens") == 5
    assert "and 4 more" in found


def test_what_this_app_did_not_start_it_does_not_stop() -> None:
    actions = by_action(menu(IDLE, HERE, Around(ours=False), NOW))
    assert not actions["stop"].enabled
    assert not actions["restart"].enabled
    assert by_action(menu(IDLE, HERE, Around(ours=True), NOW))["stop"].enabled


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("weights_differ", True),
        ("tokenizer_differs", True),
        ("producer_without_model", True),
        ("engine_differs", False),
        ("producer_down", False),
    ],
)
def test_a_producer_with_another_model_says_how_it_gets_this_one(
    reason: str, *, told: bool
) -> None:
    found = menu(with_node(IDLE, state="refused", reason=reason, called="box"), HERE, Around(), NOW)
    assert ("It gets this model by: baton node send box" in texts(found)) is told


def test_why_a_decoder_cannot_be_stopped_here_is_said() -> None:
    assert ELSEWHERE in texts(menu(IDLE, HERE, Around(ours=False), NOW))
    assert ELSEWHERE not in texts(menu(IDLE, HERE, Around(ours=True), NOW))
    assert ELSEWHERE not in texts(menu(None, Standing("absent", URL), Around(), NOW))


def test_without_a_decoder_it_can_be_started_and_nothing_copied() -> None:
    actions = by_action(menu(None, Standing("absent", URL), Around(), NOW))
    assert actions["start"].enabled
    assert not actions["copy_url"].enabled
    assert not actions["dashboard"].enabled
    assert "stop" not in actions


def test_one_elsewhere_cannot_be_started() -> None:
    actions = by_action(menu(None, Standing("absent", URL), Around(startable=False), NOW))
    assert not actions["start"].enabled


def test_without_a_model_one_is_offered_first() -> None:
    actions = by_action(menu(None, Standing("absent", URL), Around(has_model=False), NOW))
    assert "choose_model" in actions
    assert "start" not in actions


@pytest.mark.parametrize(
    ("state", "around", "may"),
    [
        ("absent", Around(), True),
        ("absent", Around(startable=False), False),
        ("absent", Around(model_follows=False), False),
        ("connected", Around(ours=True), True),
        ("connected", Around(ours=False), False),
        ("connected", Around(ours=True, model_follows=False), False),
        ("latched", Around(ours=True), True),
    ],
)
def test_the_model_can_be_changed_where_it_would_be_served(
    state: Any, around: Around, *, may: bool
) -> None:
    told = IDLE if state == "connected" else None
    actions = by_action(menu(told, Standing(state, URL), around, NOW))
    assert actions["choose_model"].enabled is may


def test_a_stale_snapshot_is_not_shown_once_the_connection_is_gone() -> None:
    found = menu(IDLE, Standing("restarting", URL, "engine_fault"), Around(), NOW)
    assert not any("Hit rate" in text for text in texts(found))
    assert texts(found)[0] == "The decoder starts again after a fault (engine_fault)"


@few
@given(snapshots)
def test_any_decoder_has_a_menu_and_an_icon(snapshot: Snapshot) -> None:
    found = menu(snapshot, HERE, Around(), NOW)
    assert found[-1].action == "quit"
    assert all(item.action or not item.enabled or item.children for item in found if item.text)
    ring = icon(snapshot, HERE).ring
    assert ring is None or 0 <= ring <= 1


@pytest.mark.parametrize(
    ("doing", "picture"),
    [
        ("loading", "starting"),
        ("idle", "idle"),
        ("prefilling_here", "prefilling_here"),
        ("prefilling_there", "prefilling_there"),
        ("decoding", "decoding"),
        ("trouble", "trouble"),
    ],
)
def test_the_icon_says_what_the_engine_does(doing: Any, picture: str) -> None:
    assert icon(with_engine(IDLE, doing=doing), HERE).picture == picture


def test_the_ring_fills_with_the_prompt() -> None:
    half = msgspec.structs.replace(IN_HAND, processed=50, total=100)
    waits = msgspec.structs.replace(IN_HAND, stage="queued", processed=None, total=None)
    busy = with_requests(IDLE, "prefilling_there", half, waits)
    assert icon(busy, HERE) == Icon("prefilling_there", 0.5)
    assert icon(with_requests(IDLE, "decoding", half), HERE).ring is None


def test_a_lost_producer_asks_for_attention() -> None:
    assert icon(with_node(IDLE, state="down"), HERE) == Icon("idle", None, True)
    assert not icon(with_node(IDLE, state="connecting"), HERE).attention


@pytest.mark.parametrize(
    ("state", "picture"),
    [("absent", "off"), ("starting", "starting"), ("latched", "trouble"), ("refused", "trouble")],
)
def test_the_icon_without_a_snapshot(state: Any, picture: str) -> None:
    assert icon(None, Standing(state, URL)).picture == picture


@pytest.mark.parametrize("at", [1e17, 1e308, 253_402_300_800.0, -1e17])
def test_a_time_that_no_day_has_is_a_dash(at: float) -> None:
    decoder = msgspec.structs.replace(IDLE.decoder, started_at=at)
    told = msgspec.structs.replace(IDLE, decoder=decoder)
    assert any(text.startswith("Saved today") for text in texts(menu(told, HERE, Around(), NOW)))
    started = [fact for _, group in about(told) for fact in group if fact.label == "started"]
    assert [fact.text for fact in started] == ["–"]


def test_what_somebody_else_calls_things_is_one_short_line() -> None:
    odd = "\x1b[31m\u202e\n" + "m" * 100_000
    decoder = msgspec.structs.replace(IDLE.decoder, model=odd)
    told = with_node(msgspec.structs.replace(IDLE, decoder=decoder), called=odd)
    for text in texts(menu(told, HERE, Around(), NOW)):
        assert text.isprintable()
        assert len(text) < 200
