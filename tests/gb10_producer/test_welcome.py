"""Codes for people: shown one after the other, on stderr alone, until somebody has paired."""

from __future__ import annotations

import logging
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gb10_producer import welcome as room
from gb10_producer.welcome import Welcome
from protocol.errors import BatonError, ConfigError
from protocol.pairing.code import Code, new_code, read_code
from tests.gb10_producer.producer import wait_until
from tests.gb10_producer.registered import MAC, OWN
from trust.acceptance import accept
from trust.invitation import Invitation
from trust.peers import Peer, Peers


class Shown:
    """A welcome, and what people saw of it."""

    def __init__(self, directory: Path) -> None:
        self.peers = Peers(directory, "producer")
        self.said: list[str] = []
        self.paired: list[Peer] = []
        self.opened: list[bool] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.welcome = Welcome(
            listener,
            self.peers,
            OWN,
            name="gb10",
            port=7777,
            called=("gb10 2", "192.0.2.7:1"),
            paired=self.paired.append,
            opened=self.opened.append,
            say=self.said.append,
        )

    def code(self, number: int = 1) -> Code:
        """The code that was shown as the so many-th."""
        wait_until(lambda: len(self.codes()) >= number)
        return self.codes()[number - 1]

    def codes(self) -> list[Code]:
        return [read_code(found[1]) for text in self.said if (found := CODE.search(text))]

    def call(self, code: Code) -> object:
        return accept("127.0.0.1", self.port, code, own=MAC, name="macbook")


CODE = re.compile(r"this code: +(.*)")


@contextmanager
def welcoming(directory: Path) -> Iterator[Shown]:
    shown = Shown(directory)
    shown.welcome.start()
    try:
        yield shown
    finally:
        shown.welcome.stop()
        assert not [one for one in threading.enumerate() if one.name in ("welcome", "invitation")]


def test_a_code_is_shown_and_gone_once_somebody_has_paired(tmp_path: Path) -> None:
    with welcoming(tmp_path) as shown:
        code = shown.code()
        assert not shown.welcome.wait(0.05)
        shown.call(code)
        assert shown.welcome.wait(5.0)
        text = shown.said[0]
        assert "baton node add 'gb10 2'\n" in text, "as a shell takes it"
        assert "baton node add 192.0.2.7:1\n" in text
        assert "10 minutes" in text
        assert shown.said[1:] == ["Paired with macbook."]
        assert [peer.name for peer in shown.paired] == ["macbook"]
        assert shown.opened == [True, False]
        with pytest.raises(BatonError) as refused:
            shown.call(code)
        assert refused.value.reason == "producer_down", "the port is closed, too"


def test_a_code_that_was_tried_in_vain_is_followed_by_another(tmp_path: Path) -> None:
    with welcoming(tmp_path) as shown:
        first = shown.code()
        with pytest.raises(BatonError):
            shown.call(new_code())
        second = shown.code(2)
        assert any("void" in text and "code_differs" in text for text in shown.said)
        assert second.words != first.words
        shown.call(second)
        assert shown.welcome.wait(5.0)


def test_after_three_codes_there_is_a_pause(tmp_path: Path) -> None:
    with welcoming(tmp_path) as shown:
        for number in (1, 2, 3):
            shown.code(number)
            with pytest.raises(BatonError):
                shown.call(new_code())
        wait_until(lambda: any("Too many codes" in text for text in shown.said))
        assert len(shown.codes()) == 3


def test_a_code_that_expired_is_followed_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "CODE_LIFE_S", 0.2)
    monkeypatch.setattr(room, "_TRYING_S", 0.1)
    monkeypatch.setattr(Invitation, "left_s", lambda self: 0.0)
    with welcoming(tmp_path) as shown:
        shown.code(2)
        assert "The code has expired." in shown.said


def test_nobody_is_welcome_who_could_not_be_kept(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir(mode=0o755)
    (tmp_path / "peers").chmod(0o755)
    shown = Shown(tmp_path)
    with pytest.raises(ConfigError) as refused:
        shown.welcome.start()
    assert refused.value.reason == "directory_exposed"
    shown.welcome.stop()
    assert shown.said == []


def test_a_stop_ends_it_whatever_it_waits_for(tmp_path: Path) -> None:
    with welcoming(tmp_path) as shown:
        shown.code()
        shown.welcome.stop()
        assert shown.welcome.wait(0.0)
        assert shown.opened == [True, False]
    assert len(shown.codes()) == 1


def test_no_code_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), welcoming(tmp_path) as shown:
        codes = [shown.code()]
        with pytest.raises(BatonError):
            shown.call(new_code())
        codes.append(shown.code(2))
        shown.call(codes[1])
        assert shown.welcome.wait(5.0)
    said = " ".join(str(vars(record)) for record in caplog.records)
    assert "paired" in said
    for code in codes:
        assert code.text not in said
        assert " ".join(code.words) not in said


def test_people_are_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    room.tell("a text")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "a text\n")
