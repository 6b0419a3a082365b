"""The icon, drawn: a baton, and around it a ring that fills while a prompt is prefilled.

One shape in one colour with alpha, so that macOS can invert it with the menu bar (a template
image). Elsewhere nobody says whether the panel is dark or light: there it is of a grey that can be
told from both.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Final

from PySide6.QtCore import QPointF, QRectF, Qt
from PySide6.QtGui import QColor, QIcon, QPainter, QPainterPath, QPen, QPixmap

from app.view.icon import Icon

STEPS: Final = 24
"""In how many steps the ring fills: a finer change is not worth a repaint."""

SIZES: Final = (16, 18, 22, 24, 32)
"""Heights of icons in points: macOS has 18, trays of X11 22 to 24."""

EITHER: Final = QColor(0x80, 0x80, 0x80)
"""Has a contrast of 3 with the lightest and the darkest of what panels have."""

_GRID: Final = 22.0
_CENTRE: Final = QPointF(11.0, 11.0)
_FAINT: Final = 0.35
_OFF: Final = 0.5
_GRIP: Final = (0.0, 0.36)


def stepped(icon: Icon) -> Icon:
    """``icon`` with its ring at the step that is drawn: equal ones look the same."""
    if icon.ring is None:
        return icon
    step = int(max(0.0, min(1.0, icon.ring)) * STEPS)
    return Icon(icon.picture, step / STEPS, icon.attention)


@lru_cache(maxsize=128)
def picture(icon: Icon, *, template: bool = sys.platform == "darwin") -> QIcon:
    """The icon in all sizes, at one and two pixels a point."""
    colour = QColor(Qt.GlobalColor.black) if template else EITHER
    made = QIcon()
    for size in SIZES:
        for scale in (1, 2):
            made.addPixmap(_pixmap(icon, size, scale, colour))
    made.setIsMask(template)
    return made


def _pixmap(icon: Icon, size: int, scale: int, colour: QColor) -> QPixmap:
    pixmap = QPixmap(size * scale, size * scale)
    pixmap.setDevicePixelRatio(scale)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.scale(size / _GRID, size / _GRID)
    _Drawing(painter, colour).draw(icon)
    painter.end()
    return pixmap


class _Drawing:
    """Draws on a square of 22 units."""

    def __init__(self, painter: QPainter, colour: QColor) -> None:
        self._painter, self._colour = painter, colour

    def draw(self, icon: Icon) -> None:
        match icon.picture:
            case "off":
                self._painter.setOpacity(_OFF)
                self._baton(15.5)
            case "starting":
                self._ring(None)
                self._baton(9.8)
            case "idle":
                self._baton(15.5, filled=_GRIP)
            case "prefilling_here":
                self._ring(icon.ring)
                self._baton(9.8, filled=(0.0, 0.5))
            case "prefilling_there":
                self._ring(icon.ring)
                self._baton(9.8, filled=(0.5, 1.0))
            case "decoding":
                self._baton(15.5, filled=(0.0, 1.0))
                self._motion()
            case "trouble":
                self._baton(15.5, filled=_GRIP)
                self._exclamation()
        if icon.attention and icon.picture != "trouble":
            self._dot()

    def _pen(self, width: float, alpha: float = 1.0) -> QPen:
        colour = QColor(self._colour)
        colour.setAlphaF(alpha)
        pen = QPen(colour, width)
        pen.setCapStyle(Qt.PenCapStyle.RoundCap)
        return pen

    def _baton(self, length: float, filled: tuple[float, float] | None = None) -> None:
        """A baton that points up, of which the part from the first to the second is filled."""
        thick = 5.6 if length > 10 else 4.4
        painter = self._painter
        painter.save()
        painter.translate(_CENTRE)
        painter.rotate(-45)
        whole = QRectF(-length / 2, -thick / 2, length, thick)
        outline = QPainterPath()
        outline.addRoundedRect(whole, thick / 2, thick / 2)
        painter.setPen(self._pen(1.7))
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.drawPath(outline)
        if filled is not None:
            begin, end = filled
            part = QPainterPath()
            left, right = whole.left() + begin * length, whole.left() + end * length
            part.addRect(QRectF(left, whole.top(), right - left, thick))
            painter.fillPath(outline.intersected(part), self._colour)
        painter.restore()

    def _ring(self, filled: float | None) -> None:
        around = QRectF(1.4, 1.4, _GRID - 2.8, _GRID - 2.8)
        painter = self._painter
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(self._pen(2.0, _FAINT))
        painter.drawEllipse(around)
        if filled:
            painter.setPen(self._pen(2.0))
            # Clockwise from the top, in sixteenths of a degree.
            painter.drawArc(around, 90 * 16, -round(filled * 360 * 16))

    def _motion(self) -> None:
        """Two strokes beside the baton: something comes out of it."""
        self._painter.setPen(self._pen(1.6))
        self._painter.drawLine(QPointF(3.2, 10.2), QPointF(7.6, 5.8))
        self._painter.drawLine(QPointF(14.4, 16.2), QPointF(18.8, 11.8))

    def _exclamation(self) -> None:
        painter = self._painter
        self._clear(QRectF(12.2, 9.6, 9.0, 12.4))
        painter.setPen(self._pen(2.4))
        painter.drawLine(QPointF(16.8, 11.6), QPointF(16.8, 15.8))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(self._colour)
        painter.drawEllipse(QPointF(16.8, 19.6), 1.45, 1.45)

    def _dot(self) -> None:
        painter = self._painter
        self._clear(QRectF(14.0, 14.0, 8.0, 8.0))
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(self._colour)
        painter.drawEllipse(QPointF(18.0, 18.0), 2.8, 2.8)

    def _clear(self, where: QRectF) -> None:
        """Make room, so that what is drawn there can be told from what was."""
        painter = self._painter
        painter.save()
        painter.setCompositionMode(QPainter.CompositionMode.CompositionMode_Clear)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(Qt.GlobalColor.black)
        painter.drawRoundedRect(where, 4, 4)
        painter.restore()
