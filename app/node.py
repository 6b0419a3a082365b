"""`baton node`: the producers that this machine's decoder is paired with.

A running decoder notices every change within two seconds. Caches are the decoder's own, and
stay whatever happens to a producer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from app import node_add, node_pairing, node_send
from app.cache_place import StateDir
from app.discovery import SECONDS, browse
from app.node_decoder import STILL, Decoder, KeysFile, Url
from app.node_figures import figures, table
from app.node_registry import Registry, SecretsChoice, link_name
from app.node_send import ModelDir
from app.status import decoders_address
from app.terminal import complain, err, out, print_json
from protocol.control.messages import Description
from protocol.errors import BatonError, ConfigError, TransferError
from trust.own import machine_name
from trust.peers import Peer

app = typer.Typer(no_args_is_help=True, help="Pair producers with this machine's decoder.")

Name = Annotated[str, typer.Argument(help="What the producer is called; see `baton node list`.")]

NOT_RUNNING = "decoder not running"
NOT_LINKED = "not used by this decoder"
NOT_ASKED = "decoder not asked"

_CHANGED_S = 30.0
"""For so long a decoder may take a producer for what it was before it was sent a model."""


@app.command()
def add(
    target: Annotated[
        str, typer.Argument(metavar="NAME|HOST[:PORT]", help="The producer that shows a code.")
    ],
    code_stdin: Annotated[
        bool, typer.Option("--code-stdin", help="Read the code from standard input.")
    ] = False,
    called: Annotated[
        str | None, typer.Option("--as", help="What to call it; else what it calls itself.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What this machine calls itself; else its host name.")
    ] = None,
    model: ModelDir = None,
    send: Annotated[
        bool | None,
        typer.Option(
            "--send/--no-send",
            help="Send it the decoder's model if it has another or none; else you are asked.",
            show_default=False,
        ),
    ] = None,
    url: Url = None,
    api_keys_file: KeysFile = None,
    state_dir: StateDir = None,
    secrets: SecretsChoice = None,
) -> None:
    """Pair with a producer that shows a code (baton produce --pair), and see that it works.

    One that lacks the decoder's model is sent it.
    """
    decoder = Decoder(decoders_address(url), api_keys_file)
    registry = Registry(state_dir, secrets)
    registry.peers.require_usable()  # before a code is spent
    found = node_add.target_of(target)
    code = node_add.ask_for_code(from_stdin=code_stdin)
    peer = node_add.pair(registry, found, code, name or machine_name("mac"), called)
    try:
        found, sent = _describe(peer), None
        if found is not None:
            sent = node_send.offer(registry, peer, found, decoder, model, send)
        if sent is not None and sent.serving != "kept":
            _await_health(decoder, peer, _CHANGED_S)
        elif sent is None and (found is None or found.state != "waiting"):
            _await_health(decoder, peer, 0.0)
    except KeyboardInterrupt:
        err.print("it stays paired; `baton node list` shows how it is")
        raise
    _print_list([peer], decoder, as_json=False)


@app.command("list")
def list_nodes(
    url: Url = None,
    api_keys_file: KeysFile = None,
    state_dir: StateDir = None,
    secrets: SecretsChoice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the paired producers: how they are, and what was measured."""
    registry = Registry(state_dir, secrets)
    found = registry.peers.all()
    for fault in found.faults:
        complain(fault.error, "baton node list")
    peers = sorted(found.peers, key=lambda peer: peer.name)
    if not peers and not as_json:
        err.print("no producer is paired; `baton node add NAME` pairs one")
        return
    decoder = None
    try:
        decoder = Decoder(decoders_address(url), api_keys_file)
    except ConfigError as error:
        # What is known without the decoder is shown nevertheless.
        complain(error, "baton node list")
    _print_list(peers, decoder, as_json=as_json)


@app.command()
def remove(name: Name, state_dir: StateDir = None, secrets: SecretsChoice = None) -> None:
    """End a pairing on both machines; what is cached of its prompts stays."""
    registry = Registry(state_dir, secrets)
    peer = registry.peers.named(name)
    unheard = node_pairing.end(registry, peer)
    err.print(f"{escape(peer.name)} is removed")
    if unheard is not None:
        err.print(
            f"[yellow]It could not be told[/] ({escape(unheard.reason)}). Unless it has removed "
            "this machine already, remove it there: baton produce --forget "
            f"'{escape(machine_name('mac'))}', or as baton produce --peers calls it.",
            soft_wrap=True,
        )


@app.command()
def rotate(name: Name, state_dir: StateDir = None, secrets: SecretsChoice = None) -> None:
    """Agree on a new key with a producer, which begins a new epoch."""
    registry = Registry(state_dir, secrets)
    peer = registry.peers.named(name)
    kept = node_pairing.renew(registry, peer)
    if kept is None:
        err.print(f"{escape(peer.name)} was removed meanwhile")
        raise typer.Exit(1)
    err.print(f"{escape(peer.name)} has a new key: epoch {kept.record.epoch}")


