"""Producers are found by zeroconf; what answers and is none is left out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from zeroconf import ServiceInfo, Zeroconf

from app.discovery import SERVICE, Seen, browse, seen_in

LOOPBACK = ("127.0.0.1",)
ONE, OTHER = f"one {os.getpid()}", f"other {os.getpid()}"
"""Other processes' tests may answer at the same time."""
TXT = {"v": "1", "name": ONE, "port": "7431", "pair": "7432", "model": "tiny"}


def info_of(txt: dict[str, str], number: int = 0) -> ServiceInfo:
    name = f"baton-{os.getpid()}-{number}"
    return ServiceInfo(
        SERVICE,
        f"{name}.{SERVICE}",
        port=7431,
        properties=txt,
        parsed_addresses=[f"127.0.0.{number + 1}"],
        server=f"{name}.local.",
    )


@contextmanager
def answering(*answers: dict[str, str]) -> Iterator[None]:
    """A responder on loopback, with an instance for each of these TXT records."""
    with Zeroconf(list(LOOPBACK)) as responder:
        for number, txt in enumerate(answers):
            responder.register_service(info_of(txt, number))
        yield


def test_those_that_answer_are_found_and_nobody_else() -> None:
    other, foreign = TXT | {"name": OTHER, "pair": "0", "model": ""}, TXT | {"v": "2"}
    with answering(TXT, other, foreign | {"name": f"new {os.getpid()}"}):
        found = [one for one in browse(3.0, LOOPBACK) if one.name.endswith(f" {os.getpid()}")]
    assert found == [
        Seen(ONE, "127.0.0.1", 7431, 7432, "tiny"),
        Seen(OTHER, "127.0.0.2", 7431, 0, ""),
    ]


def test_who_is_looked_for_ends_the_search() -> None:
    with answering(TXT):
        began = time.monotonic()
        assert ONE in [one.name for one in browse(30.0, LOOPBACK, until=ONE)]
        assert time.monotonic() - began < 10.0


def test_the_time_is_kept_where_nobody_answers() -> None:
    began = time.monotonic()
    assert ONE not in [one.name for one in browse(0.5, LOOPBACK)]
    assert 0.5 <= time.monotonic() - began < 3.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"v": "2"},
        {"name": ""},
        {"name": "\x1b[2Jgb10"},
        {"port": "0"},
        {"port": "70000"},
        {"port": "-1"},
        {"pair": "x"},
        {"pair": "123456789"},
    ],
)
def test_an_answer_that_cannot_be_meant_is_none(wrong: dict[str, str]) -> None:
    assert seen_in(info_of(TXT)) is not None
    assert seen_in(info_of(TXT | wrong)) is None
    assert seen_in(info_of({name: text for name, text in TXT.items() if name not in wrong})) is None
