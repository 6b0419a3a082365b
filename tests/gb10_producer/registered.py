"""Producers with a registry, and decoders that are in it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gb10_producer.control import Desk, Profile, Taking
from gb10_producer.prefill import Prefiller
from gb10_producer.synthetic import Synthetic
from gb10_producer.trust import RegistryTrust
from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.record import PairingRecord
from tests.contexts import decoder_context
from tests.gb10_producer.peer import MIXED, Peer
from tests.gb10_producer.producer import Running, running
from trust import peers as kept
from trust.peers import Address, Peers

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
OWN = make_certificate("producer", NOW)
MAC, STUDIO, STRANGER = (make_certificate("decoder", NOW) for _ in range(3))


def record_of(
    decoder: OwnCertificate = MAC, epoch: int = 1, key: bytes = b"k" * 32
) -> PairingRecord:
    """The decoder's half of a pairing with :data:`OWN`."""
    return PairingRecord(
        1, "decoder", epoch, key, decoder.certificate, decoder.private_key, OWN.certificate
    )


def kept_of(record: PairingRecord, name: str = "macbook", **more: Any) -> kept.Peer:
    """The producer's half of it."""
    half = PairingRecord(
        1,
        "producer",
        record.epoch,
        record.key,
        OWN.certificate,
        OWN.private_key,
        record.certificate,
    )
    return kept.Peer(name, half, 1_700_000_000, **more)


@contextmanager
def registered(
    directory: Path,
    *records: PairingRecord,
    source: Prefiller | None = None,
    taking: Taking | None = None,
    **options: Any,
) -> Iterator[tuple[Running, Peers]]:
    """A producer that has these decoders in its registry, and takes models if it is said where."""
    peers = Peers(directory, "producer")
    for number, record in enumerate(records):
        peers.add(kept_of(record, f"mac {number}"))
    trust = RegistryTrust(Peers(directory, "producer"), OWN)
    desk = Desk(trust, Profile("gb10", "0.1.0", "some-model"), taking)
    with running(source or Synthetic(MIXED, 16), trust=trust, desk=desk, **options) as producer:
        yield producer, peers


def address_of(producer: Running) -> Address:
    """Where it listens."""
    host, port = producer.url.split("//")[1].split(":")
    return Address(host, int(port))


def connected(producer: Running, record: PairingRecord) -> Peer:
    """A decoder with that record, not yet proven."""
    return Peer(
        producer.url,
        pairing=record.pairing,
        context=decoder_context(record),
        certificates=record.fingerprints,
    )
