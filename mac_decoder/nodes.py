"""The producers of this decoder: those it was started with, and those that it is paired with.

Links to the latter come and go while it serves, since another process, `baton node`, changes
who is paired. Links are made, started and closed here, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from mac_decoder.config import DecoderConfig
from mac_decoder.handoff.client import ProducerLink
from mac_decoder.handoff.connection import Producer
from mac_decoder.handoff.generations import Generations
from mac_decoder.handoff.link import Link
from mac_decoder.handoff.trust import (
    Trust,
    trust_of_file,
    trust_of_key,
    trust_of_record,
    url_of,
)
from mac_decoder.qualify.gate import Gate
from protocol.checkpoint import Checkpoint
from protocol.errors import ConfigError, TransferError
from trust.peers import Peer
from trust.tls import NO_ROOM

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""How often it is looked who is paired."""
RETRY_S: Final = 10.0
"""When it is tried again to read who is paired: a locked keyring may ask the user each time."""
_FIRST_ATTEMPT_S: Final = 1.0
"""How much later a node says that it is ready for a producer that does not answer."""


@dataclass(frozen=True)
class _Paired:
    """A link to a peer as the registry had it."""

    peer: Peer
    gate: Gate

    def serves(self, peer: Peer) -> bool:
        """Whether the link is what ``peer`` needs; a name may change."""
        return (self.peer.record, self.peer.address) == (peer.record, peer.address)


class Nodes:
    """:meth:`open` first, which may block; :meth:`close` last."""

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._peers = config.peers()
        self._given: tuple[Gate, ...] = ()
        self._paired: dict[bytes, _Paired] = {}
        self._current = False
        """Whether the links are those of the registry as it was last looked at."""
        self._not_before = 0.0
        self._told: dict[str, str] = {}

    def gates(self) -> Sequence[Gate]:
        """The links as they are now; none of them is closed. Any thread."""
        return (*self._given, *(paired.gate for paired in [*self._paired.values()]))

    def open(self) -> None:
        """Make all links.

        Raises ``ConfigError``: what ``trust_of_file`` and ``Peers.all`` raise (nothing is asked
        of the keyring where nobody is paired), and ``lane_needs_producer``.
        """
        config = self._config
        for number, url in enumerate(config.producers):
            if config.pairings:
                trust = trust_of_file(Path(config.pairings[number]))
            else:
                assert config.key is not None  # config.check saw to it
                trust = trust_of_key(config.key)
            # Who has no certificate is on this machine, and was started with this decoder.
            shown = trust.certificates.producer if trust.certificates else None
            self._given += (self._gate(url, trust, shown),)
        self._follow(lambda gate: None)
        if config.lane == "remote" and not self.gates():
            raise ConfigError(
                "the lane remote needs a producer",
                reason="lane_needs_producer",
                field="lane",
                hint="pair one with `baton node add`, or give --producer wss://HOST:PORT",
            )

    async def start(self, stopped: Callable[[], bool]) -> None:
        """Begin to connect, and wait a little for the first outcomes."""
        for gate in self.gates():
            gate.start()
        await asyncio.gather(*(first_attempt(gate, stopped) for gate in self.gates()))

    async def watch(self, add: Callable[[Link], None]) -> None:
        """Go by what changes in the registry, until cancelled.

        ``add`` is called with links to new peers, in another thread. Where the registry cannot
        be read any more, all stays as it is, and the log says why.
        """
        while True:
            await asyncio.sleep(LOOK_S)
            await asyncio.to_thread(self._look, add)

    async def close(self) -> None:
        """Close all links; everything of theirs has ended then."""
        await asyncio.gather(*(asyncio.to_thread(gate.close) for gate in self.gates()))

    def _look(self, add: Callable[[Link], None]) -> None:
        if time.monotonic() < self._not_before:
            return

        def begin(gate: Gate) -> None:
            gate.start()
            add(gate)

        try:
            if not self._current or self._peers.changed():
                self._follow(begin)
        except (ConfigError, OSError) as error:
            self._not_before = time.monotonic() + RETRY_S
            reason = error.reason if isinstance(error, ConfigError) else "descriptors_exhausted"
            self._tell("", reason, str(error))

    def _follow(self, begin: Callable[[Gate], None]) -> None:
        """Close the links whose peers have gone or changed; make and begin those of new ones.

        Raises as ``Peers.all``.
        """
        self._current = False
        found = self._peers.all()
        kept = {peer.fingerprint: peer for peer in found.peers}
        faults = {fault.name: fault.error for fault in found.faults}
        for fingerprint, paired in [*self._paired.items()]:
            peer = kept.get(fingerprint)
            # A file that cannot be read any more says nothing about its peer.
            gone = peer is None and fingerprint.hex() not in faults
            if peer is not None:
                paired.gate.link.rename(peer.name)
            if gone or (peer is not None and not paired.serves(peer)):
                del self._paired[fingerprint]
                paired.gate.close()
                log.info("producer %s: %s", paired.gate.name, "removed" if gone else "changed")
        for name, error in faults.items():
            self._tell(name, error.reason, error.message)
        for peer in found.peers:
            if peer.fingerprint not in self._paired and (gate := self._gate_of(peer)) is not None:
                self._paired[peer.fingerprint] = _Paired(peer, gate)
                begin(gate)
        self._current = True
        self._told = {name: reason for name, reason in self._told.items() if name in faults}

    def _gate_of(self, peer: Peer) -> Gate | None:
        """A link to a peer, if one can be made."""
        if peer.address is None:
            self._tell(peer.fingerprint.hex(), "peer_unreadable", "it has no address")
            return None
        try:
            trust = trust_of_record(peer.record)
        except ConfigError as error:
            if error.reason == NO_ROOM:
                raise  # it is looked at again
            self._tell(peer.fingerprint.hex(), error.reason, error.message)
            return None
        return self._gate(url_of(peer.address), trust, peer.fingerprint, peer.name)

    def _gate(self, url: str, trust: Trust, fingerprint: bytes | None, called: str = "") -> Gate:
        pairing = trust.pairing
        path = self._config.state_path / "generations.json"
        numbers = Generations(path, pairing.key, pairing.epoch)
        try:
            numbers.reserve()
        except TransferError as error:
            log.warning("no handoffs for now (%s): %s", error.reason, error.message)
        producer = Producer(url, trust, self._checkpoint.identity, self._checkpoint.layout)
        return Gate(ProducerLink(producer, numbers, called=called), fingerprint)

    def _tell(self, name: str, reason: str, message: str) -> None:
        """Log what is wrong with a peer's file, or with all of them, once while it lasts."""
        if self._told.get(name) != reason:
            self._told[name] = reason
            log.warning("peer %s not used (%s): %s", name[:16] or "registry", reason, message)


async def first_attempt(
    link: Link, stopped: Callable[[], bool], patience_s: float = _FIRST_ATTEMPT_S
) -> None:
    """Wait until the first connection attempt has an outcome, but not for long.

    A request right after ``ready`` then meets a link that is up, where there is a producer.
    """
    limit = time.monotonic() + patience_s
    while link.state.name == "connecting" and time.monotonic() < limit and not stopped():
        await asyncio.sleep(0.01)
