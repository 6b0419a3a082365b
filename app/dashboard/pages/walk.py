"""The walk of the disk that all open Cache pages share: one at a time, and none for none."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from app.view import keeping
from app.view.facts import Fact
from mac_decoder.housekeeping.house import Housekeeping
from mac_decoder.housekeeping.operations import Operation
from mac_decoder.store.ledger import Tally
from protocol.errors import BatonError

log = logging.getLogger(__name__)

AGE_S: Final = 60.0
"""How old what a walk found may be."""


class Walk:
    """Belongs to the event loop's thread."""

    def __init__(self, house: Housekeeping | None) -> None:
        self._house = house
        self._found: tuple[Fact, ...] = ()
        self.kinds: Mapping[str, Tally] = {}
        """Files by kind, as the latest walk counted them."""
        self._walking: asyncio.Task[None] | None = None
        self._ended_at = 0.0
        self._after: Operation[Any] | None = None

    async def found(self) -> tuple[Fact, ...]:
        """What the latest walk found; a new one where that is old, or of before an operation's
        end. Nothing where nothing is kept on disk.
        """
        house = self._house
        if house is None or not house.durable:
            return ()
        while self._walking is None or not self._walking.done() or self._is_old(house):
            if self._walking is None or self._walking.done():
                self._after = self._ended(house)
                self._walking = asyncio.create_task(self._walk(house))
            # Of many who wait for it each may leave.
            await asyncio.shield(self._walking)
        return self._found

    def _is_old(self, house: Housekeeping) -> bool:
        aged = time.monotonic() - self._ended_at >= AGE_S
        return aged or self._after is not self._ended(house)

    def _ended(self, house: Housekeeping) -> Operation[Any] | None:
        """The operation that ended last, as far as is known."""
        latest = house.latest
        return latest if latest is not None and latest.state != "running" else self._after

    async def _walk(self, house: Housekeeping) -> None:
        began = time.monotonic()
        try:
            footprint = await house.footprint()
        except BatonError as error:
            log.info("the disk was not walked (%s): %s", error.reason, error.message)
            # What an earlier one found may be long gone.
            self._found = keeping.not_walked(error.reason)
            self.kinds = {}
        else:
            self._found = keeping.footprint(footprint, time.monotonic() - began)
            self.kinds = footprint.kinds
        finally:
            self._ended_at = time.monotonic()
