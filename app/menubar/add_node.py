"""The window in which a producer is added: who it is, its six words, and how that goes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from PySide6.QtCore import Qt
from PySide6.QtWidgets import (
    QComboBox,
    QFormLayout,
    QLabel,
    QLineEdit,
    QProgressBar,
    QPushButton,
)

from app.discovery import Seen
from app.menubar.background import Work
from app.menubar.pairing import Paired, Pairing, Say, is_void
from app.menubar.windows import Window, worded
from app.view.words import human_bytes
from protocol.errors import BatonError

_INTRODUCTION: Final = (
    "On the producer run <b>baton produce --pair</b>. It shows six words, which are good for ten "
    "minutes and for one try."
)
_STEPS: Final = 1000
_WORDS: Final = 6
_WORD: Final = re.compile(r"[^\W\d_]+")
"""As ``read_code`` reads them: with anything but letters between."""


class AddNode(Window):
    """Pairs with a producer, and offers to send it the model."""

    def __init__(self, pairing: Pairing) -> None:
        super().__init__("Baton: add a node", 500, 240)
        self._pairing = pairing
        self._work: Work | None = None
        self._paired: Paired | None = None
        introduction = QLabel(_INTRODUCTION)
        introduction.setWordWrap(True)
        self.box.addWidget(introduction)
        self.target = QComboBox()
        self.target.setEditable(True)
        self.target.setSizePolicy(
            self.target.sizePolicy().Policy.Expanding, self.target.sizePolicy().verticalPolicy()
        )
        line = self.target.lineEdit()
        assert line is not None
        line.setPlaceholderText("its name or address")
        self.words = QLineEdit()
        self.words.setPlaceholderText("six words")
        form = QFormLayout()
        form.addRow("Producer", self.target)
        form.addRow("Six words", self.words)
        self.box.addLayout(form)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.said = QLabel()
        self.said.setWordWrap(True)
        self.said.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.box.addWidget(self.progress)
        self.box.addWidget(self.said)
        self.box.addStretch()
        self.go = QPushButton("Pair")
        self.go.clicked.connect(self._go)
        self.add_buttons(main=self.go)
        self.progress.hide()
        self.words.textChanged.connect(self._refresh)
        self.target.editTextChanged.connect(self._refresh)
        self._refresh()
        self._search = Work(
            lambda _: self._pairing.seen(), self._found, self._not_searched, self
        ).start()
        self.finished.connect(self._search.forget)

    def _found(self, seen: Sequence[Seen]) -> None:
        """Offer who answers; what was typed meanwhile stays."""
        typed = self.target.currentText()
        for one in seen:
            state = "" if one.pair else " (shows no words)"
            self.target.addItem(f"{one.name}{state}", one.name)
        open_ones = [place for place, one in enumerate(seen) if one.pair]
        if typed:
            self.target.setEditText(typed)
        elif open_ones:
            self.target.setCurrentIndex(open_ones[0])
            self.words.setFocus()
        else:
            self.target.setEditText("")

    def _not_searched(self, error: BatonError) -> None:
        # Whoever knows the address needs no search; who does not is told.
        self._tell(worded(error))

    def _refresh(self) -> None:
        ready = bool(self._name()) and len(_WORD.findall(self.words.text())) >= _WORDS
        self.go.setEnabled(self._work is None and (self._paired is not None or ready))

    def _name(self) -> str:
        """What stands there: a name that was chosen, or what was typed."""
        text = self.target.currentText().strip()
        place = self.target.findText(text)
        return text if place < 0 else str(self.target.itemData(place))

    def _go(self) -> None:
        if self._paired is None:
            name, words = self._name(), self.words.text()
            self._begin(
                lambda work: self._pairing.pair(name, words, _saying(work)), self._is_paired
            )
        else:
            paired = self._paired
            self._begin(lambda work: self._pairing.send(paired, _saying(work)), self._is_sent)

    def _begin(self, what: Callable[[Work], Any], done: Callable[[Any], None]) -> None:
        self._work = Work(what, done, self._failed, self)
        self._work.said.connect(self._show_progress, Qt.ConnectionType.QueuedConnection)
        self.finished.connect(self._work.forget)
        self._work.start()
        self.progress.show()
        self.progress.setRange(0, 0)
        for field in (self.target, self.words):
            field.setEnabled(False)
        self._refresh()

    def _show_progress(self, told: tuple[str, int, int]) -> None:
        title, done, total = told
        self.progress.setRange(0, _STEPS if total else 0)
        if total:
            self.progress.setValue(_STEPS * done // total)
            title = f"{title}: {human_bytes(done)} of {human_bytes(total)}"
        self.said.setText(f"{title}…")

    def _is_paired(self, paired: Paired) -> None:
        self._ended()
        self.words.clear()  # they are spent
        name = paired.peer.name
        if paired.lacks is None:
            self._finish(f"Paired with {name}. {paired.remark or 'The decoder qualifies it now.'}")
            return
        self._paired = paired
        size = human_bytes(paired.lacks.manifest.nbytes)
        self._tell(f"Paired with {name}. It does not have {paired.lacks.name} ({size}).")
        self.go.setText("Send the model")
        self._refresh()

    def _is_sent(self, said: str) -> None:
        self._ended()
        self._finish(f"{said}.")

    def _failed(self, error: BatonError) -> None:
        self._ended()
        if self._paired is None:
            for field in (self.target, self.words):
                field.setEnabled(True)
            if is_void(error):
                self.words.clear()
                self.words.setFocus()
        self._tell(worded(error))
        self._refresh()

    def _ended(self) -> None:
        self._work = None
        self.progress.hide()

    def _finish(self, text: str) -> None:
        self._tell(text)
        self.go.hide()

    def _tell(self, text: str) -> None:
        self.said.setText(text)
        self.fit()


def _saying(work: Work) -> Say:
    return lambda title, done, total: work.said.emit((title, done, total))
