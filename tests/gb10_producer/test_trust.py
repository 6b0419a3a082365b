"""Who may talk to a producer with a registry, while that changes."""

from __future__ import annotations

import dataclasses
import json
import logging
import ssl
import time
from pathlib import Path

import pytest
from msgspec import structs

from gb10_producer import trust as trust_module
from gb10_producer.synthetic import Synthetic
from gb10_producer.transfers import Patience
from gb10_producer.trust import (
    FixedTrust,
    Owner,
    RegistryTrust,
    require_trust_for,
)
from protocol import messages
from protocol.errors import BatonError, ConfigError, IntegrityError, TransferError
from protocol.handoff import Began, Released
from protocol.messages import Abort
from protocol.pairing import Pairing
from protocol.pairing.record import PairingRecord, fingerprint
from tests.contexts import decoder_context
from tests.gb10_producer.peer import KEY, MIXED, Closed, Peer, expected_regions
from tests.gb10_producer.producer import Gated, Running, running, wait_until
from tests.gb10_producer.registered import (
    MAC,
    OWN,
    STRANGER,
    STUDIO,
    connected,
    kept_of,
    record_of,
    registered,
)
from tests.trust.machines import old_style
from trust.peers import Peers
from trust.tls import NO_ROOM

RECORD, OTHER = record_of(MAC), record_of(STUDIO, key=b"o" * 32)
ROTATED = structs.replace(RECORD, epoch=2, key=b"r" * 32)


def refused_by_tls(
    producer: Running,
    record: PairingRecord,
    reason: str = "tls_handshake_failed",
    told: str = "tls_failed",
) -> bool:
    """Whether the connection is ended before WebSocket begins, and counted for that reason."""
    before = producer.server.refused.get(reason, 0)
    with pytest.raises(TransferError) as refused:
        connected(producer, record)
    assert refused.value.reason == told
    wait_until(lambda: producer.server.refused.get(reason, 0) > before)
    return True


# Many decoders


def test_each_decoder_is_served_under_its_own_key(tmp_path: Path) -> None:
    with (
        registered(tmp_path, RECORD, OTHER) as (producer, _),
        connected(producer, RECORD) as mac,
        connected(producer, OTHER) as studio,
    ):
        for peer in (mac, studio):
            assert peer.handshake().fetch(range(50)) == expected_regions(MIXED, range(50), 0, 16)


def test_a_certificate_with_the_key_of_another_decoder_is_refused(tmp_path: Path) -> None:
    stolen = structs.replace(RECORD, key=OTHER.key)
    with registered(tmp_path, RECORD, OTHER) as (producer, _):
        with connected(producer, stolen) as peer, pytest.raises(BatonError) as refused:
            peer.handshake()
        assert refused.value.reason == "proof_differs"


def test_a_key_without_its_certificate_gets_no_further_than_tls(tmp_path: Path) -> None:
    stolen = structs.replace(
        RECORD, certificate=STRANGER.certificate, private_key=STRANGER.private_key
    )
    with registered(tmp_path, RECORD) as (producer, _):
        assert refused_by_tls(producer, stolen)


def test_a_leaf_that_a_paired_machine_signed_is_not_paired(tmp_path: Path) -> None:
    issuer = old_style("issuer")
    issued = old_style("issued", issuer=issuer)
    paired, foreign = record_of(issuer), record_of(issued)
    with registered(tmp_path, paired) as (producer, _):
        with connected(producer, paired) as peer:
            peer.handshake().fetch(range(20))
        # TLS had nothing against it, so there is no more to hear than that it is over.
        assert refused_by_tls(producer, foreign, "proof_differs", "connection_lost")


def test_tls_1_2_is_refused(tmp_path: Path) -> None:
    context = decoder_context(RECORD)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with registered(tmp_path, RECORD) as (producer, _), pytest.raises(TransferError):
        Peer(producer.url, context=context)


def test_with_nobody_in_the_registry_nobody_is_let_in(tmp_path: Path) -> None:
    with registered(tmp_path) as (producer, _):
        assert refused_by_tls(producer, RECORD)


# While it runs


def test_somebody_who_was_just_paired_is_let_in_at_once(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, peers):
        assert refused_by_tls(producer, OTHER)
        peers.add(kept_of(OTHER))
        with connected(producer, OTHER) as peer:
            peer.handshake().fetch(range(20))


