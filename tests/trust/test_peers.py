"""The registry of paired machines: what it keeps, whom it believes, and what it survives."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from protocol.errors import ConfigError
from protocol.pairing import Pairing
from protocol.pairing.record import encode_record
from tests.trust.keyrings import Blocking, Locked, Memory, using
from tests.trust.machines import certificate, own, peer
from trust import places
from trust.peers import Address, Found, Peer, Peers
from trust.places import Place
from trust.secrets import Kept, KeyringSecrets, PlainSecrets, Secrets


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "producer"


@pytest.fixture
def peers(directory: Path) -> Peers:
    return Peers(directory, "producer")


def file_of(directory: Path, of: Peer) -> Path:
    return directory / "peers" / of.fingerprint.hex()


def fault(peers: Peers) -> str:
    """The reason of the one fault; the peer of that file is none."""
    found = peers.all()
    (only,) = found.faults
    assert only.name not in {known.fingerprint.hex() for known in found.peers}
    return only.error.reason


def refusal(call, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value.reason


def rewrite(path: Path, **fields: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def under_keyring(directory: Path) -> Secrets:
    return KeyringSecrets(Place(directory.parent / "keyring"))


# What it keeps


def test_nobody_is_known_at_first_and_nothing_is_made(peers: Peers, directory: Path) -> None:
    assert peers.all() == Found((), ())
    assert not peers.changed()
    assert peers.by_fingerprint(b"f" * 32) is None
    assert not peers.remove(b"f" * 32)
    assert not directory.exists()


@pytest.mark.parametrize("keyring", [False, True])
def test_what_was_added_is_found_by_another_process(directory: Path, keyring: bool) -> None:
    with using(Memory()):
        make = under_keyring if keyring else lambda directory: PlainSecrets()
        mac, studio = peer(0, "mac"), peer(1, "studio")
        peers = Peers(directory, "producer", make(directory))
        peers.add(mac)
        peers.add(studio)
        again = Peers(directory, "producer", make(directory))
        assert set(map(repr, again.all().peers)) == {repr(mac), repr(studio)}
        assert again.by_fingerprint(mac.fingerprint) == mac
        assert again.by_fingerprint(studio.fingerprint) == studio
        assert again.remove(mac.fingerprint)
        assert peers.by_fingerprint(mac.fingerprint) is None
        assert peers.all() == Found((studio,), ())


def test_one_with_the_same_certificate_is_replaced(peers: Peers) -> None:
    peers.add(peer(0, "mac", epoch=1))
    rotated = peer(0, "mac", epoch=2)
    peers.add(rotated)
    assert peers.all() == Found((rotated,), ())


@settings(max_examples=40)
@given(
    name=st.from_regex(r"\A[!#-\[\]-~]([ !#-\[\]-~]{0,62}[!#-\[\]-~])?\Z"),
    host=st.none() | st.sampled_from(["127.0.0.1", "fd00::1", "gb10.local", "bücher.example"]),
    port=st.integers(1, 65535),
    when=st.integers(0, 2**53 - 1),
    epoch=st.integers(0, 2**53 - 1),
    key=st.binary(min_size=32, max_size=32),
    keyring=st.booleans(),
    rotated=st.booleans(),
)
def test_any_peer_comes_back_as_it_was(
    name: str,
    host: str | None,
    port: int,
    when: int,
    epoch: int,
    key: bytes,
    keyring: bool,
    rotated: bool,
) -> None:
    address = None if host is None else Address(host, port)
    earlier = Pairing(key, epoch) if rotated else None
    kept = Peer(name, peer(0, epoch=epoch, key=key).record, when, address, earlier)
    with tempfile.TemporaryDirectory() as folder, using(Memory()):
        directory = Path(folder) / "producer"
        peers = Peers(directory, "producer", under_keyring(directory) if keyring else None)
        peers.add(kept)
        assert peers.by_fingerprint(kept.fingerprint) == kept


def test_a_change_is_kept_and_returned(peers: Peers) -> None:
    peers.add(peer(0, epoch=1))
    before = peers.all().peers[0]
    changed = peers.update(before.fingerprint, lambda found: dataclasses.replace(found, name="x"))
    assert changed == dataclasses.replace(before, name="x")
    assert peers.all() == Found((changed,), ())


def test_a_peer_that_was_removed_is_not_changed(peers: Peers, directory: Path) -> None:
    assert peers.update(b"f" * 32, lambda found: found) is None
    assert not directory.exists()
    peers.add(peer(0))
    peers.remove(peer(0).fingerprint)
    assert peers.update(peer(0).fingerprint, lambda found: found) is None
    assert peers.all() == Found((), ())


def test_a_change_that_fails_changes_nothing(peers: Peers) -> None:
    kept = peer(0)
    peers.add(kept)

    def fail(found: Peer) -> Peer:
        raise ConfigError("x", reason="made_up")

    assert refusal(peers.update, kept.fingerprint, fail) == "made_up"
    assert peers.all() == Found((kept,), ())


COUNTING = """
import dataclasses, sys
from pathlib import Path
from trust.peers import Peers

