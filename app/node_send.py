"""Sending a producer the decoder's model: when it is offered, and how it looks.

Nothing is copied by hand: the model goes over the control channel of the pairing. What a
producer has received of it stays there, and the same command goes on behind it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.markup import escape

from app import settings
from app.model_stream import Outgoing, outgoing
from app.node_decoder import Decoder
from app.node_registry import Registry
from app.terminal import err, progress, step
from app.view.words import human_bytes
from protocol.control.messages import Description, ModelKept
from protocol.errors import BatonError, CapacityError, ConfigError, TransferError
from protocol.identity import identity_differences
from trust.control import Control
from trust.peers import Peer

ModelDir = Annotated[
    Path | None,
    typer.Option("--model", help="The decoder's model; else what the running decoder serves."),
]

LOADING_S: Final = 900.0
"""How long a producer may take to load a model."""

BUSY_S: Final = 60.0
"""How long it is waited for the end of another transfer to the same producer."""

_ITS_OWN_S: Final = 120.0
"""How long it is waited for a model that a producer was started with."""
_LOOK_S: Final = 0.5
_NONE_SERVES: Final = ("decoder_unreachable", "decoder_starting", "decoder_restarting")
"""What is answered where no decoder serves a model: it would serve what the settings name."""
_NO_USE: Final = (
    "model_identity_differs",
    "model_unusable",
    "model_unsupported",
    "model_manifest_invalid",
)
"""Of what to send the same once more does not help."""
_COMMAND: Final = "baton produce, without --model"
_AWAY: Final = (
    "producer_down",
    "connection_lost",
    "handshake_refused",
    "producer_stopping",
)
"""What a producer that starts again answers for a moment."""


@dataclass(frozen=True)
class Sent:
    """What `baton node send --json` prints: ``sent`` of the ``bytes`` went over the wire."""

    producer: str
    model: str
    serving: str
    bytes: int
    sent: int
    seconds: float


def find_model(given: Path | None, decoder: Decoder) -> Path:
    """The decoder's model: ``given``, what the decoder says, or what this machine's settings do.

    Raises ``ConfigError`` (``model_not_known``), ``TransferError`` where a decoder runs that
    does not say (``invalid_api_key``, ...), and as ``settings.named``.
    """
    if given is not None:
        return given
    try:
        found = decoder.model()
    except TransferError as error:
        if error.reason not in _NONE_SERVES:
            raise  # one runs, and the settings may name another model than it serves
        found = None
    if found is None and (named := settings.named("serve", "model")) is not None:
        found = Path(named)
    if found is not None and (found / "config.json").is_file():
        return found
    raise ConfigError(
        "it is not known which model the decoder of this machine serves",
        reason="model_not_known",
        field="model",
        hint="start the decoder (baton serve --model DIR), or name its model: --model DIR",
    )


def describe(peer: Peer) -> Description:
    """What the producer is. Raises as ``Control``."""
    assert peer.address is not None
    with Control.open(peer.address, peer.record) as control:
        return control.describe()


def offer(
    registry: Registry,
    peer: Peer,
    found: Description,
    decoder: Decoder,
    model: Path | None,
    send: bool | None,
) -> Sent | None:
    """Send the decoder's model to a producer that has another or none, if that is wanted.

    ``send``: what the command line says; whoever sits at a terminal is asked. What was sent, if
    anything was. Raises as :func:`deliver` and, where the model was named or has to be sent, as
    :func:`find_model`.
    """
    if send is False:
        return None
    try:
        path = find_model(model, decoder)
    except (ConfigError, TransferError):
        if send or model is not None:
            raise
        if found.state == "waiting":
            command = f"baton node send '{peer.name}' --model DIR"
            err.print(f"it has no model yet; to send it one: {escape(command)}", soft_wrap=True)
        return None
    found = _loaded(peer, found)
    ours = read(registry, path)
    if found.identity is not None and not identity_differences(ours.identity, found.identity):
        return None
    size = human_bytes(ours.manifest.nbytes)
    lacks = f"{peer.name} does not have {ours.name} ({size})"
    if send is None and not _at_a_terminal():
        command = f"baton node send '{peer.name}'"
        err.print(f"{escape(lacks)}: {escape(command)} sends it", soft_wrap=True)
        return None
    if send is None and not typer.confirm(f"{lacks}. Send it?", default=True, err=True):
        return None
    return deliver(peer, ours)


def _at_a_terminal() -> bool:
    """Whether somebody is there who can be asked."""
    return sys.stdin.isatty() and err.is_terminal


def read(registry: Registry, model: Path) -> Outgoing:
    """The checkpoint in ``model``, hashed. Raises ``ConfigError`` as ``outgoing``."""
    with progress() as bars:
        task = bars.add_task("look at the model", total=None, note="")

        def report(done: int, total: int) -> None:
            bars.update(task, completed=done, total=total, note=human_bytes(done))

        return outgoing(model, registry.state / "digests.json", report)


def deliver(peer: Peer, ours: Outgoing) -> Sent:
    """Send a model, and wait until the producer serves it, if it does without anybody there.

    Raises as ``Control.send_model``, and ``TransferError`` (``model_not_served``).
    """
    until, told = time.monotonic() + BUSY_S, False
    while True:
        try:
            return _deliver(peer, ours)
        except CapacityError as error:
            if error.reason != "model_transfer_busy" or time.monotonic() >= until:
                raise
        if not told:
            # What an interrupted sender had under way is still arriving, more often than not.
            err.print(f"{escape(peer.name)} is receiving a model already: waiting for its end")
            told = True
        time.sleep(_LOOK_S)


def _deliver(peer: Peer, ours: Outgoing) -> Sent:
    assert peer.address is not None
    meter, began = _Meter(ours.manifest.nbytes), time.monotonic()
    try:
        with progress() as bars, Control.open(peer.address, peer.record) as control:
            title = escape(f"send {ours.name} to {peer.name}")
            task = bars.add_task(title, total=ours.manifest.nbytes, note=meter.said)

            def sent(nbytes: int) -> None:
                meter.at(nbytes)
                bars.update(task, completed=nbytes)

            kept = control.send_model(ours.offer, ours.pieces, sent)
    except (KeyboardInterrupt, BatonError) as error:
        lost = isinstance(error, BatonError) and error.reason in _NO_USE
        if meter.begun and not lost:
            told = f"{meter.told} sent; `baton node send '{peer.name}'` goes on from there"
            err.print(escape(told), soft_wrap=True)
        raise
    took = time.monotonic() - began
    how = f"{human_bytes(meter.sent)} in {took:.1f} s" if meter.sent else "nothing was lacking"
    err.print(f"[green]✓[/] {escape(peer.name)} has {escape(kept.name)} [dim]({how})[/]")
    _await_served(peer, ours, kept)
    return Sent(
        peer.name, kept.name, kept.serving, ours.manifest.nbytes, meter.sent, round(took, 3)
    )


class _Meter:
    """How much of a model went over the wire."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: int | None = None
        self._done = 0
        self._began = time.monotonic()

    @property
    def begun(self) -> bool:
        return self._first is not None

    @property
    def sent(self) -> int:
        return 0 if self._first is None else self._done - self._first

    @property
    def told(self) -> str:
        return f"{human_bytes(self._done)} of {human_bytes(self._total)}"

    def at(self, nbytes: int) -> None:
        if self._first is None:
            self._first, self._began = nbytes, time.monotonic()
        self._done = nbytes

    def said(self) -> str:
        if self._first is None:
            return "it looks at what it has"
        if self._done == self._total:
            return f"{self.told}; it looks at it"
        rate = self.sent / max(0.1, time.monotonic() - self._began)
        return f"{self.told}, {human_bytes(rate)}/s"


