"""Long loops over real processes: many requests, both lanes, and what memory does meanwhile."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from app.ask import Answer, Question, ask, served_model
from app.loopback import Loopback, loopback

pytestmark = pytest.mark.soak

REQUESTS = 300
WORDS = ("the", "ferry", "leaves", "at", "nine", "with", "letters", "bread", "salt", "rope")
GROWTH_BYTES = 200_000_000
"""Allocators keep some; a cache that leaks at every request would grow far beyond this."""


def question(number: int, name: str, lane: str) -> Question:
    draw = random.Random(number)
    text = " ".join(draw.choices(WORDS, k=draw.randrange(5, 200)))
    return Question(name, ({"role": "user", "content": text},), draw.randrange(1, 24), lane)


def resident(pair: Loopback) -> int:
    """Resident bytes of both sides, with everything that they started."""
    families = [psutil.Process(child.process.pid) for child in (pair.producer, pair.decoder)]
    members = [one for family in families for one in family.children(recursive=True)]
    return sum(one.memory_info().rss for one in members)


def test_answers_stay_the_same_and_memory_stays_bounded(checkpoint) -> None:
    with loopback(checkpoint("llama")) as pair:
        name = served_model(pair.url)

        def answer(number: int, lane: str) -> Answer:
            return ask(pair.url, question(number, name, lane))

        first = {number: answer(number, "local") for number in range(20)}
        before = resident(pair)
        with ThreadPoolExecutor(4) as clients:
            lanes = ("remote", "local", "auto")
            numbers = range(REQUESTS)
            answers = list(
                clients.map(lambda number: answer(number % 20, lanes[number % 3]), numbers)
            )
        for number, found in zip(numbers, answers, strict=True):
            assert found.tokens == first[number % 20].tokens, number
            assert found.finish_reason == first[number % 20].finish_reason
        assert resident(pair) - before < GROWTH_BYTES
