"""A menu of ``app.view.menu`` laid out as Qt's: changed in place where its form is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final

from PySide6.QtCore import QRectF, Qt
from PySide6.QtGui import QAction, QColor, QIcon, QPainter, QPalette, QPixmap
from PySide6.QtWidgets import QMenu

from app.view.facts import Tone
from app.view.menu import Action, Item

Act = Callable[[Action, str], None]

_TONES: Final[dict[Tone, str]] = {
    "good": "#2f9e5b",
    "busy": "#2f7bd6",
    "warn": "#c77d00",
    "bad": "#d13b3b",
}
_DOT: Final = 16


class Layout:
    """Keeps ``menu`` as the items say. ``act`` is told what was chosen."""

    def __init__(self, menu: QMenu, act: Act) -> None:
        self._menu, self._act = menu, act
        self._items: tuple[Item, ...] = ()
        _make_readable(menu)

    @property
    def items(self) -> tuple[Item, ...]:
        """What is laid out."""
        return self._items

    def show(self, items: Sequence[Item]) -> None:
        """Lay out; an open menu does not flicker where only words and numbers have changed."""
        wanted = tuple(items)
        if wanted == self._items:
            return
        self._lay_out(self._menu, wanted, self._items)
        self._items = wanted

    def _lay_out(self, menu: QMenu, wanted: tuple[Item, ...], before: tuple[Item, ...]) -> None:
        actions = menu.actions()
        if len(actions) != len(wanted) or _forms(wanted) != _forms(before):
            self._build(menu, wanted)
            return
        for action, item, old in zip(actions, wanted, before, strict=True):
            if item == old or item.separates:
                continue
            _dress(action, item)
            inner = action.menu()
            if isinstance(inner, QMenu):
                self._lay_out(inner, item.children, old.children)

    def _build(self, menu: QMenu, wanted: tuple[Item, ...]) -> None:
        for action in menu.actions():
            inner = action.menu()
            menu.removeAction(action)
            (inner or action).deleteLater()
        for item in wanted:
            if item.separates:
                menu.addSeparator()
            elif item.children:
                inner = QMenu(menu)
                _make_readable(inner)
                self._build(inner, item.children)
                _dress(menu.addMenu(inner), item)
            else:
                action = menu.addAction("")
                _dress(action, item)
                action.triggered.connect(self._chosen(item))

    def _chosen(self, item: Item) -> Callable[[], None]:
        # The form of an action, which is what it does, stays as long as it is there.
        def chosen() -> None:
            if item.action is not None:
                self._act(item.action, item.argument)

        return chosen


def _forms(items: Sequence[Item]) -> list[object]:
    """What of items cannot be changed in place."""
    return [(one.separates, one.action, one.argument, bool(one.children)) for one in items]


def _dress(action: QAction, item: Item) -> None:
    action.setText(item.text.replace("&", "&&"))
    action.setEnabled(item.enabled)
    action.setCheckable(item.checked is not None)
    action.setChecked(bool(item.checked))
    action.setIcon(_dot(item.tone))
    action.setIconVisibleInMenu(True)


@lru_cache
def _dot(tone: Tone) -> QIcon:
    """A dot beside a line; it says no more than the line."""
    colour = _TONES.get(tone)
    made = QIcon()
    if colour is None:
        return made
    for scale in (1, 2):
        pixmap = QPixmap(_DOT * scale, _DOT * scale)
        pixmap.setDevicePixelRatio(scale)
        pixmap.fill(Qt.GlobalColor.transparent)
        painter = QPainter(pixmap)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(colour))
        painter.drawEllipse(QRectF(4, 4, _DOT - 8, _DOT - 8))
        painter.end()
        # The same where the line is disabled, which those are that only tell.
        for mode in (QIcon.Mode.Normal, QIcon.Mode.Disabled):
            made.addPixmap(pixmap, mode)
    return made


def _make_readable(menu: QMenu) -> None:
    """Lines that only tell are there to be read: less faint than what cannot be chosen now."""
    palette = menu.palette()
    text = palette.color(QPalette.ColorGroup.Active, QPalette.ColorRole.WindowText)
    text.setAlphaF(0.75)
    for role in (
        QPalette.ColorRole.WindowText,
        QPalette.ColorRole.Text,
        QPalette.ColorRole.ButtonText,
    ):
        palette.setColor(QPalette.ColorGroup.Disabled, role, text)
    menu.setPalette(palette)
