"""`baton bench handoff`: how fast rows get from one process into the other's caches.

Two real processes over loopback with synthetic rows: the producer as it is, minus the model,
and the decoder's link, shadow and install. The limit (``bench_limit``) is measured in the same
run, once per handoff and in alternating order, and the ratio is the median over these pairs.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import secrets
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import typer
from rich.table import Table

from app.bench_decoder import Round, decode
from app.bench_limit import receive, send
from app.children import Child, start
from app.terminal import err, out, print_json
from app.view.words import human_bytes
from gb10_producer.trust import make_pairing
from protocol.errors import EngineFault, RequestError, TransferError
from protocol.halves import require
from protocol.layout import payload_bytes
from protocol.layouts_named import named

RATIO_BAR = 0.75
GROWTH_BAR_MB = 64.0
_START_S = 60.0
_SAMPLE_S = 0.01


@dataclass(frozen=True)
class HandoffRates:
    """Medians over ``pairs``; rates in 10**9 bytes of payload per second, memory in 10**6 bytes.

    ``reserve_ms`` is the reservation of the shadow, before the request and not part of the
    rates; ``touched`` says whether its pages were touched then too, as they are while a producer
    computes, or first by what arrives. Growth is peak over idle resident memory, the decoder's
    beyond the cache itself.
    """

    layout: str
    tls: bool
    touched: bool
    prompt: int
    payload_bytes: int
    pairs: int
    verified_gb_s: float
    installed_gb_s: float
    limit_gb_s: float
    ratio: float
    ratios: tuple[float, ...]
    reserve_ms: float
    producer_growth_mb: float
    decoder_growth_mb: float


def handoff(
    layout: Annotated[str, typer.Option(help="A named layout.")] = "muse-glimmer",
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.", min=2)] = 65536,
    pairs: Annotated[int, typer.Option(help="Pairs of handoff and limit.", min=1)] = 7,
    tls: Annotated[bool, typer.Option("--tls", help="With pinned TLS, the limit too.")] = False,
    untouched: Annotated[
        bool, typer.Option("--untouched", help="Let what arrives be the first to touch memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a handoff between two processes against what the machine can do."""
    require("decoder")
    result = measure(layout, prompt, pairs, tls=tls, touched=not untouched)
    if as_json:
        print_json(asdict(result))
    else:
        out.print(_table(result))


def measure(
    layout: str, prompt: int, pairs: int, *, tls: bool = False, touched: bool = True
) -> HandoffRates:
    """Run ``pairs`` handoffs and limits in alternating order.

    Raises TransferError when a process cannot connect, EngineFault when one ends.
    """
    nbytes = payload_bytes(named(layout), 0, prompt - 1)
    with ExitStack() as stack:
        pairing = make_pairing(Path(stack.enter_context(TemporaryDirectory())), 1) if tls else None
        producer, decoder = stack.enter_context(_peers(layout, prompt, touched, pairing))
        limit = stack.enter_context(_limit(nbytes, pairing))
        watch = stack.enter_context(_Watch(_worker(producer), decoder.pid).running())
        rounds: list[Round] = []
        limits: list[float] = []
        for number in range(pairs):
            for first in (number % 2 == 0, number % 2 == 1):
                if first:
                    rounds.append(decoder.ask())
                else:
                    limits.append(nbytes / limit() / 1e9)
            if rounds[-1].payload_bytes != nbytes:
                raise RequestError("the handoff had another size than the plan")
            rate = nbytes / rounds[-1].installed_s / 1e9
            err.print(f"pair {number + 1}: {rate:.3f} GB/s of {limits[-1]:.3f}")
    return _summary((layout, tls, touched, prompt, nbytes), rounds, limits, watch)


def _summary(
    what: tuple[str, bool, bool, int, int],
    rounds: Sequence[Round],
    limits: Sequence[float],
    watch: _Watch,
) -> HandoffRates:
    nbytes = what[-1]
    installed = [nbytes / found.installed_s / 1e9 for found in rounds]
    ratios = [mine / best for mine, best in zip(installed, limits, strict=True)]
    producer, decoder = watch.growth()
    return HandoffRates(
        *what,
        len(rounds),
        median(nbytes / found.verified_s / 1e9 for found in rounds),
        median(installed),
        median(limits),
        median(ratios),
        tuple(round(ratio, 4) for ratio in ratios),
        median(found.reserve_s for found in rounds) * 1e3,
        producer / 1e6,
        (decoder - nbytes) / 1e6,
    )


