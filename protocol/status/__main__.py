"""``python -m protocol.status``: prints the JSON Schema, as ``docs/status.schema.json`` has it."""

from __future__ import annotations

import sys

from protocol.status.schema import text

if __name__ == "__main__":
    sys.stdout.write(text())