@pytest.mark.parametrize("doing", ["nothing", "handoff"])
def test_a_removed_decoder_is_ended_and_not_let_in_again(tmp_path: Path, doing: str) -> None:
    source = Gated()
    with (
        registered(tmp_path, RECORD, OTHER, source=source) as (producer, peers),
        connected(producer, RECORD) as removed,
        connected(producer, OTHER) as stays,
    ):
        removed.handshake()
        stays.handshake()
        if doing == "handoff":
            removed.start(range(50))
            assert source.reached.wait(5.0)
        peers.remove(fingerprint(RECORD.certificate))
        began = time.monotonic()
        with pytest.raises(BatonError) as told:
            removed.until(Released)
        assert told.value.reason == "pairing_revoked"
        assert time.monotonic() - began < 4.0
        wait_until(lambda: producer.jobs == (0, 0))
        assert refused_by_tls(producer, RECORD)
        source.gate.set()
        assert stays.fetch(range(30)) == expected_regions(MIXED, range(30), 0, 16)


def test_a_connection_under_a_replaced_key_is_ended(tmp_path: Path) -> None:
    with (
        registered(tmp_path, RECORD) as (producer, peers),
        connected(producer, RECORD) as old,
    ):
        old.handshake()
        peers.add(kept_of(ROTATED))
        with pytest.raises(BatonError) as told:
            old.until(Released)
        assert told.value.reason == "pairing_revoked"
        with connected(producer, ROTATED) as new:
            new.handshake().fetch(range(20))
        with connected(producer, RECORD) as old_key, pytest.raises(BatonError) as refused:
            old_key.handshake()
        assert refused.value.reason == "epoch_differs"


def test_the_key_before_a_rotation_is_good_until_the_new_one_was_proven(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD) as (producer, peers):
        peers.add(kept_of(ROTATED, earlier=RECORD.pairing))
        with connected(producer, RECORD) as old:
            old.handshake().fetch(range(20))
            with connected(producer, ROTATED) as new:
                new.handshake().fetch(range(20))
                with pytest.raises(BatonError) as told:
                    old.until(Released)
                assert told.value.reason == "pairing_revoked"
        found = peers.by_fingerprint(fingerprint(RECORD.certificate))
        assert found is not None
        assert found.earlier is None
        with connected(producer, RECORD) as again, pytest.raises(BatonError) as refused:
            again.handshake()
        assert refused.value.reason == "epoch_differs"


def test_a_rotation_that_cannot_be_finished_does_not_end_the_new_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with registered(tmp_path, RECORD) as (producer, peers):
        peers.add(kept_of(ROTATED, earlier=RECORD.pairing))

        def full(*_: object) -> None:
            raise ConfigError("full", reason="trust_not_durable")

        monkeypatch.setattr(Peers, "update", full)
        with caplog.at_level(logging.WARNING), connected(producer, ROTATED) as new:
            new.handshake().fetch(range(20))
        assert "a rotation is not finished" in caplog.text


# Transfers


def lost(producer, record) -> Peer:
    peer = connected(producer, record).handshake()
    peer.start(range(50))
    peer.until(Began)
    return peer.vanish()


def resumed(producer: Running, record: PairingRecord, of: Peer) -> str:
    """Why a RESUME of what ``of`` has lost is refused to the decoder with that record."""
    assert of.reception is not None
    with connected(producer, record) as peer:
        peer.handshake()
        peer.socket.send(messages.encode(of.reception.resume(32)), text=True)
        answer = peer.socket.recv(5.0, decode=False)
        assert isinstance(answer, bytes)
        told = messages.decode(answer)
        assert isinstance(told, Abort), told
        return told.reason


def test_a_transfer_is_resumed_by_its_own_decoder_alone(tmp_path: Path) -> None:
    with registered(tmp_path, RECORD, OTHER) as (producer, _):
        gone = lost(producer, RECORD)
        wait_until(lambda: producer.transfers.kept == 1)
        assert resumed(producer, OTHER, gone) == "transfer_unknown"
        assert producer.transfers.kept == 1
        with connected(producer, RECORD) as again:
            again.handshake().resume(gone)
            assert again.complete() == expected_regions(MIXED, range(50), 0, 16)


