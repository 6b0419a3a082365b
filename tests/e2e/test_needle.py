"""A sentence in the middle of a real document is found, whichever tier the document comes from."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.benchmarks.smollm2 import checkpoints
from tests.e2e.running import until
from tests.mac_decoder.test_node import Decoder

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

NEEDLE = "The code of the harbour safe is 7316. "
HAY = (
    "The ferry leaves the harbour at nine and crosses the bay in forty minutes. ",
    "In winter the harbour master keeps two boats on land and paints their hulls. ",
    "Letters, bread and salt are carried without charge to the island's only shop. ",
    "A bell rings three times before the gangway is pulled in, whatever the weather. ",
)
LINES = 24


def document(needle: str) -> str:
    """Some 450 tokens, with ``needle`` in the middle."""
    lines = [HAY[number % len(HAY)] for number in range(LINES)]
    return "".join((*lines[: LINES // 2], needle, *lines[LINES // 2 :]))


def test_a_needle_is_found_from_every_tier(serve: Callable[..., Decoder]) -> None:
    """Beside a control that reuses nothing; where the document lacks it, it is not found."""
    decoder = serve("--model", str(checkpoints() / "fp32"), "--port", "0").await_ready()
    decoder.client.timeout = 600.0

    def ask(question: str, text: str = document(NEEDLE), **more: Any) -> dict[str, Any]:
        messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
        answer = decoder.chat(messages=messages, max_tokens=16, temperature=0, **more)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def said(answer: dict[str, Any]) -> str:
        return answer["choices"][0]["message"]["content"]

    question = "What is the code of the harbour safe?"
    cold = ask("When does the ferry leave?")
    assert cold["baton"]["source"] == "local"
    resident = ask(question)
    assert resident["baton"]["source"] == "resident"
    assert resident["baton"]["reused_tokens"] >= 256
    control = ask(question, baton={"reuse": False})
    assert control["baton"]["source"] == "local"
    assert "7316" in said(control)
    assert said(resident) == said(control)
    assert "7316" not in said(ask(question, document("")))

    until(lambda: decoder.get("/status").json()["cache"]["durable"]["publishing"] == 0)
    os.kill(decoder.child().pid, signal.SIGKILL)
    until(lambda: decoder.ready() != 200)
    until(lambda: decoder.ready() == 200, 120.0)
    durable = ask(question)
    assert durable["baton"]["source"] == "durable"
    assert durable["baton"]["reused_tokens"] == control["usage"]["prompt_tokens"] - 1
    assert said(durable) == said(control)
    other = ask("Tell me the code of the harbour safe.")
    assert other["baton"]["source"] in ("resident", "durable")
    assert other["baton"]["reused_tokens"] >= 256
    assert "7316" in said(other)
    assert decoder.stop() == 0
