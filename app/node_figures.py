"""What `baton node list` shows of each producer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from app.node_registry import link_name
from app.status import TONE_STYLES
from app.view.nodes import TONES
from app.view.words import human_bytes
from trust.peers import Peer

_NOT_THIS_MODEL: Final = ("refused", "unfit", "qualifying")
"""States of a link whose producer does not compute what the decoder would, or may not."""


@dataclass(frozen=True)
class Figures:
    """One producer. Figures are 0 where nothing was measured, times ``None`` where nothing was.

    ``state`` is the running decoder's; ``None`` where none says anything of it.
    """

    name: str
    address: str
    fingerprint: str
    state: str | None
    reason: str
    detail: str
    tokens_per_s: float
    tile: int
    link_bytes_per_s: float
    round_trip_ms: float
    qualified_at: int | None
    paired_at: int
    epoch: int


def figures(peer: Peer, links: Sequence[Mapping[str, Any]]) -> Figures:
    """What the decoder's ``links`` tell of ``peer``.

    A verdict on record counts only for the model that is served, and for what computes on both
    sides, which the decoder alone knows. One that failed is of no producer that is used, also where
    the link is down by now.
    """
    name = link_name(peer)
    link = next((link for link in links if link.get("name") == name), {})
    state = link.get("state")
    unfit = (link.get("qualified") or {}).get("fit") is False
    measured = {} if unfit or state in _NOT_THIS_MODEL else link
    qualified = measured.get("qualified") or {}
    return Figures(
        name=peer.name,
        address="" if peer.address is None else f"{peer.address.host}:{peer.address.port}",
        fingerprint=peer.fingerprint.hex(),
        state=state,
        reason=link.get("reason") or "",
        detail=link.get("detail") or "",
        tokens_per_s=measured.get("compute_tokens_per_s") or 0,
        tile=measured.get("tile") or 0,
        link_bytes_per_s=measured.get("wire_bytes_per_s") or 0,
        round_trip_ms=measured.get("round_trip_ms") or 0,
        qualified_at=qualified.get("at"),
        paired_at=peer.paired_at,
        epoch=peer.record.epoch,
    )


def table(rows: Iterable[Figures], without_state: str) -> Table:
    """A few lines for each; ``without_state`` is told where no decoder says anything."""
    made = Table.grid(padding=(0, 2))
    for row in rows:
        lines = [f"{escape(row.address)}  {_state(row, without_state)}"]
        if measured := ", ".join(_measured(row)):
            lines.append(measured)
        past = "" if row.qualified_at is None else f"qualified {_when(row.qualified_at)}, "
        lines.append(f"[dim]{past}paired {_when(row.paired_at)}, epoch {row.epoch}[/]")
        made.add_row(f"[bold]{escape(row.name)}[/]", "\n".join(lines))
    return made


def _measured(row: Figures) -> Iterator[str]:
    if row.tokens_per_s:
        yield f"{row.tokens_per_s:,.0f} tokens/s"
    if row.tile:
        yield f"tiles of {row.tile}"
    if row.link_bytes_per_s:
        yield f"link {human_bytes(row.link_bytes_per_s)}/s"
    if row.round_trip_ms:
        yield f"round trip {row.round_trip_ms:.1f} ms"


def _state(row: Figures, without: str) -> str:
    if row.state is None:
        return escape(without)
    style = TONE_STYLES[TONES.get(row.state, "busy")] or "none"
    text = f"[{style}]{escape(row.state)}[/]"
    if row.state == "ready":
        return text
    text += f" ({escape(row.reason)})" if row.reason else ""
    return f"{text}: {escape(row.detail)}" if row.detail else text


def _when(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M}"