def _await_served(peer: Peer, ours: Outgoing, kept: ModelKept) -> None:
    if kept.serving == "kept":
        err.print(
            f"It goes on serving another model; to serve this one, start it again there: "
            f"{escape(_COMMAND)}",
            soft_wrap=True,
        )
        return
    until = time.monotonic() + LOADING_S
    with step(f"{peer.name} loads it"):
        while time.monotonic() < until:
            found = _described(peer)
            if found is not None and found.state == "waiting":
                raise _not_served("it could not load the model")
            same = (
                found is not None
                and found.identity is not None
                and not identity_differences(ours.identity, found.identity)
            )
            if same:
                return
            time.sleep(_LOOK_S)
    raise _not_served("it has not loaded the model by now")


def _not_served(text: str) -> TransferError:
    return TransferError(
        text,
        reason="model_not_served",
        hint="see the log of `baton produce` there; `baton node list` shows how it is",
    )


def _described(peer: Peer) -> Description | None:
    """What the producer is; ``None`` while it starts again."""
    try:
        return describe(peer)
    except BatonError as error:
        if error.reason not in _AWAY and error.reason != "producer_busy":
            raise
        return None


def _loaded(peer: Peer, found: Description) -> Description:
    """The description of a producer that loads its model, once it has; or as it was."""
    if found.state != "loading":
        return found
    until = time.monotonic() + _ITS_OWN_S
    with step(f"{peer.name} loads its model"):
        while found.state == "loading" and time.monotonic() < until:
            time.sleep(_LOOK_S)
            found = _described(peer) or found
    return found
