"""The link against a producer over real sockets: what goes right."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shlex
import socket
import threading
import time
from urllib.parse import urlsplit

import pytest

from mac_decoder.handoff import generations, pool
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.link import described
from mac_decoder.handoff.pool import pause_s
from mac_decoder.handoff.trust import trust_of_key
from protocol.errors import BatonError, Cancelled, CapacityError, IdentityMismatch, TransferError
from protocol.handoff import Committed, PeerAborted
from protocol.layout import payload_bytes
from protocol.reasons import REASON_HEADER, WITHOUT_MODEL
from tests.mac_decoder.handoff.producer import (
    IDENTITY,
    KEY,
    LAYOUT,
    TILE,
    WIDE,
    Memory,
)

TOKENS = list(range(1, 52))
END = 50


def wait_until(condition, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def test_a_locked_state_directory_shows_in_the_link_and_passes(
    tmp_path, producer, make_link, monkeypatch
):
    """Another process may have been stopped while it held the lock."""
    monkeypatch.setattr(generations, "PATIENCE_S", 0.05)
    monkeypatch.setattr(generations, "RETRY_S", 0.1)
    path = tmp_path / "generations.json"
    holder = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(holder, fcntl.LOCK_EX)
    link = make_link(producer, numbers=generations.Generations(path, KEY, 1))
    wait_until(lambda: link.state.ready)
    with pytest.raises(TransferError) as failed:
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    assert failed.value.reason == "state_dir_locked"
    assert (link.state.name, link.state.reason) == ("down", "state_dir_locked")
    error = link.error()
    assert error is not None
    assert error.reason == "state_dir_locked"
    os.close(holder)
    wait_until(lambda: link.state.ready)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()


def test_a_full_handoff_fills_the_shadow(producer, link):
    shadow = Memory(LAYOUT, 0, END)
    seen = []
    with link.fetch(TOKENS, shadow, progress=lambda done, total: seen.append(total)) as handoff:
        assert shadow.holds_what_was_sent()
        assert handoff.transferred_bytes == payload_bytes(LAYOUT, 0, END)
        assert handoff.manifest.end == END
        assert set(handoff.phases_ms) == {"queue", "compute", "wire", "verify"}
        assert handoff.phases_ms["compute"] == 5.0
        assert all(value >= 0 for value in handoff.phases_ms.values())
        handoff.committed()
    wait_until(lambda: any(isinstance(event, Committed) for event in producer.seen))
    assert link.state.ready
    assert shadow.prefaulted
    assert link.state.detail == f"cpu, float32, tiles of {TILE}"
    assert described(link)["handoffs"] == 1
    assert link.rates.wire_bytes_per_s > 0


def test_a_delta_ships_what_lies_past_the_cut(producer, link):
    shadow = Memory(LAYOUT, 33, END)
    with link.fetch(TOKENS, shadow) as handoff:
        assert handoff.transferred_bytes == payload_bytes(LAYOUT, 33, END)
        assert handoff.manifest.cut == 33
        handoff.committed()
    assert shadow.holds_what_was_sent()


@pytest.mark.parametrize(
    ("cut", "computed", "measured"),
    [
        (0, END, True),
        (33, END, True),
        (33, END - 33, True),
        (33, END - 32, True),
        (33, 1, False),
        (0, END // 2 + 1, True),
        (0, END // 2 - 1, False),
        (33, 0, False),
    ],
)
def test_the_producers_speed_is_that_of_what_it_computed(producer, link, cut, computed, measured):
    """Rows that were only sent again say nothing about it, and where they are most, nor do the
    others.
    """
    producer.script = lambda peer, request: peer.serve(computed)
    with link.fetch(TOKENS, Memory(LAYOUT, cut, END)) as handoff:
        assert handoff.manifest.computed_tokens == computed
        handoff.committed()
    expected = computed / 0.005 if measured else 0.0
    assert link.rates.compute_tokens_per_s == pytest.approx(expected)


def test_the_boundary_token_stays_here(producer, link):
    requested = []
    producer.script = lambda peer, request: (requested.append(request.tokens), peer.serve())
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert requested[0].tolist() == TOKENS[:END]


def test_one_connection_carries_many_handoffs(producer, link):
    for _ in range(5):
        shadow = Memory(LAYOUT, 0, END)
        with link.fetch(TOKENS, shadow) as handoff:
            handoff.committed()
        assert shadow.holds_what_was_sent()
        wait_until(lambda: not link._pool._ending)
    assert producer.connections == 1
    assert producer.requests == 5


def test_large_frames_arrive_in_place(make_producer, make_link):
    producer = make_producer(layout=WIDE)
    link = make_link(producer, layout=WIDE)
    shadow = Memory(WIDE, 0, 70)
    with link.fetch(list(range(71)), shadow) as handoff:
        handoff.committed()
    assert shadow.holds_what_was_sent()


@pytest.mark.parametrize("credit", [1, 2, 7])
def test_a_small_credit_does_not_stall(make_producer, make_link, credit):
    producer = make_producer(max_credit=credit)
    link = make_link(producer)
    wait_until(lambda: link.state.ready)
    started = time.monotonic()
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert time.monotonic() - started < 4.0


def test_a_handoff_that_is_not_committed_is_withdrawn(producer, link):
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)):
        pass
    wait_until(lambda: any(isinstance(event, PeerAborted) for event in producer.seen))
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert not any(isinstance(event, Committed) for event in producer.seen[:1])


def test_handoffs_overlap_on_own_connections(producer, link):
    first = link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    second = link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    second.committed()
    first.committed()
    wait_until(lambda: sum(isinstance(event, Committed) for event in producer.seen) == 2)


def test_many_threads_share_the_connections(producer, make_link):
    link = make_link(producer, max_connections=2)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(3):
                shadow = Memory(LAYOUT, 0, END)
                with link.fetch(TOKENS, shadow) as handoff:
                    handoff.committed()
                assert shadow.holds_what_was_sent()
        except (BatonError, AssertionError) as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert producer.connections <= 2
    assert producer.requests == 18


def test_cancelling_returns_at_once_and_keeps_the_connection(producer, link):
    reached = threading.Event()

    def begin_and_wait(peer, request):
        peer.begin()
        reached.set()
        peer.frames()
        peer.machine.progress(1, time.monotonic()) if peer.machine.remaining else None
        while not any(isinstance(event, PeerAborted) for event in peer.events):
            peer.receive()

    def only_begin(peer, request):
        peer.begin()
        reached.set()
        while not any(isinstance(event, PeerAborted) for event in peer.events):
            peer.receive()

    producer.script = only_begin
    shadow = Memory(LAYOUT, 0, END)
    started = time.monotonic()
    with pytest.raises(Cancelled):
        link.fetch(TOKENS, shadow, cancelled=reached.is_set)
    assert time.monotonic() - started < 2.0
    before = shadow.digest()
    producer.script = lambda peer, request: peer.serve()
    wait_until(lambda: not link._pool._ending)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert shadow.digest() == before
    assert producer.connections == 1


def test_cancelling_in_the_middle_of_a_frame_leaves_the_shadow_alone(make_producer, make_link):
    producer = make_producer(layout=WIDE)
    link = make_link(producer, layout=WIDE)
    half = threading.Event()
    cancelled = threading.Event()

    def stop_in_a_frame(peer, request):
        peer.begin()
        slot = next(peer.slots())
        raw = peer.frame(slot) + bytes(slot.nbytes)
        peer.write(b"\x82\x7f" + len(raw).to_bytes(8, "big") + raw[:200_000])
        half.set()
        cancelled.wait(5)
        time.sleep(0.25)
        peer.write(raw[200_000:])
        while not any(isinstance(event, PeerAborted) for event in peer.events):
            peer.receive()

    producer.script = stop_in_a_frame
    shadow = Memory(WIDE, 0, 40)

    def withdraw() -> bool:
        if half.is_set():
            time.sleep(0.05)
            cancelled.set()
        return cancelled.is_set()

    with pytest.raises(Cancelled):
        link.fetch(list(range(41)), shadow, cancelled=withdraw)
    before = shadow.digest()
    wait_until(lambda: producer.seen)
    assert shadow.digest() == before
    producer.script = lambda peer, request: peer.serve()
    shadow = Memory(WIDE, 0, 40)
    with link.fetch(list(range(41)), shadow) as handoff:
        handoff.committed()
    assert shadow.holds_what_was_sent()


def test_the_producers_abort_is_its_error_and_the_connection_lives(producer, link):
    def refuse(peer, request):
        error = CapacityError("full", reason="queue_full", retry_after_s=7)
        peer.machine.abort(error, time.monotonic())
        peer.flush()

    producer.script = refuse
    with pytest.raises(CapacityError) as caught:
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    assert caught.value.reason == "queue_full"
    assert caught.value.retry_after_s == 7
    producer.script = lambda peer, request: peer.serve()
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert producer.connections == 1
    assert link.rates.failures == {"queue_full": 1}


def test_a_restarted_producer_is_found_again(make_producer, make_link):
    first = make_producer()
    link = make_link(first)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    first.stop()
    wait_until(lambda: not link.state.ready)
    assert link.state.name == "down"
    assert link.state.reason in ("connection_lost", "producer_down")
    with pytest.raises(TransferError):
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    make_producer(port=first.port)
    wait_until(lambda: link.state.ready, 6.0)
    assert link.state.reason == ""
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()


def test_a_producer_that_is_down_is_a_state_and_a_typed_error(make_link, unused_port):
    link = make_link(url=f"ws://127.0.0.1:{unused_port}")
    wait_until(lambda: link.state.name == "down")
    assert link.state.reason == "producer_down"
    error = link.error()
    assert isinstance(error, TransferError)
    with pytest.raises(TransferError) as caught:
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    assert caught.value.reason == "producer_down"


def test_other_weights_are_a_state_and_a_typed_error(make_producer, make_link):
    theirs = IDENTITY.__class__(**{**_fields(IDENTITY), "weights": "99" * 32})
    link = make_link(make_producer(identity=theirs))
    wait_until(lambda: link.state.name == "refused")
    assert link.state.reason == "weights_differ"
    assert isinstance(link.error(), IdentityMismatch)
    with pytest.raises(IdentityMismatch) as caught:
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    assert caught.value.reason == "weights_differ"
    assert described(link)["reason"] == "weights_differ"


def test_what_differs_and_what_helps_is_logged_once_for_every_change(
    make_producer, make_link, monkeypatch, caplog
):
    monkeypatch.setattr(pool, "REFUSED_PAUSE_S", 0.02)
    differing = {"weights": "99" * 32, "tokenizer": "88" * 32}
    producer = make_producer(identity=IDENTITY.__class__(**{**_fields(IDENTITY), **differing}))
    with caplog.at_level(logging.INFO, logger=pool.__name__):
        link = make_link(producer)
        wait_until(lambda: link.state.attempts >= 3)
        assert refusals(caplog) == [link.state.detail]
        assert "weights, tokenizer" in link.state.detail
        assert "baton node send" in link.state.detail
        # Now the weights are right, and the tokenizer is another one still.
        producer.identity = IDENTITY.__class__(**{**_fields(IDENTITY), "tokenizer": "77" * 32})
        wait_until(lambda: link.state.reason == "tokenizer_differs")
        assert refusals(caplog)[1:] == [link.state.detail]
        assert "weights" not in link.state.detail
        producer.identity = IDENTITY
        wait_until(lambda: link.state.ready)
    assert len(refusals(caplog)) == 2


def test_what_helps_names_the_producer_as_a_shell_takes_it(make_producer, make_link):
    theirs = IDENTITY.__class__(**{**_fields(IDENTITY), "weights": "99" * 32})
    producer = make_producer(identity=theirs)
    link = make_link(producer)
    named = make_link(producer, called="gb10")
    for one in (link, named):
        wait_until(lambda: one.state.name == "refused")  # noqa: B023
    assert link.called == urlsplit(producer.url).netloc
    assert "baton node send NAME " in link.state.detail
    assert named.called == "gb10"
    assert "baton node send gb10 " in named.state.detail
    assert "NAME" not in named.state.detail
    named.rename("it's; mine")
    assert named.called == "it's; mine"
    command = named.state.detail.partition("files: ")[2].partition(" sends it")[0]
    assert shlex.split(command) == ["baton", "node", "send", "it's; mine"]


def test_a_producer_without_a_model_says_how_it_gets_one(make_link):
    answer = f"HTTP/1.1 503 No\r\n{REASON_HEADER}: {WITHOUT_MODEL}\r\n\r\n".encode()

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = listener.accept()
                with taken:
                    taken.recv(4096)
                    taken.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        link = make_link(url=f"ws://127.0.0.1:{listener.getsockname()[1]}", called="gb10")
        wait_until(lambda: link.state.name == "down")
        state = link.state
        link.close()
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert state.reason == WITHOUT_MODEL
    assert state.detail.endswith("; send it this decoder's: baton node send gb10")


def test_another_key_says_that_the_machines_have_to_be_paired_again(make_producer, make_link):
    link = make_link(make_producer(key=bytes(32)))
    wait_until(lambda: link.state.name == "refused")
    assert "pairing key" in link.state.detail


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said, as warnings, of a producer that is not available."""
    told = [record for record in caplog.records if "not available" in record.msg]
    assert all(record.levelno == logging.WARNING for record in told)
    return [record.args[2] for record in told if isinstance(record.args, tuple)]


