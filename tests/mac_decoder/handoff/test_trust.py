"""TLS with both certificates pinned: whom the link talks to, and whom it does not."""

from __future__ import annotations

import socket
import ssl
import time
from pathlib import Path

import pytest

from gb10_producer.trust import make_records
from mac_decoder.handoff.trust import trust_of_file, trust_of_key
from protocol.errors import BatonError, ConfigError
from protocol.pairing.record import PairingRecord, encode_record
from tests.contexts import producer_context
from tests.mac_decoder.handoff.producer import KEY, LAYOUT, WIDE, Memory, TestProducer


def written(record: PairingRecord, directory: Path, mode: int = 0o600) -> Path:
    path = directory / f"{record.role}.pairing"
    path.write_bytes(encode_record(record))
    path.chmod(mode)
    return path


def secured(make_producer, record: PairingRecord, **options) -> TestProducer:
    return make_producer(
        key=record.key,
        epoch=record.epoch,
        certificates=record.fingerprints,
        context=producer_context(record),
        **options,
    )


def reason_of(link) -> str:
    deadline = time.monotonic() + 30
    while link.state.name == "connecting":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return link.state.reason


@pytest.fixture(scope="module")
def records() -> tuple[PairingRecord, PairingRecord]:
    return make_records(3)


def test_a_handoff_over_tls(make_producer, make_link, records, tmp_path):
    theirs, ours = records
    producer = secured(make_producer, theirs, layout=WIDE)
    link = make_link(producer, layout=WIDE, trust=trust_of_file(written(ours, tmp_path)))
    shadow = Memory(WIDE, 0, 40)
    with link.fetch(list(range(41)), shadow) as handoff:
        handoff.committed()
    assert shadow.holds_what_was_sent()


def test_only_tls_1_3_is_spoken(records, tmp_path):
    trust = trust_of_file(written(records[1], tmp_path))
    assert trust.context is not None
    assert trust.context.minimum_version == ssl.TLSVersion.TLSv1_3


def test_another_certificate_is_not_the_pinned_one(make_producer, make_link, records, tmp_path):
    _, ours = records
    stranger, _ = make_records(3)
    # It accepts our certificate, and even holds the key: the pin alone refuses it.
    mixed = PairingRecord(
        version=1,
        role="producer",
        epoch=3,
        key=ours.key,
        certificate=stranger.certificate,
        private_key=stranger.private_key,
        peer_certificate=ours.certificate,
    )
    producer = secured(make_producer, mixed)
    link = make_link(producer, trust=trust_of_file(written(ours, tmp_path)))
    assert reason_of(link) == "certificate_differs"
    assert link.state.name == "refused"
    assert producer.requests == 0


def test_a_producer_of_another_pairing_refuses_our_certificate(
    make_producer, make_link, records, tmp_path
):
    theirs, ours = records
    _, other = make_records(3)
    strict = PairingRecord(
        version=1,
        role="producer",
        epoch=3,
        key=theirs.key,
        certificate=theirs.certificate,
        private_key=theirs.private_key,
        peer_certificate=other.certificate,
    )
    producer = secured(make_producer, strict)
    link = make_link(producer, trust=trust_of_file(written(ours, tmp_path)))
    assert reason_of(link) == "tls_failed"
    with pytest.raises(BatonError):
        link.fetch(list(range(51)), Memory(LAYOUT, 0, 50))


def test_a_producer_that_goes_away_during_the_tls_handshake_has_refused_nobody(
    make_link, records, tmp_path
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = make_link(
            url=f"wss://127.0.0.1:{listener.getsockname()[1]}",
            trust=trust_of_file(written(records[1], tmp_path)),
        )
        with listener.accept()[0] as accepted:
            assert accepted.recv(1 << 14), "the client's hello"
        assert reason_of(link) == "connection_lost"


def test_no_tls_where_tls_is_due(make_producer, make_link, records, tmp_path):
    producer = make_producer()
    link = make_link(
        url=producer.url.replace("ws:", "wss:"), trust=trust_of_file(written(records[1], tmp_path))
    )
    assert reason_of(link) in ("tls_failed", "connect_timeout", "connection_lost")


def test_tls_where_none_is_due(make_producer, make_link, records):
    producer = secured(make_producer, records[0])
    link = make_link(url=producer.url.replace("wss:", "ws:"), trust=trust_of_key(KEY))
    assert reason_of(link) in ("handshake_invalid", "connection_lost")


def test_a_file_that_others_can_read(records, tmp_path):
    with pytest.raises(ConfigError) as caught:
        trust_of_file(written(records[1], tmp_path, 0o640))
    assert caught.value.reason == "pairing_exposed"


def test_a_file_that_is_missing(tmp_path):
    with pytest.raises(ConfigError) as caught:
        trust_of_file(tmp_path / "nowhere")
    assert caught.value.reason == "pairing_missing"


def test_the_other_sides_file(records, tmp_path):
    with pytest.raises(ConfigError) as caught:
        trust_of_file(written(records[0], tmp_path))
    assert caught.value.reason == "pairing_of_other_side"


def test_a_certificate_that_is_none(records, tmp_path):
    import msgspec

    broken = msgspec.structs.replace(records[1], certificate=b"\x30\x03\x02\x01\x01")
    with pytest.raises(ConfigError) as caught:
        trust_of_file(written(broken, tmp_path))
    assert caught.value.reason == "pairing_unreadable"


def test_nothing_of_a_secret_is_shown(records, tmp_path):
    trust = trust_of_file(written(records[1], tmp_path))
    assert records[1].key.hex() not in repr(trust)
    assert repr(records[1].key)[2:-1] not in repr(trust)
