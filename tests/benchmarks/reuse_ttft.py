"""Time to first token of a warm prompt. Run: python -m tests.benchmarks.reuse_ttft --model DIR

The same prompt is asked again and again over HTTP, in turn of `baton serve`, which has it in
memory (its source is checked to be the resident tier, the whole prompt), and of
``mlx_lm.server``, which has it in its own prompt cache. On ``--model`` the bar is a ratio of 1.1
(SmolLM2: ``python -m tests.benchmarks.smollm2`` prints where it is), on a tiny model, where
nothing hides what Baton adds, 30 ms and 1 ms per 1,000 tokens more.

``phases`` are the medians of Baton's own report, in milliseconds; ``unbooked`` is what they
leave of the engine's time, and ``outside`` what the
client saw beyond the engine's time: HTTP, the template, the tokenizer, the first chunk's way.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests import checkpoints
from tests.benchmarks.servers import Heard, Server, ask, baton, mlx_lm, words

CONTEXT = 1 << 17
MOST_TRIES = 40
TOKENS = 4


def tiny(directory: Path) -> Path:
    """A tiny model with a long context, and its RoPE base where mlx-lm's own loader looks too."""
    path = checkpoints.make("llama", directory / "llama", spread=1 / 8)
    config = json.loads((path / "config.json").read_text())
    config["max_position_embeddings"] = CONTEXT
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (path / "config.json").write_text(json.dumps(config))
    return path


def heard_first(ours: Server, theirs: Server, text: str) -> list[dict[str, str]]:
    """Messages whose first token is text, and the same for both servers.

    A byte of a longer character, or the end of the turn, would be said with a later token.
    """
    for number in range(MOST_TRIES):
        messages = [{"role": "user", "content": f"{text} What is {number}?"}]
        alone = [ask(server, messages, 1).texts[:1] for server in (ours, theirs)]
        first = [ask(server, messages, TOKENS).texts[:1] for server in (ours, theirs)]
        # mlx-lm's drops a space at the start.
        if alone == first and len({said.strip() for (said,) in filter(None, alone)}) == 1:
            return messages
    raise SystemExit("no prompt was found whose first token is text")


def compared(ours: Server, theirs: Server, text: str, rounds: int, pause_s: float) -> Any:
    """Both servers on one prompt: medians and the paired ones."""
    messages = heard_first(ours, theirs, text)
    mine: list[Heard] = []
    base: list[Heard] = []
    for number in range(rounds + 1):
        both = [(ours, mine), (theirs, base)]
        for server, answers in both if number % 2 else both[::-1]:
            # What the last answer left is put away in the meantime, as between two turns.
            time.sleep(pause_s)
            answers.append(ask(server, messages, TOKENS))
    # The first pair warms both up.
    mine, base = mine[1:], base[1:]
    prompt = mine[0].usage["prompt_tokens"]
    for answer in mine:
        found = (answer.baton["source"], answer.baton["reused_tokens"])
        if found != ("resident", prompt - 1):
            raise SystemExit(f"not the hit that is measured: {answer.baton}")
    if any(answer.cached_tokens < prompt - 1 for answer in base):
        raise SystemExit("mlx_lm.server prefilled the prompt again")
    names = mine[0].baton["phases"]
    phases = {name: median(answer.baton["phases"][name] for answer in mine) for name in names}
    phases["unbooked"] = median(
        answer.baton["ttft_ms"] - sum(answer.baton["phases"].values()) for answer in mine
    )
    phases["outside"] = median(answer.ttft_ms - answer.baton["ttft_ms"] for answer in mine)
    pairs = list(zip(mine, base, strict=True))
    return {
        "prompt_tokens": prompt,
        "baton_ttft_ms": median(answer.ttft_ms for answer in mine),
        "mlx_lm_ttft_ms": median(answer.ttft_ms for answer in base),
        "ratio": median(a.ttft_ms / b.ttft_ms for a, b in pairs),
        "excess_ms": median(a.ttft_ms - b.ttft_ms for a, b in pairs),
        "excess_bar_ms": 30 + prompt / 1000,
        "phases": phases,
        "rounds": rounds,
    }


def on(model: Path, lengths: Sequence[int], rounds: int, pause_s: float) -> list[Any]:
    """The comparison on one checkpoint, for prompts of these lengths."""
    with baton(model, "--no-disk") as ours, mlx_lm(model) as theirs:
        return [compared(ours, theirs, words(model, length), rounds, pause_s) for length in lengths]


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a checkpoint that is compared by ratio")
    parser.add_argument("--tokens", type=int, default=300, help="length of its prompt")
    parser.add_argument("--lengths", type=int, nargs="*", default=[2000, 8000])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between two requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    if arguments.lengths:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny(Path(directory))
            found["tiny"] = on(model, arguments.lengths, arguments.rounds, arguments.pause)
    if arguments.model is not None:
        lengths = [arguments.tokens]
        found["model"] = on(arguments.model, lengths, arguments.rounds, arguments.pause)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, prompts in found.items():
        for figures in prompts:
            print(name)
            for key, value in figures.items():
                print(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")


if __name__ == "__main__":
    main()
