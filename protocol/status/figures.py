"""Numbers that say how they are known. One that is not known has no value, not even 0."""

from __future__ import annotations

import math
from typing import Annotated, Final, Literal

import msgspec

Basis = Literal["measured", "estimated", "unavailable"]

Count = Annotated[int, msgspec.Meta(ge=0)]
"""What this process counted, or a size that it set: always known, so it needs no basis."""


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finite number with its basis; an unavailable one has none (``null``) and is a dash."""

    value: float | None
    basis: Basis

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a value without a basis, or a basis without a value."""
        if (self.value is None) != (self.basis == "unavailable"):
            raise ValueError("a figure has a value exactly if it is available")
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError("a figure is finite")


UNAVAILABLE: Final = Figure(None, "unavailable")


def measured(value: float | None) -> Figure:
    """``value`` as a measurement; ``None``: nothing was measured."""
    return UNAVAILABLE if value is None else Figure(float(value), "measured")


def rate(value: float, digits: int = 1) -> Figure:
    """A measured rate or time of which 0 means that nothing was measured yet."""
    return Figure(round(value, digits), "measured") if value > 0 else UNAVAILABLE
