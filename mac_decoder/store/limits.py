"""How much of a volume the durable tier takes where nobody said so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NamedTuple

from protocol.errors import ConfigError

MIN_CAP: Final = 16 << 20
"""Below this the index alone would take a good part."""

NO_CAP: Final = 1 << 62
"""The cap of whoever only keeps house: opening a tier then deletes nothing for its size."""

_MOST: Final = 100 * 10**9
_MOST_KEPT_FREE: Final = 20 * 10**9


class Limits(NamedTuple):
    """The hard cap on all files, and the free space that is left to others, in bytes."""

    cap_bytes: int
    floor_bytes: int


def default_limits(directory: Path) -> Limits:
    """The smaller of 100 GB and a tenth of the volume; of 20 GB and a twentieth stay free.

    ``directory`` or one of its parents must exist.
    """
    there = directory
    while not there.exists():
        there = there.parent
    volume = os.statvfs(there)
    total = volume.f_blocks * volume.f_frsize
    return Limits(min(_MOST, total // 10), min(_MOST_KEPT_FREE, total // 20))


def check_cap(cap_bytes: int) -> None:
    """Raise ``ConfigError`` (``cache_cap_too_small``) below ``MIN_CAP``."""
    if cap_bytes < MIN_CAP:
        raise ConfigError(
            f"a durable tier needs at least {MIN_CAP} bytes",
            reason="cache_cap_too_small",
            field="cache_max",
            found=cap_bytes,
            expected=MIN_CAP,
            hint="raise --cache-max, or use --no-disk",
        )
