"""What a producer says by zeroconf, as a decoder that looks for one reads it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace

import psutil
import pytest
import zeroconf

from app.discovery import SECONDS, Seen, browse
from app.discovery import SERVICE as LOOKED_FOR
from gb10_producer import advertise
from gb10_producer.advertise import SERVICE, Advertisement, addresses_of
from gb10_producer.config import parse
from tests.gb10_producer.producer import wait_until

LOOPBACK = ("127.0.0.1",)
NAME = f"gb10 {os.getpid()}"
"""Other processes' tests may answer at the same time."""


def made(name: str = NAME, **options: object) -> Advertisement:
    fixed = {"addresses": ["127.0.0.1"], "port": 7431, "model": "tiny", "interfaces": LOOPBACK}
    return Advertisement(name=name, **fixed | options)  # type: ignore[arg-type]


def seen(until: Callable[[list[Seen]], bool], first: str | None = NAME) -> list[Seen]:
    """Who answers to that name, once that is so; ``first``: nobody else is waited for.

    Who asks for a moment only may hear nothing: others that ask the same just before are answered
    for all.
    """
    deadline = time.monotonic() + 40.0
    while True:
        found = [one for one in browse(SECONDS, LOOPBACK, until=first) if one.name == NAME]
        if until(found):
            return found
        assert time.monotonic() < deadline, found


def test_it_is_found_says_where_codes_are_tried_and_is_withdrawn() -> None:
    assert SERVICE == LOOKED_FOR
    answer = made()
    answer.start()
    try:
        assert seen(bool) == [Seen(NAME, "127.0.0.1", 7431, 0, "tiny")]
        answer.pair(7432)
        seen(lambda found: [one.pair for one in found] == [7432])
        answer.serve("another")
        seen(lambda found: [(one.pair, one.model) for one in found] == [(7432, "another")])
        answer.pair(0)
        seen(lambda found: [(one.pair, one.model) for one in found] == [(0, "another")])
    finally:
        answer.stop()
    seen(lambda found: not found)


def test_two_of_one_name_are_both_found() -> None:
    one, other = made(), made(port=7433, instance=f"{NAME} pairing")
    one.start()
    other.start()
    other.pair(7432)
    try:
        found = seen(lambda found: len(found) == 2 and any(one.pair for one in found), None)
        assert sorted((one.port, one.pair) for one in found) == [(7431, 0), (7433, 7432)]
    finally:
        one.stop()
        other.stop()


def test_a_name_and_a_model_of_any_kind_can_be_said() -> None:
    answer = made(model="mödel " * 100, instance="a.b" + "x" * 80)
    answer.start()
    try:
        (found,) = seen(bool)
        assert found.model.startswith("m?del m?del")
        assert len(found.model) == 200
    finally:
        answer.stop()


@pytest.mark.parametrize("error", [OSError(101, "no network"), zeroconf.NonUniqueNameException()])
def test_a_network_that_cannot_be_told_is_logged_and_nothing_else(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(zeroconf, "Zeroconf", fail)
    answer = made()
    with caplog.at_level(logging.WARNING):
        answer.start()
        wait_until(lambda: "not advertised" in caplog.text)
    answer.pair(7432)
    began = time.monotonic()
    answer.stop()
    assert time.monotonic() - began < 5.0


def test_one_that_was_never_started_is_stopped_too() -> None:
    made().stop()


def test_addresses_are_those_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(family: int, number: str) -> SimpleNamespace:
        return SimpleNamespace(family=family, address=number)

    interfaces = {
        "lo": [address(socket.AF_INET, "127.0.0.1"), address(socket.AF_INET6, "::1")],
        "eth": [
            address(socket.AF_INET6, "fd00::7"),
            address(socket.AF_INET6, "fe80::1%eth"),
            address(socket.AF_INET, "192.0.2.7"),
        ],
        "none": [address(socket.AF_INET, "169.254.1.1"), address(17, "00:11:22:33:44:55")],
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces)
    assert advertise.psutil is psutil
    assert addresses_of("0.0.0.0") == ["192.0.2.7", "169.254.1.1"]
    assert addresses_of("::") == ["192.0.2.7", "169.254.1.1", "fd00::7"]
    assert addresses_of("198.51.100.1") == ["198.51.100.1"]


@pytest.mark.parametrize(
    ("words", "advertised"),
    [
        ([], True),
        (["--host", "192.0.2.1"], True),
        (["--no-advertise"], False),
        (["--host", "127.0.0.1"], False),
        (["--host", "localhost"], False),
        (["--host", "0.0.0.0", "--pairing", "p"], False),
        (["--key-fd", "3"], False),
    ],
)
def test_it_is_said_where_others_can_reach_it(words: list[str], advertised: bool) -> None:
    config = parse(["--model", "m", *words]).config
    assert config.advertised is advertised
    assert parse(config.arguments()).config == config
