"""`baton status`: what a running decoder says about itself, and how to ask it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import httpx
import msgspec
import typer
from rich.table import Table
from rich.text import Text

from app import settings
from app.settings import DEFAULT_PORT
from app.terminal import out, print_json
from app.view.facts import Tone
from app.view.standing import known_code, one_line
from app.view.summary import summary
from protocol.errors import ConfigError, PeerProtocolError, TransferError
from protocol.status.snapshot import Snapshot
from trust import plain_file

DEFAULT_URL = "http://127.0.0.1:8000"

AS_SET: Final = f"as config.toml says, else {DEFAULT_URL}"
"""What help says of an address that was not typed."""

MOST_STATUS_BYTES: Final = 16 << 20
"""Of an answer: 200 requests and 50 events are a hundredth of it."""

MOST_KEYS_BYTES: Final = 1 << 16
"""Of a file of API keys: as many as `baton serve` takes."""

_MOST_LINE: Final = 600
"""Of one thing that the summary tells: what a person has to do stands at the end of it."""

_NO_ANSWER: Final = (
    *(httpx.HTTPError, httpx.InvalidURL, OSError),
    *(ValueError, LookupError, TypeError),
)
"""What asking for a status raises where no decoder answers, or something else does."""

TONE_STYLES: Final[Mapping[Tone, str]] = {
    "plain": "",
    "good": "green",
    "busy": "yellow",
    "warn": "yellow",
    "bad": "bold red",
}
"""How what is shown looks on a terminal."""


def status(
    url: Annotated[
        str | None,
        typer.Argument(help="Where the decoder listens: HOST:PORT or a URL.", show_default=AS_SET),
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="The decoder's file of API keys, if it asks for one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decoder's JSON.")] = False,
) -> None:
    """Show what a running decoder says about itself, its producer and its queue."""
    key = None if api_keys_file is None else first_key(api_keys_file)
    found = fetch_status(decoders_address(url), key=key)
    if as_json:
        print_json(found)
        return
    table = Table.grid(padding=(0, 2))
    for line in summary(snapshot_in(found), time.time()):
        text = Text(one_line(line.text, _MOST_LINE), TONE_STYLES[line.tone])
        table.add_row(f"[bold]{line.title}[/]", text)
    out.print(table)


def fetch_status(url: str, timeout_s: float = 5.0, key: str | None = None) -> dict[str, Any]:
    """The JSON of ``GET /status`` of the decoder at ``url`` (see :func:`base_url`).

    Raises TransferError: ``decoder_unreachable`` when nobody answers as a decoder does, else
    the decoder's own reason (``decoder_starting``, ``invalid_api_key``, ...; ``unknown`` where it
    gives none that could be one).
    """
    address = f"{base_url(url)}/status"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        status, raw = asyncio.run(_answer(address, headers, timeout_s))
        body = json.loads(raw)
        if status == httpx.codes.OK and isinstance(body, dict):
            return body
        code, message = known_code(body["error"]["code"]), one_line(str(body["error"]["message"]))
    except (*_NO_ANSWER, RecursionError) as error:
        raise TransferError(
            f"no decoder answers at {address}",
            reason="decoder_unreachable",
            field="url",
            found=type(error).__name__,
            hint="start one with `baton serve`, or give its address: baton status HOST:PORT",
        ) from error
    wants_key = code == "invalid_api_key"
    raise TransferError(
        f"the decoder at {address} says: {message}",
        reason=code,
        hint="give --api-keys-file, as `baton serve` has it" if wants_key else None,
    )


async def _answer(address: str, headers: dict[str, str], timeout_s: float) -> tuple[int, bytes]:
    """The status and body of an answer, all of which is here in time and fits.

    Raises ``TimeoutError``, ``ValueError`` (it is too long), ``httpx.HTTPError``.
    """
    async with (
        asyncio.timeout(timeout_s),
        httpx.AsyncClient(timeout=timeout_s, headers=headers) as asking,
        asking.stream("GET", address) as answer,
    ):
        body = bytearray()
        async for piece in answer.aiter_bytes():
            body += piece
            if len(body) > MOST_STATUS_BYTES:
                raise ValueError("it is too long")
        return answer.status_code, bytes(body)


def decoders_address(typed: str | None) -> str:
    """Where the decoder is: what was typed, what the settings say, or the usual address.

    Raises as ``settings.decoders_url``, where nothing was typed.
    """
    return typed if typed is not None else settings.decoders_url() or DEFAULT_URL


def base_url(address: str) -> str:
    """``scheme://host:port`` of what people type: ``host``, ``host:port``, or a URL, also the
    one that OpenAI clients are given (``.../v1``).

    Raises ConfigError ``address_invalid``.
    """
    text = address.strip()
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
        # What no name can be is found out here, and not where somebody connects.
        (host or "").encode("idna")
    except ValueError as error:
        raise _no_address(address) from error
    path = parts.path.rstrip("/").removesuffix("/status").removesuffix("/v1")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise _no_address(address)
    if not text.isprintable() or " " in text:
        raise _no_address(address)
    if port is None and "://" not in text:
        port = DEFAULT_PORT
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"


def _no_address(typed: str) -> ConfigError:
    return ConfigError(
        f"{one_line(typed)} is no address of a decoder",
        reason="address_invalid",
        field="url",
        expected="HOST:PORT, or http://HOST:PORT",
    )


def first_key(path: Path) -> str:
    """The first API key in a plain file. Raises ``ConfigError`` (``api_keys_invalid``)."""
    why: str | None = None
    try:
        words = plain_file.read(path, MOST_KEYS_BYTES).content.decode().split()
    except OSError as error:
        words, why = [], error.strerror
    except UnicodeDecodeError:
        words = []
    except ValueError as error:
        words, why = [], str(error)
    if not words:
        raise ConfigError(
            f"there is no API key in {path}{f': {why}' if why else ''}",
            reason="api_keys_invalid",
            field="api-keys-file",
        )
    return words[0]


def snapshot_in(found: Mapping[str, Any]) -> Snapshot:
    """The snapshot in the JSON of ``/status``.

    Raises PeerProtocolError (``status_version_differs``) where it has another form.
    """
    try:
        return msgspec.convert(found.get("snapshot"), Snapshot)
    except msgspec.ValidationError as error:
        raise PeerProtocolError(
            "the decoder's status is of another version",
            reason="status_version_differs",
            field="snapshot",
            hint="use the same release of Baton for both; --json prints what it says",
        ) from error
