"""How far a producer's rows are from this decoder's own, and how far rounding alone can be.

Measured is, row by row, the norm of the difference over the norm of this decoder's row. What
rounding does is small and nearly the same everywhere in the first layer, where little has been
computed; from there it grows, by how much depends on the model, but from each layer to the next
by little. A mistake begins with a jump. So there are three rules, each with a bound by dtype:

first   no row of the first attention layer is far off; behind recurrent layers, which smear
        single differences over all later rows, no stretch is
growth  no stretch of a later attention layer is much farther off than one of any layer before
worst   nor is it as far off as what has nothing to do with it

A stretch is some consecutive rows, and as far off as the median of them: a router that takes
another expert here and there moves single rows, while a mistake moves all from some position on.
What is no number is no rounding, wherever it is. States after the first layer are not compared
but in formats whose rounding leaves something to compare.

Where the bounds come from: `docs/qualification.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.errors import IntegrityError
from protocol.layout import KEY, STATE, VALUE, Dtype, Layout, RecurrentLayer, row_bytes

Rows = Mapping[tuple[int, int], NDArray[np.uint8]]
"""Flat bytes by layer and role, in the wire's form."""

NO_NUMBER: Final = 1e9
"""How far what is no number is off; an infinity could not be written down."""

_GROWTH: Final = 4.0
_GROWTH_BEHIND: Final = 10.0
"""Behind recurrent layers since the last attention layer."""

STRETCH: Final = 64
"""Rows that are taken together; every second one begins in the middle of another."""

_SMALL: Final = 0.1
"""Rows much smaller than the others are what is left of larger numbers, with their rounding."""

_ROLES: Final = {KEY: "keys", VALUE: "values"}


class Bound(NamedTuple):
    """What rounding can explain. ``slack`` comes on top of what a layer may grow by; ``state`` is
    ``None`` where anything can be.
    """

    first: float
    behind: float
    slack: float
    worst: float
    state: float | None


BOUNDS: Final[dict[Dtype, Bound]] = {
    "float32": Bound(first=1e-4, behind=1e-3, slack=1e-4, worst=5e-3, state=2e-2),
    "float16": Bound(first=5e-3, behind=3e-2, slack=3e-3, worst=0.1, state=0.5),
    "bfloat16": Bound(first=4e-2, behind=0.15, slack=2e-2, worst=0.8, state=None),
}
"""By the dtype of rows, which both sides have."""


class Distance(NamedTuple):
    """How far an array is ``apart``, where no more than ``allowed`` can be rounding."""

    apart: float
    allowed: float
    where: str

    @property
    def excess(self) -> float:
        """Above 1 it cannot be rounding."""
        return self.apart / self.allowed

    @property
    def explained(self) -> bool:
        """Whether it can be rounding."""
        return self.excess <= 1.0


def distance(layout: Layout, found: Rows, expected: Rows) -> Distance:
    """Of all arrays of ``found`` the one that rounding explains least.

    ``expected`` has the same places and sizes. Raises ``IntegrityError`` (``rows_not_finite``)
    where this decoder's own are no numbers.
    """
    all_of_them = _distances(layout, found, expected)
    return max(all_of_them, key=lambda one: one.excess, default=Distance(0.0, 1.0, "nothing"))


def bound_of(layout: Layout) -> Bound:
    """The bound of a layout: that of its roughest array."""
    found: set[Dtype] = set()
    for layer in layout.layers:
        if isinstance(layer, RecurrentLayer):
            found |= {state.dtype for state in layer.states}
        else:
            found.add(layer.dtype)
    return max((BOUNDS[dtype] for dtype in found), key=lambda bound: bound.first)


def _distances(layout: Layout, found: Rows, expected: Rows) -> Iterator[Distance]:
    bound = bound_of(layout)
    so_far: float | None = None
    """The farthest stretch of the attention layers before; none before the first."""
    behind = False
    """Whether a recurrent layer stands between."""
    for index, layer in enumerate(layout.layers):
        if isinstance(layer, RecurrentLayer):
            for number, state in enumerate(layer.states):
                place = (index, STATE + number)
                if expected[place].nbytes:
                    parts = state.shape[0]
                    apart = _apart(found[place], expected[place], state.dtype, parts)
                    where = f"layer {index}, state {number}"
                    yield from _no_numbers(apart, where)
                    allowed = bound.state if index else bound.first
                    if allowed is not None:
                        yield Distance(float(np.median(apart)), allowed, where)
            behind = True
            continue
        here = 0.0
        for role, called in _ROLES.items():
            place = (index, role)
            if not expected[place].nbytes:
                continue
            rows = expected[place].nbytes // row_bytes(layer, role)
            apart = _apart(found[place], expected[place], layer.dtype, rows)
            where = f"layer {index}, {called}"
            yield from _no_numbers(apart, where)
            stretch = _worst_stretch(apart)
            if so_far is None:
                most = stretch if behind else float(apart.max())
                yield Distance(most, bound.behind if behind else bound.first, where)
            else:
                growth = _GROWTH_BEHIND if behind else _GROWTH
                yield Distance(stretch, min(growth * so_far + bound.slack, bound.worst), where)
            here = max(here, stretch)
        # Not less than rounding to this dtype: two frameworks may agree to the bit in one layer.
        so_far, behind = max(so_far or bound.first / 10, here), False


def _worst_stretch(apart: NDArray[np.float64]) -> float:
    """The median of the farthest stretch; the last one ends with the last row."""
    last = max(0, len(apart) - STRETCH)
    starts = [*range(0, last, STRETCH // 2), last]
    return max(float(np.median(apart[start : start + STRETCH])) for start in starts)


def _no_numbers(apart: NDArray[np.float64], where: str) -> Iterator[Distance]:
    if apart.max() >= NO_NUMBER:
        yield Distance(NO_NUMBER, 1.0, where)


def _apart(
    found: NDArray[np.uint8], expected: NDArray[np.uint8], dtype: Dtype, rows: int
) -> NDArray[np.float64]:
    """How far each of so many rows is off."""
    own = _numbers(expected, dtype).reshape(rows, -1)
    if not np.isfinite(own).all():
        raise IntegrityError("this decoder's own rows are no numbers", reason="rows_not_finite")
    other = _numbers(found, dtype).reshape(rows, -1)
    sizes = np.linalg.norm(own, axis=1)
    least = _SMALL * float(np.sqrt(np.mean(sizes**2)))
    with np.errstate(invalid="ignore", over="ignore"):
        off = np.linalg.norm(other - own, axis=1)
    scale = np.maximum(sizes, least) if least else np.ones_like(sizes)
    return np.where(np.isfinite(off), np.minimum(off / scale, NO_NUMBER), NO_NUMBER)


def _numbers(data: NDArray[np.uint8], dtype: Dtype) -> NDArray[np.float64]:
    if dtype == "bfloat16":
        wide = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        wide = data.view(np.float16 if dtype == "float16" else np.float32)
    return wide.astype(np.float64)
