"""The windows: adding a node, the check-up, a log, an error. With Qt, without a screen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("PySide6.QtWidgets", reason="Qt is not installed", exc_type=ImportError)

from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QLabel, QPlainTextEdit, QPushButton
from shiboken6 import isValid

from app.discovery import Seen
from app.doctor_findings import Finding
from app.menubar import errands
from app.menubar.add_node import AddNode
from app.menubar.background import _going_on
from app.menubar.pairing import Paired, Pairing, Say
from app.menubar.windows import CheckUp, ErrorWindow, LogWindow, Window
from app.service import Done, Installed
from protocol.errors import BatonError, ConfigError, TransferError
from tests.app.menubar.spinning import spin

WORDS = "one two three four five six"
PEER: Any = SimpleNamespace(name="gb10", address="somewhere")
OURS: Any = SimpleNamespace(name="SmolLM2", manifest=SimpleNamespace(nbytes=90_000_000))


pytestmark = pytest.mark.usefixtures("qt")


class Scripted(Pairing):
    """A pairing that goes as the test says."""

    def __init__(self) -> None:
        super().__init__("", "file", "http://127.0.0.1:1", None)
        self.answers: list[Paired | BatonError] = []
        self.network: list[Seen] | BatonError = []
        self.asked: list[tuple[str, str]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()

    def seen(self) -> list[Seen]:
        if isinstance(self.network, BatonError):
            raise self.network
        return self.network

    def pair(self, target: str, words: str, say: Say) -> Paired:
        self.asked.append((target, words))
        say(f"Pairing with {target}", 0, 0)
        self.goes_on.wait(10)
        found = self.answers.pop(0)
        if isinstance(found, BatonError):
            raise found
        return found

    def send(self, paired: Paired, say: Say) -> str:
        say("Sending", 45_000_000, 90_000_000)
        self.goes_on.wait(10)
        return f"{paired.peer.name} has it"


@pytest.fixture
def pairing() -> Scripted:
    return Scripted()


@pytest.fixture
def add(pairing: Scripted) -> Iterator[Callable[[], AddNode]]:
    made: list[AddNode] = []

    def make() -> AddNode:
        made.append(AddNode(pairing))
        made[-1].open_in_front()
        return made[-1]

    yield make
    for window in made:
        if isValid(window):
            window.close()
    QApplication.processEvents()


def typed(window: AddNode, producer: str, words: str) -> None:
    window.target.setEditText(producer)
    window.words.clear()
    QTest.keyClicks(window.words, words)


def test_who_shows_words_is_offered_first(add, pairing: Scripted) -> None:
    pairing.network = [Seen("attic", "10.0.0.3", 1, 0, ""), Seen("gb10", "10.0.0.2", 1, 7432, "")]
    window = add()
    spin(lambda: window.target.count() == 2)
    assert window.target.currentText() == "gb10"
    window.target.setCurrentIndex(0)
    typed_words = "one-two-three-four-five-six"
    QTest.keyClicks(window.words, typed_words)
    pairing.answers = [Paired(PEER)]
    window.go.click()
    spin(lambda: bool(pairing.asked))
    assert pairing.asked == [("attic", typed_words)], "the name, without what is said of it"


def test_what_was_typed_stays_when_somebody_answers(add, pairing: Scripted) -> None:
    pairing.network = [Seen("gb10", "10.0.0.2", 1, 7432, "")]
    window = add()
    window.target.setEditText("10.0.0.9")
    spin(lambda: window.target.count() == 1)
    assert window.target.currentText() == "10.0.0.9"


def test_nothing_is_tried_before_there_are_six_words_and_a_name(add) -> None:
    window = add()
    typed(window, "gb10", "one two three four five")
    assert not window.go.isEnabled()
    typed(window, "", WORDS)
    assert not window.go.isEnabled()
    typed(window, "gb10", WORDS)
    assert window.go.isEnabled()


def test_pairing_by_keyboard_alone(add, pairing: Scripted) -> None:
    pairing.answers = [Paired(PEER)]
    window = add()
    typed(window, "gb10", WORDS)
    QTest.keyClick(window.words, Qt.Key.Key_Return)
    spin(lambda: "Paired with gb10" in window.said.text())
    assert pairing.asked == [("gb10", WORDS)]
    assert not window.go.isVisible()


def test_while_it_pairs_nothing_can_be_changed(add, pairing: Scripted) -> None:
    pairing.goes_on.clear()
    pairing.answers = [Paired(PEER)]
    window = add()
    typed(window, "gb10", WORDS)
    window.go.click()
    spin(lambda: "Pairing with gb10" in window.said.text())
    assert not window.go.isEnabled()
    assert not window.words.isEnabled()
    assert window.progress.isVisible()
    pairing.goes_on.set()
    spin(lambda: "Paired" in window.said.text())
    assert not window.progress.isVisible()


def test_a_wrong_code_is_void_and_the_next_one_is_asked_for(add, pairing: Scripted) -> None:
    hint = "type the next one that the producer shows"
    pairing.answers = [TransferError("it differs", reason="code_differs", hint=hint), Paired(PEER)]
    window = add()
    typed(window, "gb10", WORDS)
    window.go.click()
    spin(lambda: hint in window.said.text())
    assert "code_differs" in window.said.text()
    assert window.words.text() == ""
    typed(window, "gb10", WORDS)
    window.go.click()
    spin(lambda: "Paired" in window.said.text())


def test_an_address_that_was_mistyped_costs_no_word(add, pairing: Scripted) -> None:
    pairing.answers = [ConfigError("no <b>address", reason="address_invalid")]
    window = add()
    typed(window, "gb 10", WORDS)
    window.go.click()
    spin(lambda: "address_invalid" in window.said.text())
    assert window.words.text() == WORDS
    assert "<b>address" not in window.said.text()


def test_a_model_that_is_lacking_is_offered_and_sent(add, pairing: Scripted) -> None:
    pairing.answers = [Paired(PEER, lacks=OURS)]
    window = add()
    typed(window, "gb10", WORDS)
    window.go.click()
    spin(lambda: "does not have SmolLM2 (90.0 MB)" in window.said.text())
    assert window.go.text() == "Send the model"
    pairing.goes_on.clear()
    window.go.click()
    spin(lambda: "45.0 MB of 90.0 MB" in window.said.text())
    assert window.progress.value() == window.progress.maximum() // 2
    pairing.goes_on.set()
    spin(lambda: window.said.text() == "gb10 has it.")


def test_a_network_that_cannot_be_searched_is_told(add, pairing: Scripted) -> None:
    pairing.network = TransferError("no network", reason="discovery_unavailable", hint="by address")
    window = add()
    spin(lambda: "by address" in window.said.text())


def test_a_window_that_is_closed_in_the_middle_hears_no_more(add, pairing: Scripted) -> None:
    pairing.goes_on.clear()
    pairing.answers = [Paired(PEER)]
    window = add()
    typed(window, "gb10", WORDS)
    window.go.click()
    spin(lambda: bool(pairing.asked))
    window.close()
    QApplication.processEvents()
    spin(lambda: not isValid(window))
    pairing.goes_on.set()
    spin(lambda: not _going_on)


def button(window: Window, text: str) -> QPushButton:
    found = [one for one in window.findChildren(QPushButton) if one.text() == text]
    assert found, text
    return found[0]


def test_the_check_up_shows_what_is_wrong_first_and_looks_again() -> None:
    looked: list[int] = []

    def examine() -> list[Finding]:
        looked.append(1)
        return [
            Finding("Python", "ok", "3.11"),
            Finding("cable", "remark", "USB 2 <slow>"),
            Finding("disk", "wrong", "full", "make room"),
        ]

    window = CheckUp(examine)
    window.open_in_front()
    spin(lambda: "make room" in window._text.toPlainText())
    text = window._text.toPlainText()
    assert text.index("disk") < text.index("cable") < text.index("Python")
    assert "USB 2 <slow>" in text
    button(window, "Look again").click()
    spin(lambda: len(looked) == 2)
    button(window, "Copy").click()
    window.close()


def test_a_check_up_that_fails_says_why() -> None:
    def examine() -> list[Finding]:
        raise ConfigError("it cannot be read", reason="settings_unreadable", hint="mend it")

    window = CheckUp(examine)
    spin(lambda: "mend it" in window._text.toPlainText())
    window.close()


def shown_by(window: LogWindow) -> str:
    return window.findChildren(QPlainTextEdit)[0].toPlainText()


def test_a_log_is_shown_from_its_end_and_copied(tmp_path: Path) -> None:
    text = "\n".join(f"line {number}" for number in range(300))
    window = LogWindow("here", lambda: text, tmp_path / "none")
    window.open_in_front()
    spin(lambda: text in shown_by(window))
    button(window, "Copy").click()
    assert QGuiApplication.clipboard().text() == text
    assert not [one for one in window.findChildren(QPushButton) if one.text() == "Open folder"]
    window.close()


def test_a_log_that_takes_its_time_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def ask(command: list[str], timeout_s: float) -> Done:
        assert command == ["journalctl", "--unit=u", "--no-pager"]
        assert goes_on.wait(10)
        return Done(0, "what it said")

    monkeypatch.setattr(errands, "ask", ask)
    decoder: Any = SimpleNamespace(
        service=Installed("u", tmp_path / "u", (), True, "journalctl --unit=u")
    )
    window = errands.log(decoder)
    assert shown_by(window) == "Reading…"
    goes_on.set()
    spin(lambda: shown_by(window) == "what it said")
    window.close()


def test_a_log_that_cannot_be_read_says_why() -> None:
    def read() -> str:
        raise ConfigError("no journal", reason="service_failed")

    window = LogWindow("here", read, None)
    spin(lambda: shown_by(window) == "no journal")
    window.close()


def test_what_nobody_has_thought_of_ends_too_and_says_no_value(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def examine() -> list[Finding]:
        raise ValueError("a secret")

    window = CheckUp(examine)
    spin(lambda: "internal_error" in window._text.toPlainText())
    assert window._busy.isHidden()
    assert "ValueError" in window._text.toPlainText()
    assert "examine (" in caplog.text
    assert "a secret" not in caplog.text + window._text.toPlainText()
    window.close()


def test_an_error_has_all_that_the_command_line_would_say() -> None:
    error = ConfigError(
        "it & that", reason="r", field="f", found="a", expected="b", hint="h\ni\n" * 9
    )
    window = ErrorWindow("Baton", error)
    window.open_in_front()
    QApplication.processEvents()
    label = window.findChildren(QLabel)[0]
    assert label.height() >= label.heightForWidth(label.width()), "some of it is cut off"
    said = label.text()
    for part in ("It &amp; that", "(r)", "field: f", "found: a", "expected: b", "→ h<br>i"):
        assert part in said
    window.close()
