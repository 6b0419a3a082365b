"""The window in which a model is chosen: the demo model, or a directory; then it is served.

``app.first_run`` says what it shows in every state. Whatever takes time is done in a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from PySide6.QtCore import QEvent, Qt, QTimer, Signal
from PySide6.QtGui import QCloseEvent, QIcon, QPalette, QPixmap
from PySide6.QtWidgets import (
    QButtonGroup,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QProgressBar,
    QPushButton,
    QRadioButton,
    QSizePolicy,
    QVBoxLayout,
)

from app import demo_fetch, first_run
from app.app_icon import png
from app.first_run import Checked, Choice, State, shown
from app.menubar.background import Work
from app.menubar.windows import Window
from protocol.errors import BatonError

_STEPS: Final = 1000
_PAUSE_MS: Final = 300
"""How long nothing is typed before a directory is looked at."""

_ICON: Final = 56
_BAD: Final = ("#b3261e", "#ff8f85")
"""On light and on dark: both have a contrast of more than 4.5 with a window's usual colour."""

Obtain = Callable[[demo_fetch.Tell, demo_fetch.Stop], Path]


def _obtain(tell: demo_fetch.Tell, stop: demo_fetch.Stop) -> Path:
    return demo_fetch.obtain(None, tell, stop)


class FirstRun(Window):
    """Asks for a model until the settings name one: ``chosen`` then tells its directory. ``now``
    is the one that they name before, if they do.

    It closes by itself. Closed before, it stops what it began; what was fetched is kept.
    """

    chosen = Signal(object)

    def __init__(self, obtain: Obtain = _obtain, now: str = "") -> None:
        super().__init__("Baton", 580, 410)
        self._obtain = obtain
        self._stop = threading.Event()
        self._closing = False
        self._work: Work | None = None
        self._look: Work | None = None
        self._state = first_run.begun(first_run.offer(), now)
        self._lay_out()
        self._typed = QTimer(self, singleShot=True, interval=_PAUSE_MS)
        self._typed.timeout.connect(self._check)
        self._connect()
        self._show()
        if now:
            self.take(now)

    def _lay_out(self) -> None:
        self.box.setContentsMargins(24, 20, 24, 20)
        self.box.setSpacing(14)
        self.box.addLayout(self._heading())
        self.demo, self.demo_about = QRadioButton(f"&{first_run.DEMO}"), _paragraph()
        self.own, own_about = QRadioButton(f"&{first_run.OWN}"), _paragraph(first_run.OWN_ABOUT)
        self.path = QLineEdit()
        self.path.setPlaceholderText("Directory of the model")
        self.path.setAccessibleName("Directory of the model")
        self.browse = QPushButton("&Choose …")
        self.browse.setAutoDefault(False)
        row = QHBoxLayout()
        row.setSpacing(6)
        row.addWidget(self.path)
        row.addWidget(self.browse)
        self._group = QButtonGroup(self)
        choices = QGridLayout()
        choices.setColumnMinimumWidth(0, 22)
        choices.setColumnStretch(1, 1)
        choices.setVerticalSpacing(4)
        for place, (button, about) in enumerate(
            ((self.demo, self.demo_about), (self.own, own_about))
        ):
            self._group.addButton(button)
            font = button.font()
            font.setBold(True)
            button.setFont(font)
            choices.addWidget(button, 3 * place, 0, 1, 2)
            choices.addWidget(about, 3 * place + 1, 1)
        choices.setRowMinimumHeight(2, 10)
        choices.addLayout(row, 5, 1)
        self.box.addLayout(choices)
        self.bar = QProgressBar()
        self.bar.setTextVisible(False)
        self.says, self.wrong = _paragraph(), _paragraph()
        self.wrong.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.box.addWidget(self.bar)
        self.box.addWidget(self.says)
        self.box.addWidget(self.wrong)
        self.box.addStretch(1)
        self.leave, self.begin = QPushButton(), QPushButton()
        self.leave.setAutoDefault(False)
        self.begin.setDefault(True)
        buttons = QHBoxLayout()
        buttons.addStretch()
        buttons.addWidget(self.leave)
        buttons.addWidget(self.begin)
        self.box.addLayout(buttons)

    def _heading(self) -> QHBoxLayout:
        picture = QPixmap()
        picture.loadFromData(png(2 * _ICON))
        picture.setDevicePixelRatio(2)
        self.setWindowIcon(QIcon(picture))
        icon = QLabel()
        icon.setPixmap(picture)
        title = QLabel(first_run.TITLE)
        font = title.font()
        font.setPointSizeF(font.pointSizeF() * 1.4)
        font.setBold(True)
        title.setFont(font)
        words = QVBoxLayout()
        words.setSpacing(2)
        words.addWidget(title)
        words.addWidget(_paragraph(first_run.ABOUT))
        row = QHBoxLayout()
        row.setSpacing(14)
        row.addWidget(icon, alignment=Qt.AlignmentFlag.AlignTop)
        row.addLayout(words, 1)
        return row

    def _connect(self) -> None:
        self.demo.toggled.connect(lambda on: self._chose("demo" if on else "own"))
        self.path.textEdited.connect(self._edited)
        self.browse.clicked.connect(self._browse)
        self.begin.clicked.connect(self._begin)
        self.leave.clicked.connect(self.reject)

    def reject(self) -> None:
        """Escape, and the button on the left: stop what goes on, else close."""
        # Qt comes here, too, while it closes a window.
        if self._state.doing == "demo" and not self._closing:
            self._stop.set()
            self._become(self._state.stopped())
        else:
            super().reject()

    def closeEvent(self, event: QCloseEvent) -> None:
        self._closing = True
        self._stop.set()
        for work in (self._work, self._look):
            if work is not None:
                work.forget()
        super().closeEvent(event)

    def changeEvent(self, event: QEvent) -> None:
        super().changeEvent(event)
        if event.type() == QEvent.Type.PaletteChange and hasattr(self, "begin"):
            self._show()

    def _become(self, state: State) -> None:
        if state != self._state:
            self._state = state
            self._show()

    def _show(self) -> None:
        state, now = self._state, shown(self._state)
        (self.demo if state.choice == "demo" else self.own).setChecked(True)
        self.demo_about.setText(state.offer.about)
        self.demo.setEnabled(now.may_demo)
        self.own.setEnabled(now.may_choose)
        self.path.setEnabled(now.may_choose)
        self.browse.setEnabled(now.may_choose)
        self.bar.setVisible(now.bar_visible)
        self.bar.setRange(0, 0 if now.bar is None else _STEPS)
        if now.bar is not None:
            self.bar.setValue(round(now.bar * _STEPS))
        self.says.setText(now.says)
        self.says.setVisible(bool(now.says))
        self.wrong.setText("\n".join(filter(None, (now.error, now.hint and f"→ {now.hint}"))))
        self.wrong.setVisible(bool(now.error))
        dark = self.palette().color(QPalette.ColorRole.Window).lightness() < 128
        self.wrong.setStyleSheet(f"color: {_BAD[dark]}")
        self.begin.setText(now.begin)
        self.begin.setEnabled(now.may_begin)
        self.leave.setText(now.leave)

    def _chose(self, choice: Choice) -> None:
        self._become(self._state.chose(choice))

    def _edited(self, text: str) -> None:
        self._become(self._state.typed(text))
        self._typed.start()

    def _browse(self) -> None:
        dialog = QFileDialog(self, "Directory of the model", self.path.text())
        dialog.setFileMode(QFileDialog.FileMode.Directory)
        dialog.setOption(QFileDialog.Option.ShowDirsOnly)
        dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        dialog.fileSelected.connect(self.take)
        dialog.open()

    def take(self, directory: str) -> None:
        """Look at this directory, as if it had been typed."""
        self.path.setText(directory)
        self._become(self._state.typed(directory))
        self._check()

    def _check(self) -> None:
        path = self._state.path
        if self._state.doing != "checking":
            return
        if self._look is not None:
            self._look.forget()

        def found(result: Checked | BatonError) -> None:
            self._become(self._state.found(path, result))

        self._look = Work(lambda _: first_run.check(path), found, found, self).start()

    def _begin(self) -> None:
        state = self._state
        self._stop.clear()
        if state.choice == "demo":
            self._become(state.started(time.monotonic()))
            self._do(self._fetch)
        elif state.checked is not None:
            model = state.checked.path
            self._do(lambda _: _settle(model))

    def _fetch(self, work: Work) -> Path:
        return _settle(self._obtain(work.said.emit, self._stop.is_set))

    def _do(self, what: Callable[[Work], Path]) -> None:
        self._work = Work(what, self._settled, self._failed, self)
        self._work.said.connect(self._progressed, Qt.ConnectionType.QueuedConnection)
        self._work.start()

    def _progressed(self, progress: demo_fetch.Progress) -> None:
        self._become(self._state.progressed(progress, time.monotonic()))

    def _settled(self, model: Path) -> None:
        self._become(self._state.settled(model))
        self.chosen.emit(model)
        self.close()

    def _failed(self, error: BatonError) -> None:
        self._become(self._state.failed(error, first_run.offer()))


def _settle(model: Path) -> Path:
    first_run.choose(model)
    return model


def _paragraph(text: str = "") -> QLabel:
    label = QLabel(text)
    label.setWordWrap(True)
    label.setTextFormat(Qt.TextFormat.PlainText)
    policy = QSizePolicy(QSizePolicy.Policy.Preferred, QSizePolicy.Policy.Maximum)
    # As high as its lines are at this width, and no higher: what is above does not move.
    policy.setHeightForWidth(True)
    label.setSizePolicy(policy)
    return label
