"""Compares the two frameworks on one prompt, through the code that a real handoff runs.

torch prefills and its rows are placed in a shadow and installed; MLX prefills the same
tokens itself; then rows, states and the tokens that follow are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rich.table import Table

from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.errors import ConfigError
from protocol.layout import (
    KEY,
    STATE,
    VALUE,
    Layout,
    RecurrentLayer,
    Slot,
    regions,
    row_bytes,
)

PROBE_TOKENS: Final = 96
"""Prompt positions that both frameworks prefill."""

FOLLOWING: Final = 32
"""Tokens of the text after them, over which the next token is compared."""

STEP: Final = 64
"""Tile of MLX's own prefill."""

MEMORY_SHARE: Final = 0.6
"""How much of the available memory a probe may fill with weights."""

KV_BOUND: Final = {"float32": 1e-3, "bfloat16": 1.5e-1, "float16": 2e-2}
RECURRENT_BOUND: Final = 2e-2
"""Largest relative error that is noise; meaning differs by orders more. Delta nets amplify."""

AGREEMENT_BOUND: Final = {"float32": 0.95, "bfloat16": 0.8, "float16": 0.9}
"""Smallest share of equal next tokens; near ties flip in the short formats."""

Rows = dict[tuple[int, int], np.ndarray]


@dataclass(frozen=True)
class Agreement:
    """How far torch and MLX are apart on one prompt.

    ``errors`` is per layer: the largest difference of any row or state element, relative to
    the largest magnitude in that array. ``agreement`` is the share of equal next tokens.
    """

    model: str
    dtype: str
    recurrent: bool
    positions: int
    errors: tuple[float, ...]
    agreement: float
    compared: int

    @property
    def worst(self) -> float:
        """The largest error of any layer."""
        return float(np.max(self.errors))

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "dtype": self.dtype,
            "positions": self.positions,
            "kv_error": self.worst,
            "kv_error_by_layer": list(self.errors),
            "argmax_agreement": self.agreement,
            "argmax_compared": self.compared,
        }

    def table(self) -> Table:
        """For people."""
        table = Table(title=f"torch against MLX, {self.positions} positions, {self.dtype}")
        table.add_column("")
        table.add_column("found", justify="right")
        table.add_column("bound", justify="right")
        table.add_row("largest relative KV error", f"{self.worst:.2e}", f"{kv_bound(self):.0e}")
        table.add_row("  first layer", f"{self.errors[0]:.2e}", "")
        table.add_row("  last layer", f"{self.errors[-1]:.2e}", "")
        table.add_row(
            f"same next token, of {self.compared}",
            f"{self.agreement:.1%}",
            f"{AGREEMENT_BOUND[self.dtype]:.0%}",
        )
        return table


def kv_bound(found: Agreement) -> float:
    """The bound that holds for this dtype and these kinds of layers."""
    bound = KV_BOUND[found.dtype]
    return max(bound, RECURRENT_BOUND) if found.recurrent else bound


def require_agreement(found: Agreement) -> None:
    """Raise ConfigError ``frameworks_differ`` when a probe is beyond its bounds."""
    if found.worst <= kv_bound(found) and found.agreement >= AGREEMENT_BOUND[found.dtype]:
        return
    raise ConfigError(
        "torch and MLX read this checkpoint differently",
        reason="frameworks_differ",
        field="kv_error, argmax_agreement",
        found=f"{found.worst:.2e}, {found.agreement:.1%}",
        expected=f"at most {kv_bound(found):.0e}, at least {AGREEMENT_BOUND[found.dtype]:.0%}",
        hint="the model would answer fluently and wrongly; nothing was kept",
    )


def compare(model: Path) -> Agreement:
    """Run the probe on a checkpoint. Blocking; needs both frameworks in this process.

    Both compute in float32 where that fits in memory, so that what differs is meaning and
    not rounding; else in the checkpoint's own dtype, with wider bounds.
    """
    from mac_decoder.engine import model as decoder_side
    from mac_decoder.engine.prefill import LocalPrefill
    from mac_decoder.engine.probe import likeliest
    from mac_decoder.kv.install import build, extract

    checkpoint = in_float32(read_checkpoint(model))
    # One framework after the other, so that the model is in memory once.
    tokens = probe_tokens(checkpoint)
    end = len(tokens) - FOLLOWING
    theirs, shadow = prefill_with_torch(checkpoint, tokens, end)
    loaded = decoder_side.load(checkpoint, cast=True)
    local = LocalPrefill(loaded.model, tokens[: end + 1], STEP)
    while local.remaining:
        local.advance()
    ours = extract(local.caches, checkpoint.layout, end)
    installed = build(loaded.model, checkpoint.layout, shadow)
    said = likeliest(loaded.model, installed, tokens[end:])
    expected = likeliest(loaded.model, local.caches, tokens[end:])
    return Agreement(
        checkpoint.name,
        checkpoint.dtype,
        any(isinstance(layer, RecurrentLayer) for layer in checkpoint.layout.layers),
        end,
        layer_errors(checkpoint.layout, theirs, ours),
        float(np.mean([a == b for a, b in zip(said, expected, strict=True)])),
        len(expected),
    )


