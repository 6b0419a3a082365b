"""How many bytes all caches together may take on this machine."""

from __future__ import annotations

import mlx.core as mx
import psutil

RESERVE = 2 << 30
"""Kept free for activations, joining of batches and the rest of the system, in bytes."""

_MOST_RESIDENT = 8 << 30


def cache_budget(configured: int) -> int:
    """Bytes for caches; to be asked once the weights are in memory.

    ``configured`` where it is set. Else what Metal recommends to keep wired, less what MLX
    holds now and a reserve; without a GPU, half of what the system has available. At least
    an eighth of that first figure, so that a tight machine refuses long prompts, not all.
    """
    if configured > 0:
        return configured
    if mx.metal.is_available():
        recommended = int(mx.device_info()["max_recommended_working_set_size"])
        return max(recommended - mx.get_active_memory() - RESERVE, recommended // 8)
    return psutil.virtual_memory().available // 2


def resident_budget(configured: int | None) -> int:
    """Bytes for the resident tier; to be asked once the weights are in memory.

    ``configured`` where it is set. Else 8 GiB, or a quarter of what the system has left beyond
    the reserve, where that is less: the other quarters are for requests' own caches.
    """
    if configured is not None:
        return configured
    return min(_MOST_RESIDENT, max(psutil.virtual_memory().available - RESERVE, 0) // 4)


def default_step() -> int:
    """Tile of local prefill in tokens: short enough that decoding goes on beside it."""
    return 512 if mx.metal.is_available() else 64
