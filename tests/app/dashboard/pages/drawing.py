"""Pages drawn without a browser, and who would look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from app.dashboard.pages.screen import Change, Seen
from app.view.standing import Standing
from protocol.status.snapshot import Snapshot
from tests.app.view.snapshots import NOW

HERE = Standing("connected", "http://127.0.0.1:8000")


def seen(snapshot: Snapshot, now: float = NOW, *, may_manage: bool = False) -> Seen:
    return Seen(snapshot, now, HERE, may_manage)


class Looking:
    """A browser that only notes what it is told."""

    def __init__(self, *, manages: bool = False) -> None:
        self.manages = manages
        self.told: list[Change] = []
        self.salt = b"salt"

    def tell(self, found: Sequence[Change]) -> None:
        self.told += found

    def may_manage(self) -> bool:
        return self.manages

    def allowed(self) -> bool:
        return True

    def last(self, operation: str) -> Any:
        """What the latest change of this name was given."""
        return next(given for name, *given in reversed(self.told) if name == operation)