def in_float32(checkpoint: Checkpoint) -> Checkpoint:
    """The same checkpoint, to be computed in float32, if memory allows it."""
    bits = {"float32": 32, "bfloat16": 16, "float16": 16}[checkpoint.dtype]
    if checkpoint.quantisation is not None:
        bits = checkpoint.quantisation["bits"]
    if checkpoint.nbytes * 32 / bits > psutil.virtual_memory().available * MEMORY_SHARE:
        return checkpoint
    layout = checkpoint.architecture.layout(checkpoint.config, "float32")
    return replace(checkpoint, dtype="float32", layout=layout)


def probe_tokens(checkpoint: Checkpoint) -> list[int]:
    """The probe's tokens: real text, repeated when a small tokenizer makes it short."""
    from mac_decoder.engine.probe import encode

    text = (files("app") / "demo_document.txt").read_text()
    wanted = PROBE_TOKENS + FOLLOWING
    found = encode(checkpoint.path, text)
    while len(found) < wanted:
        found += found
    return found[:wanted]


def prefill_with_torch(checkpoint: Checkpoint, tokens: Sequence[int], end: int) -> tuple[Rows, Any]:
    """Prefill ``[0, end)`` with torch: its rows as flat bytes, and a shadow that holds them."""
    from gb10_producer import model as producer_side
    from gb10_producer import prefill
    from mac_decoder.kv.shadow import Shadow

    layout = checkpoint.layout
    shadow = Shadow(layout, 0, end)
    first = {(region.index, region.role): region.first for region in regions(layout, 0, end)}
    pieces: dict[tuple[int, int], list[np.ndarray]] = {place: [] for place in first}

    def place(index: int, role: int, start: int, last: int, width: int, data: memoryview) -> None:
        if not data.nbytes:
            return
        offset = (start - first[index, role]) * width
        shadow.place(Slot(0, index, role, start, last, offset, data.nbytes))[:] = data
        pieces[index, role].append(np.frombuffer(data, np.uint8))

    def emit(item: prefill.Rows | prefill.State) -> None:
        if isinstance(item, prefill.State):
            place(item.index, STATE + item.number, end, end, 0, item.data)
            return
        layer = layout.layers[item.index]
        assert not isinstance(layer, RecurrentLayer)
        for role, data in ((KEY, item.key), (VALUE, item.value)):
            place(item.index, role, item.first, item.last, row_bytes(layer, role), data)

    source = prefill.TorchPrefiller(producer_side.load(checkpoint, "auto", progress=False))
    source.prefill(tokens, 0, end, emit, lambda: False, lambda _: None)
    rows = {
        place: np.concatenate(parts) if parts else np.empty(0, np.uint8)
        for place, parts in pieces.items()
    }
    return rows, shadow


def layer_errors(layout: Layout, found: Rows, expected: Rows) -> tuple[float, ...]:
    """Per layer the largest error of its arrays, relative to each array's largest magnitude."""
    worst = [0.0] * len(layout.layers)
    for (index, role), data in expected.items():
        ours, theirs = (floats(layout, index, role, one) for one in (data, found[index, role]))
        if not ours.size:
            continue
        scale = float(np.abs(ours).max()) or 1.0
        # numpy's maximum lets NaN through, where Python's max may drop it
        worst[index] = float(np.maximum(worst[index], np.abs(theirs - ours).max() / scale))
    return tuple(worst)


def floats(layout: Layout, index: int, role: int, data: np.ndarray) -> np.ndarray:
    """The elements of one region's bytes as float32."""
    layer = layout.layers[index]
    if isinstance(layer, RecurrentLayer):
        dtype = layer.states[role - STATE].dtype
    else:
        dtype = layer.dtype
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32)