peers = Peers(Path(sys.argv[1]), "producer")
for _ in range(20):
    assert peers.update(
        bytes.fromhex(sys.argv[2]),
        lambda found: dataclasses.replace(found, paired_at=found.paired_at + 1),
    )
"""


def test_no_change_of_two_processes_is_lost(peers: Peers, directory: Path) -> None:
    kept = peer(0)
    peers.add(kept)
    command = [sys.executable, "-c", COUNTING, str(directory), kept.fingerprint.hex()]
    processes = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in processes] == [0, 0]
    (found,) = peers.all().peers
    assert found.paired_at == kept.paired_at + 40


def test_a_peer_is_found_by_its_name_or_fingerprint(peers: Peers) -> None:
    mac, studio = peer(0, "mac"), peer(1, "studio")
    for one in (mac, studio):
        peers.add(one)
    assert peers.named("studio") == studio
    assert peers.named(mac.fingerprint.hex()) == mac
    assert peers.named(mac.fingerprint.hex()[:8].upper()) == mac
    for unknown in ("mini", mac.fingerprint.hex()[:7], "", "0" * 64):
        assert refusal(peers.named, unknown) == "peer_unknown"


def test_of_two_peers_of_one_name_the_fingerprint_decides(peers: Peers) -> None:
    one, other = peer(0, "mac"), peer(1, "mac")
    peers.add(one)
    peers.add(other)
    with pytest.raises(ConfigError) as caught:
        peers.named("mac")
    assert caught.value.reason == "peer_ambiguous"
    prefixes = str(caught.value.expected).split(", ")
    assert {peers.named(prefix).fingerprint for prefix in prefixes} == {
        one.fingerprint,
        other.fingerprint,
    }


@pytest.mark.parametrize("name", ["", "a" * 65, "two\nlines", "\x1b[2J", "ä", ' "x"', "\u202e"])
def test_a_name_cannot_play_with_a_terminal(name: str) -> None:
    assert refusal(lambda: peer(name=name)) == "name_malformed"


@pytest.mark.parametrize("host", ["", "a b", "a\nb", "a" * 64, "a..b"])
def test_a_host_has_the_form_of_one(host: str) -> None:
    address = Address(host, 1)
    assert refusal(lambda: Peer("mac", peer().record, 0, address)) == "host_malformed"


def test_a_record_of_the_other_side_is_not_kept(directory: Path) -> None:
    with pytest.raises(ValueError):
        Peers(directory, "decoder").add(peer())
    assert not directory.exists()


def test_a_peer_that_could_not_be_read_again_is_not_kept(peers: Peers, directory: Path) -> None:
    bad = Peer("mac", peer().record, -1)
    assert refusal(peers.add, bad) == "peer_unreadable"
    assert peers.all() == Found((), ())


# A running process and another one


@given(data=st.data())
@settings(max_examples=25)
def test_a_running_process_sees_what_another_one_did(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        running, other = (Peers(Path(folder) / "state", "producer") for _ in range(2))
        expected: dict[bytes, Peer] = {}
        running.all()
        for number in data.draw(st.lists(st.integers(0, 5), max_size=8)):
            of = peer(number % 3, epoch=len(expected))
            if number < 3:
                other.add(of)
                expected[of.fingerprint] = of
                happened = True
            else:
                happened = other.remove(of.fingerprint)
                assert happened == (expected.pop(of.fingerprint, None) is not None)
            assert running.changed() == happened
            assert {known.fingerprint: known for known in running.all().peers} == expected
            assert not running.changed()


def test_its_own_change_hides_nobody_elses(directory: Path) -> None:
    running, other = Peers(directory, "producer"), Peers(directory, "producer")
    running.add(peer(0))
    running.all()
    other.add(peer(1))
    assert refusal(running.add, Peer("mac", peer(2).record, -1)) == "peer_unreadable"
    assert running.changed()


def test_what_another_process_does_while_all_is_read_is_a_change_after_it(
    directory: Path,
) -> None:
    class Meanwhile(PlainSecrets):
        """Somebody removes the other peer while this one's file is being read."""

        def reveal(self, kept: Kept, bound: bytes) -> bytes:
            for known in (peer(0), peer(1)):
                if known.fingerprint.hex().encode() not in bound:
                    other.remove(known.fingerprint)
            return super().reveal(kept, bound)

    other = Peers(directory, "producer")
    other.add(peer(0))
    other.add(peer(1))
    running = Peers(directory, "producer", Meanwhile())
    (kept,) = running.all().peers
    assert running.changed()
    assert other.all().peers == (kept,)


