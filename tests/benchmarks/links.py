"""A handoff over a link of 1 Gbit/s. Run as root, on Linux: python -m tests.benchmarks.links

Two network namespaces joined by a pair of interfaces, each shaped by tbf to ``--gbit``: what
two machines on one switch have. In one runs `baton produce` with synthetic rows and a pairing,
in the other a decoder's link, shadow and install, over TLS. Told are, for each of ``rounds``
and as medians, in 10**6 bytes per second:

``raw_mb_s``
    what one plain TCP stream carries over the same interfaces, measured in turn with the others
    (the line less Ethernet's, IP's and TCP's own bytes): the limit.
``payload_mb_s``, ``of_raw``
    payload of a handoff over the time from the request to the installed cache; the share of the
    limit that it is.

Then the same through `tests/proxy.py` beside the decoder, which holds every byte up by
so many milliseconds each way; stalls for 2 s in the middle of every handoff; or closes or resets
the connection there. ``lost_s`` is how much longer that took than a handoff through the proxy
left alone, ``resumed`` on how many further connections each went on, ``reasons`` why one did not
come, if it did not. (netem, which would delay in the kernel, is missing from many kernels.)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from app.children import Child, start
from protocol.layout import payload_bytes
from protocol.layouts_named import named
from tests.proxy import Cut, Fault, Line, Offset, Proxy, Stall

LAYOUT: Final = "muse-glimmer"
PRODUCER, DECODER = "10.77.31.1", "10.77.31.2"
RAW_PORT: Final = 7499
STALL_S: Final = 2.0
_CHUNK: Final = 1 << 20
_START_S: Final = 60.0
_ROUND_S: Final = 120.0


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()}")


@dataclass(frozen=True)
class Namespaces:
    """Names of the two, and how to run something in them."""

    producer: str
    decoder: str

    @staticmethod
    def inside(name: str, *words: str) -> list[str]:
        """The command line that runs this project's python with ``words`` in a namespace."""
        return ["ip", "netns", "exec", name, sys.executable, *words]


