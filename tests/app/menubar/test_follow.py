"""Following a decoder: whatever it answers, and wherever it goes."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.menubar import follow
from app.menubar.follow import HELD_S, LONGEST_PAUSE_S, Clocks, Follower, Pauses, Told
from app.menubar.place import Place
from mac_decoder.api import tls
from protocol.errors import ConfigError
from protocol.status.snapshot import VERSION
from protocol.status.stream import Full, Hello, encode
from tests.app.menubar.authority import Authority
from tests.app.menubar.fake import Fake, fake
from tests.app.view.snapshots import IDLE, with_engine
from tests.e2e.paired import free_port
from tests.e2e.running import until

BUSY = msgspec.structs.replace(with_engine(IDLE, doing="decoding"), revision=8)
LATER = msgspec.structs.replace(BUSY, revision=9)

FOR_EVER_S = 600.0
"""What a test does not wait for."""


class Hands(Clocks):
    """Clocks whose hands only the test moves."""

    def __init__(self) -> None:
        self.passed_s = self.slept_s = 0.0
        super().__init__(lambda: self.passed_s + self.slept_s, lambda: self.passed_s)


class Noted(Pauses):
    """Pauses that are noted, and not made."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[float] = []

    def next(self) -> float:
        self.given.append(super().next())
        return 0.01


def for_ever() -> Pauses:
    return Pauses(FOR_EVER_S, FOR_EVER_S)


