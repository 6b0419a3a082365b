"""What the engine costs over mlx-lm's own loop. Run: python -m tests.benchmarks.engine_overhead

Three figures, each from one process, pairs taken in turn:

- milliseconds per token over ``stream_generate``, one request through ``Engine.submit``, in wall
  time and in processor time;
- milliseconds from submit to the boundary step, for prompts whose rows only have to be copied;
- decode rate of a given checkpoint (``--model``) as a share of ``stream_generate``'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlx_lm.generate import stream_generate

from mac_decoder.engine.events import Finished, Generation, Lane, Report, Sampling, Token
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import LoadedModel, load
from mac_decoder.engine.settings import EngineSettings
from protocol.checkpoint import Checkpoint, read_checkpoint
from tests import checkpoints
from tests.mac_decoder.engine.links import CopyingLink

GREEDY = Sampling(temperature=0.0)


def prompt(length: int, vocabulary: int) -> tuple[int, ...]:
    """A prompt without structure that a cache could profit from."""
    return tuple((7919 * (index + 1) % 104729) % vocabulary for index in range(length))


def ask(tokens: Sequence[int], count: int, lane: Lane = "local") -> Generation:
    """A greedy request that only its length ends."""
    return Generation("bench", tuple(tokens), count, GREEDY, lane=lane)


class Clock:
    """Readings of wall time and of the whole process's processor time, one per token.

    The latter does not move when other processes take the cores.
    """

    def __init__(self) -> None:
        self._readings: list[tuple[float, float]] = []

    def read(self) -> None:
        self._readings.append((time.perf_counter(), time.process_time()))

    @property
    def per_token(self) -> tuple[float, float]:
        """Milliseconds per token from the first to the last: wall, processor."""
        steps = max(len(self._readings) - 1, 1)
        (wall, busy), (wall_end, busy_end) = self._readings[0], self._readings[-1]
        return (wall_end - wall) * 1e3 / steps, (busy_end - busy) * 1e3 / steps


async def through_engine(
    engine: Engine, generation: Generation
) -> tuple[tuple[float, float], list[int], Report]:
    """Milliseconds per token, the tokens, and the report."""
    clock = Clock()
    tokens: list[int] = []
    report: Report | None = None
    async with engine.submit(generation) as stream:
        async for event in stream:
            if isinstance(event, Token):
                clock.read()
                tokens.append(event.id)
            elif isinstance(event, Finished):
                report = event.report
    if report is None:
        raise SystemExit("a request did not finish")
    return clock.per_token, tokens, report


def through_mlx_lm(
    loaded: LoadedModel, generation: Generation
) -> tuple[tuple[float, float], list[int]]:
    """The same from ``stream_generate``, which stops at the tokenizer's stop tokens."""
    clock = Clock()
    tokens: list[int] = []
    # One more than asked: its last response repeats the last token.
    count = generation.max_tokens + 1
    for response in stream_generate(
        loaded.model, loaded.tokenizer, list(generation.tokens), max_tokens=count
    ):
        if response.finish_reason is None:
            clock.read()
            tokens.append(response.token)
    return clock.per_token, tokens


async def per_token(checkpoint: Checkpoint, pairs: int, length: int, count: int) -> dict[str, Any]:
    """Decode through both, in turn."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1) as other:
        loaded = await loop.run_in_executor(other, load, checkpoint)
        # mlx-lm ends at a stop token; the pair would not be of one length.
        loaded.tokenizer.eos_token_ids = set()
        engine = Engine(lambda: load(checkpoint))
        await engine.start()
        request = ask(prompt(length, loaded.vocabulary), count)
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        same = True
        for _ in range(pairs + 1):
            mine, tokens, _report = await through_engine(engine, request)
            base, expected = await loop.run_in_executor(other, through_mlx_lm, loaded, request)
            ours.append(mine)
            theirs.append(base)
            same = same and tokens == expected
        await engine.close()
    # The first pair warms both up.
    both = list(zip(ours[1:], theirs[1:], strict=True))
    median = statistics.median
    return {
        "engine_ms_per_token": median(wall for (wall, _busy), _ in both),
        "stream_generate_ms_per_token": median(wall for _, (wall, _busy) in both),
        "excess_ms_per_token": median(a[0] - b[0] for a, b in both),
        "excess_processor_ms_per_token": median(a[1] - b[1] for a, b in both),
        "share_of_stream_generate": median(b[0] / a[0] for a, b in both),
        "same_tokens": same,
        "pairs": pairs,
    }


async def before_boundary(checkpoint: Checkpoint, lengths: Sequence[int], tries: int) -> list[Any]:
    """From submit to the boundary step, where the prompt's rows have only to be copied."""
    link = CopyingLink(checkpoint.layout)
    engine = Engine(lambda: load(checkpoint), EngineSettings(remote_threshold=1), [link])
    await engine.start()
    with ThreadPoolExecutor(1) as other:
        loop = asyncio.get_running_loop()
        loaded = await loop.run_in_executor(other, load, checkpoint)
        found: list[Any] = []
        for length in lengths:
            tokens = prompt(length, loaded.vocabulary)
            await loop.run_in_executor(other, link.prepare, loaded, tokens)
            spent: list[float] = []
            for _ in range(tries):
                _rate, _tokens, report = await through_engine(engine, ask(tokens, 2, "remote"))
                spent.append(report.ttft_ms - report.phases["boundary_decode"])
            bar = 20 + length / 1000
            found.append({"tokens": length, "ms": statistics.median(spent), "bar_ms": bar})
    await engine.close()
    return found


async def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures, as one JSON object."""
    found: dict[str, Any] = {}
    for name in arguments.tiny:
        tiny = read_checkpoint(checkpoints.make(name, directory / name))
        found[name] = await per_token(tiny, arguments.pairs, 64, 200)
        found[name]["before_boundary"] = await before_boundary(tiny, arguments.lengths, 5)
    if arguments.model is not None:
        given = read_checkpoint(arguments.model)
        found["model"] = await per_token(given, arguments.pairs, 32, 24)
    return found


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", nargs="*", default=["llama", "muse_glimmer"])
    parser.add_argument("--model", type=Path, help="a checkpoint whose decode rate is compared")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1000, 4000])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = asyncio.run(measure(arguments, Path(directory)))
    if arguments.json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        print(name)
        for key, value in figures.items():
            print(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")


if __name__ == "__main__":
    main()
