"""The reuse rooms load without mlx, files, databases or sockets: facts in, values out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mac_decoder.reuse

FORBIDDEN = ("mlx", "mlx_lm", "torch", "socket", "sqlite3", "asyncio", "websockets")


def test_the_rooms_load_without_a_device_or_io() -> None:
    names = sorted(path.stem for path in Path(mac_decoder.reuse.__file__).parent.glob("*.py"))
    rooms = ", ".join(f"mac_decoder.reuse.{name}" for name in names if name != "__init__")
    found, already = (
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"import sys, {what}; print([m for m in {FORBIDDEN} if m in sys.modules])",
            ],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for what in (rooms, "numpy, msgspec")
    )
    assert found == already
