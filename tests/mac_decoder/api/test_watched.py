"""What a client is owed at every step of its answer, should the process die there."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message

from mac_decoder.api import sse
from mac_decoder.api.deadlines import DeadlineProtocol
from mac_decoder.api.watched import _Noted
from mac_decoder.custody import Entry, Owed

START: Message = {"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)}
JSON: Message = {**START, "headers": [(b"content-type", b"application/json")]}
PIECE: Message = {"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True}
LAST: Message = {"type": "http.response.body", "body": b""}


def steps(
    messages: list[Message],
    *,
    waiting: int = 0,
    unread: bool = False,
    method: str = "POST",
    version: str = "1.1",
) -> list[Owed]:
    """What is owed before, within and after each ``send``, and when the application is left."""
    page = bytearray(1)
    entry = Entry(cast(Any, page), 0)
    found: list[Owed] = []
    transport = SimpleNamespace(get_write_buffer_size=lambda: waiting)
    protocol = SimpleNamespace(cycle=SimpleNamespace(more_body=unread), transport=transport)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        for message in messages:
            found.append(Owed(page[0]))
            await send(message)
        found.append(Owed(page[0]))

    async def write(_: Message) -> None:
        found.append(Owed(page[0]))

    async def main() -> None:
        noted = _Noted(app, cast(DeadlineProtocol, protocol), entry)
        scope = {"type": "http", "method": method, "http_version": version}
        await noted(scope, cast(Any, None), write)
        found.append(Owed(page[0]))

    asyncio.run(main())
    return found


N, A, H, E, U = Owed.NOTHING, Owed.ANSWER, Owed.HEAD, Owed.END, Owed.UNKNOWN


@pytest.mark.parametrize(
    ("messages", "given", "owed"),
    [
        ([START, PIECE, LAST], {}, [A, U, E, U, E, U, N, N]),
        ([START, PIECE], {}, [A, U, E, U, E, U]),
        ([JSON, PIECE, LAST], {}, [A, U, U, U, U, U, N, N]),
        ([START, PIECE, LAST], {"version": "1.0"}, [A, U, U, U, U, U, N, N]),
        ([START, PIECE, LAST], {"waiting": 1}, [U, U, U, U, U, U, U, U]),
        ([JSON, LAST], {"unread": True}, [A, U, U, U, U, U]),
        ([JSON, LAST], {"method": "HEAD"}, [H, U, U, U, N, N]),
        ([], {}, [A, U]),
    ],
    ids=["stream", "unfinished", "whole", "old", "slow", "body unread", "head", "none"],
)
def test_what_is_owed(messages: list[Message], given: dict[str, Any], owed: list[Owed]) -> None:
    assert steps(messages, **given) == owed
