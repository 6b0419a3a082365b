"""What a delta costs the producer. Run: python -m tests.benchmarks.delta_compute --model DIR

A decoder and a producer on one machine. In each round a new prompt is handed off in full, then one
as long that shares half of it, as a delta. The producer's times are compared in pairs, and so are
those to the first token. Bars: the delta takes the producer at most 0.6 of the full prompt's time,
and it computes the suffix and no more. The later half of a prompt attends to more: of a small model
and a long prompt it is most of the work, whoever does it.

``--control`` runs the producer without a prefix cache: then it computes everything.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np
from tokenizers import Tokenizer

from app.loopback import loopback
from app.status import fetch_status

RATIO_BAR: Final = 0.6
_ANSWER_S: Final = 600.0


def ask(url: str, model: str, tokens: Sequence[int]) -> dict[str, Any]:
    """The ``baton`` object of an answer of one token, which the producer must prefill."""
    body = {
        "model": model,
        "prompt": list(tokens),
        "max_tokens": 1,
        "temperature": 0,
        "baton": {"lane": "remote"},
    }
    connection = HTTPConnection(urlsplit(url).netloc, timeout=_ANSWER_S)
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    if "baton" not in answer or answer["baton"]["source"] != "remote":
        raise SystemExit(f"not the handoff that is measured: {answer}")
    return answer["baton"]


def on(model: Path, length: int, rounds: int, producer_arguments: tuple[str, ...]) -> Any:
    """The comparison on one checkpoint, with prompts that leave ``length`` tokens to prefill."""
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    draws = np.random.default_rng(17)

    def drawn(count: int) -> list[int]:
        # special tokens come first or last in every tokenizer's vocabulary
        return draws.integers(vocabulary // 4, vocabulary // 2, count).tolist()

    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    with loopback(model, producer_arguments=producer_arguments) as both:
        name = fetch_status(both.url)["model"]
        for number in range(rounds + 1):
            half = drawn(length // 2 + 1)
            first = [*half, *drawn(length - length // 2)]
            second = [*half, *drawn(length - length // 2)]
            pair = ask(both.url, name, first), ask(both.url, name, second)
            if number:  # the first warms up
                pairs.append(pair)
    fulls, deltas = zip(*pairs, strict=True)
    if any(full["reused_tokens"] or full["computed_tokens"] != length for full in fulls):
        raise SystemExit(f"not full prefills: {fulls}")
    return {
        "tokens": length,
        "delta_at": median(delta["reused_tokens"] for delta in deltas),
        "full_computed_tokens": length,
        "delta_computed_tokens": sorted({delta["computed_tokens"] for delta in deltas}),
        "delta_suffix_tokens": sorted({delta["prefilled_tokens"] for delta in deltas}),
        "full_producer_ms": _compute_ms(fulls),
        "delta_producer_ms": _compute_ms(deltas),
        "producer_ratio": median(_ratios(pairs, lambda baton: baton["phases"]["compute"])),
        "producer_ratio_bar": RATIO_BAR,
        "full_ttft_ms": median(full["ttft_ms"] for full in fulls),
        "delta_ttft_ms": median(delta["ttft_ms"] for delta in deltas),
        "ttft_ratio": median(_ratios(pairs, lambda baton: baton["ttft_ms"])),
        "rounds": rounds,
    }


def _compute_ms(answers: Sequence[dict[str, Any]]) -> float:
    return median(baton["phases"]["compute"] for baton in answers)


def _ratios(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]], of: Any) -> list[float]:
    return [of(delta) / of(full) for full, delta in pairs]


def main() -> None:
    """Read the command line, measure, print; fail where more than the suffix was computed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint")
    parser.add_argument("--tokens", type=int, default=2048, help="of a prompt, to be prefilled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--control", action="store_true", help="without a prefix cache")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    options = ("--prefix-cache", "0") if arguments.control else ()
    found = on(arguments.model, arguments.tokens, arguments.rounds, options)
    if arguments.json:
        print(json.dumps(found))
    else:
        for key, value in found.items():
            print(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")
    expected = [arguments.tokens] if arguments.control else found["delta_suffix_tokens"]
    if found["delta_computed_tokens"] != expected:
        raise SystemExit(f"computed {found['delta_computed_tokens']}, not {expected}")


if __name__ == "__main__":
    main()