@app.command()
def qualify(
    name: Name,
    url: Url = None,
    api_keys_file: KeysFile = None,
    state_dir: StateDir = None,
    secrets: SecretsChoice = None,
) -> None:
    """Qualify a producer anew: compare its rows with this machine's, and measure it."""
    registry, decoder = Registry(state_dir, secrets), Decoder(decoders_address(url), api_keys_file)
    peer = registry.peers.named(name)
    try:
        # A producer that cannot be asked keeps the verdict that it has.
        decoder.require_reached(link_name(peer))
        registry.forget_verdict(peer)
        decoder.wait(
            link_name(peer),
            f"{peer.name}: qualify, comparing its rows with this machine's",
            lambda: registry.verdict(peer) is not None,
        )
    except TransferError as error:
        if error.reason == STILL:
            err.print(_still(error))
            return
        if error.reason != "decoder_unreachable":
            raise
        registry.forget_verdict(peer)
        err.print(f"{_not_running(decoder)}: it is qualified once one runs (baton serve)")
        return
    _print_list([peer], decoder, as_json=False)


@app.command()
def send(
    name: Name,
    model: ModelDir = None,
    url: Url = None,
    api_keys_file: KeysFile = None,
    state_dir: StateDir = None,
    secrets: SecretsChoice = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Send a producer the decoder's model, or go on where that was interrupted."""
    registry, decoder = Registry(state_dir, secrets), Decoder(decoders_address(url), api_keys_file)
    peer = registry.peers.named(name)
    node_pairing.address_of(peer)
    path = node_send.find_model(model, decoder)
    sent = node_send.deliver(peer, node_send.read(registry, path))
    if as_json:
        print_json(asdict(sent))
        return
    if sent.serving != "kept":
        try:
            _await_health(decoder, peer, _CHANGED_S)
        except KeyboardInterrupt:
            err.print("it has the model; `baton node list` shows how it is")
            raise
    _print_list([peer], decoder, as_json=False)


@app.command()
def discover(
    seconds: Annotated[float, typer.Option(min=0.0, max=60.0, help="How long to ask.")] = SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the producers that answer in the local network."""
    seen = browse(seconds)
    if as_json:
        print_json([asdict(one) for one in seen])
        return
    if not seen:
        err.print("nobody answers; a producer that can be paired runs `baton produce --pair`")
        return
    shown = Table()
    for title in ("name", "address", "model", "pairing"):
        shown.add_column(title, overflow="fold")
    for one in seen:
        pairing = "open: baton node add" if one.pair else "closed"
        model = one.model.encode("ascii", "replace").decode()
        shown.add_row(escape(one.name), f"{one.host}:{one.port}", escape(model), pairing)
    out.print(shown)


def _describe(peer: Peer) -> Description | None:
    """Say what the producer is; that it cannot be asked yet is no failure of pairing."""
    try:
        return node_add.describe(peer)
    except BatonError as error:
        err.print(f"it does not say what it serves ({escape(error.reason)})")
        return None


def _await_health(decoder: Decoder, peer: Peer, settle_s: float) -> None:
    title = f"{peer.name}: qualify, comparing its rows with this machine's"
    try:
        decoder.wait(link_name(peer), title, settle_s=settle_s)
    except TransferError as error:
        if error.reason == STILL:
            err.print(_still(error))
            return
        if error.reason != "decoder_unreachable":
            raise
        err.print(f"{_not_running(decoder)}: it is used once one runs (baton serve --model DIR)")


def _not_running(decoder: Decoder) -> str:
    """That no decoder answers, and where; it may be elsewhere."""
    return f"{NOT_RUNNING} at {escape(decoder.url)} (--url HOST:PORT names another)"


def _still(error: TransferError) -> str:
    """Qualifying takes longer than anybody should wait here, which is nobody's fault."""
    return f"still being qualified ({escape(str(error.found))}): see `baton node list` later"


def _print_list(peers: Sequence[Peer], decoder: Decoder | None, *, as_json: bool) -> None:
    links, without = _links(decoder)
    rows = [figures(peer, links) for peer in peers]
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        out.print(table(rows, without))


def _links(decoder: Decoder | None) -> tuple[Sequence[Mapping[str, Any]], str]:
    """What the decoder says of its links, and what to say of a producer without one."""
    if decoder is None:
        return (), NOT_ASKED
    try:
        return decoder.links(), NOT_LINKED
    except TransferError as error:
        if error.reason == "decoder_unreachable":
            return (), f"{NOT_RUNNING} at {decoder.url}"
        return (), f"not told ({error.reason})"