def test_another_key_is_refused_before_any_prompt_leaves(make_producer, make_link):
    producer = make_producer(key=bytes(32))
    link = make_link(producer)
    wait_until(lambda: link.state.name == "refused")
    assert link.state.reason == "proof_differs"
    with pytest.raises(BatonError):
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    assert producer.requests == 0


def test_closing_ends_a_running_fetch(producer, link):
    reached = threading.Event()

    def wait(peer, request):
        reached.set()
        while True:
            peer.receive()

    producer.script = wait
    caught: list[BatonError] = []

    def run() -> None:
        try:
            link.fetch(TOKENS, Memory(LAYOUT, 0, END))
        except BatonError as error:
            caught.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    reached.wait(3)
    link.close()
    thread.join(3)
    assert caught[0].reason == "link_closed"
    assert link.state.name == "off"


def test_a_prompt_above_the_producers_limit_costs_no_connection(producer, link):
    with pytest.raises(CapacityError) as caught:
        link.fetch(list(range(5001)), Memory(LAYOUT, 0, 5000))
    assert caught.value.reason == "prompt_too_long"
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert producer.connections == 1


def test_a_failing_progress_callback_frees_everything(producer, link):
    def report(peer, request):
        peer.machine.progress(3, time.monotonic())
        peer.flush()
        peer.serve()

    def broken(done: int, total: int) -> None:
        raise RuntimeError("a bug of the caller")

    producer.script = report
    with pytest.raises(RuntimeError):
        link.fetch(TOKENS, Memory(LAYOUT, 0, END), progress=broken)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()


