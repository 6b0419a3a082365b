"""Memory for arrays that others fill: mlx's own, and as it comes.

``mx.empty`` fills with zeros where mlx runs on the CPU, on the thread that everything waits
for; half a gigabyte takes as long as reading it. mlx's loader writes nothing of its own: here
it loads files that end with their header, and is told that all of them was read. What such an
array holds until it is written to is anybody's old bytes.
"""

from __future__ import annotations

import io
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_FORMATS: Final = {mx.uint16: "<u2", mx.uint32: "<u4"}


class _Hollow(io.BytesIO):
    """A header, and behind it whatever was in the reader's memory before."""

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the header goes; claim all of it."""
        super().readinto(buffer)
        return len(buffer)


def unwritten(shape: tuple[int, ...], dtype: mx.Dtype) -> tuple[mx.array, NDArray[np.uint8]]:
    """An evaluated array of ``dtype`` (``uint16`` or ``uint32``), and its bytes, to be written.

    Both are the same memory, which mlx frees once neither is left. Raises ``RuntimeError``
    where mlx fails or has no memory.
    """
    file = _Hollow()
    header = {"descr": _FORMATS[dtype], "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    file.seek(0)
    loaded: Any = mx.load(file, format="npy")
    # A loader that reads later than this would write over what is placed meanwhile.
    mx.eval(loaded)
    try:
        view = np.array(loaded, copy=False)
    except MemoryError as error:
        raise RuntimeError("mlx gave no memory") from error
    # mlx's CPU build does not say that there was none; numpy then takes some of its own.
    if view.flags.owndata and view.nbytes:
        raise RuntimeError("mlx gave no memory")
    return loaded, view.reshape(-1).view(np.uint8)
