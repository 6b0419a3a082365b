"""What Prometheus is told, and whether the dashboard asks for anything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import load
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.link import LinkState, Rates
from mac_decoder.keeper import Keeper
from mac_decoder.store.limits import Limits
from mac_decoder.store.store import Store
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.serving import MODEL, serving
from tests.mac_decoder.engine.links import CopyingLink

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "baton.json"
NAME = re.compile(r"\bbaton_[a-z_]+")
SERIES = re.compile(r"(baton_[a-z_]+)\{([^}]*)\}")
GROUPED = re.compile(r"\b(?:by|ignoring) \(([^)]*)\)")
SHOWN = re.compile(r"\{\{(\w+)\}\}")

Samples = list[tuple[str, dict[str, str], float]]


def samples(text: str) -> Samples:
    """Every sample: name, labels, value."""
    return [
        (sample.name, dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


@pytest.fixture(scope="module")
def told(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Samples]:
    """The samples of a decoder that has all there can be: tiers, a producer, refusals."""
    known = read_checkpoint(checkpoint("llama"))
    key, directory = bytes(32), tmp_path_factory.mktemp("cache")
    keeper = Keeper(known.identity, known.layout, key)
    keeper.attach(Store.open(directory, key, *Limits(1 << 28, 0), listener=keeper.heard))
    link = CopyingLink(
        known.layout,
        name="wss://box:1",
        state=LinkState("down", "producer_unreachable", "nobody answers"),
        rates=Rates(2000.0, 1e9, 0.5),
    )
    settings = EngineSettings(prefill_step=64, ram_bytes=1 << 28)
    with (
        serving(lambda: Engine(lambda: load(known), settings, [link], keeper)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        for _ in range(2):
            prompt = [number % 50 + 3 for number in range(400)]
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4}
            assert http.post("/v1/completions", json=body).status_code == 200
            keeper.drain(10)
        assert http.get("/status", headers={"origin": "http://evil.example"}).status_code == 403
        assert http.post("/v1/completions", json={}).status_code == 400
        answer = http.get("/metrics")
        assert answer.status_code == 200
        yield samples(answer.text)
    keeper.close()


def expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def labels_of(told: Samples, name: str) -> set[str]:
    return {label for sample, labels, _ in told if sample == name for label in labels}


def test_the_dashboard_is_one(told: Samples) -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [panel["gridPos"] for panel in panels]
    for place in places:
        assert place["x"] + place["w"] <= 24
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels lie on each other"
    assert all(panel["fieldConfig"]["defaults"]["noValue"] == "–" for panel in panels)


def test_every_metric_of_the_dashboard_is_exported(told: Samples) -> None:
    exported = {name for name, _, _ in told}
    asked = {name for text in expressions() for name in NAME.findall(text)}
    assert len(asked) > 20
    assert asked - exported == set()


def test_every_label_of_the_dashboard_is_there(told: Samples) -> None:
    """A misspelt label selects nothing, which looks like a quiet decoder."""
    for text in expressions():
        used = {
            (name, label.partition("=")[0].rstrip("!"))
            for name, inside in SERIES.findall(text)
            for label in inside.split(",")
        }
        names = {name for name, _ in used}
        for group in GROUPED.findall(text):
            used |= {(name, label.strip()) for name in names for label in group.split(",")}
        for name, label in used - {(name, "instance") for name in names}:
            assert label in labels_of(told, name), text


def test_every_legend_names_labels_that_are_left() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            shown = set(SHOWN.findall(target["legendFormat"])) - {"instance"}
            grouped = {
                label.strip()
                for group in re.findall(r"\bby \(([^)]*)\)", target["expr"])
                for label in group.split(",")
            }
            if grouped:
                assert shown <= grouped, target


def value(told: Samples, name: str, **labels: str) -> float:
    found = [number for sample, has, number in told if sample == name and has == labels]
    assert len(found) == 1, (name, labels, found)
    return found[0]


def test_a_producer_is_in_exactly_one_state(told: Samples) -> None:
    states = {
        labels["state"]: number for name, labels, number in told if name == "baton_producer_state"
    }
    assert states.pop("down") == 1
    assert set(states.values()) == {0}
    assert value(told, "baton_producer_tokens_per_second", producer="wss://box:1") == 2000
    assert value(told, "baton_link_round_trip_seconds", producer="wss://box:1") == 0.0005


def test_the_cap_and_the_footprint_are_two_figures(told: Samples) -> None:
    on_disk = value(told, "baton_cache_bytes", tier="durable", of="on_disk")
    assert 0 < on_disk <= value(told, "baton_cache_bytes", tier="durable", of="limit")
    assert value(told, "baton_cache_bytes", tier="durable", of="referenced") > 0
    assert value(told, "baton_cache_held", tier="durable") > 0


def test_what_was_not_measured_has_no_sample(http: httpx.Client) -> None:
    """This server has no producer, no tiers, and has saved nothing."""
    told = samples(http.get("/metrics").text)
    names: dict[str, Any] = {name: labels for name, labels, _ in told}
    for absent in (
        "baton_producer_state",
        "baton_producer_tokens_per_second",
        "baton_link_round_trip_seconds",
        "baton_saved_seconds",
    ):
        assert absent not in names
    assert not [1 for _, labels, _ in told if labels.get("tier") in ("resident", "durable")]


def test_no_sample_comes_twice(told: Samples) -> None:
    """Prometheus refuses the whole page then."""
    series = [(name, tuple(sorted(labels.items()))) for name, labels, _ in told]
    assert len(set(series)) == len(series)
