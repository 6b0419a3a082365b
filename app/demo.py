"""`baton demo`: a question about a document, prefilled by torch, decoded by MLX, all here."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from app.ask import Answer, Question, ask, served_model
from app.demo_model import ensure
from app.document import read_document
from app.loopback import Loopback, loopback
from app.terminal import Words, err, out, print_json, progress
from app.view.words import human_bytes
from protocol.halves import require

QUESTION = "What are these tides at new moon and full moon called?"
"""One that a model of this size can answer, from the middle of the text."""

LINE_WIDTH = 100

MEANINGS = {
    "prompt tokens": "the text and the question, as the model reads them",
    "who prefilled": "remote: the producer (torch); local: the decoder (MLX)",
    "bytes shipped": "the KV cache that the producer handed over",
    "time to first token": "from the question to the first token of the answer",
    "decode": "the decoder's speed after that",
    "queue": "waited for its turn",
    "lookup": "looked for a cache of an earlier prompt to go on from",
    "compute": "computed keys and values of the prompt",
    "wire": "received what was still on its way after the last tile",
    "verify": "checked the seal over all bytes",
    "install": "made MLX caches of them",
    "boundary_decode": "the decoder computed the last prompt token itself",
    "failed_handoff": "lost on a handoff that failed",
    "same answer": "both prefills led to the same tokens",
    "reasons": "why the prompt took this lane",
}
"""What the words of the table mean; phases are parts of the time to the first token."""


def demo(
    document: Annotated[Path | None, typer.Option(help="A text file to ask about.")] = None,
    question: Annotated[str, typer.Option(help="What to ask about it.")] = QUESTION,
    compare_local: Annotated[
        bool,
        typer.Option(help="Also answer with the decoder's own prefill; minutes on a CPU."),
    ] = False,
    serve: Annotated[
        bool, typer.Option(help="Keep both running, and say how to ask more.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint instead of the demo's small model.")
    ] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="Where the model is kept.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 80,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask a question about a document, with both machines' processes on this one."""
    require("both")
    text = read_document(document)
    err.print("Baton: a producer (torch) and a decoder (MLX), both on this machine.")
    checkpoint = model if model is not None else ensure(cache_dir)
    messages = ({"role": "user", "content": f"{text}\n\n{question}"},)
    with loopback(checkpoint) as pair:
        name = served_model(pair.url)
        asked = Question(name, messages, max_tokens, "remote")
        remote = _answer(pair.url, asked, question, as_json)
        local = None
        if compare_local:
            local = _answer_locally(pair.url, replace(asked, lane="local", reuse=False))
        if as_json:
            print_json(summary(remote, local))
        else:
            found = _table(remote, local)
            out.print(found, _legend(found))
        if serve:
            _keep(pair, name)


def summary(remote: Answer, local: Answer | None) -> dict[str, Any]:
    """The JSON object of a demo; what only ``--compare-local`` measures is ``None`` without it."""
    found: dict[str, Any] = {
        "answer": remote.text,
        "prompt_tokens": remote.usage.get("prompt_tokens"),
        "completion_tokens": remote.usage.get("completion_tokens"),
        "finish_reason": remote.finish_reason,
        "source": remote.baton.get("source"),
        "transferred_bytes": remote.baton.get("transferred_bytes"),
        "ttft_ms": round(remote.ttft_ms, 1),
        "tokens_per_s": round(remote.tokens_per_s, 2),
        "phases": remote.baton.get("phases"),
        "reasons": remote.baton.get("reasons"),
        "local_ttft_ms": None,
        "local_tokens_per_s": None,
        "same_tokens": None,
    }
    if local is not None:
        found["local_ttft_ms"] = round(local.ttft_ms, 1)
        found["local_tokens_per_s"] = round(local.tokens_per_s, 2)
        found["same_tokens"] = local.tokens == remote.tokens and local.text == remote.text
    return found


