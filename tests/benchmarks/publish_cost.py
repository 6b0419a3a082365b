"""What keeping caches on disk costs whoever waits. Run: python -m tests.benchmarks.publish_cost

The same chats are held with two decoders, in turn, one of which has a durable tier and one of which
has not (``--no-disk``): time to first token and milliseconds per token, turn by turn, in pairs.
Publishing goes on while the next tokens are decoded; before the other decoder is asked, it is
waited for. Bars: nothing more to the first token, at most 3 % to decoding.

``spread`` is the middle half of the paired figures: what is smaller than it is noise. Greedy
answers of both are checked to be the same, and that cuts were published.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final

from tests.benchmarks.reuse_ttft import tiny
from tests.benchmarks.servers import Heard, Server, ask, baton, status, words

FEWEST: Final = 8
"""Tokens of an answer whose decoding is timed."""

SETTLE_S: Final = 60.0


class Chat:
    """A conversation with one server; each turn asks for something new."""

    def __init__(self, server: Server, opening: str) -> None:
        self._server = server
        self._messages = [{"role": "system", "content": opening}]
        self._turns = 0

    def turn(self, tokens: int) -> Heard:
        """The next turn."""
        self._turns += 1
        self._messages.append({"role": "user", "content": f"And what is {self._turns}?"})
        heard = ask(self._server, self._messages, tokens)
        self._messages.append({"role": "assistant", "content": heard.text})
        return heard


def settle(server: Server) -> None:
    """Wait until everything that was to be kept is."""
    until = time.monotonic() + SETTLE_S
    while time.monotonic() < until:
        cache = status(server)["cache"]
        if not cache["keeping_bytes"] and not (cache["durable"] or {}).get("publishing"):
            return
        time.sleep(0.02)
    raise SystemExit(f"{server.url} does not come to an end of keeping")


def compared(on: Server, off: Server, texts: Sequence[str], turns: int, tokens: int) -> Any:
    """The same chats with both, in turn; the first warms both up."""
    pairs: list[tuple[int, Heard, Heard]] = []
    for number, text in enumerate(texts):
        chats = {server: Chat(server, text) for server in (on, off)}
        for turn in range(turns):
            heard: dict[Server, Heard] = {}
            for server in (on, off) if (number + turn) % 2 else (off, on):
                heard[server] = chats[server].turn(tokens)
                settle(server)
            if heard[on].text != heard[off].text:
                raise SystemExit("the two answered differently")
            if number:
                pairs.append((turn, heard[on], heard[off]))
    published = status(on)["cache"]["durable"]["counts"].get("published", 0)
    if published < len(pairs):
        raise SystemExit(f"only {published} cuts were published")
    timed = [(a, b) for _, a, b in pairs if a.usage["completion_tokens"] >= FEWEST]
    found: dict[str, Any] = {
        "prompt_tokens": [b.usage["prompt_tokens"] for turn, _, b in pairs[:turns]],
        "published": published,
        "pairs": len(pairs),
    }
    for name, some in (
        ("first turn", [(a, b) for turn, a, b in pairs if turn == 0]),
        ("later turns", [(a, b) for turn, a, b in pairs if turn]),
    ):
        found[f"ttft, {name}"] = _paired([(a.ttft_ms, b.ttft_ms) for a, b in some])
    found["decode"] = _paired([(a.decode_ms, b.decode_ms) for a, b in timed])
    return found


def _paired(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Medians in milliseconds, with the tier, without it, and of each pair."""
    if len(pairs) < 2:
        return {}
    ratios = [on / off for on, off in pairs]
    low, _, high = quantiles(ratios, n=4)
    return {
        "on_ms": round(median(on for on, _ in pairs), 3),
        "off_ms": round(median(off for _, off in pairs), 3),
        "excess_ms": round(median(on - off for on, off in pairs), 3),
        "ratio": round(median(ratios), 4),
        "spread": [round(low, 4), round(high, 4)],
    }


def on(model: Path, length: int, chats: int, turns: int, tokens: int) -> Any:
    """The comparison on one checkpoint."""
    with tempfile.TemporaryDirectory() as place:
        disk = ("--cache-dir", place, "--state-dir", place)
        with baton(model, *disk) as kept, baton(model, "--no-disk") as unkept:
            texts = [words(model, length, f"Chat {number}.") for number in range(chats + 1)]
            return compared(kept, unkept, texts, turns, tokens)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=10, help="on a tiny model")
    parser.add_argument("--tokens", type=int, default=2000, help="of its system prompt")
    parser.add_argument("--model", type=Path, help="a checkpoint to measure as well")
    parser.add_argument("--model-chats", type=int, default=3)
    parser.add_argument("--model-tokens", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"bar": {"decode.ratio": 1.03}}
    if arguments.chats:
        with tempfile.TemporaryDirectory() as directory:
            model = tiny(Path(directory))
            found["tiny"] = on(model, arguments.tokens, arguments.chats, arguments.turns, 128)
    if arguments.model is not None:
        sizes = (arguments.model_tokens, arguments.model_chats, arguments.turns, 16)
        found["model"] = on(arguments.model, *sizes)
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
