"""This machine's own certificate: made once, and never made anew under those who pinned it."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from protocol.errors import ConfigError
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.record import Role
from tests.trust.keyrings import Memory, using
from tests.trust.machines import NOW, meet
from trust.own import own_certificate
from trust.places import Place
from trust.secrets import KeyringSecrets, PlainSecrets
from trust.tls import client_context, server_context


def plain(directory: Path, role: Role = "producer") -> OwnCertificate:
    return own_certificate(directory, role, PlainSecrets(), NOW)


def reason(directory: Path, role: Role = "producer") -> str:
    with pytest.raises(ConfigError) as caught:
        plain(directory, role)
    return caught.value.reason


def test_it_is_made_once_for_each_side_and_is_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    first = plain(state)
    assert plain(state) == first
    assert plain(state, "decoder") != first
    files = [path for path in (state / "own").iterdir() if not path.name.startswith(".")]
    assert {path.name for path in files} == {"producer", "decoder"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE((state / "own").stat().st_mode) == 0o700


def test_both_sides_can_use_it(tmp_path: Path) -> None:
    ours, theirs = plain(tmp_path / "one"), plain(tmp_path / "two", "decoder")
    server = server_context(ours.certificate, ours.private_key, [theirs.certificate])
    meeting = meet(server, client_context(theirs.certificate, theirs.private_key))
    assert (meeting.to_server, meeting.to_client) == (theirs.certificate, ours.certificate)


MAKING = """
import sys
from pathlib import Path
from tests.trust.machines import NOW
from trust.own import own_certificate
from trust.secrets import PlainSecrets

print("ready", flush=True)
sys.stdin.readline()
print(own_certificate(Path(sys.argv[1]), "producer", PlainSecrets(), NOW).certificate.hex())
"""


def test_processes_that_start_together_have_the_same(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", MAKING, str(tmp_path / "state")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    made = [process.communicate(timeout=20.0)[0] for process in processes]
    assert len(set(made)) == 1
    assert bytes.fromhex(made[0].strip()) == plain(tmp_path / "state").certificate


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"x" * (128 * 1024 + 1)])
def test_a_broken_one_is_told_and_not_replaced(tmp_path: Path, content: bytes) -> None:
    plain(tmp_path / "state")
    path = tmp_path / "state" / "own" / "producer"
    path.write_bytes(content)
    assert reason(tmp_path / "state") == "own_unreadable"
    assert path.read_bytes() == content


def test_one_that_others_have_access_to_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "state")
    path = tmp_path / "state" / "own" / "producer"
    path.chmod(0o644)
    assert reason(tmp_path / "state") == "own_exposed"


def test_the_other_sides_is_refused(tmp_path: Path) -> None:
    plain(tmp_path / "state")
    own = tmp_path / "state" / "own"
    (own / "producer").rename(own / "decoder")
    assert reason(tmp_path / "state", "decoder") == "own_unreadable"


def test_under_the_keyring_its_key_is_sealed_to_its_certificate(tmp_path: Path) -> None:
    with using(Memory()):
        secrets = KeyringSecrets(Place(tmp_path / "keyring"))
        one = own_certificate(tmp_path / "one", "producer", secrets, NOW)
        two = own_certificate(tmp_path / "two", "producer", secrets, NOW)
        path, other = tmp_path / "one" / "own" / "producer", tmp_path / "two" / "own" / "producer"
        assert msgspec.json.encode(one.private_key).strip(b'"') not in path.read_bytes()
        assert own_certificate(tmp_path / "one", "producer", secrets, NOW) == one
        mixed = json.loads(path.read_text()) | {"secrets": json.loads(other.read_text())["secrets"]}
        path.write_text(json.dumps(mixed))
        with pytest.raises(ConfigError) as caught:
            own_certificate(tmp_path / "one", "producer", secrets, NOW)
        assert caught.value.reason == "secret_altered"
        assert one != two


def test_a_lost_key_of_the_keyring_makes_no_new_certificate(tmp_path: Path) -> None:
    with using(Memory()):
        own_certificate(
            tmp_path / "state", "producer", KeyringSecrets(Place(tmp_path / "keyring")), NOW
        )
    with using(empty := Memory()), pytest.raises(ConfigError) as caught:
        own_certificate(
            tmp_path / "state", "producer", KeyringSecrets(Place(tmp_path / "keyring")), NOW
        )
    assert caught.value.reason == "keychain_item_missing"
    assert empty.writes == 0