class _Process:
    """A child that answers orders over a pipe."""

    def __init__(self, target: Any, *arguments: object) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        self.pipe: Connection = ours
        self._process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def hear(self) -> Any:
        """What it says next."""
        try:
            return self.pipe.recv()
        except EOFError as error:
            raise EngineFault("a process of the benchmark ended", reason="child_failed") from error

    def ask(self) -> Any:
        """Order one round and return the answer."""
        self.pipe.send(True)
        return self.hear()

    def end(self) -> None:
        """End it, and wait until it is gone."""
        with contextlib.suppress(OSError):  # it may be gone already
            self.pipe.send(False)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


Pairing = tuple[Path, Path] | None
"""The producer's and the decoder's pairing file."""


@contextmanager
def _peers(
    layout: str, prompt: int, touched: bool, pairing: Pairing
) -> Iterator[tuple[Child, _Process]]:
    """The producer, and a decoder that has proven its key to it."""
    key = secrets.token_bytes(32)
    words = ["--synthetic", layout, "--port", "0", "--no-supervisor"]
    words += ["--key-fd", "{key_fd}"] if pairing is None else ["--pairing", str(pairing[0])]
    producer = start("producer", [sys.executable, "-m", "gb10_producer", *words], key)
    try:
        url = producer.wait_ready(_START_S)
        decoder = _Process(decode, url, layout, prompt, touched)
        try:
            decoder.pipe.send(key if pairing is None else pairing[1])
            reason = decoder.hear()
            if reason:
                raise TransferError("the decoder cannot connect", reason=reason)
            yield producer, decoder
        finally:
            decoder.end()
    finally:
        producer.end()


@contextmanager
def _limit(nbytes: int, pairing: Pairing) -> Iterator[Any]:
    """Both ends of the raw transfer; the value is a call that runs it and returns seconds."""
    ours, theirs = pairing or (None, None)
    sender = _Process(send, nbytes, ours)
    try:
        receiver = _Process(receive, nbytes, sender.hear(), theirs)
        try:
            receiver.hear()

            def run() -> float:
                receiver.pipe.send(True)
                sender.ask()
                return receiver.hear()

            yield run
        finally:
            receiver.end()
    finally:
        sender.end()


def _worker(child: Child) -> int:
    """The process id of the producer itself, below its lifeline."""
    return psutil.Process(child.process.pid).children(recursive=True)[-1].pid


class _Watch:
    """Samples the resident memory of processes from outside, while the block runs."""

    def __init__(self, *pids: int) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._idle = self._sample()
        self._peak = list(self._idle)
        self._done = threading.Event()

    def growth(self) -> list[int]:
        """Peak over idle of each process, in bytes."""
        return [peak - idle for peak, idle in zip(self._peak, self._idle, strict=True)]

    @contextmanager
    def running(self) -> Iterator[_Watch]:
        """Sample in a thread."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._done.set()
            thread.join()

    def _sample(self) -> list[int]:
        return [process.memory_info().rss for process in self._processes]

    def _run(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self._peak = [max(pair) for pair in zip(self._peak, self._sample(), strict=True)]


def _table(result: HandoffRates) -> Table:
    title = f"{result.layout}, {result.prompt:,} tokens, {human_bytes(result.payload_bytes)}"
    wire = ", TLS" if result.tls else ""
    table = Table(title=f"{title}{wire}, median of {result.pairs} pairs")
    for column in ("", "measured", "bar"):
        table.add_column(column)
    table.add_row("verified", f"{result.verified_gb_s:.3f} GB/s", "")
    table.add_row("installed", f"{result.installed_gb_s:.3f} GB/s", "")
    table.add_row("limit", f"{result.limit_gb_s:.3f} GB/s", "")
    table.add_row("installed / limit", f"{result.ratio:.3f}", f"{RATIO_BAR:.2f}")
    what = "reserving and touching the shadow" if result.touched else "reserving the shadow"
    table.add_row(what, f"{result.reserve_ms:.0f} ms", "")
    bar = f"{GROWTH_BAR_MB:.0f} MB"
    table.add_row("producer grew by", f"{result.producer_growth_mb:.1f} MB", bar)
    table.add_row("decoder, beyond the cache", f"{result.decoder_growth_mb:.1f} MB", bar)
    return table
