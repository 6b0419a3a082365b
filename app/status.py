"""`baton status`: what a running decoder says about itself, and how to ask it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from app.terminal import out, print_json
from app.view.words import human_bytes
from protocol.errors import ConfigError, TransferError

DEFAULT_URL = "http://127.0.0.1:8000"
DEFAULT_PORT: Final = 8000

STATE_STYLES: Final = {"ready": "green", "refused": "bold red", "unfit": "bold red"}
"""How a link's state looks; the others are yellow."""


def status(
    url: Annotated[
        str, typer.Argument(help="Where the decoder listens: HOST:PORT or a URL.")
    ] = DEFAULT_URL,
    api_keys_file: Annotated[
        Path | None, typer.Option(help="The decoder's file of API keys, if it asks for one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decoder's JSON.")] = False,
) -> None:
    """Show what a running decoder says about itself, its producer and its queue."""
    found = fetch_status(url, key=None if api_keys_file is None else first_key(api_keys_file))
    if as_json:
        print_json(found)
        return
    table = Table.grid(padding=(0, 2))
    for title, text in summary(found):
        table.add_row(f"[bold]{title}[/]", text)
    out.print(table)


def fetch_status(url: str, timeout_s: float = 5.0, key: str | None = None) -> dict[str, Any]:
    """The JSON of ``GET /status`` of the decoder at ``url`` (see :func:`base_url`).

    Raises TransferError: ``decoder_unreachable`` when nobody answers as a decoder does, else
    the decoder's own reason (``decoder_starting``, ``invalid_api_key``, ...).
    """
    address = f"{base_url(url)}/status"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        response = httpx.get(address, timeout=timeout_s, headers=headers)
        body = response.json()
        if response.status_code == 200 and isinstance(body, dict):
            return body
        code, message = str(body["error"]["code"]), str(body["error"]["message"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError) as error:
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


def base_url(address: str) -> str:
    """``scheme://host:port`` of what people type: ``host``, ``host:port``, or a URL, also the
    one that OpenAI clients are given (``.../v1``).

    Raises ConfigError ``address_invalid``.
    """
    text = address.strip()
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    path = parts.path.rstrip("/").removesuffix("/status").removesuffix("/v1")
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise ConfigError(
            f"{address} is no address of a decoder",
            reason="address_invalid",
            field="url",
            expected="HOST:PORT, or http://HOST:PORT",
        )
    if port is None and "://" not in text:
        port = DEFAULT_PORT
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{'' if port is None else f':{port}'}{path}"


def first_key(path: Path) -> str:
    """The first API key in a file. Raises ``ConfigError`` (``api_keys_invalid``)."""
    try:
        return path.read_text().split()[0]
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise ConfigError(
            f"there is no API key in {path}", reason="api_keys_invalid", field="api-keys-file"
        ) from error


def summary(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The rows that people are shown of a status: a title, and text with markup.

    What a decoder of another release does not tell has no row.
    """
    engine: Mapping[str, Any] = found.get("engine") or {}
    yield "model", escape(str(found.get("model", "?")))
    fault = engine.get("fault")
    not_ready = f"[bold red]not ready[/]{f': {escape(str(fault))}' if fault else ''}"
    yield "ready", "[green]yes[/]" if engine.get("ready") else not_ready
    supervisor = found.get("supervisor") or {}
    if supervisor.get("restarts"):
        last = escape(str(supervisor.get("last_fault")))
        yield "restarts", f"{supervisor['restarts']}, the last after {last}"
    yield "requests", _requests(engine)
    if engine.get("ended"):
        tokens = engine.get("generated_tokens", 0)
        yield "ended", f"{_counts(engine['ended'])}; {tokens:,} tokens generated"
    yield from _producer(engine)
    if engine.get("rates"):
        yield "rates", _rates(engine)
    if engine.get("cache_bytes_limit"):
        reserved = human_bytes(engine.get("cache_bytes_reserved", 0))
        yield "memory", f"{reserved} of {human_bytes(engine['cache_bytes_limit'])} for requests"
    yield from _cache(found.get("cache") or {})


def _requests(engine: Mapping[str, Any]) -> str:
    stages = {name: count for name, count in (engine.get("requests") or {}).items() if count}
    text = f"{engine.get('open', 0)} open of at most {engine.get('open_limit', '?')}"
    return f"{text} ({_counts(stages)})" if stages else text


def _producer(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    links = engine.get("links") or []
    if not links:
        yield "producer", "none: every prompt is prefilled here"
        return
    for number, link in enumerate(links, 1):
        yield from _link(f"producer {number}" if len(links) > 1 else "producer", link)
    if engine.get("remote_threshold") is not None:
        yield "asked from", f"{engine['remote_threshold']:,} tokens on"
    fallbacks = engine.get("fallbacks")
    yield "fallbacks", f"{_counts(fallbacks)} (prefilled here instead)" if fallbacks else "none"


def _link(name: str, link: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    state = str(link.get("state"))
    text = f"[{STATE_STYLES.get(state, 'yellow')}]{state}[/]"
    if link.get("reason"):
        text += f" ({link['reason']})"
    if link.get("detail"):
        text += f": {escape(str(link['detail']))}"
    if state in ("down", "refused"):
        text += f"; tried {link.get('attempts', 0)} times, again in {link.get('retry_in_s', 0)} s"
    yield name, f"{escape(str(link['name']))} {text}" if link.get("name") else text
    handoffs = f"{link.get('handoffs', 0)} received"
    if link.get("resumed"):
        handoffs += f", {link['resumed']} lost connections gone on from"
    failures = link.get("failures")
    yield "handoffs", f"{handoffs}; failed: {_counts(failures)}" if failures else handoffs


def _rates(engine: Mapping[str, Any]) -> str:
    rates, link = engine["rates"], (engine.get("links") or [{}])[0]
    known = (
        ("prefill here", rates.get("local_tokens_per_s"), "tokens/s"),
        ("producer", rates.get("producer_tokens_per_s"), "tokens/s"),
        ("overhead of a handoff", rates.get("handoff_overhead_ms"), "ms"),
        ("round trip", link.get("round_trip_ms"), "ms"),
    )
    parts = [f"{name} {value:,.1f} {unit}" for name, value, unit in known if value]
    if wire := rates.get("link_bytes_per_s"):
        parts.append(f"link {human_bytes(wire)}/s")
    return ", ".join(parts) or "nothing measured yet"


def _cache(cache: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tiers = (
        ("live", "sequences", "bytes", None),
        ("resident", "cuts", "used_bytes", "budget_bytes"),
        ("durable", "cuts", "on_disk", "cap_bytes"),
    )
    for name, counted, used, most in tiers:
        tier = cache.get(name)
        if not tier:
            continue
        text = f"{tier.get(counted, 0):,} {counted}, {human_bytes(tier.get(used, 0))}"
        yield f"{name} cache", f"{text} of {human_bytes(tier[most])}" if most in tier else text
    counters = cache.get("counters")
    if counters:
        hits, misses = counters.get("cache_hits", 0), counters.get("cache_misses", 0)
        continued = counters.get("session_continuation_hits", 0)
        yield "reuse", f"{hits} hits, {misses} misses, {continued} continued live"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {escape(name)}" for name, count in counts.items())
