"""`baton plan`: how many bytes a handoff of a prompt ships, by layer kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape
from rich.table import Table

from app.terminal import err, out, print_json
from app.view.words import human_bytes
from protocol.architectures import text_config
from protocol.checkpoint import read_config, read_layout
from protocol.errors import ConfigError, RequestError
from protocol.layout import Layout, SlidingLayer, extra_cuts, payload_bytes, regions
from protocol.layouts_named import named

USUAL_PROMPT: Final = 32_768
"""A long document, or a coding agent's prompt after some turns."""


@dataclass(frozen=True)
class KindPlan:
    """What all layers of one kind (and one window) ship; bytes are sums over these layers."""

    kind: str
    window: int | None
    layers: int
    first: int
    last: int
    payload_bytes: int
    full_bytes: int


@dataclass(frozen=True)
class HandoffPlan:
    """The bytes of a handoff over ``[held, prompt - 1)``; ``share`` is payload over full."""

    prompt: int
    held: int
    extra_cuts: tuple[int, ...]
    payload_bytes: int
    full_bytes: int
    share: float
    resent_window_bytes: int
    layers: tuple[KindPlan, ...]


def plan_handoff(layout: Layout, prompt: int, held: int, extra: Sequence[int] = ()) -> HandoffPlan:
    """Count the handoff for a prompt of ``prompt`` tokens of which ``held`` are held, with cuts
    at ``extra`` too.

    The boundary token is never shipped. ``resent_window_bytes`` counts the sliding layers
    whose suffix outruns their window: their whole window goes again, held or not. Raises
    RequestError ``prompt_out_of_range`` unless ``prompt >= 1``, ``held_out_of_range`` unless
    ``0 <= held <= prompt``, and ``extra_cut_out_of_range`` for one that no handoff brings.
    """
    if prompt < 1:
        raise RequestError(
            "a prompt has at least one token",
            reason="prompt_out_of_range",
            field="prompt",
            found=prompt,
            expected="1 or more",
        )
    if not 0 <= held <= prompt:
        raise RequestError(
            "a decoder holds no more tokens than the prompt has",
            reason="held_out_of_range",
            field="held",
            found=held,
            expected=f"0 to {prompt}",
        )
    end = prompt - 1
    cut = min(held, end)
    cuts = extra_cuts(layout, cut, end, max(end, 1), extra)
    if wrong := sorted({*extra} - {*cuts}):
        raise RequestError(
            "no handoff brings a cut there",
            reason="extra_cut_out_of_range",
            field="extra-cut",
            found=wrong[0],
            expected=f"{_lowest(layout, cut, end)} to {end - 1}",
        )
    payload, full = payload_bytes(layout, cut, end, cuts), payload_bytes(layout, 0, end, cuts)
    resent = sum(
        region.nbytes
        for region in regions(layout, cut, end, cuts)
        if isinstance(layer := layout.layers[region.index], SlidingLayer)
        and 0 < cut < (*cuts, end)[0] - layer.window
    )
    share = payload / full if full else 0.0
    kinds = _by_kind(layout, cut, end, cuts)
    return HandoffPlan(prompt, held, cuts, payload, full, share, resent, kinds)


def _lowest(layout: Layout, cut: int, end: int) -> int:
    """The lowest extra cut that a handoff over ``[cut, end)`` brings, whatever the tile."""
    windows = [layer.window for layer in layout.layers if isinstance(layer, SlidingLayer)]
    return max(cut + 1, end - min(windows, default=end))


def _by_kind(layout: Layout, cut: int, end: int, extra: Sequence[int]) -> tuple[KindPlan, ...]:
    """One entry per kind and window, in the order in which the layout first has them."""
    members: dict[tuple[str, int | None], list[int]] = {}
    for index, layer in enumerate(layout.layers):
        window = layer.window if isinstance(layer, SlidingLayer) else None
        members.setdefault((layer.kind, window), []).append(index)
    shipped, whole = regions(layout, cut, end, extra), regions(layout, 0, end, extra)
    found: list[KindPlan] = []
    for (kind, window), indices in members.items():
        mine = [region for region in shipped if region.index in indices]
        found.append(
            KindPlan(
                kind,
                window,
                len(indices),
                mine[0].first if mine else end,
                mine[-1].last if mine else end,
                sum(region.nbytes for region in mine),
                sum(region.nbytes for region in whole if region.index in indices),
            )
        )
    return tuple(found)


def _context(model: Path) -> int | None:
    """The model's longest prompt and answer together, where its configuration says so."""
    found = text_config(read_config(model)).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def plan(
    prompt: Annotated[
        int | None,
        typer.Option(
            help=f"Tokens of the prompt; {USUAL_PROMPT:,} or half the model's context if not given."
        ),
    ] = None,
    held: Annotated[int, typer.Option(help="Tokens that the decoder already holds.")] = 0,
    extra_cut: Annotated[
        list[int] | None,
        typer.Option(help="Another position to bring a cut of: where the next turn will part."),
    ] = None,
    layout: Annotated[str | None, typer.Option(help="A named layout: muse-glimmer.")] = None,
    model: Annotated[Path | None, typer.Option(help="A checkpoint instead of a name.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show how many bytes a handoff ships, by layer kind."""
    if (layout is None) == (model is None):
        raise ConfigError(
            "say either --layout or --model",
            reason="layout_or_model",
            field="layout",
            hint="baton plan --model DIR, or --layout muse-glimmer",
        )
    chosen = read_layout(model) if model is not None else named(layout or "")
    context = None if model is None else _context(model)
    if prompt is None:
        prompt = USUAL_PROMPT if context is None else max(1, min(USUAL_PROMPT, context // 2))
    result = plan_handoff(chosen, prompt, held, extra_cut or ())
    if context is not None and prompt >= context:
        err.print(
            f"[yellow]remark[/]: {prompt:,} tokens leave no room for an answer in this model's "
            f"context of {context:,}; a decoder refuses the prompt"
        )
    if as_json:
        print_json(asdict(result))
        return
    table = Table(title=f"handoff of {prompt:,} prompt tokens, {held:,} held")
    for title in ("layers", "kind", "positions", "payload bytes", "full bytes"):
        table.add_column(title, justify="left" if title in ("kind", "positions") else "right")
    for kind in result.layers:
        name = kind.kind if kind.window is None else f"{kind.kind} ({kind.window:,})"
        positions = escape(f"[{kind.first:,}, {kind.last:,})")
        table.add_row(
            str(kind.layers), name, positions, f"{kind.payload_bytes:,}", f"{kind.full_bytes:,}"
        )
    table.add_section()
    table.add_row(
        str(len(chosen.layers)), "all", "", f"{result.payload_bytes:,}", f"{result.full_bytes:,}"
    )
    out.print(table)
    out.print(f"share of full  {result.share:.4%}   ({human_bytes(result.payload_bytes)})")
    if held:
        out.print(f"window sent again  {result.resent_window_bytes:,} bytes")
