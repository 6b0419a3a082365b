"""How exactly torch's prefill continues in mlx, on a real model and five real texts.

    python -m tests.benchmarks.exactness DIRECTORY [--json] [--texts N] [--tokens 64] [--only fp32]

``DIRECTORY`` holds checkpoints of SmolLM2 in ``fp32``, ``bf16``, ``q4`` and ``q8`` (those that
are missing are left out). For each, torch prefills with that very checkpoint, its rows are
installed in mlx-lm, and compared with mlx-lm's own prefill: the largest difference of keys and
values in each layer relative to the largest value, and greedy tokens. The last row is the
control that must fail: original weights behind the 4-bit decoder.

mlx's CPU backend is slow with a reference BLAS; preload an optimised one if there is one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from gb10_producer.prefill import TorchPrefiller
from mac_decoder.engine.model import LoadedModel, load
from mac_decoder.kv import install
from protocol.checkpoint import read_checkpoint
from protocol.layout import KEY, VALUE
from tests import crossing

TEXTS = Path(__file__).parent / "texts"
TILE = 512
VARIANTS = ("fp32", "q8", "q4", "bf16")
FP32_BOUND = 5e-5


@dataclass(frozen=True)
class TextResult:
    """One text: errors per layer, and what greedy decoding made of them.

    ``same_tokens`` counts free-running greedy tokens until the first that differs;
    ``equal_argmax`` is the share of equal argmaxes when both get mlx's own tokens.
    """

    text: str
    prompt_tokens: int
    key_error: list[float]
    value_error: list[float]
    rms_error: float
    same_tokens: int
    equal_argmax: float


@dataclass(frozen=True)
class RunResult:
    """One decoder's checkpoint, prefilled by torch with ``weights``."""

    decoder: str
    weights: str
    dtype: str
    new_tokens: int
    texts: list[TextResult]

    @property
    def worst(self) -> float:
        """The largest relative error in any layer of any text."""
        return max(max(*text.key_error, *text.value_error) for text in self.texts)

    @property
    def holds(self) -> bool:
        """Whether the fp32 promise is kept: within the bound, all tokens equal."""
        equal = all(text.same_tokens == self.new_tokens for text in self.texts)
        return self.worst <= FP32_BOUND and equal


def run(decoder: Path, weights: Path, texts: Sequence[Path], new_tokens: int) -> RunResult:
    """Compare torch with ``weights`` and mlx with ``decoder`` on all ``texts``."""
    loaded = load(read_checkpoint(decoder))
    prefiller = crossing.producer(weights, TILE)
    found = [_compare(loaded, prefiller, text, new_tokens) for text in texts]
    return RunResult(decoder.name, weights.name, loaded.checkpoint.dtype, new_tokens, found)


def _compare(
    loaded: LoadedModel, prefiller: TorchPrefiller, text: Path, new_tokens: int
) -> TextResult:
    prompt = [int(token) for token in loaded.tokenizer.encode(text.read_text())]
    end, layout = len(prompt) - 1, loaded.layout
    rows = crossing.collect(prefiller, prompt, 0, end)
    own = crossing.own_prefill(loaded.model, prompt, end, TILE)
    expected = install.extract(own, layout, end)
    if prefiller.layout != layout:
        raise SystemExit("the two checkpoints have other layouts")
    errors = crossing.errors(layout, rows, expected)
    theirs = crossing.installed(loaded.model, layout, rows, end, TILE)
    reference = crossing.greedy(loaded.model, own, prompt[-1], new_tokens)
    forced, free = _decode_beside(loaded.model, theirs, prompt[-1], reference)
    same = next((i for i, token in enumerate(free) if token != reference[i]), new_tokens)
    return TextResult(
        text=text.stem,
        prompt_tokens=len(prompt),
        key_error=[error for (_, role), error in errors.items() if role == KEY],
        value_error=[error for (_, role), error in errors.items() if role == VALUE],
        rms_error=statistics.median(
            _rms(crossing.floats(layout, place, rows[place]), crossing.floats(layout, place, data))
            for place, data in expected.items()
        ),
        same_tokens=same,
        equal_argmax=float(np.mean([a == b for a, b in zip(forced, reference, strict=True)])),
    )


def _decode_beside(
    model: Any, caches: list[Any], boundary: int, reference: list[int]
) -> tuple[list[int], list[int]]:
    """Argmaxes when fed ``reference``, and free-running tokens up to where they part.

    Up to the first difference both are the same computation.
    """
    forced: list[int] = []
    for token in [boundary, *reference[:-1]]:
        logits = model(mx.array([[token]]), cache=caches)[0, -1]
        forced.append(int(mx.argmax(logits).item()))
    parted = next((i for i, token in enumerate(forced) if token != reference[i]), len(forced))
    return forced, forced[: parted + 1]


def _rms(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def table(results: Sequence[RunResult]) -> str:
    """One line per run and text."""
    lines = [
        f"{'decoder':8} {'torch':6} {'text':10} {'tokens':>6} {'K max':>9} {'V max':>9}"
        f" {'median':>9} {'tokens equal':>13} {'argmax':>7}"
    ]
    for result in results:
        for text in result.texts:
            lines.append(
                f"{result.decoder:8} {result.weights:6} {text.text:10} {text.prompt_tokens:6}"
                f" {max(text.key_error):9.1e} {max(text.value_error):9.1e} {text.rms_error:9.1e}"
                f" {text.same_tokens:6}/{result.new_tokens:<6} {text.equal_argmax:7.1%}"
            )
        if result.dtype == "bfloat16":
            lines.append(_by_layer(result))
    return "\n".join(lines)


def _by_layer(result: RunResult) -> str:
    layers = range(len(result.texts[0].key_error))
    keys = [max(text.key_error[layer] for text in result.texts) for layer in layers]
    values = [max(text.value_error[layer] for text in result.texts) for layer in layers]
    lines = [f"  {result.decoder} by layer, worst text: K / V relative error"]
    for start in range(0, len(keys), 6):
        stop = min(start + 6, len(keys))
        cells = (f"{i:3}: {keys[i]:.1%}/{values[i]:.1%}" for i in range(start, stop))
        lines.append("  " + "  ".join(cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or one JSON object; status 1 when an fp32 promise is broken."""
    parser = argparse.ArgumentParser(description="exactness of the handover on a real model")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--texts", type=int, default=5, help="shortest first")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", choices=VARIANTS, help="the decoder's checkpoint")
    options = parser.parse_args(arguments)
    texts = sorted(TEXTS.glob("*.txt"), key=lambda path: path.stat().st_size)[: options.texts]
    pairs = [(name, name) for name in VARIANTS] + [("q4", "fp32")]
    if options.only is not None:
        pairs = [pair for pair in pairs if pair[0] == options.only]
    results: list[RunResult] = []
    started = time.monotonic()
    for decoder, weights in pairs:
        folders = [options.directory / decoder, options.directory / weights]
        if all(folder.is_dir() for folder in folders):
            results.append(run(*folders, texts, options.tokens))
            if not options.json:
                print(table(results[-1:]), flush=True)
    promised = [r for r in results if r.dtype == "float32" and r.decoder == r.weights]
    control = [r for r in results if r.decoder != r.weights]
    passed = all(r.holds for r in promised) and not any(r.holds for r in control)
    if options.json:
        found = [asdict(r) | {"worst": r.worst, "holds": r.holds} for r in results]
        print(json.dumps({"passed": passed, "bound": FP32_BOUND, "runs": found}))
    else:
        verdict = "holds" if passed else "is broken"
        print(f"the fp32 promise {verdict} ({time.monotonic() - started:.0f} s)")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