@contextmanager
def namespaces(gbit: float) -> Iterator[Namespaces]:
    """Two namespaces with a shaped link between them; gone afterwards."""
    if os.geteuid() or shutil.which("ip") is None or shutil.which("tc") is None:
        raise SystemExit("network namespaces take root, and Linux with iproute2 (ip and tc)")
    made = Namespaces(f"baton-p-{os.getpid()}", f"baton-d-{os.getpid()}")
    ends = (
        (made.producer, f"bp{os.getpid()}", PRODUCER),
        (made.decoder, f"bd{os.getpid()}", DECODER),
    )
    with contextlib.ExitStack() as stack:
        for name, _, _ in ends:
            _run("ip", "netns", "add", name)
            stack.callback(_run, "ip", "netns", "del", name)
        first, second = ends[0][1], ends[1][1]
        _run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for name, device, address in ends:
            _run("ip", "link", "set", device, "netns", name)
            within = ("ip", "netns", "exec", name)
            _run(*within, "ip", "address", "add", f"{address}/30", "dev", device)
            _run(*within, "ip", "link", "set", "lo", "up")
            _run(*within, "ip", "link", "set", device, "up")
            shape = ("rate", f"{gbit}gbit", "burst", "256kb", "latency", "20ms")
            _run(*within, "tc", "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield made


# -- what runs inside of them


def send_raw(nbytes: int) -> None:
    """Child: send so many bytes to whoever connects, as often as somebody does."""
    chunk = memoryview(os.urandom(_CHUNK))
    with socket.create_server((PRODUCER, RAW_PORT)) as listener:
        print("ready raw", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                for offset in range(0, nbytes, _CHUNK):
                    connection.sendall(chunk[: min(_CHUNK, nbytes - offset)])


def receive_raw() -> float:
    """Child: receive all that is sent, and say how many bytes per second that was."""
    place = memoryview(bytearray(_CHUNK))
    with socket.create_connection((PRODUCER, RAW_PORT)) as connection:
        began, nbytes = time.perf_counter(), 0
        while count := connection.recv_into(place):
            nbytes += count
        return nbytes / (time.perf_counter() - began)


def hand_off(url: str, pairing: Path, prompt: int, rounds: int) -> list[dict[str, Any]]:
    """Child: so many handoffs, one after another: seconds until the cache was installed."""
    from mac_decoder.handoff.client import ProducerLink
    from mac_decoder.handoff.connection import Producer
    from mac_decoder.handoff.generations import Generations
    from mac_decoder.handoff.trust import trust_of_file
    from mac_decoder.kv.bare import BareModel
    from mac_decoder.kv.install import build
    from mac_decoder.kv.shadow import Shadow
    from protocol.errors import TransferError
    from protocol.layouts_named import stand_in_identity

    layout = named(LAYOUT)
    trust = trust_of_file(pairing)
    target = Producer(url, trust, stand_in_identity(layout), layout)
    key, epoch = trust.pairing.key, trust.pairing.epoch
    numbers = Generations(pairing.with_name("generations.json"), key, epoch)
    found: list[dict[str, Any]] = []
    with ProducerLink(target, numbers) as link:
        for _ in range(rounds):
            until = time.monotonic() + _START_S
            while not link.state.ready:
                if time.monotonic() > until:
                    raise SystemExit(f"no connection: {link.state}")
                time.sleep(0.01)
            shadow = Shadow(layout, 0, prompt - 1)
            began = time.perf_counter()
            try:
                with link.fetch(range(prompt), shadow) as handoff:
                    build(BareModel(layout), layout, shadow)
                    handoff.committed()
                    reason, resumed = "", handoff.resumed
            except TransferError as error:
                reason, resumed = error.reason, 0
            seconds = time.perf_counter() - began
            found.append({"seconds": seconds, "resumed": resumed, "reason": reason})
    return found


def halfway(kind: str, nbytes: int, rounds: int) -> list[Fault]:
    """A fault in the middle of each handoff but the first."""
    found: list[Fault] = []
    for number in range(1, 1 + rounds):
        at = Offset(number * nbytes + nbytes // 2, since="proxy")
        cut = Cut(at, "reset" if kind == "reset" else "close")
        found.append(Stall(at, STALL_S) if kind == "stall" else cut)
    return found


def disturb(url: str, delay_ms: float, faults: list[Fault]) -> None:
    """Child: a proxy to ``url`` until this process is ended."""
    line = Line(delay_ms=delay_ms)
    with Proxy(url, *faults, down=line, up=line) as proxy:
        print(f"ready {proxy.url}", flush=True)
        threading.Event().wait()


# -- what measures


class Link:
    """A producer behind the link; every measurement is a process in the decoder's namespace."""

    def __init__(self, spaces: Namespaces, url: str, pairing: Path, prompt: int) -> None:
        self._spaces = spaces
        self._url = url
        self._pairing = pairing
        self._prompt = prompt
        self.nbytes = payload_bytes(named(LAYOUT), 0, prompt - 1)

    def raw(self) -> float:
        """One TCP stream, in bytes per second."""
        return self._child("receive-raw")

    def handoffs(self, rounds: int, url: str = "") -> list[dict[str, Any]]:
        """Several handoffs over one connection."""
        words = ("--url", url or self._url, "--pairing", str(self._pairing))
        sizes = ("--prompt", str(self._prompt), "--rounds", str(rounds))
        return self._child("hand-off", *words, *sizes)

    @contextmanager
    def disturbed(self, *options: str) -> Iterator[str]:
        """A proxy beside the decoder; its address."""
        words = ["-m", "tests.benchmarks.links", "--child", "disturb", "--url", self._url]
        child = start("proxy", self._spaces.inside(self._spaces.decoder, *words, *options))
        try:
            yield child.wait_ready(_START_S)
        finally:
            child.end()

    def _child(self, what: str, *options: str) -> Any:
        words = ("-m", "tests.benchmarks.links", "--child", what, *options)
        done = subprocess.run(
            self._spaces.inside(self._spaces.decoder, *words),
            capture_output=True,
            text=True,
            timeout=_ROUND_S,
        )
        if done.returncode:
            raise SystemExit(f"{what} failed: {done.stderr[-2000:]}")
        return json.loads(done.stdout)


@contextmanager
def link(gbit: float, prompt: int) -> Iterator[Link]:
    """Namespaces, a producer and a raw sender, until the block ends."""
    children: list[Child] = []
    with tempfile.TemporaryDirectory() as place, namespaces(gbit) as spaces:
        made = Path(place) / "pairing"
        make = [sys.executable, "-m", "gb10_producer", "--make-pairing", str(made)]
        _run(*make)
        nbytes = payload_bytes(named(LAYOUT), 0, prompt - 1)
        sender = ["-m", "tests.benchmarks.links", "--child", "send-raw", "--nbytes", str(nbytes)]
        producer = ["-m", "gb10_producer", "--synthetic", LAYOUT, "--host", PRODUCER]
        producer += ["--port", "0", "--pairing", str(made / "producer.pairing")]
        try:
            for name, words in (("sender", sender), ("producer", producer)):
                children.append(start(name, spaces.inside(spaces.producer, *words)))
                children[-1].wait_ready(_START_S)
            yield Link(spaces, children[-1].url, made / "decoder.pairing", prompt)
        finally:
            for child in children:
                child.end()


def measure(gbit: float, prompt: int, rounds: int, delays: list[float]) -> dict[str, Any]:
    """All that the page says, on one link."""
    with link(gbit, prompt) as over:
        raw: list[float] = []
        alone: list[float] = []
        for _ in range(rounds):
            raw.append(over.raw())
            # The first one of a connection grows the window.
            alone.append(over.nbytes / _good(over.handoffs(2))[1])
        found: dict[str, Any] = {
            "layout": LAYOUT,
            "prompt": prompt,
            "payload_bytes": over.nbytes,
            "line_mb_s": gbit * 1e3 / 8,
            "raw_mb_s": median(raw) / 1e6,
            "payload_mb_s": median(alone) / 1e6,
            "of_raw": median(mine / limit for mine, limit in zip(alone, raw, strict=True)),
            "rounds": [
                [round(r / 1e6, 1), round(p / 1e6, 1)] for r, p in zip(raw, alone, strict=True)
            ],
        }
        for delay in delays:
            with over.disturbed("--delay", str(delay)) as url:
                seconds = median(_good(over.handoffs(1 + rounds, url))[1:])
            rate = over.nbytes / seconds
            found[f"delay {delay:g} ms each way"] = {
                "payload_mb_s": rate / 1e6,
                "of_raw": rate / median(raw),
            }
            if delay == delays[0]:
                undisturbed = seconds
        halves = ("--nbytes", str(over.nbytes), "--rounds", str(rounds))
        for name in ("stall", "close", "reset"):
            with over.disturbed("--delay", str(delays[0]), "--fault", name, *halves) as url:
                last = over.handoffs(1 + rounds, url)[1:]
            found[f"{name}, halfway"] = {
                "lost_s": median(one["seconds"] for one in last) - undisturbed,
                "resumed": [one["resumed"] for one in last],
                "reasons": [one["reason"] for one in last],
            }
        return found


def _good(found: list[dict[str, Any]]) -> list[float]:
    for one in found:
        if one["reason"]:
            raise SystemExit(f"a handoff failed: {one['reason']}")
    return [one["seconds"] for one in found]


def _child(arguments: argparse.Namespace) -> None:
    match arguments.child:
        case "send-raw":
            send_raw(arguments.nbytes)
        case "receive-raw":
            print(json.dumps(receive_raw()))
        case "hand-off":
            sizes = arguments.prompt, arguments.rounds
            print(json.dumps(hand_off(arguments.url, arguments.pairing, *sizes)))
        case "disturb":
            rounds = arguments.rounds if arguments.fault else 0
            faults = halfway(arguments.fault, arguments.nbytes, rounds)
            disturb(arguments.url, arguments.delay, faults)


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--prompt", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delays", type=float, nargs="*", default=[0.0, 5.0, 50.0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    for name, kind in (("child", str), ("url", str), ("pairing", Path), ("fault", str)):
        parser.add_argument(f"--{name}", type=kind, default="", help=argparse.SUPPRESS)
    parser.add_argument("--nbytes", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--delay", type=float, default=0.0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        _child(arguments)
        return
    found = measure(arguments.gbit, arguments.prompt, arguments.rounds, arguments.delays)
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
