"""What the endpoint costs. Run: python -m tests.benchmarks.endpoint_overhead

Tokens are said at known times behind the real endpoint, a real socket and another process's
client, so that nothing but the endpoint, uvicorn and the loopback is measured:

- milliseconds from a token to the arrival of its chunk, alone and beside seven other streams;
- milliseconds of the server's processor time for one token;
- milliseconds from a request's first byte to the engine's ``submit``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from mac_decoder.api.settings import ApiSettings
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.recital import make_recital
from tests.mac_decoder.api.scripted import Part, ScriptedEngine
from tests.mac_decoder.api.serving import Server, serving


async def listen(port: int, words: int) -> tuple[float, list[float]]:
    """Ask for one stream: when it was asked for, and when each of its chunks came."""
    messages = [{"role": "user", "content": "word " * words}]
    body = json.dumps({"model": "tiny", "messages": messages, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    asked = time.perf_counter()
    writer.write(head.encode() + b"\r\n\r\n" + body)
    heard: list[float] = []
    while b"[DONE]" not in (line := await reader.readline()):
        if not line:
            raise SystemExit("a stream was cut off")
        if b'"content":"la"' in line:
            heard.append(time.perf_counter())
    writer.close()
    return asked, heard


def client(port: int, streams: int, words: int, results: Any) -> None:
    """The other process."""

    async def ask() -> list[tuple[float, list[float]]]:
        return await asyncio.gather(*(listen(port, words) for _ in range(streams)))

    results.put(asyncio.run(ask()))


def run(server: Server, streams: int, words: int) -> tuple[list[float], list[float]]:
    """Delays of all chunks, and times from asking to ``submit``, in milliseconds."""
    spawning = multiprocessing.get_context("spawn")
    results: Any = spawning.Queue()
    server.engine.parts.clear()
    server.engine.said.clear()
    process = spawning.Process(target=client, args=(server.port, streams, words, results))
    process.start()
    answers = results.get(timeout=120)
    process.join()
    delays: list[float] = []
    submits: list[float] = []
    # Streams begin in the order in which they were asked for.
    for (asked, heard), said in zip(sorted(answers), server.engine.said, strict=True):
        submits.append((said[0] - asked) * 1e3)
        delays += [(b - a) * 1e3 for a, b in zip(said[1:], heard, strict=True)]
    return delays, submits


def engine(path: Path, tokens: int, pause_s: float) -> ScriptedEngine:
    """Says ``tokens`` tokens, one every ``pause_s``; notes when it was asked and when it said."""

    async def play(part: Part) -> None:
        said = [time.perf_counter()]
        made.said.append(said)
        for _ in range(tokens):
            await asyncio.sleep(pause_s)
            said.append(time.perf_counter())
            part.token(word)
        part.end("length")

    made: Any = ScriptedEngine(read_checkpoint(path), play)
    made.said = []
    word = made.loaded.tokenizer.convert_tokens_to_ids("la")
    return made


def figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 3),
        "p99": round(ordered[int(len(ordered) * 0.99)], 3),
        "max": round(ordered[-1], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--pause-ms", type=float, default=10.0)
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        recital = make_recital(Path(folder))
        make = engine(recital.path, chosen.tokens, chosen.pause_ms / 1e3)
        with serving(lambda: make, ApiSettings()) as server:
            run(server, 1, 10)
            before = time.process_time()
            delays, submits = run(server, 1, 10)
            spent = (time.process_time() - before) * 1e3 / chosen.tokens
            found["chunk_delay_ms"] = figures(delays)
            found["processor_ms_per_token"] = round(spent, 3)
            found["submit_ms"] = round(submits[0], 3)
            found["submit_ms_2000_tokens"] = round(run(server, 1, 380)[1][0], 3)
            found["chunk_delay_ms_of_8"] = figures(run(server, 8, 10)[0])
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