@pytest.mark.parametrize("name", ["baton-digest", "baton-prefault"])
def test_a_thread_that_cannot_start_frees_everything(producer, link, monkeypatch, name):
    wait_until(lambda: link.state.ready)
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError):
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    monkeypatch.undo()
    wait_until(lambda: any(isinstance(event, PeerAborted) for event in producer.seen))
    wait_until(lambda: not link._pool._ending)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert producer.connections == 1
    assert link.state.reason == ""


def test_a_sealed_cut_that_nobody_gets_is_withdrawn(producer, link, monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("a bug of the link")

    monkeypatch.setattr(link, "_received", broken)
    with pytest.raises(RuntimeError):
        link.fetch(TOKENS, Memory(LAYOUT, 0, END))
    monkeypatch.undo()
    wait_until(lambda: any(isinstance(event, PeerAborted) for event in producer.seen))
    wait_until(lambda: not link._pool._ending)
    with link.fetch(TOKENS, Memory(LAYOUT, 0, END)) as handoff:
        handoff.committed()
    assert producer.connections == 1


def test_a_link_that_is_down_holds_neither_tokens_nor_shadow(make_link, unused_port):
    import gc
    import weakref

    class Tokens(list):
        """A prompt that can be watched."""

    link = make_link(url=f"ws://127.0.0.1:{unused_port}")
    wait_until(lambda: link.state.name == "down")
    link._pool._failed_at = float("-inf")  # the fetch tries, and fails, by itself
    tokens, shadow = Tokens(TOKENS), Memory(LAYOUT, 0, END)
    gone = weakref.ref(shadow), weakref.ref(tokens)
    with pytest.raises(TransferError):
        link.fetch(tokens, shadow)
    del shadow, tokens
    gc.collect()
    assert [one() for one in gone] == [None, None]
    held = link._pool._failure
    assert held is not None
    assert (held.__traceback__, held.__cause__, held.__context__) == (None, None, None)


def test_no_reference_to_the_shadow_is_left(producer, link):
    import gc
    import weakref

    shadow = Memory(LAYOUT, 0, END)
    gone = weakref.ref(shadow)
    with link.fetch(TOKENS, shadow) as handoff:
        handoff.committed()
    del shadow, handoff
    gc.collect()
    assert gone() is None


def test_connections_share_their_generations_under_a_real_lock():
    producers = [
        Producer(url="", trust=trust_of_key(bytes(32)), identity=IDENTITY, layout=LAYOUT)
        for _ in range(2)
    ]
    first, second = (producer.outstanding for producer in producers)
    assert isinstance(first._lock, type(threading.Lock()))
    assert first is not second


def test_pauses_grow_and_are_bounded():
    pauses = [pause_s(attempt, True) for attempt in range(1, 40)]
    assert all(0.19 <= pause <= 5.0 for pause in pauses)
    assert pauses[-1] >= 4.0
    assert pause_s(1, False) == pause_s(20, False) == 10.0


def test_the_signature_is_the_one_that_the_engine_names():
    from mac_decoder.handoff.link import Link

    assert isinstance(ProducerLink, type)
    for name in ("state", "rates", "fetch"):
        assert hasattr(ProducerLink, name)
        assert hasattr(Link, name)


def _fields(identity) -> dict[str, str]:
    return {name: getattr(identity, name) for name in identity.__struct_fields__}