def test_what_another_decoder_asked_for_does_not_stop_a_request(tmp_path: Path) -> None:
    """A RESUME that was faster than its PREFILL refuses that PREFILL: its own alone."""
    with registered(tmp_path, RECORD, OTHER) as (producer, _):
        gone = lost(producer, RECORD)
        with connected(producer, RECORD) as again:
            again.handshake().resume(gone)
            again.complete()
        wait_until(lambda: len(producer.transfers) == 0)
        assert resumed(producer, OTHER, gone) == "transfer_unknown", "not: committed"
        assert resumed(producer, RECORD, gone) == "transfer_committed"


def test_a_removed_decoders_transfers_are_not_kept(tmp_path: Path) -> None:
    patience = Patience(keep_s=60.0)
    with registered(tmp_path, RECORD, OTHER, patience=patience) as (producer, peers):
        lost(producer, RECORD)
        lost(producer, OTHER)
        wait_until(lambda: producer.transfers.kept == 2)
        peers.remove(fingerprint(RECORD.certificate))
        wait_until(lambda: producer.transfers.kept == 1)


def test_under_a_new_key_nothing_is_resumed(tmp_path: Path) -> None:
    """Its SEAL would be the old key's."""
    with registered(tmp_path, RECORD) as (producer, peers):
        gone = lost(producer, RECORD)
        wait_until(lambda: producer.transfers.kept == 1)
        peers.add(kept_of(ROTATED, earlier=RECORD.pairing))
        assert resumed(producer, ROTATED, gone) == "transfer_unknown"


# The registry


def test_a_directory_that_others_may_enter_is_trusted_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with registered(tmp_path, RECORD) as (producer, _), connected(producer, RECORD) as peer:
        peer.handshake()
        with caplog.at_level(logging.ERROR):
            (tmp_path / "peers").chmod(0o755)
            with pytest.raises(BatonError) as told:
                peer.until(Released)
        assert told.value.reason == "pairing_revoked"
        assert "nobody is trusted" in caplog.text
        (tmp_path / "peers").chmod(0o700)
        with connected(producer, RECORD) as again:
            again.handshake().fetch(range(20))


def test_a_broken_file_is_told_once_and_is_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    peers.add(kept_of(OTHER))
    (tmp_path / "peers" / fingerprint(OTHER.certificate).hex()).write_text("{}")
    with caplog.at_level(logging.WARNING):
        trust = RegistryTrust(Peers(tmp_path, "producer"), OWN)
        for _ in range(3):
            trust.refresh()
    assert caplog.text.count("a peer is not trusted") == 1
    assert trust.stands(Owner(fingerprint(RECORD.certificate), 1))
    with pytest.raises(IntegrityError):
        trust.admit(OTHER.certificate)


def test_a_certificate_that_tls_cannot_use_keeps_nobody_else_out(tmp_path: Path) -> None:
    broken = structs.replace(OTHER, certificate=b"no certificate")
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    peers.add(kept_of(broken))
    trust = RegistryTrust(peers, OWN)
    assert trust.admit(RECORD.certificate).pairings == (RECORD.pairing,)
    with pytest.raises(IntegrityError):
        trust.admit(b"no certificate")