def _answer(url: str, question: Question, asked: str, quiet: bool) -> Answer:
    """Ask with the remote lane open: progress until the first token, then the text as it comes."""
    if not quiet:
        out.print(f"\n[bold]{escape(asked)}[/]\n")
    written = Words(min(out.width, LINE_WIDTH) if out.is_terminal else sys.maxsize)
    with _prefill("the producer prefills the prompt") as (bars, follow):

        def show(said: str) -> None:
            bars.stop()
            if not quiet:
                print(written.add(said), end="", flush=True)

        answer = ask(url, question, on_text=show, on_comment=follow)
    if not quiet:
        print(written.end(), flush=True)
        if answer.finish_reason == "length":
            limit = f"{question.max_tokens} tokens; --max-tokens allows more"
            out.print(f"[dim](finish_reason length: cut off at {limit})[/]")
        out.print()
    return answer


def _answer_locally(url: str, question: Question) -> Answer:
    """Ask the same with the local lane alone, whose prefill takes long."""
    if sys.platform != "darwin":
        err.print("now without the producer: MLX computes on the CPU here, which takes minutes")
    with _prefill("the decoder prefills the same prompt") as (_, follow):
        return ask(url, question, on_comment=follow)


@contextmanager
def _prefill(title: str) -> Iterator[tuple[Progress, Callable[[str], None]]]:
    """A bar, or a line without a terminal, and what follows the stream's comments."""
    if not err.is_terminal:
        err.print(f"… {title}")
    with progress() as bars:
        yield bars, _following(bars, title)


def _following(bars: Progress, title: str) -> Callable[[str], None]:
    """A bar that follows the stream's comments, which end in ``processed/total``."""
    task = bars.add_task(title, total=None, note="")

    def follow(comment: str) -> None:
        done, _, total = comment.rpartition(" ")[2].partition("/")
        if done.isdigit() and total.isdigit():
            note = f"{int(done):,} of {int(total):,} tokens"
            bars.update(task, completed=int(done), total=int(total), note=note)

    return follow


def _table(remote: Answer, local: Answer | None) -> Table:
    """The few figures of a demo, the local lane beside the remote one where it was run."""
    table = Table(show_header=local is not None)
    table.add_column("")
    table.add_column("producer prefills" if local else "")
    if local is not None:
        table.add_column("decoder prefills")
    both = (remote,) if local is None else (remote, local)

    def row(title: str, show: Callable[[Answer], str]) -> None:
        table.add_row(title, *[show(answer) for answer in both])

    row("prompt tokens", lambda answer: f"{answer.usage.get('prompt_tokens', 0):,}")
    row("who prefilled", lambda answer: str(answer.baton.get("source", "?")))
    row("bytes shipped", lambda answer: human_bytes(answer.baton.get("transferred_bytes", 0)))
    row("time to first token", lambda answer: f"{answer.ttft_ms / 1000:.2f} s")
    for phase in dict.fromkeys(name for one in both for name in one.baton.get("phases") or {}):
        row(f"  {phase}", lambda answer, name=phase: _phase(answer, name))
    row("decode", lambda answer: f"{answer.tokens_per_s:.1f} tokens/s")
    if local is not None:
        same = local.tokens == remote.tokens and local.text == remote.text
        table.add_section()
        table.add_row("same answer", "yes, token for token" if same else "no", "")
    row("reasons", lambda answer: "\n".join(answer.baton.get("reasons") or ()))
    return table


def _legend(table: Table) -> Table:
    """What the words in the first column of ``table`` mean."""
    words = [str(cell).strip() for cell in table.columns[0].cells]
    legend = Table.grid(padding=(0, 2))
    for word in words:
        if word in MEANINGS:
            legend.add_row(word, MEANINGS[word], style="dim")
    return legend


def _phase(answer: Answer, name: str) -> str:
    found = (answer.baton.get("phases") or {}).get(name)
    return "" if found is None else f"{found:,.0f} ms"


def _keep(pair: Loopback, name: str) -> None:
    """Keep both processes running until the user interrupts, or one of them ends."""
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Hello"}]})
    address = f"{pair.url}/v1/chat/completions"
    try:
        for line in (
            f"OpenAI endpoint  {pair.url}/v1  (the base URL for any client)",
            f"model            {name}",
            f"producer         {pair.producer.url}",
            f"try it           curl {address} -H 'content-type: application/json' -d '{body}'",
            "Ctrl-C ends both.",
        ):
            err.print(Text(line), soft_wrap=True)
        while True:
            for child in (pair.producer, pair.decoder):
                child.require_running()
            time.sleep(0.5)
    except KeyboardInterrupt:
        return
