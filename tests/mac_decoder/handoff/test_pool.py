"""Connections that nobody uses: pinged, dropped when silent or after sleep, found again."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from mac_decoder.handoff import pool as module
from mac_decoder.handoff import transport
from protocol.errors import BatonError, TransferError
from protocol.handoff import Committed
from tests.mac_decoder.handoff.producer import LAYOUT, Memory
from tests.mac_decoder.handoff.test_client import END, TOKENS, wait_until


def test_an_idle_connection_is_pinged_and_the_round_trip_measured(producer, link, monkeypatch):
    wait_until(lambda: link.rates.round_trip_ms > 0)
    monkeypatch.setattr(module, "PING_EVERY_S", 0.05)
    first = link.rates.round_trip_ms
    link._pool._wake()
    wait_until(lambda: link.rates.round_trip_ms not in (0.0, first), 5.0)
    assert link.state.ready
    assert producer.connections == 1


def test_a_producer_that_fell_silent_is_dropped_and_found_again(producer, link, monkeypatch):
    wait_until(lambda: link.state.ready)
    monkeypatch.setattr(module, "SILENCE_S", -1.0)
    link._pool._wake()
    wait_until(lambda: link.state.reason == "peer_silent", 5.0)
    monkeypatch.undo()
    wait_until(lambda: link.state.ready, 5.0)
    assert producer.connections >= 2


def test_after_sleep_all_connections_are_made_anew(producer, link, monkeypatch):
    wait_until(lambda: link.state.ready)
    answers = [True]
    monkeypatch.setattr(module, "slept", lambda before, now: bool(answers) and answers.pop())
    link._pool._wake()
    wait_until(lambda: producer.connections == 2, 5.0)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()


def test_closing_still_tells_the_producer_of_what_was_installed(producer, link):
    link.fetch(TOKENS, Memory(LAYOUT, 0, END)).committed()
    link.close()
    wait_until(lambda: any(isinstance(event, Committed) for event in producer.seen))


def test_nobody_waits_for_ever_when_all_connections_are_taken(producer, make_link):
    link = make_link(producer, max_connections=1)
    held = link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    done = threading.Event()

    def second() -> None:
        link.fetch(TOKENS, Memory(LAYOUT, 0, END)).committed()
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    time.sleep(0.2)
    assert not done.is_set()
    held.committed()
    thread.join(5)
    assert done.is_set()
    assert producer.connections == 1


def test_a_name_server_that_hangs_costs_no_more_than_the_deadline(make_link, monkeypatch):
    released = threading.Event()

    def hanging(*_: object, **options: object) -> list:
        if options.get("flags", 0) & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        released.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "no answer")

    monkeypatch.setattr(transport.socket, "getaddrinfo", hanging)
    started = time.monotonic()
    with pytest.raises(TransferError) as caught:
        transport.connect("box.example", 1, tls=None, deadline=started + 0.3, stopped=lambda: False)
    assert caught.value.reason == "connect_timeout"
    with pytest.raises(TransferError) as caught:
        transport.connect("box.example", 1, tls=None, deadline=started + 60, stopped=lambda: True)
    assert caught.value.reason == "link_closed"
    assert time.monotonic() - started < 10.0
    released.set()


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..b", "a\0b"])
def test_a_host_that_is_no_name_is_unreachable(host):
    with pytest.raises(TransferError) as caught:
        transport.connect(host, 1, tls=None, deadline=time.monotonic() + 2, stopped=lambda: False)
    assert caught.value.reason == "producer_unreachable"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_link_whose_thread_dies_is_refused_with_a_reason(producer, link, monkeypatch):
    wait_until(lambda: link.state.ready)

    def broken(*_: object) -> None:
        raise RuntimeError("a bug of the link")

    monkeypatch.setattr(link._pool, "_look_after", broken)
    link._pool._wake()
    wait_until(lambda: link.state.name == "refused", 5.0)
    assert link.state.reason == "link_broken"
    with pytest.raises(BatonError) as caught:
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    assert caught.value.reason == "link_broken"
    assert not link._pool._parked
