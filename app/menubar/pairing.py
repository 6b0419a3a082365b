"""What `baton node add` does, for a window: no terminal is asked and none is written to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from app import node_pairing, node_send
from app.discovery import Seen, browse
from app.model_stream import Outgoing, outgoing
from app.node_decoder import Decoder
from app.node_registry import Registry
from protocol.control.messages import Description
from protocol.errors import BatonError, ConfigError, TransferError
from protocol.identity import identity_differences
from protocol.pairing.code import read_code
from trust.control import Control
from trust.own import machine_name
from trust.peers import Peer
from trust.secrets import Choice

Say = Callable[[str, int, int], None]
"""Told what is done, and how much of how much; of 0 where that is not known."""

_LOADS_S: Final = 60.0
_LOOK_S: Final = 0.5


@dataclass(frozen=True)
class Paired:
    """A producer that is kept now. ``lacks`` is the decoder's model, if it has to be sent;
    ``remark`` what should be known besides.
    """

    peer: Peer
    lacks: Outgoing | None = None
    remark: str = ""


class Pairing:
    """Pairs producers with the decoder of these settings. Any thread; nothing here has Qt."""

    def __init__(
        self, state_dir: str, secrets: Choice | None, url: str, keys_file: Path | None
    ) -> None:
        self._state_dir = Path(state_dir) if state_dir else None
        self._secrets: Choice | None = secrets
        self._decoder = Decoder(url, keys_file)

    def seen(self) -> list[Seen]:
        """The producers that answer in the local network. Raises as ``browse``."""
        return browse()

    def pair(self, target: str, words: str, say: Say) -> Paired:
        """Pair with the producer that shows these words.

        Raises as ``read_code``, ``node_pairing.target_of``, ``node_pairing.pair``.
        """
        code = read_code(words)  # before anything is asked: a slip costs nothing
        registry = Registry(self._state_dir, self._secrets)
        registry.peers.require_usable()
        say(f"Looking for {target}", 0, 0)
        found = node_pairing.target_of(target)
        say(f"Pairing with {target}", 0, 0)
        peer = node_pairing.pair(registry, found, code, machine_name("mac"), None).peer
        say(f"Asking {peer.name} what it serves", 0, 0)
        return self._compared(registry, peer, say)

    def send(self, paired: Paired, say: Say) -> str:
        """Send the model that the producer lacks; what to say of it.

        Raises as ``Control.send_model``.
        """
        ours, peer = paired.lacks, paired.peer
        assert ours is not None
        assert peer.address is not None
        title, total = f"Sending {ours.name} to {peer.name}", ours.manifest.nbytes
        say(title, 0, total)
        with Control.open(peer.address, peer.record) as control:
            kept = control.send_model(ours.offer, ours.pieces, lambda done: say(title, done, total))
        if kept.serving == "kept":
            return (
                f"{peer.name} has {kept.name}, and goes on serving another model: to serve this "
                "one, start it again there: baton produce, without --model"
            )
        return f"{peer.name} has {kept.name} and loads it"

    def _compared(self, registry: Registry, peer: Peer, say: Say) -> Paired:
        """What it has, beside what this machine's decoder serves."""
        try:
            found = self._loaded(peer)
            path = node_send.find_model(None, self._decoder)
        except (ConfigError, TransferError) as error:
            return Paired(peer, remark=f"Its model was not compared ({error.reason})")
        try:
            ours = outgoing(
                path,
                registry.state / "digests.json",
                lambda done, total: say("Looking at the model", done, total),
            )
        except ConfigError as error:
            return Paired(peer, remark=f"The model cannot be sent ({error.reason})")
        same = found.identity is not None and not identity_differences(
            ours.identity, found.identity
        )
        return Paired(peer) if same else Paired(peer, lacks=ours)

    def _loaded(self, peer: Peer) -> Description:
        """What the producer is, once it has loaded its model if it does so now."""
        until = time.monotonic() + _LOADS_S
        while True:
            found = node_send.describe(peer)
            if found.state != "loading" or time.monotonic() > until:
                return found
            time.sleep(_LOOK_S)


def is_void(error: BatonError) -> bool:
    """Whether the words that were typed are good for nothing any more."""
    return error.reason in ("code_differs", "code_burned", "code_expired")