def test_epochs_are_of_a_pair(peers: Peers) -> None:
    assert peers.epoch_with(peer(0).fingerprint) == 0
    peers.add(peer(0, epoch=7))
    peers.add(peer(1, epoch=3))
    assert [peers.epoch_with(peer(n).fingerprint) for n in (0, 1)] == [7, 3]
    peers.remove(peer(0).fingerprint)
    assert peers.epoch_with(peer(0).fingerprint) == 0


def test_what_would_stop_a_new_peer_is_told_before(directory: Path) -> None:
    with using(memory := Memory()):
        peers = Peers(directory, "producer", under_keyring(directory))
        peers.require_usable()
        assert memory.writes == 1, "the keyring has been asked, and will not be again"
        assert peers.all() == Found((), ())
        (directory / "peers").chmod(0o750)
        assert refusal(peers.require_usable) == "directory_exposed"
    with using(Locked()):
        locked = Peers(directory.parent / "other", "producer", under_keyring(directory))
        assert refusal(locked.require_usable) == "keychain_locked"


ADDING = """
import pickle, sys
from pathlib import Path
from trust.peers import Peers

peers = Peers(Path(sys.argv[1]), "producer")
mine = pickle.loads(bytes.fromhex(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
for round in range(20):
    for each in mine:
        peers.add(each)
    for each in mine[1:]:
        peers.remove(each.fingerprint)
"""


def test_two_processes_at_once_lose_nothing(directory: Path) -> None:
    processes = []
    for number in range(2):
        shared = peer(0, "shared", key=bytes([number]) * 32)
        mine = [peer(1 + number, "kept"), shared, peer(3 + number, "removed")]
        words = [str(directory), pickle.dumps(mine).hex()]
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", ADDING, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    peers = Peers(directory, "producer")
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    while any(process.poll() is None for process in processes):
        found = peers.all()
        assert found.faults == ()
        for known in found.peers:
            assert known.name in ("kept", "removed", "shared")
    for process in processes:
        process.communicate(timeout=20.0)
        assert process.returncode == 0
    assert {known.fingerprint for known in peers.all().peers} == {
        peer(1).fingerprint,
        peer(2).fingerprint,
    }


CHANGING = """
import pickle, sys
from pathlib import Path
from trust.peers import Peers

peers = Peers(Path(sys.argv[1]), "producer")
versions = pickle.loads(bytes.fromhex(sys.argv[2]))
print("ready", flush=True)
while True:
    for version in versions:
        peers.add(version)
    peers.remove(versions[0].fingerprint)
"""


def test_a_peer_is_whole_or_not_there_whenever_the_process_is_killed(directory: Path) -> None:
    versions = [peer(0, "mac", epoch=epoch) for epoch in range(3)]
    still = peer(1, "studio")
    peers = Peers(directory, "producer")
    peers.add(still)
    dice = random.Random(5)
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", CHANGING, str(directory), pickle.dumps(versions).hex()],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdout.close()
        time.sleep(dice.uniform(0.0, 0.05))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        found = peers.all()
        assert {one.error.reason for one in found.faults} <= {"peer_foreign"}
        assert all(one.name.startswith(".") for one in found.faults), "half written, and told"
        (kept,) = [known for known in found.peers if known.name == "studio"]
        assert kept == still
        assert [known for known in found.peers if known != kept] in [
            [],
            *([version] for version in versions),
        ]
        peers.add(still)


# Disks