class Ears:
    """Everything that a follower told, and where it looks."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.wrong: ConfigError | None = None
        self.heard: list[Told] = []

    def find(self) -> Place:
        if self.wrong is not None:
            raise self.wrong
        return self.place

    @property
    def states(self) -> list[str]:
        return [told.standing.state for told in self.heard]

    def await_state(self, state: str) -> Told:
        until(lambda: bool(self.heard) and self.states[-1] == state)
        return self.heard[-1]


@contextmanager
def following(
    place: Place, clocks: Clocks | None = None, pauses: Pauses | None = None
) -> Iterator[tuple[Follower, Ears]]:
    ears = Ears(place)
    follower = Follower(ears.find, ears.heard.append, clocks, pauses)
    follower.start()
    try:
        yield follower, ears
    finally:
        follower.stop()


@pytest.fixture
def decoder() -> Iterator[Fake]:
    with fake() as made:
        made.begins_with(IDLE)
        yield made


def test_a_snapshot_and_then_what_changes_of_it(decoder: Fake) -> None:
    with following(Place(decoder.url)) as (_, ears):
        assert ears.await_state("connected").snapshot == IDLE
        assert ears.states == ["connecting", "connected"]
        decoder.says(BUSY)
        until(lambda: ears.heard[-1].snapshot == BUSY)
        decoder.says_raw(encode(Full(at=1.0, snapshot=BUSY)))
        decoder.says(LATER)
        until(lambda: ears.heard[-1].snapshot == LATER)
        assert len(ears.heard) == 4, "what says nothing new is not told"


@pytest.mark.parametrize(
    ("status", "code", "state", "reason"),
    [
        (503, "decoder_starting", "starting", ""),
        (503, "decoder_restarting", "restarting", ""),
        (503, "decoder_latched_off", "latched", ""),
        (503, "decoder_stopping", "stopping", ""),
        (503, "too_many_streams", "refused", "too_many_streams"),
        (401, "invalid_api_key", "key_needed", ""),
        (403, "host_not_allowed", "refused", "host_not_allowed"),
        (404, None, "refused", "not_a_decoder"),
        (404, "<script>", "refused", "unknown"),
        (503, "x" * 65, "refused", "unknown"),
        (503, "x" * 100_000, "refused", "unknown"),
        (503, "Decoder_Starting", "refused", "unknown"),
        (503, "ünknown", "refused", "unknown"),
        (503, "two words", "refused", "unknown"),
        (503, "", "refused", "unknown"),
        (503, 7, "refused", "unknown"),
    ],
)
def test_a_handshake_that_is_refused_says_what_goes_on(
    decoder: Fake, status: int, code: object, state: str, reason: str
) -> None:
    decoder.refusal = (status, code)
    with following(Place(decoder.url)) as (follower, ears):
        told = ears.await_state(state)
        assert (told.standing.reason, told.snapshot) == (reason, None)
        decoder.refusal = None
        follower.try_now()
        assert ears.await_state("connected").snapshot == IDLE


def test_nobody_there_and_then_somebody() -> None:
    port = free_port()
    with following(Place(f"http://127.0.0.1:{port}")) as (_, ears):
        ears.await_state("absent")
        with fake(port) as decoder:
            decoder.begins_with(IDLE)
            ears.await_state("connected")
            decoder.refusal = (503, "decoder_stopping")
            decoder.hangs_up()
            ears.await_state("stopping")
        ears.await_state("absent")
        assert ears.heard[-1].snapshot is None, "what a decoder said dies with it"


def test_a_connection_that_has_held_is_made_again_at_once_and_without_a_word(
    decoder: Fake,
) -> None:
    clocks, pauses = Hands(), Noted()
    decoder.refusal = (503, "decoder_starting")
    with following(Place(decoder.url), clocks, pauses) as (_, ears):
        until(lambda: len(pauses.given) > 3)
        decoder.refusal = None
        ears.await_state("connected")
        decoder.begins_with(BUSY)
        before = len(pauses.given)
        clocks.passed_s += HELD_S
        decoder.hangs_up()
        until(lambda: ears.heard[-1].snapshot == BUSY)
        assert pauses.given[before:] == [pauses.first_s]
        assert ears.states == ["connecting", "starting", "connected", "connected"]


def test_who_hangs_up_behind_a_snapshot_is_trouble(decoder: Fake) -> None:
    """What it said a moment ago is not what is there, however often it says that again."""
    decoder.leaves = True
    pauses = Noted()
    with following(Place(decoder.url), Hands(), pauses) as (_, ears):
        until(lambda: len(pauses.given) > 3)
        assert pauses.given[:4] == [0.25, 0.5, 1.0, 2.0], "not as fast as it goes"
        assert ears.states[:5] == ["connecting", *2 * ["connected", "refused"]]
        assert (ears.heard[2].standing.reason, ears.heard[2].snapshot) == ("connection_lost", None)


def test_a_decoder_that_dies_as_soon_as_it_was_found_is_not_shown_as_running(
    decoder: Fake,
) -> None:
    with following(Place(decoder.url), Hands(), for_ever()) as (_, ears):
        ears.await_state("connected")
        decoder.close()
        assert ears.await_state("refused").standing.reason == "connection_lost"


def test_silence_behind_a_snapshot_is_trouble(
    decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "SILENCE_S", 1.0)
    pauses = Noted()
    with following(Place(decoder.url), pauses=pauses) as (_, ears):
        until(lambda: len(pauses.given) > 1)
        # Silence is no use that a connection is of.
        assert pauses.given[:2] == [0.25, 0.5]
        assert ears.states[:3] == ["connecting", "connected", "refused"]
        assert (ears.heard[2].standing.reason, ears.heard[2].snapshot) == ("no_answer", None)


def test_what_a_sleep_has_ended_is_no_trouble(
    decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sleepy(Clocks):
        def slept(self) -> bool:
            return True

    monkeypatch.setattr(follow, "SILENCE_S", 0.4)
    pauses = Noted()
    with following(Place(decoder.url), Sleepy(), pauses) as (_, ears):
        until(lambda: len(pauses.given) > 2)
        assert set(pauses.given) == {pauses.first_s}
        assert ears.states == ["connecting", "connected"]


@pytest.mark.parametrize("held", [True, False])
def test_a_change_that_is_missing_leads_to_a_whole_snapshot(decoder: Fake, *, held: bool) -> None:
    clocks = Hands()
    with following(Place(decoder.url), clocks, Noted()) as (_, ears):
        ears.await_state("connected")
        decoder.begins_with(BUSY)
        clocks.passed_s += HELD_S if held else 0.0
        decoder.says_raw(b'{"type":"change","at":0,"since":99,"revision":100}')
        until(lambda: ears.heard[-1].snapshot == BUSY)
        # As the first that a connection says it may be all that it ever does.
        between = [] if held else ["refused"]
        assert ears.states == ["connecting", "connected", *between, "connected"]
        assert ears.heard[2].standing.reason == ("" if held else "status_out_of_order")


def test_another_version_is_said_to_be_one(decoder: Fake) -> None:
    other = f'{{"type":"hello","at":0,"version":{VERSION + 1},"new":true}}'
    decoder.says_hello(other.encode())
    with following(Place(decoder.url)) as (_, ears):
        ears.await_state("version_differs")


HELLO = encode(Hello(at=0.0, version=VERSION, process="ab", full_every_s=10.0))
CHANGE = b'{"type":"change","at":0,"since":7,"revision":8}'


@pytest.mark.parametrize("silence", ["before the handshake", "after it", "after hello"])
def test_who_says_nothing_is_in_trouble_and_not_waited_for(
    silence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "FIRST_S", 0.5)
    with ExitStack() as stack:
        if silence == "before the handshake":
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listening.getsockname()[1]
        else:
            mute = stack.enter_context(fake())
            if silence == "after it":
                mute.says_hello(None)
            port = mute.port
        _, ears = stack.enter_context(following(Place(f"http://127.0.0.1:{port}")))
        assert ears.await_state("refused").standing.reason == "no_answer"
        assert ears.states == ["connecting", "refused"]


def test_who_sends_a_snapshot_byte_by_byte_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "FIRST_S", 1.0)
    with fake() as slow:
        slow.drips = True
        slow.begins_with(IDLE)
        with following(Place(slow.url)) as (_, ears):
            assert ears.await_state("refused").standing.reason == "no_answer"


@pytest.mark.parametrize(
    ("begins", "goes_on"),
    [(HELLO, HELLO), (CHANGE, None), (HELLO, CHANGE), (encode(Full(at=0, snapshot=IDLE)), None)],
)
def test_what_comes_where_it_has_no_place_is_trouble(begins: bytes, goes_on: bytes | None) -> None:
    with fake() as wrong:
        wrong.says_hello(begins)
        wrong.goes_on = goes_on
        pauses = Noted()
        with following(Place(wrong.url), pauses=pauses) as (_, ears):
            until(lambda: len(pauses.given) > 3)
            assert pauses.given[:4] == [0.25, 0.5, 1.0, 2.0], "not as fast as it goes"
            assert ears.states == ["connecting", "refused"]
            assert ears.heard[-1].standing.reason == "status_out_of_place"


def test_what_is_nested_without_end_is_trouble() -> None:
    with fake() as wrong:
        wrong.says_hello(b'{"x":' + b"[" * 10_000 + b"]" * 10_000 + b',"type":"hello"}')
        with following(Place(wrong.url), pauses=for_ever()) as (_, ears):
            assert ears.await_state("refused").standing.reason == "status_malformed"


def test_what_breaks_here_is_told_and_tried_again(
    decoder: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(text: object) -> object:
        raise KeyError("what somebody typed")

    monkeypatch.setattr(follow, "decode", breaks)
    with following(Place(decoder.url), pauses=for_ever()) as (follower, ears):
        standing = ears.await_state("refused").standing
        assert (standing.reason, standing.url) == ("internal_error", decoder.url)
        assert "following the status broke: KeyError at breaks (" in caplog.text
        assert "typed" not in caplog.text
        monkeypatch.undo()
        follower.try_now()
        assert ears.await_state("connected").snapshot == IDLE


def test_who_hangs_up_before_there_is_a_snapshot_is_trouble() -> None:
    with fake() as wrong, following(Place(wrong.url), pauses=for_ever()) as (_, ears):
        until(lambda: wrong.followers == 1)
        wrong.hangs_up()
        assert ears.await_state("refused").standing.reason == "connection_lost"


@pytest.mark.parametrize("elsewhere", ["http://[", "{other}", "x" * 3000])
def test_nobody_sends_it_on(decoder: Fake, elsewhere: str) -> None:
    with fake() as other:
        other.begins_with(IDLE)
        decoder.refusal = (302, None)
        decoder.sends_to = elsewhere.replace("{other}", other.url.replace("http", "ws"))
        with following(Place(decoder.url)) as (_, ears):
            assert ears.await_state("refused").standing.reason == "not_a_decoder"
            assert other.asked == []


def test_a_second_hello_behind_a_snapshot_is_trouble_too(decoder: Fake) -> None:
    decoder.goes_on = HELLO
    pauses = Noted()
    with following(Place(decoder.url), Hands(), pauses) as (_, ears):
        until(lambda: len(pauses.given) > 3)
        assert pauses.given[:4] == [0.25, 0.5, 1.0, 2.0]
        said = next(told for told in ears.heard if told.standing.state == "refused")
        assert (said.standing.reason, said.snapshot) == ("status_out_of_place", None)


def test_another_port_is_followed_at_once(decoder: Fake) -> None:
    with fake() as other:
        other.begins_with(BUSY)
        with following(Place(decoder.url), pauses=Noted()) as (follower, ears):
            ears.await_state("connected")
            ears.place = Place(other.url)
            follower.look_again()
            until(lambda: ears.heard[-1].snapshot == BUSY)
            assert ears.heard[-1].standing.url == other.url
            until(lambda: decoder.followers == 0)


def test_settings_that_cannot_be_read_are_told_and_read_again(decoder: Fake) -> None:
    with following(Place(decoder.url)) as (follower, ears):
        ears.await_state("connected")
        ears.wrong = ConfigError("port in config.toml is wrong", reason="settings_invalid")
        follower.look_again()
        told = ears.await_state("refused")
        assert (told.standing.reason, told.standing.url) == ("settings_invalid", decoder.url)
        assert told.standing.said == "port in config.toml is wrong"
        ears.wrong = None
        follower.try_now()
        ears.await_state("connected")


def test_the_key_is_given_to_a_decoder_that_asks_for_it(decoder: Fake) -> None:
    decoder.demands_a_key = True
    with following(Place(decoder.url, key="baton-secret")) as (_, ears):
        ears.await_state("connected")
    first, second = decoder.asked
    assert "Authorization" not in first
    assert second["Authorization"] == "Bearer baton-secret"
    assert "Origin" not in second
    assert "secret" not in repr(ears.heard)
    assert "key_needed" not in ears.states


@pytest.mark.parametrize("refusal", [None, (503, "decoder_starting"), (401, "who_are_you")])
def test_over_plain_http_nobody_is_given_a_key_that_was_not_asked_for(
    decoder: Fake, refusal: tuple[int, str] | None
) -> None:
    decoder.refusal = refusal
    with following(Place(decoder.url, key="baton-secret")) as (_, ears):
        until(lambda: len(ears.heard) > 1)
    assert decoder.asked
    assert all("Authorization" not in headers for headers in decoder.asked)


def test_a_key_that_is_not_the_right_one_is_tried_once_each_time(decoder: Fake) -> None:
    decoder.refusal = (401, "invalid_api_key")
    with following(Place(decoder.url, key="baton-old"), pauses=Noted()) as (_, ears):
        until(lambda: len(decoder.asked) > 4)
    assert ["Authorization" in headers for headers in decoder.asked[:4]] == 2 * [False, True]
    assert ears.states == ["connecting", "key_needed"]


def test_over_tls_the_key_comes_with_the_first_question(tmp_path: Path) -> None:
    with fake(tls=tls.own(tmp_path, ["localhost"]).context) as decoder:
        decoder.begins_with(IDLE)
        with following(Place(decoder.url, "baton-secret", tls.shown(tmp_path))) as (_, ears):
            ears.await_state("connected")
        assert decoder.asked[0]["Authorization"] == "Bearer baton-secret"


def test_only_the_certificate_that_is_known_is_believed(tmp_path: Path) -> None:
    ours, others = (tls.own(tmp_path / name, ["localhost"]) for name in ("ours", "others"))
    with fake(tls=ours.context) as decoder:
        decoder.begins_with(IDLE)
        # The certificate names localhost alone, and the address is another: it is the very one.
        with following(Place(decoder.url, "k", tls.shown(tmp_path / "ours"))) as (_, ears):
            ears.await_state("connected")
        asked = len(decoder.asked)
        with following(Place(decoder.url, "k", others.path)) as (_, ears):
            assert ears.await_state("refused").standing.reason == "certificate_differs"
        with following(Place(decoder.url, "k", tmp_path / "none.pem")) as (_, ears):
            ears.await_state("absent")
        assert len(decoder.asked) == asked, "a key was given to a stranger"


def test_an_authority_in_the_file_vouches_for_nobody(tmp_path: Path) -> None:
    """A file with the whole chain: whom else its authority has certified is a stranger."""
    authority = Authority()
    ours, others = (authority.certified(tmp_path, name) for name in ("ours", "others"))
    with fake(tls=tls.given(*ours).context) as decoder:
        decoder.begins_with(IDLE)
        with following(Place(decoder.url, "k", ours[0])) as (_, ears):
            ears.await_state("connected")
    with fake(tls=tls.given(*others).context) as stranger:
        stranger.begins_with(IDLE)
        with following(Place(stranger.url, "k", ours[0])) as (_, ears):
            assert ears.await_state("refused").standing.reason == "certificate_differs"
        assert stranger.asked == [], "a key was given to a stranger"


def test_after_a_sleep_the_decoder_is_tried_at_once() -> None:
    port, clocks = free_port(), Hands()
    with following(Place(f"http://127.0.0.1:{port}"), clocks, for_ever()) as (_, ears):
        ears.await_state("absent")
        with fake(port) as decoder:
            decoder.begins_with(IDLE)
            clocks.slept_s = 3600.0
            ears.await_state("connected")


def test_clocks_that_are_corrected_are_no_sleep() -> None:
    wall = [1000.0]
    clocks = Clocks(lambda: wall[0], lambda: 0.0)
    wall[0] += 1.0
    assert not clocks.slept()
    wall[0] += 60.0
    assert clocks.slept()
    assert not clocks.slept(), "one sleep is told once"
    wall[0] -= 60.0
    assert not clocks.slept()


def test_pauses_grow_to_a_bound_and_begin_anew() -> None:
    pauses = Pauses()
    found = [pauses.next() for _ in range(8)]
    assert found == sorted(found)
    assert found[0] < found[1]
    assert found[-1] == LONGEST_PAUSE_S
    pauses.begin_anew()
    assert pauses.next() == found[0]


def test_it_ends_at_once_while_a_connection_is_being_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with following(Place(f"http://127.0.0.1:{port}")) as (follower, ears):
            taken, _ = silent.accept()
            with taken:
                began = time.monotonic()
                follower.stop()
                assert time.monotonic() - began < 2.0
    assert ears.states == ["connecting"]


def test_another_port_is_followed_at_once_while_a_connection_is_being_opened(
    decoder: Fake,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with following(Place(f"http://127.0.0.1:{port}")) as (follower, ears):
            taken, _ = silent.accept()
            with taken:
                ears.place = Place(decoder.url)
                follower.look_again()
                ears.await_state("connected")


def test_a_follower_ends_at_once_whatever_it_waits_for(decoder: Fake) -> None:
    waiting: dict[str, Any] = {
        "connected": Place(decoder.url),
        "absent": Place(f"http://127.0.0.1:{free_port()}"),
    }
    for state, place in waiting.items():
        with following(place) as (follower, ears):
            ears.await_state(state)
            began = time.monotonic()
            follower.stop()
            assert time.monotonic() - began < 2.0
            assert not follower._thread.is_alive()
