"""TLS contexts: who gets in, who does not, and what a context alone would let in."""

from __future__ import annotations

import datetime
import ssl
import tempfile
from pathlib import Path

import pytest

from protocol.errors import ConfigError
from protocol.pairing.certificates import OwnCertificate, make_certificate
from protocol.pairing.record import fingerprint
from tests.trust.machines import certificate, meet, old_style, own
from trust.tls import NO_ROOM, client_context, pinned, server_context


def serving(*pins: OwnCertificate) -> ssl.SSLContext:
    return server_context(own().certificate, own().private_key, [pin.certificate for pin in pins])


def calling(shown: OwnCertificate) -> ssl.SSLContext:
    return client_context(shown.certificate, shown.private_key)


def test_each_of_several_pinned_leaves_gets_in_and_is_told_apart() -> None:
    leaves = [certificate(number) for number in range(3)]
    for leaf in leaves:
        meeting = meet(serving(*leaves), calling(leaf))
        prints = [fingerprint(known.certificate) for known in leaves]
        assert pinned(meeting.to_server, prints) == fingerprint(leaf.certificate)
        assert pinned(meeting.to_client, [fingerprint(own().certificate)]) is not None
        assert meeting.version == "TLSv1.3"


def test_pins_of_one_subject_name_do_not_hide_each_other() -> None:
    leaves = [old_style("baton decoder") for _ in range(3)]
    for leaf in leaves:
        assert meet(serving(*leaves), calling(leaf)).to_server == leaf.certificate


def test_a_valid_leaf_that_is_not_pinned_is_refused() -> None:
    meeting = meet(serving(certificate(0), certificate(1)), calling(certificate(2)))
    assert (meeting.to_server, meeting.to_client) == (None, None)


def test_without_pins_nobody_gets_in() -> None:
    assert meet(serving(), calling(certificate(0))).to_server is None


def test_a_leaf_that_a_pinned_one_signed_is_no_pinned_one() -> None:
    """Earlier pairings made leaves that OpenSSL takes for authorities: it lets these in."""
    authority = old_style("baton decoder")
    issued = old_style("somebody", issuer=authority)
    shown = meet(serving(authority), calling(issued)).to_server
    assert shown == issued.certificate, "the context alone stops it: pinned() is tested for nothing"
    assert pinned(shown, [fingerprint(authority.certificate)]) is None


def test_a_leaf_of_ours_issues_nothing() -> None:
    issued = old_style("somebody", issuer=certificate(0))
    assert meet(serving(certificate(0)), calling(issued)).to_server is None


def test_a_client_without_a_certificate_is_refused() -> None:
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.verify_mode = ssl.CERT_NONE
    assert meet(serving(certificate(0)), bare).to_server is None


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion")
def test_tls_1_2_is_refused_by_both_sides() -> None:
    client = calling(certificate(0))
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert meet(serving(certificate(0)), client).to_server is None
    server = serving(certificate(0))
    server.minimum_version = server.maximum_version = ssl.TLSVersion.TLSv1_2
    assert meet(server, client).to_server is not None, "two of them would agree"
    assert meet(server, calling(certificate(0))).to_server is None


@pytest.mark.parametrize("year", [2000, 2070])
def test_dates_are_no_reason(year: int) -> None:
    """The clock of a box without a battery is anywhere; the very certificate is pinned."""
    now = datetime.datetime(year, 1, 1, tzinfo=datetime.UTC)
    theirs, ours = make_certificate("decoder", now), make_certificate("producer", now)
    server = server_context(ours.certificate, ours.private_key, [theirs.certificate])
    meeting = meet(server, calling(theirs))
    assert (meeting.to_server, meeting.to_client) == (theirs.certificate, ours.certificate)


def test_no_session_can_be_resumed() -> None:
    """A resumed session would not show its certificate again."""
    meeting = meet(serving(certificate(0)), calling(certificate(0)))
    assert meeting.to_client is not None
    assert meeting.session is None or not meeting.session.has_ticket


def test_no_private_key_is_ever_in_a_file_in_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, bytes]] = []
    load = ssl.SSLContext.load_cert_chain

    def watched(context: ssl.SSLContext, certfile: Path, *rest: object, **named: object) -> None:
        seen.append((certfile, certfile.read_bytes()))
        load(context, certfile, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    serving(certificate(0))
    calling(certificate(0))
    assert len(seen) == 2
    for path, text in seen:
        assert b"BEGIN ENCRYPTED PRIVATE KEY" in text
        assert b"BEGIN PRIVATE KEY" not in text
        assert not path.parent.exists()


@pytest.mark.parametrize("broken", [b"no DER", b"", b"\x30\x03\x02\x01\x01"])
def test_what_is_no_certificate_or_key_is_refused(broken: bytes) -> None:
    ours, key = own().certificate, own().private_key
    for make in (
        lambda: server_context(broken, key, []),
        lambda: server_context(ours, broken, []),
        lambda: server_context(ours, key, [broken]),
        lambda: client_context(broken, key),
        lambda: client_context(ours, broken),
        lambda: client_context(ours, certificate(0).private_key),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.reason == "pairing_unreadable"


def test_a_pin_is_one_certificate() -> None:
    """OpenSSL would take all of them, and the fingerprint would be none's."""
    both = certificate(0).certificate + certificate(1).certificate
    with pytest.raises(ConfigError) as caught:
        server_context(own().certificate, own().private_key, [both])
    assert caught.value.reason == "pairing_unreadable"


def test_nothing_shown_is_never_pinned() -> None:
    assert pinned(None, []) is None
    assert pinned(b"", [fingerprint(certificate(0).certificate)]) is None


def test_a_full_disk_is_no_fault_of_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    for make in (
        lambda: server_context(own().certificate, own().private_key, []),
        lambda: client_context(own().certificate, own().private_key),
    ):
        with pytest.raises(ConfigError) as caught:
            make()
        assert caught.value.reason == NO_ROOM
