"""`baton bench ttft`: time to first token, prefilled remotely and locally, in pairs of one run.

Then the same over a link that is throttled until the wire takes as long as the computation:
what the stream overlaps, and what is left after the last tile, show there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer
from rich.table import Table

from app.ask import Answer, Question, ask, served_model
from app.demo_model import ensure
from app.document import read_document
from app.loopback import Loopback, loopback
from app.terminal import err, out, print_json, step
from protocol.errors import TransferError
from protocol.halves import require

RATIO_BAR = 1 / 8
THROTTLED_BAR = 1.25
TAIL_BAR_MS = 150.0


@dataclass(frozen=True)
class Throttled:
    """Medians over a link of ``link_mbps``, in milliseconds; ``wire_ms`` is payload over rate.

    ``over_larger`` is the time to first token over the larger of computation and wire;
    ``after_last_tile_ms`` what passed between the last tile computed and the first token.
    """

    link_mbps: float
    compute_ms: float
    wire_ms: float
    ttft_ms: float
    over_larger: float
    after_last_tile_ms: float
    decode_step_ms: float
    phases: dict[str, float]


@dataclass(frozen=True)
class Ttft:
    """Medians of the paired rounds; times in milliseconds, as the client saw them."""

    prompt_tokens: int
    rounds: int
    transferred_bytes: int
    remote_ttft_ms: float
    local_ttft_ms: float
    ratio: float
    after_last_tile_ms: float
    decode_step_ms: float
    phases: dict[str, float]
    throttled: Throttled


def ttft(
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint; the demo's model if not given.")
    ] = None,
    document: Annotated[Path | None, typer.Option(help="The prompt's text.")] = None,
    rounds: Annotated[int, typer.Option(help="Pairs of remote and local.", min=1)] = 3,
    link_mbps: Annotated[
        float | None,
        typer.Option(help="Throttled rate; chosen so that wire and compute take equal time."),
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where the model is kept.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare time to first token, remote and local, and over a link as slow as the compute."""
    require("both")
    text = read_document(document)
    checkpoint = model if model is not None else ensure(cache_dir)
    with loopback(checkpoint) as pair:
        _ask(pair, text, "warm-up", "remote")
        remote, local = [], []
        for number in range(rounds):
            remote.append(_ask(pair, text, f"round {number}", "remote"))
            local.append(_ask(pair, text, f"round {number}", "local"))
            err.print(
                f"round {number + 1}: remote {remote[-1].ttft_ms:,.0f} ms, "
                f"local {local[-1].ttft_ms:,.0f} ms"
            )
    rate = link_mbps or _rate_as_slow_as_compute(remote)
    with loopback(checkpoint, producer_arguments=("--link-mbps", f"{rate:.1f}")) as pair:
        _ask(pair, text, "warm-up", "remote")
        slowed = [_ask(pair, text, f"slow {number}", "remote") for number in range(rounds)]
    result = _summary(remote, local, slowed, rate)
    if as_json:
        print_json(asdict(result))
    else:
        out.print(_table(result))


def _ask(pair: Loopback, text: str, label: str, lane: str) -> Answer:
    """One short answer. The label comes first, so that nothing held elsewhere is shared."""
    content = f"({label})\n\n{text}\n\nSummarise this in one sentence."
    name, messages = served_model(pair.url), ({"role": "user", "content": content},)
    question = Question(name, messages, 8, lane, reuse=False)
    comments = [""]
    with step(f"{label}, lane {lane}", lambda: comments[-1]):
        return of_lane(ask(pair.url, question, on_comment=comments.append), lane)


def of_lane(answer: Answer, lane: str) -> Answer:
    """``answer``, if its prompt took the lane that is measured; else TransferError."""
    source = answer.baton.get("source")
    if source != lane:
        raise TransferError(
            "an answer took another lane than the one that is measured",
            reason="lane_differs",
            found=source,
            expected=lane,
        )
    return answer


def _rate_as_slow_as_compute(answers: Sequence[Answer]) -> float:
    """Megabits per second at which the payload takes as long as its computation."""
    compute_s = median(answer.baton["phases"]["compute"] for answer in answers) / 1000
    return answers[0].baton["transferred_bytes"] * 8e-6 / compute_s


def _summary(
    remote: Sequence[Answer], local: Sequence[Answer], slowed: Sequence[Answer], rate: float
) -> Ttft:
    payload = slowed[0].baton["transferred_bytes"]
    wire_ms = payload * 8e-3 / rate
    phases = _phases(slowed)
    slow_ttft = median(answer.ttft_ms for answer in slowed)
    throttled = Throttled(
        rate,
        phases["compute"],
        wire_ms,
        slow_ttft,
        median(a.ttft_ms / max(a.baton["phases"]["compute"], wire_ms) for a in slowed),
        median(_after_last_tile(answer) for answer in slowed),
        median(_decode_step(answer) for answer in slowed),
        phases,
    )
    return Ttft(
        remote[0].usage["prompt_tokens"],
        len(remote),
        remote[0].baton["transferred_bytes"],
        median(answer.ttft_ms for answer in remote),
        median(answer.ttft_ms for answer in local),
        median(far.ttft_ms / near.ttft_ms for far, near in zip(remote, local, strict=True)),
        median(_after_last_tile(answer) for answer in remote),
        median(_decode_step(answer) for answer in [*remote, *local]),
        _phases(remote),
        throttled,
    )


def _phases(answers: Sequence[Answer]) -> dict[str, float]:
    """The median of every phase."""
    names = answers[0].baton["phases"]
    return {name: median(a.baton["phases"][name] for a in answers) for name in names}


def _after_last_tile(answer: Answer) -> float:
    """Milliseconds from the last tile computed to the first token at the client."""
    phases = answer.baton["phases"]
    return answer.ttft_ms - phases["queue"] - phases["compute"]


def _decode_step(answer: Answer) -> float:
    return 1000 / answer.tokens_per_s if answer.tokens_per_s else 0.0


def _table(result: Ttft) -> Table:
    table = Table(title=f"{result.prompt_tokens:,} prompt tokens, medians of {result.rounds}")
    for title in ("", "measured", "bar"):
        table.add_column(title)
    slow = result.throttled

    def row(title: str, found: str, bar: str = "") -> None:
        table.add_row(title, found, bar)

    row("remote", f"{result.remote_ttft_ms:,.0f} ms")
    row("local", f"{result.local_ttft_ms:,.0f} ms")
    row("remote / local", f"{result.ratio:.4f}", f"{RATIO_BAR:.4f}")
    tail = f"{TAIL_BAR_MS:.0f} ms + one decode step"
    row("last tile to first token", f"{result.after_last_tile_ms:,.0f} ms", tail)
    row("decode step", f"{result.decode_step_ms:,.0f} ms")
    for name, milliseconds in result.phases.items():
        row(f"  {name}", f"{milliseconds:,.1f} ms")
    table.add_section()
    row(f"over {slow.link_mbps:,.0f} Mbit/s", f"{slow.ttft_ms:,.0f} ms")
    row("compute, wire", f"{slow.compute_ms:,.0f} ms, {slow.wire_ms:,.0f} ms")
    row("over the larger", f"{slow.over_larger:.3f}", f"{THROTTLED_BAR:.2f}")
    row("last tile to first token", f"{slow.after_last_tile_ms:,.0f} ms")
    for name, milliseconds in slow.phases.items():
        row(f"  {name}", f"{milliseconds:,.1f} ms")
    return table
