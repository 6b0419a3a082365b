"""What multiplies where MLX has no GPU. On Linux its wheels bring a reference BLAS, which is slow:
SmolLM2-135M in float32 prefills at 9 tokens/s with it and at 180 with OpenBLAS, on two cores.

A system's OpenBLAS takes its place where there is one. Call :func:`use` before MLX is imported.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from typing import Final

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

AUTO: Final = "auto"
BUNDLED: Final = "bundled"

_KNOWN: Final = ("libopenblas.so.0", "libopenblasp.so.0")
"""What Debian, Fedora, Arch and openSUSE call it; the dynamic linker knows where it is."""


def use(choice: str) -> str:
    """Have MLX, once it is imported, multiply with ``choice``; return what it will be, or "".

    ``auto`` is OpenBLAS if the system has it, ``bundled`` what MLX brings; anything else is a
    library's file or name. Raises ``ConfigError`` (``blas_unusable``) for such a one that cannot
    be loaded.
    """
    if sys.platform != "linux" or choice == BUNDLED:
        return ""
    for name in _KNOWN if choice == AUTO else (choice,):
        try:
            # The linker looks a symbol up in what was loaded like this first, in MLX's own last.
            loaded = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            if choice != AUTO:
                raise _unusable(choice, str(error)) from error
            continue
        if hasattr(loaded, "cblas_sgemm"):
            return name
        if choice != AUTO:
            raise _unusable(choice, "it has no cblas_sgemm")
    return ""


def _unusable(choice: str, why: str) -> ConfigError:
    return ConfigError(
        f"no BLAS can be loaded from there: {why}",
        reason="blas_unusable",
        field="blas",
        found=choice,
        hint=f"give a library's file, {AUTO} or {BUNDLED}",
    )
