"""What an open dashboard and a menu bar cost. Run: python -m tests.benchmarks.face_cost --model DIR

One decoder with its dashboard answers the same prompt again and again, in rounds: with nobody who
looks, with the menu bar's follower, with a page that is a bare WebSocket, with both, and with the
page in Chromium and the follower. Each is compared with nobody of its own round. Decoding is timed
by the decoder, from the first token to the last. Bar: at most 2 %, with Chromium and the follower;
what is more than with the bare WebSocket is Chromium's own, which computes on the same machine.

Where there are two processors, the decoder has one and what looks at it the other. With
``--shared`` everything shares all processors.

Decoding rates of single answers differ by more than the bar, so what the event loop's thread takes
of the processor is told as well: more than that nothing in the decoder does for those who look,
and on a processor that it shares with the model, that is what it costs.

``/status`` is asked during a prefill as well, without and with both open. Bar: 50 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import httpx
import psutil
from playwright.sync_api import Browser
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from app.children import start
from app.menubar.follow import Follower, Told
from app.menubar.place import Place
from tests.benchmarks.servers import Server, words
from tests.e2e import page_socket
from tests.e2e.browsing import WIDE, chromium

SETTLE_S: Final = 1.0

MOST_AT_ONCE: Final = 5
"""More is told of an answer, to whoever looks, than of a connection's beginning."""

ALONE: Final = "alone"


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
def followed(server: Server) -> Iterator[None]:
    """The menu bar's follower is connected."""
    place, heard = Place(server.url), list[Told]()
    follower = Follower(lambda: place, heard.append)
    follower.start()
    try:
        yield
    finally:
        follower.stop()
    # Whoever is let go of costs nothing.
    assert len(heard) > MOST_AT_ONCE
    assert heard[-1].standing.state == "connected"


@contextmanager
def page_alone(server: Server) -> Iterator[None]:
    """A page is looked at by a WebSocket that draws nothing."""
    shown = page_socket.page_of(server.url)
    with page_socket.socket_of(server.url, shown) as opened:
        assert page_socket.greeted(opened).startswith("40{")
        opened.send(page_socket.act(shown, do="shown"))
        heard: list[str] = []
        reading = threading.Thread(target=_hears_out, args=(opened, heard))
        reading.start()
        yield
    reading.join()
    assert len(heard) > MOST_AT_ONCE


def _hears_out(opened: ClientConnection, heard: list[str]) -> None:
    try:
        while True:
            heard.append(page_socket.hears(opened, None))
    except ConnectionClosed:
        return


@contextmanager
def page_in(browser: Browser, server: Server) -> Iterator[None]:
    """A page is open in Chromium."""
    context = browser.new_context(viewport=WIDE)
    try:
        page = context.new_page()
        page.goto(server.url)
        page.locator("#headline").wait_for()
        yield
    finally:
        context.close()


Looking = Callable[[], AbstractContextManager[None]]


@contextmanager
def all_of(looking: Sequence[Looking]) -> Iterator[None]:
    """With each of them, once things are calm; calm again afterwards."""
    with ExitStack() as stack:
        for look in looking:
            stack.enter_context(look())
        time.sleep(SETTLE_S)
        yield
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


def measured(model: Path, tokens: int, rounds: int, prompt: int, *, shared: bool) -> Any:
    """All figures of one checkpoint."""
    with served(model) as (server, owner):
        if not shared:
            apart(owner)
        with chromium() as browser:
            menu_bar, bare = partial(followed, server), partial(page_alone, server)
            everything = (menu_bar, partial(page_in, browser, server))
            ways: dict[str, Sequence[Looking]] = {
                ALONE: (),
                "menu bar": (menu_bar,),
                "page": (bare,),
                "page and menu bar": (menu_bar, bare),
                "in Chromium, and menu bar": everything,
            }
            # The first page imports NiceGUI.
            with all_of(everything):
                decoded(server, owner, tokens)
            runs: list[dict[str, Run]] = []
            for number in range(rounds):
                # In any order, the same ones in every run of this.
                order = random.Random(number).sample(list(ways), len(ways))
                found: dict[str, Run] = {}
                for name in order:
                    with all_of(ways[name]):
                        found[name] = decoded(server, owner, tokens)
                runs.append(found)
            text = words(model, prompt, "Look.")
            alone = answers(server, text)
            with all_of(everything):
                looked_at = answers(server, text)
    return {
        "tokens_per_s": round(median(one[ALONE].rate for one in runs), 1),
        "loop": round(median(one[ALONE].loop for one in runs), 4),
        "costs": {name: cost(name, runs) for name in ways if name != ALONE},
        "status_ms": {
            name: {"median": round(median(took), 1), "most": round(max(took), 1), "of": len(took)}
            for name, took in ((ALONE, alone), ("looked at", looked_at))
            if took
        },
    }


def cost(name: str, runs: Sequence[dict[str, Run]]) -> dict[str, Any]:
    """What one way to look costs: the median of the rounds and their quartiles, by the decoder's
    rate and by the processor's time of its event loop.
    """
    lost = [1 - one[name].rate / one[ALONE].rate for one in runs]
    low, middle, high = quantiles(lost, n=4)
    return {
        "of the rate": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "of a processor": round(median(one[name].loop - one[ALONE].loop for one in runs), 4),
    }


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of the prefill")
    parser.add_argument("--shared", action="store_true", help="all processors for everybody")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        os.environ["XDG_CONFIG_HOME"] = place
        found = measured(given.model, given.tokens, given.rounds, given.prompt, shared=given.shared)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
