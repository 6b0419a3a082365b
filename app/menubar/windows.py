"""Windows that show text: a log, what the check-up found, an error."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from PySide6.QtCore import Qt, QTimer, QUrl
from PySide6.QtGui import QDesktopServices, QFontDatabase, QGuiApplication
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QHBoxLayout,
    QLabel,
    QPlainTextEdit,
    QProgressBar,
    QPushButton,
    QTextBrowser,
    QVBoxLayout,
    QWidget,
)

from app.doctor_findings import Finding, Verdict
from app.menubar.background import Work
from protocol.errors import BatonError

_MARKS: Final[dict[Verdict, tuple[str, str]]] = {
    "wrong": ("✗", "#d13b3b"),
    "remark": ("!", "#c77d00"),
    "ok": ("✓", "#2f9e5b"),
}


class Window(QDialog):
    """A window that goes away when it is closed, and comes to the front when it is opened."""

    def __init__(self, title: str, width: int, height: int, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(title)
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.resize(width, height)
        self.box = QVBoxLayout(self)

    def open_in_front(self) -> None:
        """Show it before other programs' windows, whichever is active."""
        self.show()
        self.raise_()
        self.activateWindow()

    def fit(self) -> None:
        """Grow until all of a text can be read."""
        needed = self.box.totalHeightForWidth(self.width())
        self.resize(self.width(), max(self.height(), needed))

    def add_buttons(
        self, *more: tuple[str, Callable[[], object]], main: QPushButton | None = None
    ) -> None:
        """A row of buttons, the last of which closes; ``main`` is the one that Return presses."""
        row = QHBoxLayout()
        for text, act in more:
            button = QPushButton(text)
            button.setAutoDefault(False)
            button.clicked.connect(lambda *_, act=act: act())
            row.addWidget(button)
        row.addStretch()
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.close)
        row.addWidget(buttons)
        if main is not None:
            close = buttons.button(QDialogButtonBox.StandardButton.Close)
            close.setAutoDefault(False)
            main.setDefault(True)
            row.addWidget(main)
        self.box.addLayout(row)


class ErrorWindow(Window):
    """An error as the command line would tell it: what it is, and what to do about it."""

    def __init__(self, title: str, error: BatonError) -> None:
        super().__init__(title, 460, 160)
        said = QLabel(worded(error))
        said.setTextFormat(Qt.TextFormat.RichText)
        said.setWordWrap(True)
        said.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.box.addWidget(said)
        self.box.addStretch()
        self.add_buttons()
        self.fit()


class LogWindow(Window):
    """The end of a log, and where the rest of it is. ``read`` may take its time."""

    def __init__(self, where: str, read: Callable[[], str], file: Path | None) -> None:
        super().__init__("Baton: log", 820, 480)
        place = QLabel(where)
        place.setWordWrap(True)
        place.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.box.addWidget(place)
        self._text = ""
        self._shown = QPlainTextEdit("Reading…")
        self._shown.setReadOnly(True)
        self._shown.setFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        self._shown.setLineWrapMode(QPlainTextEdit.LineWrapMode.NoWrap)
        self.box.addWidget(self._shown)
        more: list[tuple[str, Callable[[], object]]] = [
            ("Copy", lambda: QGuiApplication.clipboard().setText(self._text))
        ]
        if file is not None and file.exists():
            url = QUrl.fromLocalFile(str(file.parent))
            more.append(("Open folder", lambda: QDesktopServices.openUrl(url)))
        self.add_buttons(*more)
        work = Work(lambda _: read(), self._show, self._failed, self).start()
        self.finished.connect(work.forget)

    def _show(self, text: str) -> None:
        self._text = text
        self._shown.setPlainText(text or "Nothing is written there yet.")
        # Once it has its size.
        bar = self._shown.verticalScrollBar()
        QTimer.singleShot(0, self._shown, lambda: bar.setValue(bar.maximum()))

    def _failed(self, error: BatonError) -> None:
        self._show("\n".join(filter(None, (error.message, error.hint))))


class CheckUp(Window):
    """What the check-up finds, what is wrong first."""

    def __init__(self, examine: Callable[[], Sequence[Finding]]) -> None:
        super().__init__("Baton: check-up", 720, 560)
        self._examine = examine
        self._text = QTextBrowser()
        self._text.setOpenLinks(False)
        self._busy = QProgressBar()
        self._busy.setRange(0, 0)
        self._busy.setTextVisible(False)
        self.box.addWidget(self._text)
        self.box.addWidget(self._busy)
        self.add_buttons(("Look again", self.look), ("Copy", self._copy))
        self._work: Work | None = None
        self.look()

    def look(self) -> None:
        """Look at everything again."""
        if self._work is not None:
            return
        self._text.setHtml("<p>Looking at this machine, its decoder and its producers…</p>")
        self._busy.show()
        self._work = Work(lambda _: list(self._examine()), self._show, self._failed, self).start()
        self.finished.connect(self._work.forget)

    def _show(self, found: Sequence[Finding]) -> None:
        self._ended(findings_as_html(found))

    def _failed(self, error: BatonError) -> None:
        self._ended(worded(error))

    def _ended(self, text: str) -> None:
        self._work = None
        self._busy.hide()
        self._text.setHtml(text)

    def _copy(self) -> None:
        QGuiApplication.clipboard().setText(self._text.toPlainText())


def worded(error: BatonError) -> str:
    """An error as rich text."""
    message = error.message[:1].upper() + error.message[1:]
    lines = [f"<p><b>{_escaped(message)}</b> ({_escaped(error.reason)})</p>"]
    details = error.details()
    for name in ("field", "found", "expected"):
        if name in details:
            lines.append(f"<p>{name}: {_escaped(details[name])}</p>")
    if error.hint:
        lines.append(f"<p>→ {_escaped(error.hint)}</p>")
    return "".join(lines)


def findings_as_html(found: Sequence[Finding]) -> str:
    """Findings as a table: what is wrong, what is remarkable, the rest."""
    rows: list[str] = []
    for verdict in _MARKS:
        mark, colour = _MARKS[verdict]
        for finding in found:
            if finding.verdict != verdict:
                continue
            todo = f"<br>→ {_escaped(finding.what_to_do)}" if finding.what_to_do else ""
            rows.append(
                f'<tr><td style="color:{colour}"><b>{mark}</b></td>'
                f"<td><b>{_escaped(finding.subject)}</b></td>"
                f"<td>{_escaped(finding.found)}{todo}</td></tr>"
            )
    return f'<table cellpadding="4">{"".join(rows)}</table>'


def _escaped(text: str) -> str:
    return html.escape(text).replace("\n", "<br>")
