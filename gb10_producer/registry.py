"""This producer's registry: opened for serving, listed and shortened for people."""

from __future__ import annotations

import datetime
import sys
from dataclasses import dataclass

from gb10_producer.config import ProducerConfig
from protocol.pairing.certificates import OwnCertificate
from trust.own import machine_name, own_certificate
from trust.peers import Peer, Peers
from trust.secrets import default_choice, secrets_of


@dataclass(frozen=True)
class Registry:
    """Who is paired with this producer, and what it shows them."""

    peers: Peers
    own: OwnCertificate
    name: str


def open_registry(config: ProducerConfig) -> Registry:
    """The registry, with this machine's certificate, which is made if there is none.

    Raises ``ConfigError`` as ``own_certificate`` does.
    """
    secrets = secrets_of(config.secrets or default_choice())
    now = datetime.datetime.now(datetime.UTC)
    own = own_certificate(config.state_path, "producer", secrets, now)
    peers = Peers(config.state_path, "producer", secrets)
    return Registry(peers, own, config.name or machine_name("gb10"))


def list_peers(config: ProducerConfig) -> None:
    """Print a line for each peer, and on stderr one for each file that cannot be used.

    Raises ``ConfigError`` as ``Peers.all`` does.
    """
    found = _peers(config).all()
    for peer in sorted(found.peers, key=lambda peer: (peer.name, peer.fingerprint)):
        print(_line(peer))
    for fault in found.faults:
        print(f"{fault.name}: {fault.error.message} ({fault.error.reason})", file=sys.stderr)
    if not found.peers:
        print("nobody is paired with this producer: baton produce --pair", file=sys.stderr)


def forget(config: ProducerConfig, called: str) -> None:
    """Remove the peer of that name or fingerprint; a running producer notices.

    Raises ``ConfigError``: ``peer_unknown``, ``peer_ambiguous``, and as ``Peers.remove`` does.
    """
    peers = _peers(config)
    broken = {fault.name for fault in peers.all().faults}
    if called in broken:  # what cannot be read has no name
        peers.discard(called)
        print(f"removed {called}")
        return
    peer = peers.named(called)
    peers.remove(peer.fingerprint)
    print(f"forgotten: {_line(peer)}")


def _peers(config: ProducerConfig) -> Peers:
    return Peers(config.state_path, "producer", secrets_of(config.secrets or default_choice()))


def _line(peer: Peer) -> str:
    when = datetime.datetime.fromtimestamp(peer.paired_at).strftime("%Y-%m-%d %H:%M")
    known = f"{peer.fingerprint.hex()[:16]}  epoch {peer.record.epoch}  paired {when}"
    return f"{peer.name}  {known}"
