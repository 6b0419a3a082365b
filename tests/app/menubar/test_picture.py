"""The icon: every state looks different, at every size, in a colour to be told from any panel."""

from __future__ import annotations

from itertools import combinations
from typing import Any, get_args

import pytest

pytest.importorskip("PySide6.QtWidgets", reason="Qt is not installed", exc_type=ImportError)

from PySide6.QtCore import QSize
from PySide6.QtGui import QIcon, QImage

from app.menubar.picture import EITHER, SIZES, STEPS, picture, stepped
from app.view.icon import Icon, Picture

pytestmark = pytest.mark.usefixtures("qt")

ALL = [Icon(one) for one in get_args(Picture)]
RINGS = [Icon("prefilling_there", step / STEPS) for step in (0, 6, 12, 18, 24)]


def image(icon: QIcon, size: int, scale: float = 1.0) -> QImage:
    return icon.pixmap(QSize(size, size), scale).toImage()


def ink(found: QImage) -> float:
    """How much of it is drawn."""
    points = [(x, y) for x in range(found.width()) for y in range(found.height())]
    return sum(found.pixelColor(x, y).alphaF() for x, y in points)


def apart(one: QImage, other: QImage) -> float:
    points = [(x, y) for x in range(one.width()) for y in range(one.height())]
    return sum(abs(one.pixelColor(*p).alphaF() - other.pixelColor(*p).alphaF()) for p in points)


@pytest.mark.parametrize("size", SIZES)
def test_every_state_can_be_told_from_every_other(size: int) -> None:
    kinds = [*ALL, *RINGS, Icon("idle", attention=True), Icon("decoding", attention=True)]
    images = [image(picture(kind), size) for kind in kinds]
    for (a, one), (b, other) in combinations(zip(kinds, images, strict=True), 2):
        if {a, b} == {Icon("prefilling_there"), RINGS[0]}:
            continue  # nothing of the ring is filled yet
        assert apart(one, other) > size * size * 0.012, (a, b)


def test_a_ring_fills() -> None:
    filled = [ink(image(picture(one), 22)) for one in RINGS]
    assert filled == sorted(filled)
    assert filled[-1] > filled[0] * 1.3


def test_a_template_is_black_with_alpha_and_said_to_be_one() -> None:
    made = picture(Icon("decoding"), template=True)
    assert made.isMask()
    found = image(made, 22)
    colours = {
        found.pixelColor(x, y).name()
        for x in range(22)
        for y in range(22)
        if found.pixelColor(x, y).alpha() > 200
    }
    assert colours == {"#000000"}
    assert found.pixelColor(0, 0).alpha() == 0


def test_elsewhere_it_has_a_colour_that_light_and_dark_panels_can_be_told_from() -> None:
    made = picture(Icon("idle"), template=False)
    assert not made.isMask()
    for panel in (1.0, 0.791, 0.0242, 0.0):  # white, #e6e6e6, #2b2b2b, black
        light = luminance(EITHER)
        ratio = (max(light, panel) + 0.05) / (min(light, panel) + 0.05)
        assert ratio > 3.0


def luminance(colour: Any) -> float:
    def linear(value: float) -> float:
        return value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4

    red, green, blue = colour.redF(), colour.greenF(), colour.blueF()
    return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue)


def test_two_pixels_a_point_are_drawn_not_stretched() -> None:
    sharp = image(picture(Icon("idle")), 22, 2.0)
    assert sharp.width() == 44
    blurred = image(picture(Icon("idle")), 22).scaled(44, 44)
    assert apart(sharp, blurred) > 20


def test_a_ring_goes_by_steps_and_stays_within_itself() -> None:
    assert stepped(Icon("prefilling_here", 0.5001)) == stepped(Icon("prefilling_here", 0.51))
    assert stepped(Icon("prefilling_here", 7.0)).ring == 1.0
    assert stepped(Icon("prefilling_here", -1.0)).ring == 0.0
    assert stepped(Icon("idle")) == Icon("idle")
