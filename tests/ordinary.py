"""What of a test runs every time; the rest is for `make soak`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Final

import pytest
from hypothesis import settings

THOROUGH: Final = 200
"""Examples in `make soak` of a test that names no number: what tells the profile."""


def examples(count: int) -> settings:
    """Settings of a test that takes ``count`` examples in `make soak`, every time a third."""
    thorough = settings().max_examples == THOROUGH
    return settings(max_examples=count if thorough else count // 3)


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
