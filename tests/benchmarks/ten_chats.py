"""How much of ordinary chats is a delta. Run: python -m tests.benchmarks.ten_chats

Ten chats of ten turns, with random lengths (seeded), are held in rotation: the first turn of
each, then the second of each, through the HTTP endpoint of a real decoder with a real producer.
Told are, for each model and lane:

``could_be_deltas``
    turns whose prompt shares a whole tile or more with an earlier prompt. Counted here, from
    the tokens, and not by the decoder.
``deltas`` and ``share``
    those of them that were deltas, and the quotient.
``sources``, ``reasons``
    who had the cache of a turn, and why, by how often.
``shipped_bytes``, ``computed_tokens``
    payload of the handoffs, and what the producer computed; beside them ``full_bytes`` and
    ``full_tokens``, which as many full handoffs would have cost.
``ttft_ms``
    the median.

On the lane ``remote`` the bar is a share of 1. On ``auto`` the measured rates decide; a decoder
that has measured none computes a rest of less than 256 tokens itself, and most turns have no more.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import jinja2
from tokenizers import Tokenizer

from app.loopback import loopback
from protocol.checkpoint import read_layout
from protocol.layout import payload_bytes
from tests import checkpoints

TILE: Final = 64
KINDS: Final = ("llama", "muse_glimmer")
LANES: Final = ("remote", "auto")
_ANSWER_S: Final = 120.0
_TEXT: Final = (
    "the a runner river garden bridge document baton cache number paris summarise answer machine "
    "reads writes prompts replies what why carries stays before after seven small"
)
_WORDS: Final = _TEXT.split()

Messages = list[dict[str, str]]


class Rendering:
    """Prompts in tokens, by the checkpoint's own files and none of Baton's code."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._template = jinja2.Template((model / "chat_template.jinja").read_text())

    def tokens(self, messages: Messages) -> list[int]:
        """What a model reads before it answers ``messages``."""
        text = self._template.render(messages=messages, add_generation_prompt=True)
        return self._tokenizer.encode(text, add_special_tokens=False).ids


@dataclass(frozen=True)
class Turn:
    """One answered prompt; ``shared`` tokens of it were in an earlier one."""

    shared: int
    prompt: int
    baton: dict[str, Any]

    @property
    def is_delta(self) -> bool:
        """Whether a producer sent what this decoder did not hold, and no more."""
        return self.baton["source"] == "remote" and self.baton["reused_tokens"] > 0


@dataclass
class Decoder:
    """A decoder that is asked, and what it was asked before."""

    url: str
    lane: str
    rendering: Rendering
    asked: list[list[int]] = field(default_factory=list)

    def answer(self, messages: Messages, most: int) -> tuple[str, Turn]:
        """Ask for the next message."""
        tokens = self.rendering.tokens(messages)
        shared = max((_alike(tokens, before) for before in self.asked), default=0)
        self.asked.append(tokens)
        body = {
            "model": self._model(),
            "messages": messages,
            "max_tokens": most,
            "temperature": 0,
            "baton": {"lane": self.lane},
        }
        with httpx.Client(timeout=_ANSWER_S) as client:
            response = client.post(f"{self.url}/v1/chat/completions", json=body)
        if response.status_code != 200:
            raise SystemExit(f"the decoder refused: {response.text[:2000]}")
        found = response.json()
        prompt = found["usage"]["prompt_tokens"]
        if prompt != len(tokens):
            raise SystemExit(f"{prompt} prompt tokens, where the template gives {len(tokens)}")
        text = found["choices"][0]["message"]["content"] or ""
        return text, Turn(shared, prompt, found["baton"])

    def _model(self) -> str:
        return httpx.get(f"{self.url}/v1/models", timeout=_ANSWER_S).json()["data"][0]["id"]


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))


def _said(draw: random.Random, longest: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(3, longest)))


def hold(decoder: Decoder, chats: int, turns: int, seed: int) -> list[Turn]:
    """All chats, turn by turn; every one of them begins with a message of its own."""
    draw = random.Random(seed)
    held: list[Messages] = [[] for _ in range(chats)]
    found: list[Turn] = []
    for turn in range(turns):
        for number, messages in enumerate(held):
            begins = f"{number} {_said(draw, 100)}" if turn == 0 else ""
            messages.append({"role": "user", "content": f"{begins} {_said(draw, 80)}".strip()})
            text, answered = decoder.answer(messages, draw.randint(4, 48))
            messages.append({"role": "assistant", "content": text})
            found.append(answered)
    return found


def figures(model: Path, turns: Sequence[Turn], tile: int) -> dict[str, Any]:
    """What :func:`hold` found, counted."""
    layout = read_layout(model)
    could_be = [turn for turn in turns if turn.shared >= tile]
    deltas = [turn for turn in turns if turn.is_delta]
    among = sum(turn.is_delta for turn in could_be)
    remote = [turn for turn in turns if turn.baton["source"] == "remote"]
    return {
        "turns": len(turns),
        "prompt_tokens": sum(turn.prompt for turn in turns),
        "longest_prompt": max(turn.prompt for turn in turns),
        "could_be_deltas": len(could_be),
        "deltas": len(deltas),
        "share": round(among / len(could_be), 4) if could_be else None,
        "sources": dict(Counter(turn.baton["source"] for turn in turns)),
        "reasons": dict(Counter(reason for turn in turns for reason in turn.baton["reasons"])),
        "shipped_bytes": sum(turn.baton["transferred_bytes"] for turn in turns),
        "full_bytes": sum(payload_bytes(layout, 0, turn.prompt - 1) for turn in remote),
        "computed_tokens": sum(turn.baton["computed_tokens"] for turn in remote),
        "full_tokens": sum(turn.prompt - 1 for turn in remote),
        "ttft_ms": round(median(turn.baton["ttft_ms"] for turn in turns), 2),
    }


def measure(model: Path, lane: str, chats: int, turns: int, seed: int, tile: int) -> list[Turn]:
    """Start both processes on ``model``, hold the chats, end both."""
    with loopback(
        model,
        producer_arguments=("--device", "cpu", "--tile", str(tile)),
        decoder_arguments=("--prefill-step", str(tile)),
    ) as processes:
        return hold(Decoder(processes.url, lane, Rendering(model)), chats, turns, seed)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=10)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--tile", type=int, default=TILE)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="tiny models")
    parser.add_argument("--lanes", nargs="*", default=list(LANES))
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for kind in arguments.kinds:
            model = checkpoints.make(kind, Path(place) / kind)
            for lane in arguments.lanes:
                sizes = arguments.chats, arguments.turns, arguments.seed, arguments.tile
                turns = measure(model, lane, *sizes)
                found[f"{kind}, {lane}"] = figures(model, turns, arguments.tile)
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