def test_a_disk_that_fails_leaves_the_old_peer(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = peer(0, epoch=1)
    peers.add(before)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(places, "sync", full)
    assert refusal(peers.add, peer(0, epoch=2)) == "trust_not_durable"
    assert refusal(peers.add, peer(1)) == "trust_not_durable"
    assert peers.all() == Found((before,), ())


# What somebody put there


def test_an_exposed_file_is_no_peer(peers: Peers, directory: Path) -> None:
    peers.add(peer(1))
    peers.add(peer(0))
    file_of(directory, peer(0)).chmod(0o640)
    assert fault(peers) == "peer_exposed"
    assert refusal(peers.by_fingerprint, peer(0).fingerprint) == "peer_exposed"
    assert peers.by_fingerprint(peer(1).fingerprint) is not None


def test_an_exposed_directory_has_no_peers(peers: Peers, directory: Path) -> None:
    peers.add(peer(0))
    (directory / "peers").chmod(0o755)
    assert refusal(peers.all) == "directory_exposed"
    assert refusal(peers.by_fingerprint, peer(0).fingerprint) == "directory_exposed"
    assert refusal(peers.changed) == "directory_exposed"
    assert refusal(peers.add, peer(1)) == "directory_exposed"
    assert refusal(peers.remove, peer(0).fingerprint) == "directory_exposed"


def test_a_link_is_no_peer(peers: Peers, directory: Path, tmp_path: Path) -> None:
    peers.add(peer(1))
    shutil.move(file_of(directory, peer(1)), tmp_path / "elsewhere")
    file_of(directory, peer(1)).symlink_to(tmp_path / "elsewhere")
    assert fault(peers) == "peer_unreadable"


def test_a_pipe_in_the_place_of_a_file_stops_nobody(peers: Peers, directory: Path) -> None:
    peers.add(peer(0))
    file_of(directory, peer(0)).unlink()
    os.mkfifo(file_of(directory, peer(0)), 0o600)
    assert fault(peers) == "peer_unreadable"


@pytest.mark.parametrize(
    "name", ["notes.txt", ".DS_Store", "A" * 64, "f" * 63, "f" * 65, ".f.0011223344556677"]
)
def test_a_foreign_file_is_told_skipped_and_kept(peers: Peers, directory: Path, name: str) -> None:
    peers.add(peer(0))
    path = directory / "peers" / name
    path.write_bytes(b"whatever")
    assert fault(peers) == "peer_foreign"
    assert len(peers.all().peers) == 1
    peers.add(peer(1))
    peers.remove(peer(1).fingerprint)
    assert path.read_bytes() == b"whatever"


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\xff\xfe", b"null", b"x" * (256 * 1024 + 1), b'{"type":"baton_peer"}'],
)
def test_a_file_that_is_none_of_ours_is_told_and_kept(
    peers: Peers, directory: Path, content: bytes
) -> None:
    peers.add(peer(0))
    file_of(directory, peer(0)).write_bytes(content)
    assert fault(peers) == "peer_unreadable"
    assert file_of(directory, peer(0)).read_bytes() == content


def test_every_shortened_file_is_told(peers: Peers, directory: Path) -> None:
    peers.add(peer(0))
    path = file_of(directory, peer(0))
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 37):
        path.write_bytes(whole[:length])
        assert fault(peers) == "peer_unreadable"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "\x1b[2J"},
        {"address": {"host": "a b", "port": 1}},
        {"address": {"host": "a", "port": 0}},
        {"version": 2},
        {"epoch": -1},
        {"extra": 1},
        {"secrets": {"type": "plain", "secret": ""}},
        {"secrets": {"type": "other"}},
    ],
)
def test_a_field_that_no_file_of_ours_has_is_told(
    peers: Peers, directory: Path, fields: dict[str, object]
) -> None:
    peers.add(peer(0))
    rewrite(file_of(directory, peer(0)), **fields)
    assert fault(peers) == "peer_unreadable"


def test_the_file_of_another_peer_is_not_taken_for_this_one(peers: Peers, directory: Path) -> None:
    peers.add(peer(0))
    peers.add(peer(1))
    shutil.copy(file_of(directory, peer(0)), file_of(directory, peer(1)))
    assert fault(peers) == "peer_misplaced"
    assert refusal(peers.by_fingerprint, peer(1).fingerprint) == "peer_misplaced"


def test_a_file_of_the_other_side_of_this_machine_is_told(
    peers: Peers, directory: Path, tmp_path: Path
) -> None:
    peers.add(peer(0))
    theirs = tmp_path / "decoder"
    shutil.copytree(directory, theirs)
    theirs.chmod(0o700)
    assert fault(Peers(theirs, "decoder")) == "pairing_of_other_side"


def test_a_pairing_file_is_no_peers_file(peers: Peers, directory: Path) -> None:
    peers.add(peer(0))
    file_of(directory, peer(0)).write_bytes(encode_record(peer(0).record))
    assert fault(peers) == "peer_unreadable"


# Under the keyring's key


