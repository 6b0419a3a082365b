"""Whom this machine's decoder is paired with, and what this machine is called: `baton node`."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Final

import typer

from app.cache_place import StateDir
from mac_decoder.config import DecoderConfig
from mac_decoder.handoff.trust import url_of
from mac_decoder.qualify.verdicts import Verdict, Verdicts
from protocol.pairing.certificates import OwnCertificate
from trust.own import own_certificate
from trust.peers import Peer, Peers
from trust.secrets import Choice, default_choice, secrets_of

SecretsChoice = Annotated[
    Choice | None,
    typer.Option(help="How secrets are kept, as `baton serve` has it.", show_default=False),
]

_LONGEST_NAME: Final = 64


class Registry:
    """The producers of the decoder with these options. The keyring is asked when need be.

    Methods raise ``ConfigError`` as those of ``Peers``.
    """

    def __init__(self, state_dir: StateDir, secrets: SecretsChoice) -> None:
        config = DecoderConfig(model="", state_dir=str(state_dir or ""))
        self.state: Path = config.state_path
        self._secrets = secrets_of(secrets or default_choice())
        self.peers = Peers(self.state, "decoder", self._secrets)
        self._verdicts = Verdicts(self.state)

    def own(self) -> OwnCertificate:
        """This machine's certificate, made if there is none. Raises as ``own_certificate``."""
        return own_certificate(self.state, "decoder", self._secrets, datetime.now(UTC))

    def keep(self, peer: Peer) -> list[str]:
        """Keep a new peer; the names of those whose place it takes, which are forgotten.

        At one address there is one producer: an older pairing's is not there any more.
        """
        self.peers.add(peer)
        replaced = [
            other
            for other in self.peers.all().peers
            if other.address == peer.address and other.fingerprint != peer.fingerprint
        ]
        for other in replaced:
            self.forget(other)
        return [other.name for other in replaced]

    def forget(self, peer: Peer) -> None:
        """Forget a peer, and what was found of it. Caches stay: they are this decoder's."""
        self.peers.remove(peer.fingerprint)
        self._verdicts.forget(peer.fingerprint)

    def free_name(self, name: str, fingerprint: bytes) -> str:
        """``name``, with a number if another peer has it."""
        taken = {peer.name for peer in self.peers.all().peers if peer.fingerprint != fingerprint}
        found, number = name, 1
        while found in taken:
            number += 1
            suffix = f" {number}"
            found = name[: _LONGEST_NAME - len(suffix)].rstrip() + suffix
        return found

    def verdict(self, peer: Peer) -> Verdict | None:
        """What was found of a peer's rows, if anything."""
        return self._verdicts.of(peer.fingerprint)

    def forget_verdict(self, peer: Peer) -> None:
        """Have a running decoder, or the next one, qualify a peer anew."""
        self._verdicts.forget(peer.fingerprint)


def link_name(peer: Peer) -> str:
    """What a decoder's status calls the link to ``peer``."""
    return "" if peer.address is None else url_of(peer.address)