def test_who_pinned_another_certificate_of_this_machine_is_nobody(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    trust = RegistryTrust(peers, STRANGER)
    assert trust.empty


def test_changes_are_told_once(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    trust = RegistryTrust(Peers(tmp_path, "producer"), OWN)
    told: list[bool] = []
    trust.watch(lambda: told.append(trust.empty))
    trust.refresh()
    assert told == []
    peers.add(kept_of(RECORD))
    trust.refresh()
    trust.refresh()
    assert told == [False]
    trust.forget(Owner(fingerprint(RECORD.certificate), 1))
    assert told == [False, True]
    assert Peers(tmp_path, "producer").all().peers == ()


def test_a_rotation_of_who_was_removed_brings_nobody_back(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    trust = RegistryTrust(peers, OWN)
    owner = Owner(fingerprint(RECORD.certificate), 1)
    Peers(tmp_path, "producer").remove(owner.fingerprint)
    with pytest.raises(BatonError) as refused:
        trust.rekey(owner, RECORD.pairing, ROTATED.pairing)
    assert refused.value.reason == "pairing_revoked"
    assert peers.all().peers == ()


def test_a_rotation_from_a_key_that_was_replaced_is_refused(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(structs.replace(RECORD, epoch=5, key=b"5" * 32)))
    trust = RegistryTrust(peers, OWN)
    owner = Owner(fingerprint(RECORD.certificate), 1)
    with pytest.raises(BatonError) as refused:
        trust.rekey(owner, RECORD.pairing, ROTATED.pairing)
    assert refused.value.reason == "pairing_revoked"
    assert peers.all().peers[0].record.epoch == 5


def test_a_second_rotation_from_the_same_key_takes_the_firsts_place(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    trust = RegistryTrust(peers, OWN)
    owner = Owner(fingerprint(RECORD.certificate), 1)
    for key in (b"1" * 32, b"2" * 32):
        trust.rekey(owner, RECORD.pairing, Pairing(key, 2))
    (found,) = peers.all().peers
    assert (found.record.pairing, found.earlier) == (Pairing(b"2" * 32, 2), RECORD.pairing)
    assert trust.admit(RECORD.certificate).pairings == (Pairing(b"2" * 32, 2), RECORD.pairing)


def test_no_file_says_a_key_in_a_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        registered(tmp_path, RECORD) as (producer, peers),
        connected(producer, RECORD) as peer,
    ):
        peer.handshake().fetch(range(20))
        peers.remove(fingerprint(RECORD.certificate))
        with pytest.raises((BatonError, Closed)):
            peer.until(Released)
    said = " ".join(json.dumps(vars(record), default=repr) for record in caplog.records)
    assert "decoder connected" in said
    assert RECORD.key.hex() not in said
    assert "k" * 32 not in said


# One pairing, and none


def test_off_loopback_somebody_must_be_paired_or_about_to_be(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    nobody = RegistryTrust(peers, OWN)
    require_trust_for("127.0.0.1", nobody)
    require_trust_for("0.0.0.0", nobody, pairing=True)
    for trust in (nobody, FixedTrust(KEY)):
        with pytest.raises(ConfigError) as refused:
            require_trust_for("0.0.0.0", trust)
        assert refused.value.reason == "pairing_required"
        assert "--pair" in str(refused.value.hint)
    peers.add(kept_of(RECORD))
    require_trust_for("0.0.0.0", RegistryTrust(peers, OWN))


def test_a_producer_with_one_key_has_no_control_channel() -> None:
    with running(Synthetic(MIXED, 16)) as producer:
        for path in ("/control", "/other", "//", "/?x", "/control/"):
            with pytest.raises(Exception) as refused:
                Peer(producer.url + path)
            assert "404" in str(refused.value), path


def test_names_and_times_do_not_matter_to_who_stands(tmp_path: Path) -> None:
    peers = Peers(tmp_path, "producer")
    peers.add(kept_of(RECORD))
    with registered(tmp_path) as (producer, _), connected(producer, RECORD) as peer:
        peer.handshake()
        peers.update(
            fingerprint(RECORD.certificate), lambda found: dataclasses.replace(found, name="other")
        )
        time.sleep(1.3)
        assert peer.fetch(range(20)) == expected_regions(MIXED, range(20), 0, 16)


def without_room(*_: object) -> ssl.SSLContext:
    raise ConfigError("no room", reason=NO_ROOM)


def test_without_room_for_temporary_files_those_who_are_known_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was removed is shut out at once, who is new gets in once there is room."""
    third = record_of(STRANGER, key=b"t" * 32)
    with registered(tmp_path, RECORD, OTHER) as (producer, peers):
        # The test's own end of TLS is in this process, and has room.
        with_room = trust_module.server_context
        monkeypatch.setattr(trust_module, "server_context", without_room)
        peers.add(kept_of(third))
        peers.remove(fingerprint(OTHER.certificate))
        assert refused_by_tls(producer, third)
        with connected(producer, RECORD) as peer:
            peer.handshake().fetch(range(20))
        with pytest.raises((Closed, TransferError, ConnectionError)):
            connected(producer, OTHER).handshake()
        monkeypatch.setattr(trust_module, "server_context", with_room)
        wait_until(lambda: producer.server.trust._pins == {*producer.server.trust._known})
        with connected(producer, third) as peer:
            peer.handshake().fetch(range(20))
