"""``/status/stream``: who listens is told what changes, and nobody has to ask again.

Each connection has its own task, which wakes up when something was touched, and now and then
for what touches nothing (a link that breaks). It takes the board's snapshot, compares it with
the one that it told last, and tells the difference. A client that does not read holds up this
task alone, and is left soon.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

from starlette.websockets import WebSocket, WebSocketDisconnect

from mac_decoder.api.guard import KeyGuard, refuse
from mac_decoder.api.service import Service
from mac_decoder.status.board import SHARED_S, until_beat
from protocol.errors import CapacityError
from protocol.status.snapshot import VERSION
from protocol.status.stream import FULL_EVERY_S, Full, Hello, Message, diff, encode

_LOOK_S: Final = 0.5
"""How long what touches nothing may stay unnoticed."""

_UNWANTED: Final = 1008
"""RFC 6455: what came violates a policy."""


async def answer(service: Service, websocket: WebSocket) -> None:
    """Serve one connection until it ends; refused where there are too many
    (``too_many_streams``).
    """
    if service.streams >= service.settings.max_streams:
        busy = CapacityError("too many clients follow the status", reason="too_many_streams")
        service.door.refusals.count(busy.reason)
        await refuse(busy, websocket.scope, websocket.receive, websocket.send)
        return
    service.streams += 1
    try:
        with service.board.listening() as changed:
            await websocket.accept()
            told = _Telling(service, websocket, changed)
            try:
                await told.run()
            except (WebSocketDisconnect, TimeoutError):
                # It has left, or takes nothing: then it gets nothing more, not even a goodbye.
                return
            finally:
                told.end()
    finally:
        service.streams -= 1


class _Telling:
    """One connection."""

    def __init__(self, service: Service, websocket: WebSocket, changed: asyncio.Event) -> None:
        self._service = service
        self._websocket = websocket
        self._changed = changed
        self._heard = asyncio.ensure_future(websocket.receive())

    def end(self) -> None:
        self._heard.cancel()

    async def run(self) -> None:
        board, clock = self._service.board, asyncio.get_running_loop().time
        known = (await board.now(SHARED_S)).snapshot
        process = known.decoder.process
        await self._send(
            Hello(at=_now(), version=VERSION, process=process, full_every_s=FULL_EVERY_S)
        )
        await self._send(Full(at=_now(), snapshot=known))
        full_at = clock() + FULL_EVERY_S
        while await self._stays(until_beat(clock())) and await self._stays(
            _LOOK_S, until=self._changed
        ):
            self._changed.clear()
            found = (await board.now(SHARED_S)).snapshot
            if clock() >= full_at:
                full_at = clock() + FULL_EVERY_S
                await self._send(Full(at=_now(), snapshot=found))
            elif found is not known:
                await self._send(diff(known, found, _now()))
            known = found

    async def _send(self, message: Message) -> None:
        async with asyncio.timeout(self._service.settings.stream_stall_s):
            await self._websocket.send_text(encode(message).decode())

    async def _stays(self, seconds: float, until: asyncio.Event | None = None) -> bool:
        """Wait so long, or until the event is set; false once the client has no more to get."""
        waiting = None if until is None else asyncio.ensure_future(until.wait())
        try:
            both = {self._heard} if waiting is None else {self._heard, waiting}
            await asyncio.wait(both, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if waiting is not None:
                waiting.cancel()
        if self._heard.done():
            if self._heard.result()["type"] != "websocket.disconnect":
                await self._close(_UNWANTED, "nothing is taken from clients")
            return False
        if not self._websocket.scope[KeyGuard.ALLOWED]():
            await self._close(_UNWANTED, "the API key is not valid any more")
            return False
        return True

    async def _close(self, code: int, reason: str) -> None:
        async with asyncio.timeout(self._service.settings.stream_stall_s):
            await self._websocket.close(code, reason)


def _now() -> float:
    return round(time.time(), 3)
