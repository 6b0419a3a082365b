"""How far mlx-lm is from transformers on every tiny model, and the page that says so.

``python -m tests.measured_models`` measures all of them anew (or those named) and writes the
record (``tests/golden/models.json``) and ``docs/models.md``; tests hold both against the code.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from mac_decoder.engine.model import load
from protocol.architectures import ARCHITECTURES, REFUSED, Architecture, text_config
from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer
from tests import checkpoints, tiny_models
from tests.reference import torch_logits, torch_model
from tests.refused_models import REFUSED_VARIANTS

ROOT: Final = Path(__file__).resolve().parent.parent
RECORD: Final = ROOT / "tests" / "golden" / "models.json"
PAGE: Final = ROOT / "docs" / "models.md"

SHORT, LONG = 100, 300
CARRIED: Final = tuple(name for name in tiny_models.NAMES if name not in tiny_models.REFUSED)

SILENT = 0.05
"""A difference of logits (whose spread is 3 or more) above this is another model's answer."""


@dataclass(frozen=True)
class Measured:
    """Largest differences of logits, float32, random weights.

    ``alone`` is what mlx-lm does with the files and nothing else: ``same``, ``silent`` (loads
    and answers with other logits, off by ``alone_off``) or ``error``. ``short`` and ``long``
    are over the first 100 and all 300 positions, as Baton loads it; ``torch_self`` is
    transformers in one pass against transformers in passes of 64 and, where a layer is
    recurrent, token by token: there it runs another algorithm, the one that mlx-lm always runs.
    """

    alone: str
    alone_off: float
    short: float
    long: float
    torch_self: float


def prompt() -> list[int]:
    """The 300 tokens that every model is measured on."""
    return [int(token) for token in np.random.default_rng(11).integers(3, 500, LONG)]


def measure(path: Path, *, against_itself: bool = True) -> Measured:
    """Measure the checkpoint in ``path``; ``torch_self``, which takes longest, if asked for."""
    known, tokens, model = read_checkpoint(path), prompt(), torch_model(path)
    expected = torch_logits(model, tokens)
    alone, alone_off = _alone(path, expected)
    found = _logits(load(known).model, tokens)
    steps = [64] if against_itself else []
    if steps and any(isinstance(layer, RecurrentLayer) for layer in known.layout.layers):
        steps.append(1)
    return Measured(
        alone,
        alone_off,
        short=_off(found[:SHORT], expected[:SHORT]),
        long=_off(found, expected),
        torch_self=max((_off(torch_logits(model, tokens, n), expected) for n in steps), default=0),
    )


def _alone(path: Path, expected: np.ndarray) -> tuple[str, float]:
    from mlx_lm.utils import load_model

    try:
        model, _config = load_model(path)
    except (ValueError, TypeError, KeyError):
        return "error", 0.0
    off = _off(_logits(model, prompt()), expected)
    return ("silent" if off > SILENT else "same"), off


def _logits(model: Any, tokens: list[int]) -> np.ndarray:
    return np.array(model(mx.array([tokens]))[0].astype(mx.float32))


def _off(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def recorded() -> dict[str, Measured]:
    """The record of the last full measurement."""
    return {name: Measured(**row) for name, row in json.loads(RECORD.read_text()).items()}


def kinds(layout: Layout) -> str:
    """``2 full + 6 sliding`` for people."""
    names = {FullLayer: "full", SlidingLayer: "sliding", RecurrentLayer: "recurrent"}
    counts = Counter(names[type(layer)] for layer in layout.layers)
    return " + ".join(f"{counts[name]} {name}" for name in names.values() if counts[name])


def told(checkpoint: Checkpoint) -> list[str]:
    """Names of the fields that the decoder passes beside the file, where they say more."""
    overrides = checkpoint.architecture.mlx_overrides(checkpoint.config)
    given, passed = text_config(checkpoint.config), text_config(overrides)
    return sorted(name for name, value in passed.items() if given.get(name) != value)


_TWEAKS = {
    "round_embed_scale": "embedding scale rounded to bfloat16",
    "no_sliding_window": "window ignored",
    "yarn_truncate": "YaRN range rounded",
    "drop_vision": "vision weights left out",
    "split_experts": "experts split and transposed",
    "fold_multipliers": "key and value multipliers folded",
}


def _changed(tweaks: Sequence[str], config: dict[str, Any], otherwise: str) -> str:
    """The tweaks that change something for ``config``, for people."""
    text = text_config(config)
    ropes = text.get("rope_parameters") or {}
    nested = [part for part in ropes.values() if isinstance(part, dict)] or [ropes]
    idle = {
        "yarn_truncate": all(part.get("truncate", True) for part in nested),
        "no_sliding_window": text.get("sliding_window") is None
        or text.get("use_sliding_window") is False,
        "fold_multipliers": text.get("key_multiplier", 1.0) == 1.0,
    }
    return ", ".join(_TWEAKS[name] for name in tweaks if not idle.get(name)) or otherwise


_ALONE = {"same": "right", "error": "does not load", "silent": "**wrong, silently**"}


def _row(name: str, checkpoint: Checkpoint, found: Measured) -> str:
    entry: Architecture = checkpoint.architecture
    alone = _ALONE[found.alone]
    if found.alone == "silent":
        alone += f" (off by {found.alone_off:.1g})"
    fields = ", ".join(f"`{field}`" for field in told(checkpoint)) or "nothing"
    weights = _changed(entry.mlx_weights, checkpoint.config, "as stored")
    torch = _changed(entry.torch_tweaks, checkpoint.config, "as it is")
    off = f"{found.short:.0e} / {found.long:.0e}"
    own = f"{found.torch_self:.0e}"
    cells = (f"`{name}`", kinds(checkpoint.layout), alone, fields, weights, torch, off, own)
    return f"| {' | '.join(cells)} |"


def page(found: dict[str, Measured], described: dict[str, Checkpoint]) -> str:
    """``docs/models.md`` as it should be."""
    rows = "\n".join(_row(name, described[name], found[name]) for name in CARRIED)
    notes = "\n".join(f"- `{e.name}`: {e.note}." for e in ARCHITECTURES.values() if e.note)
    whole = "\n".join(f"- `{name}`: {why}." for name, why in REFUSED.items())
    variants = "\n".join(
        f"| `{case.base}` | {case.title} | `{case.field}` | {case.why} |"
        for case in REFUSED_VARIANTS
    )
    template = (ROOT / "tests" / "golden" / "models.template.md").read_text()
    return (
        template.replace("{{rows}}", rows)
        .replace("{{notes}}", notes)
        .replace("{{refused}}", whole)
        .replace("{{variants}}", variants)
    )


def main(names: Sequence[str]) -> None:
    """Measure ``names``, or everything where there are none; write the record and the page."""
    found: dict[str, Measured] = {}
    described: dict[str, Checkpoint] = {}
    with tempfile.TemporaryDirectory() as root:
        for name in CARRIED:
            path = checkpoints.make(name, Path(root) / name)
            described[name] = read_checkpoint(path)
            known = recorded() if names else {}
            found[name] = known[name] if names and name not in names else measure(path)
            print(name, found[name], flush=True)
        rows = {name: asdict(row) for name, row in found.items()}
        RECORD.write_text(json.dumps(rows, indent=1) + "\n")
        PAGE.write_text(page(found, described))


if __name__ == "__main__":
    main(sys.argv[1:])
