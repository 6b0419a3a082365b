"""The wire's modules import nothing that reads a clock, a file, a socket or a device."""

from __future__ import annotations

import subprocess
import sys

WIRE = "protocol.handoff"
FORBIDDEN = ("socket", "asyncio", "mlx", "torch", "websockets", "ssl", "http")


def test_the_machines_load_without_io() -> None:
    code = f"import sys, {WIRE}; print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    # numpy itself loads some of the standard library; what it loads is taken off.
    base = f"import sys, numpy, msgspec; print([m for m in {FORBIDDEN!r} if m in sys.modules])"
    found, already = (
        subprocess.run(
            [sys.executable, "-c", source], capture_output=True, text=True, check=True
        ).stdout
        for source in (code, base)
    )
    assert found == already
