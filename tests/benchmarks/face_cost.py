"""What an open dashboard and a menu bar cost. Run: python -m tests.benchmarks.face_cost --model DIR

One decoder with its dashboard answers the same prompt again and again, in pairs: once with the
dashboard open in Chromium and the menu bar's follower connected, once with neither. Decoding is
timed by the decoder, from the first token to the last. Bar: at most 2 %.

Where there are two processors, the decoder has one and what looks at it the other: so that the
figure holds what the decoder does for them, and not that a browser computes on this machine too.
With ``--shared`` everything shares all processors.

Decoding rates of single answers differ by more than the bar, so what the event loop's thread takes
of the processor is told as well, with and without: more than that difference nothing in the decoder
does for those who look, and on a processor that it shares with the model, that is what it costs.

``/status`` is asked during a prefill as well, without and with both open. Bar: 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import httpx
import psutil
from playwright.sync_api import Browser

from app.children import start
from app.menubar.follow import Follower, Told
from app.menubar.place import Place
from tests.benchmarks.servers import Server, words
from tests.e2e.browsing import WIDE, chromium

SETTLE_S = 1.0


@contextmanager
def served(model: Path, *options: str) -> Iterator[tuple[Server, psutil.Process]]:
    """`baton serve` with its dashboard, and its process."""
    command = [sys.executable, "-m", "app.cli", "serve", "--model", str(model), "--port", "0"]
    child = start("decoder", [*command, "--served-name", "bench", "--no-disk", *options])
    try:
        url = child.wait_ready(120.0)
        # The supervisor has the socket, too; who computes is its child.
        port = int(url.rpartition(":")[2])
        (owner,) = (
            one
            for one in psutil.Process().children(recursive=True)
            if not one.children() and any(c.laddr.port == port for c in one.net_connections())
        )
        yield Server(url, "bench"), owner
    finally:
        child.end()


@contextmanager
def watched(browser: Browser, server: Server) -> Iterator[list[Told]]:
    """A page of it is open, and a follower connected; gives what that was told."""
    told: list[Told] = []
    place = Place(server.url)
    follower = Follower(lambda: place, told.append)
    context = browser.new_context(viewport=WIDE)
    try:
        page = context.new_page()
        page.goto(server.url)
        page.locator("#headline").wait_for()
        follower.start()
        time.sleep(SETTLE_S)
        yield told
    finally:
        follower.stop()
        context.close()
        time.sleep(SETTLE_S)


class Run(NamedTuple):
    """One answer: tokens per second by the decoder's own measure, and the share of a processor
    that its event loop took meanwhile.
    """

    rate: float
    loop: float


def decoded(server: Server, owner: psutil.Process, tokens: int) -> Run:
    """Ask for one answer."""
    body = {
        "model": server.model,
        "messages": [{"role": "user", "content": "Tell a long story."}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "baton": {"reuse": False},
    }
    began, used = time.perf_counter(), loop_s(owner)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=600) as got:
        for _ in got.iter_lines():
            pass
    loop = (loop_s(owner) - used) / (time.perf_counter() - began)
    ended = httpx.get(f"{server.url}/status", timeout=30).json()["snapshot"]["recent"]["finished"]
    # Not the rate that is told, which is rounded: by more than what is looked for.
    last = ended[0]
    return Run((last["generated_tokens"] - 1) / (last["decode_ms"]["value"] / 1e3), loop)


def loop_s(owner: psutil.Process) -> float:
    """Processor time of the event loop's thread, which is the process's first."""
    (first,) = (one for one in owner.threads() if one.id == owner.pid)
    return first.user_time + first.system_time


def answers(server: Server, prompt: str) -> list[float]:
    """Milliseconds of ``/status`` while a prompt is prefilled."""
    took: list[float] = []
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "baton": {"reuse": False}}
    asking = threading.Thread(
        target=lambda: httpx.post(f"{server.url}/v1/completions", json=body, timeout=600)
    )
    asking.start()
    with httpx.Client(timeout=30) as client:
        while asking.is_alive():
            began = time.perf_counter()
            found = client.get(f"{server.url}/status").json()["snapshot"]
            if found["engine"]["doing"] == "prefilling_here":
                took.append((time.perf_counter() - began) * 1e3)
            time.sleep(0.05)
    asking.join()
    return took


def apart(owner: psutil.Process) -> None:
    """Give the decoder one processor, and everything that looks at it the others."""
    mine, *others = sorted(os.sched_getaffinity(0))
    for thread in owner.threads():
        os.sched_setaffinity(thread.id, {mine})
    os.sched_setaffinity(0, set(others))


def measured(model: Path, tokens: int, pairs: int, prompt: int, *, shared: bool) -> Any:
    """All figures of one checkpoint."""
    with served(model) as (server, owner):
        if not shared:
            apart(owner)
        with chromium() as browser:
            # The first page imports NiceGUI.
            with watched(browser, server):
                decoded(server, owner, tokens)
            runs: list[tuple[Run, Run]] = []
            told = 0
            for number in range(pairs):
                # Each follows the other in half of the pairs.
                found: dict[bool, Run] = {}
                for looked_at in (True, False) if number % 2 else (False, True):
                    if looked_at:
                        with watched(browser, server) as messages:
                            found[True] = decoded(server, owner, tokens)
                            told += len(messages)
                    else:
                        found[False] = decoded(server, owner, tokens)
                runs.append((found[True], found[False]))
            text = words(model, prompt, "Look.")
            alone = answers(server, text)
            with watched(browser, server):
                looked_at = answers(server, text)
    ratios = [on.rate / off.rate for on, off in runs]
    low, middle, high = quantiles(ratios, n=4)
    return {
        "tokens_per_s": round(median(off.rate for _, off in runs), 1),
        "looked_at": round(median(on.rate for on, _ in runs), 1),
        "cost": round(1 - middle, 4),
        "spread": [round(1 - high, 4), round(1 - low, 4)],
        "loop": {
            "alone": round(median(off.loop for _, off in runs), 4),
            "looked_at": round(median(on.loop for on, _ in runs), 4),
            "more": round(median(on.loop - off.loop for on, off in runs), 4),
        },
        "messages_to_the_menu_bar": told,
        "status_ms": {
            name: {"median": round(median(took), 1), "most": round(max(took), 1), "of": len(took)}
            for name, took in (("alone", alone), ("looked at", looked_at))
            if took
        },
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the prefill")
    parser.add_argument("--shared", action="store_true", help="all processors for everybody")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CONFIG_HOME"] = place
        found = measured(given.model, given.tokens, given.pairs, given.prompt, shared=given.shared)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
