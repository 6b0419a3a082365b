"""Arrays that own exactly their bytes, so that dropping them frees what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mac_decoder.reuse.cut import BlockBody, Bytes, CutBody, Place


def owned_cut(cut: CutBody) -> CutBody:
    """The cut with arrays as :func:`owned` gives them."""
    rest = {place: owned(array) for place, array in cut.rest.items()}
    return replace(cut, tokens=owned(cut.tokens), rest=rest)


def owned_block(block: BlockBody) -> BlockBody:
    """The block with arrays as :func:`owned` gives them."""
    return BlockBody(block.hash, {place: owned(array) for place, array in block.data.items()})


def owned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A read-only view of ``array``, in numpy memory that holds nothing else.

    Copied only where it is a part of a larger array, or lies in memory that is not numpy's.
    """
    root = array
    while isinstance(root.base, np.ndarray):
        root = root.base
    exact = root.flags.owndata and root.nbytes == array.nbytes
    mine = array.view() if exact else array.copy()
    mine.setflags(write=False)
    return mine


def same_bytes(ours: Mapping[Place, Bytes], theirs: Mapping[Place, Bytes]) -> bool:
    """Whether both have the same places with the same bytes."""
    if ours.keys() != theirs.keys():
        return False
    return all(np.array_equal(array, theirs[place]) for place, array in ours.items())
