"""Which kinds of a test run every time; the others are for `make soak`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def usual(kinds: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Parameters of all ``kinds``, tuples where a test takes several; those that are not
    ``quick`` are marked for soak. A name in ``quick`` that is no kind would leave a test out.
    """
    kinds = [*kinds]
    assert quick, "nothing would be tested every time"
    unknown = [name for name in quick if name not in kinds]
    assert not unknown, unknown
    return [
        pytest.param(
            *(kind if isinstance(kind, tuple) else (kind,)),
            marks=() if kind in quick else pytest.mark.soak,
        )
        for kind in kinds
    ]