def test_with_the_keyring_no_secret_is_in_a_file(directory: Path) -> None:
    with using(Memory()):
        mac = peer(0)
        Peers(directory, "producer", under_keyring(directory)).add(mac)
    raw = file_of(directory, mac).read_bytes()
    text = json.dumps(json.loads(raw))
    for secret in (mac.record.key, mac.record.private_key):
        for form in (secret, secret.hex().encode(), msgspec.json.encode(secret).strip(b'"')):
            assert form not in raw
            assert form.decode("latin-1") not in text


def test_secrets_of_one_file_do_not_open_in_another(directory: Path) -> None:
    with using(Memory()):
        peers = Peers(directory, "producer", under_keyring(directory))
        peers.add(peer(0))
        peers.add(peer(1))
        mine, other = (file_of(directory, peer(number)) for number in range(2))
        rewrite(mine, secrets=json.loads(other.read_text())["secrets"])
        assert fault(peers) == "secret_altered"
        assert refusal(peers.by_fingerprint, peer(0).fingerprint) == "secret_altered"


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "another"},
        {"address": None},
        {"address": {"host": "evil.example", "port": 7431}},
        {"epoch": 0},
        {"paired_at": 0},
    ],
)
def test_nothing_of_a_sealed_file_can_be_changed(
    directory: Path, fields: dict[str, object]
) -> None:
    with using(Memory()):
        peers = Peers(directory, "producer", under_keyring(directory))
        peers.add(peer(0))
        rewrite(file_of(directory, peer(0)), **fields)
        assert fault(peers) == "secret_altered"


def test_a_file_of_the_other_side_does_not_open_as_ours(directory: Path) -> None:
    """Both sides of one machine share the wrapping key; the role is bound, too."""
    with using(Memory()):
        Peers(directory, "producer", under_keyring(directory)).add(peer(0))
        rewrite(file_of(directory, peer(0)), role="decoder")
        assert fault(Peers(directory, "decoder", under_keyring(directory))) == "secret_altered"


def test_a_plain_file_that_somebody_put_there_pairs_nobody(directory: Path, tmp_path: Path) -> None:
    with using(Memory()):
        peers = Peers(directory, "producer", under_keyring(directory))
        peers.add(peer(0))
        planted = Peers(tmp_path / "attacker", "producer")
        planted.add(peer(1))
        shutil.copy(file_of(tmp_path / "attacker", peer(1)), file_of(directory, peer(1)))
        assert fault(peers) == "secret_not_sealed"


def test_files_that_were_copied_to_another_machine_do_not_open(directory: Path) -> None:
    with using(Memory()):
        Peers(directory, "producer", under_keyring(directory)).add(peer(0))
    with using(Memory()):
        other = under_keyring(directory)
        other.protect(b"its own", b"")
        assert fault(Peers(directory, "producer", other)) == "secret_altered"


def test_a_lost_key_is_told_once_and_not_replaced(directory: Path) -> None:
    with using(Memory()):
        Peers(directory, "producer", under_keyring(directory)).add(peer(0))
    with using(empty := Memory()):
        peers = Peers(directory, "producer", under_keyring(directory))
        assert refusal(peers.all) == "keychain_item_missing"
        assert refusal(peers.add, peer(1)) == "keychain_item_missing"
    assert empty.writes == 0
    assert not file_of(directory, peer(1)).exists()


def test_a_locked_keyring_is_a_refusal_and_no_hang(directory: Path) -> None:
    with using(Memory()):
        Peers(directory, "producer", under_keyring(directory)).add(peer(0))
    with using(Locked()):
        peers = Peers(directory, "producer", under_keyring(directory))
        assert refusal(peers.all) == "keychain_locked"
        assert peers.remove(peer(0).fingerprint), "revoking needs no secret"
    with using(blocking := Blocking()):
        slow = KeyringSecrets(Place(directory.parent / "keyring"), timeout_s=0.1)
        assert refusal(Peers(directory, "producer", slow).add, peer(0)) == "keychain_locked"
        blocking.clicked.set()


def test_no_repr_or_refusal_shows_a_secret(peers: Peers, directory: Path) -> None:
    mac = peer(0)
    peers.add(mac)
    rewrite(file_of(directory, mac), paired_at="never")
    (only,) = peers.all().faults
    told = f"{only!r} {only.error.details()} {only.error} {only.error.__cause__} {mac!r}"
    for secret in (mac.record.key, mac.record.private_key, own().private_key):
        for form in (repr(secret)[2:-1], secret.hex(), msgspec.json.encode(secret).decode()[1:-1]):
            assert form not in told
    assert certificate(0).private_key.hex() not in told
