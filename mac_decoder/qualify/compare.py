"""How far a producer's rows are from this decoder's own, and how far rounding alone can be.

Measured is, for each layer's keys, values and states, the norm of the difference over the norm
of this decoder's (``NO_NUMBER`` where one is none). Two bounds hold for it: the worst of all
arrays, and the median, which other weights move and rounding hardly does.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import IntegrityError
from protocol.layout import KEY, STATE, Dtype, Layout, RecurrentLayer

Rows = Mapping[tuple[int, int], NDArray[np.uint8]]
"""Flat bytes by layer and role, in the wire's form."""

NO_NUMBER: Final = 1e9
"""How far what is no number is off; an infinity could not be written down."""

_ROLES: Final = ("keys", "values")


class Bound(NamedTuple):
    """What the worst array, and the median of all, may differ by."""

    worst: float
    median: float


BOUNDS: Final[dict[Dtype, Bound]] = {
    "float32": Bound(5e-3, 1e-3),
    "float16": Bound(5e-2, 2e-2),
    "bfloat16": Bound(0.28, 0.12),
}
"""By the dtype of rows, which both sides have. `docs/qualification.md` says what was measured, and
what such bounds do not notice.
"""


class Distance(NamedTuple):
    """How far the rows are apart; ``where`` names the worst array."""

    worst: float
    median: float
    where: str

    def within(self, bound: Bound) -> bool:
        """Whether this can be rounding."""
        return self.worst <= bound.worst and self.median <= bound.median


def distance(layout: Layout, found: Rows, expected: Rows) -> Distance:
    """The distance of ``found`` from ``expected``, which have the same places and sizes.

    Raises ``IntegrityError`` (``rows_not_finite``) where this decoder's own are no numbers.
    """
    apart = {
        place: _relative(
            _numbers(expected[place], dtype_of(layout, place)),
            _numbers(found[place], dtype_of(layout, place)),
        )
        for place in expected
        if expected[place].nbytes
    }
    index, role = max(apart, key=lambda place: apart[place])
    name = _ROLES[role - KEY] if role < STATE else f"state {role - STATE}"
    return Distance(apart[index, role], statistics.median(apart.values()), f"layer {index}, {name}")


def dtype_of(layout: Layout, place: tuple[int, int]) -> Dtype:
    """The elements of one array."""
    index, role = place
    layer: Any = layout.layers[index]
    return layer.states[role - STATE].dtype if role >= STATE else layer.dtype


def bound_of(layout: Layout) -> Bound:
    """The bound of a layout: that of its roughest array."""
    found: set[Dtype] = set()
    for layer in layout.layers:
        if isinstance(layer, RecurrentLayer):
            found |= {state.dtype for state in layer.states}
        else:
            found.add(layer.dtype)
    return max(BOUNDS[dtype] for dtype in found)


def _numbers(data: NDArray[np.uint8], dtype: Dtype) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)


def _relative(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    if not np.isfinite(expected).all():
        raise IntegrityError("this decoder's own rows are no numbers", reason="rows_not_finite")
    if not np.isfinite(found).all():
        return NO_NUMBER
    size = float(np.linalg.norm(expected.astype(np.float64)))
    apart = float(np.linalg.norm(found.astype(np.float64) - expected))
    return min(apart / size if size else apart, NO_NUMBER)
