"""The snapshot beside a real engine: an answer's own figures, all tiers, a producer that dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import load
from mac_decoder.engine.request import Stage
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.trust import trust_of_key
from mac_decoder.keeper import Keeper
from mac_decoder.status.journal import STAGES
from mac_decoder.store.events import Deleting, Invalid
from mac_decoder.store.limits import Limits
from mac_decoder.store.store import Store
from protocol.checkpoint import read_checkpoint
from tests.e2e.running import until
from tests.mac_decoder.api.following import following
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.serving import MODEL, Server, serving
from tests.mac_decoder.engine.drive import loaded_copy
from tests.mac_decoder.engine.links import CopyingLink
from tests.mac_decoder.handoff.producer import IDENTITY, KEY, LAYOUT, TestProducer

PROMPT = [number % 50 + 3 for number in range(400)]


class Kept:
    """A server with tiers and a producer's link, as :class:`CopyingLink` plays it."""

    def __init__(self, server: Server, path: Path, keeper: Keeper, link: CopyingLink) -> None:
        self.path, self.keeper, self.link = path, keeper, link
        self.http = httpx.Client(base_url=server.url, timeout=60)

    def ask(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
        answer = self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert self.keeper.drain(10)
        return answer.json()

    def snapshot(self) -> dict[str, Any]:
        return self.http.get("/status").json()["snapshot"]

    def ended(self, name: str) -> dict[str, Any]:
        """What is told of a request that has ended; it has just been answered."""
        found: list[dict[str, Any]] = []

        def there() -> bool:
            recent = self.snapshot()["recent"]["finished"]
            found[:] = [one for one in recent if one["id"] == name]
            return bool(found)

        until(there, 2)
        return found[0]


@pytest.fixture
def kept(checkpoint: Callable[..., Path], tmp_path: Path) -> Iterator[Kept]:
    path = checkpoint("llama")
    known = read_checkpoint(path)
    key = bytes(32)
    keeper = Keeper(known.identity, known.layout, key)
    keeper.attach(Store.open(tmp_path, key, *Limits(1 << 28, 0), listener=keeper.heard))
    link = CopyingLink(known.layout)
    settings = EngineSettings(prefill_step=64, ram_bytes=1 << 28, remote_threshold=1000)
    with serving(lambda: Engine(lambda: load(known), settings, [link], keeper)) as server:
        made = Kept(server, path, keeper, link)
        yield made
        made.http.close()
    keeper.close()


def same_figures(baton: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """Every number of an answer's ``baton`` object is the snapshot's; nothing is left out."""
    told = {name: baton[name] for name in baton if name != "ignored"}
    phases = {name: figure["value"] for name, figure in served["phases"].items()}
    shown = dict(served) | {"phases": phases, "ttft_ms": served["ttft_ms"]["value"]}
    shown["restore_ms"] = served["restore_ms"]["value"] or 0.0
    assert shown == told
    figures = [*served["phases"].values(), served["ttft_ms"]]
    assert {figure["basis"] for figure in figures} == {"measured"}
    restored = "measured" if baton["restore_bytes"] else "unavailable"
    assert served["restore_ms"]["basis"] == restored


def test_the_figures_are_the_answers_own_whatever_the_source(kept: Kept) -> None:
    long = [number % 40 + 3 for number in range(1200)]
    kept.link.prepare(loaded_copy(kept.path), long)
    answers = [
        kept.ask(PROMPT),
        kept.ask(PROMPT, max_tokens=2),
        kept.ask([*PROMPT[:300], 9, 9]),
        kept.ask(long),
        kept.ask(long, baton={"reuse": False, "lane": "local"}),
        kept.ask(PROMPT[:20], n=2),
    ]
    sources = [answer["baton"]["source"] for answer in answers]
    assert {"local", "resident", "remote"} <= set(sources), sources
    for answer in answers:
        ended = kept.ended(answer["id"])
        same_figures(answer["baton"], ended["served"])
        assert ended["prompt_tokens"] == answer["usage"]["prompt_tokens"]
        assert ended["generated_tokens"] == answer["usage"]["completion_tokens"]
        assert ended["finish_reasons"] == [one["finish_reason"] for one in answer["choices"]]
        assert ended["total_ms"]["value"] >= ended["served"]["ttft_ms"]["value"]
    recent = kept.snapshot()["recent"]["finished"]
    assert [one["id"] for one in recent] == [one["id"] for one in reversed(answers)]


def test_the_tiers_are_told_with_the_caps_figure_and_the_footprint_apart(kept: Kept) -> None:
    kept.ask(PROMPT)
    kept.ask([*PROMPT, 5, 6, 7])
    found = kept.snapshot()["cache"]
    durable, resident = found["durable"], found["resident"]
    assert 0 < durable["on_disk"] <= durable["cap_bytes"]
    assert durable["referenced"] > 0
    assert durable["cuts"] >= 1
    assert 0 < resident["used_bytes"] <= resident["budget_bytes"]
    assert found["joules_saved"] == {"value": None, "basis": "unavailable"}


def test_what_the_disk_does_is_told_with_its_reason(kept: Kept) -> None:
    """As the store tells its listener, before it acts."""
    kept.keeper.heard(Deleting("blocks/aa/secret", 1000, "room"))
    kept.keeper.heard(Deleting("cuts/bb/secret", 24, "room", b"cut"))
    kept.keeper.heard(Invalid("blocks/cc/secret", "digest_differs", (b"one", b"two")))
    latest, before = kept.snapshot()["cache"]["events"]
    assert abs(latest.pop("at") - time.time()) < 60
    assert abs(before.pop("at") - time.time()) < 60
    invalid = {"kind": "invalid", "reason": "digest_differs", "files": 1, "cuts": 2, "bytes": 0}
    assert latest == invalid
    deleted = {"kind": "deleted", "reason": "room", "files": 2, "cuts": 1, "bytes": 1024}
    assert before == deleted


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """All numbers in a snapshot, by where they are."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from numbers(one, f"{path}.{name}")
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, value


COUNTERS = (
    *(".engine.generated_tokens", ".engine.ended", ".engine.fallbacks"),
    *(".requests.outcomes", ".cache.counters", ".cache.durable.counts"),
    *(".cache.live.evicted", ".cache.resident.evicted", ".door.refused"),
)


def test_no_counter_goes_back(kept: Kept) -> None:
    """Whatever runs at once, and whoever asks: also where one is asked while another is made."""
    taken: list[dict[str, Any]] = []
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            taken.append(kept.snapshot())

    looking = threading.Thread(target=look)
    looking.start()
    for number in range(6):
        kept.ask(PROMPT[number * 10 :])
        kept.http.post("/v1/completions", json={})
    over.set()
    looking.join(20)
    assert len(taken) > 5
    last: dict[str, float] = {}
    for snapshot in taken:
        found = {name: value for name, value in numbers(snapshot) if name.startswith(COUNTERS)}
        assert all(found.get(name, -1) >= value for name, value in last.items()), (last, found)
        last = found
    assert last[".requests.outcomes.completed"] >= 5
    revisions = [snapshot["revision"] for snapshot in taken]
    assert revisions == sorted(revisions)


def test_every_stage_of_the_engine_has_a_name_for_people() -> None:
    assert list(STAGES) == [stage.value for stage in Stage]


def test_a_long_prefill_shows_and_does_not_hold_up_the_status(
    checkpoint: Callable[..., Path],
) -> None:
    known = read_checkpoint(checkpoint("llama"))
    settings = EngineSettings(prefill_step=64)
    prompt = (PROMPT * 10)[:3000]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "stream": True}
    with (
        serving(lambda: Engine(lambda: load(known), settings)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
        following(server.url) as follower,
        http.stream("POST", "/v1/completions", json=body),
    ):
        follower.until(lambda now: now.engine.doing == "prefilling_here", 5.0)
        follower.until(lambda now: now.requests.in_hand[0].tokens_per_s.value, 5.0)
        one = follower.snapshot.requests.in_hand[0]
        assert one.stage == "prefilling_here"
        assert one.total == len(prompt) - 1
        took: list[float] = []
        for _ in range(30):
            began = time.perf_counter()
            told = http.get("/status").json()["snapshot"]
            took.append(time.perf_counter() - began)
            assert told["engine"]["doing"] == "prefilling_here"
    assert sorted(took)[len(took) // 2] < 0.05, took


def test_a_producer_that_dies_shows_within_two_seconds(recital: Recital, tmp_path: Path) -> None:
    """Over a real link: what notices it is the link's own thread, and nothing asks it to."""
    known = read_checkpoint(recital.path)
    producer = TestProducer()
    target = Producer(producer.url, trust_of_key(KEY), IDENTITY, LAYOUT)
    with (
        ProducerLink(target, Generations(tmp_path / "numbers.json", KEY, 0)) as link,
        serving(lambda: Engine(lambda: load(known), EngineSettings(), [link])) as server,
        following(server.url) as follower,
    ):
        follower.until(lambda now: now.nodes.producers[0].state == "ready", 5.0)
        assert follower.snapshot.nodes.producers[0].tile == 16
        producer.stop()
        took = follower.until(lambda now: now.nodes.producers[0].state == "down", 2.0)
        assert took < 2.0
        node = follower.snapshot.nodes.producers[0]
        assert node.reason
        assert node.wire_bytes_per_s.basis == "unavailable"
