"""``python -m app.decoder``: as ``python -m mac_decoder``, with the dashboard on the same port.

Only what starts the decoder for a person comes here: `baton serve` and the service that it
installs. The supervisor starts its child by this module too, and the child alone makes pages.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from mac_decoder import __main__ as decoder

if TYPE_CHECKING:
    from mac_decoder.api.face import MakeFace

MODULE: Final = "app.decoder"


def main(argv: list[str] | None = None) -> int:
    """Run what the arguments ask for; the exit status is that of ``mac_decoder``."""
    return decoder.main(argv, MODULE, _dashboard)


def _dashboard() -> MakeFace:
    # Only in the child: the supervisor shows nothing.
    from app.dashboard.mount import Dashboard

    return Dashboard


if __name__ == "__main__":
    sys.exit(main())
