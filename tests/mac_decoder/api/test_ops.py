"""Health, readiness, status, metrics, and what the log says of a request."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import httpx
import pytest
from prometheus_client import generate_latest

from mac_decoder.api.door import Door
from mac_decoder.api.metrics import Metrics
from mac_decoder.engine.events import Report
from mac_decoder.status import sections
from tests.mac_decoder.api.answers import chat, refused, text
from tests.mac_decoder.api.recital import Recital


def test_alive_and_ready(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "alive"}
    assert http.get("/ready").json() == {"status": "ready", "model": "tiny"}


def test_the_status_is_the_engine_s(http: httpx.Client) -> None:
    status = http.get("/status").json()
    assert status["model"] == "tiny"
    assert status["engine"]["ready"] is True
    assert status["engine"]["open"] == 0


def test_the_models_page_names_the_one_model(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert http.get("/v1/models/tiny").json() == listed["data"][0]


def figure(metrics: str, name: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith(name)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_metrics_count_requests_tokens_and_reasons(http: httpx.Client, recital: Recital) -> None:
    names = {
        "completed": 'baton_requests_total{outcome="completed",route="completions",source="local"}',
        "refused": 'baton_requests_total{outcome="refused",route="chat",source="none"}',
        "prompt": 'baton_tokens_total{kind="prompt"}',
        "generated": 'baton_tokens_total{kind="generated"}',
        "code": 'baton_request_errors_total{reason="invalid_value"}',
        "reason": 'baton_lane_reasons_total{reason="nothing_to_prefill"}',
        "ttft": 'baton_ttft_seconds_count{source="local"}',
        "fallbacks": "baton_fallbacks_total{",
    }
    before = http.get("/metrics").text
    assert http.post("/v1/completions", json=text()).status_code == 200
    refused(http.post("/v1/chat/completions", json=chat(n=0)), 400, "invalid_value")
    after = http.get("/metrics").text
    grown = {key: figure(after, name) - figure(before, name) for key, name in names.items()}
    assert grown == {
        "completed": 1,
        "refused": 1,
        "prompt": 1,
        "generated": 4,
        "code": 1,
        "reason": 1,
        "ttft": 1,
        "fallbacks": 0,
    }
    assert figure(after, "baton_requests_in_hand") == 0


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The lines about requests. A stream's comes just after its last byte."""
    records = [record for record in caplog.records if record.name == "mac_decoder.api"]
    return [json.loads(record.getMessage()) for record in records]


def test_one_line_is_logged_for_a_request_and_none_of_its_text(
    http: httpx.Client, recital: Recital, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "quite a private matter"
    messages = [{"role": "user", "content": secret}]
    bias = recital.bias("greeting")
    with caplog.at_level(logging.DEBUG):
        http.post(
            "/v1/chat/completions", json=chat(messages=messages, logit_bias=bias, user=secret)
        )
        http.post("/v1/chat/completions", json=chat(messages=messages, stop=[secret] * 5))
        http.post("/v1/completions", json=text(secret, max_tokens=2, stream=True))
        limit = time.monotonic() + 5
        while len(lines := told(caplog)) < 3 and time.monotonic() < limit:
            time.sleep(0.01)
    assert [line["outcome"] for line in lines] == ["completed", "refused", "completed"]
    assert [line["stream"] for line in lines] == [False, False, True]
    assert lines[0]["finish_reasons"] == ["stop"]
    assert lines[0]["reasons"] == ["no_producer"]
    assert {"ttft_ms", "phases", "total_ms", "prompt_tokens", "completion_tokens"} <= set(lines[0])
    assert lines[1]["code"] == "invalid_value"
    everything = " ".join(record.getMessage() for record in caplog.records)
    assert secret not in everything
    assert "morning" not in everything


def test_fallbacks_are_counted_by_their_reason_and_choices_are_not() -> None:
    """``producer_busy`` is a producer's refusal; what was chosen by rates has other codes. They are
    those of ``/status``, also of requests that ended before they had a report.
    """
    engine = sections.engine({"fallbacks": {"producer_busy": 1}}, loaded=False)
    told = engine, sections.nodes({}), sections.cache({})
    metrics = Metrics(dict, Door(), lambda: told)
    phases = {"queue": 1.0}
    fallen = ("above_threshold", "producer_busy")
    metrics.count_report(Report("local", 0, 7, 0, 12.5, phases, fallen, fallback=True))
    metrics.count_report(Report("local", 0, 7, 0, 12.5, phases, ("producer_backlog",)))
    metrics.count_report(Report("local", 0, 7, 0, 12.5, phases, ("a_new_choice",)))
    text = generate_latest(metrics.registry).decode()
    assert figure(text, 'baton_fallbacks_total{reason="producer_busy"}') == 1
    assert figure(text, "baton_fallbacks_total{") == 1


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_a_probe_may_ask_for_the_head_alone(http: httpx.Client, path: str) -> None:
    response = http.head(path)
    assert (response.status_code, response.content) == (200, b"")
