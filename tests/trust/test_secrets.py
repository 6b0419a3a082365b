"""The keyring's one item, and what is sealed under it."""

from __future__ import annotations

import base64
import subprocess
import sys
import threading
import time
from pathlib import Path

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given
from keyring.backends import fail
from keyring.errors import InitError, KeyringError, KeyringLocked, PasswordSetError

from protocol.errors import ConfigError
from tests.trust.keyrings import Blocking, Forgetful, Locked, Memory, Refusing, using
from trust import secrets
from trust.places import Place
from trust.secrets import ITEM, SERVICE, Kept, KeyringSecrets, Plain, PlainSecrets, Sealed


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "keyring")


def reason(call, *arguments: object) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments)
    return caught.value.reason


def sealed(kept: Kept) -> Sealed:
    assert isinstance(kept, Sealed)
    return kept


# Sealing


@given(secret=st.binary(max_size=200), bound=st.binary(max_size=50))
def test_what_was_sealed_opens_where_it_was_sealed_and_nowhere_else(
    secret: bytes, bound: bytes
) -> None:
    with using(Memory()):
        keeper = KeyringSecrets(Place(Path("unused")))
        keeper._key = b"k" * 32
        kept = keeper.protect(secret, bound)
        assert keeper.reveal(kept, bound) == secret
        assert reason(keeper.reveal, kept, bound + b"x") == "secret_altered"
        assert len(secret) < 8 or secret not in sealed(kept).sealed


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_every_changed_bit_is_noticed(place: int, bit: int) -> None:
    keeper = KeyringSecrets(Place(Path("unused")))
    keeper._key = b"k" * 32
    kept = sealed(keeper.protect(b"a secret", b"bound"))
    whole = bytearray(kept.nonce + kept.sealed)
    whole[place % len(whole)] ^= 1 << bit
    changed = Sealed(bytes(whole[:12]), bytes(whole[12:]))
    assert reason(keeper.reveal, changed, b"bound") == "secret_altered"


def test_no_nonce_is_used_twice() -> None:
    keeper = KeyringSecrets(Place(Path("unused")))
    keeper._key = b"k" * 32
    nonces = {sealed(keeper.protect(b"same", b"same")).nonce for _ in range(1000)}
    assert len(nonces) == 1000


def test_a_file_of_another_machine_does_not_open(tmp_path: Path) -> None:
    with using(Memory()):
        kept = KeyringSecrets(Place(tmp_path / "one")).protect(b"secret", b"bound")
    with using(Memory()):
        other = KeyringSecrets(Place(tmp_path / "two"))
        other.protect(b"its own", b"bound")
        assert reason(other.reveal, kept, b"bound") == "secret_altered"


def test_the_two_ways_of_keeping_are_not_mixed(place: Place) -> None:
    with using(Memory()):
        under_key, plain = KeyringSecrets(place), PlainSecrets()
        kept = under_key.protect(b"secret", b"bound")
        assert reason(plain.reveal, kept, b"bound") == "secret_sealed"
        planted = plain.protect(b"secret", b"bound")
        assert plain.reveal(planted, b"elsewhere") == b"secret"
        assert reason(under_key.reveal, planted, b"bound") == "secret_not_sealed"


def test_no_repr_shows_a_secret() -> None:
    assert "hush" not in repr(Plain(b"hush"))
    assert msgspec.json.decode(msgspec.json.encode(Plain(b"hush")), type=Kept) == Plain(b"hush")


# The item


def test_one_item_is_written_once_and_read_once_per_start(place: Place) -> None:
    with using(Memory()) as _, using(memory := Memory()):
        first = KeyringSecrets(place)
        kept = [first.protect(b"secret %d" % number, b"") for number in range(5)]
        assert list(memory.items) == [(SERVICE, ITEM)]
        assert memory.writes == 1
        memory.reads = 0
        second = KeyringSecrets(place)
        revealed = [second.reveal(one, b"") for one in kept]
        assert revealed == [b"secret %d" % number for number in range(5)]
        second.protect(b"another", b"")
        assert (memory.reads, memory.writes) == (1, 1)
        (value,) = memory.items.values()
        assert len(base64.b64decode(value)) == 32


def test_nothing_is_asked_before_a_secret_is_needed(place: Place) -> None:
    with using(memory := Memory()):
        KeyringSecrets(place)
        secrets.secrets_of("keyring")
    assert (memory.reads, memory.writes) == (0, 0)


def test_sealed_files_without_their_key_make_no_new_one(place: Place) -> None:
    with using(Memory()):
        kept = KeyringSecrets(place).protect(b"secret", b"")
    with using(empty := Memory()):
        assert reason(KeyringSecrets(place).reveal, kept, b"") == "keychain_item_missing"
    assert empty.writes == 0


@pytest.mark.parametrize("value", ["", "no base64!", base64.b64encode(b"k" * 31).decode(), "ä"])
def test_an_item_that_is_not_ours_is_never_written_over(place: Place, value: str) -> None:
    with using(memory := Memory()):
        memory.items[SERVICE, ITEM] = value
        assert reason(KeyringSecrets(place).protect, b"secret", b"") == "keychain_unreadable"
    assert memory.items == {(SERVICE, ITEM): value}
    assert memory.writes == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyringLocked("locked"), "keychain_locked"),
        (InitError("no collection"), "keychain_unavailable"),
        (KeyringError("what it is, is not said"), "keychain_unavailable"),
    ],
)
def test_a_keyring_that_refuses_is_never_written_to(
    place: Place, error: Exception, expected: str
) -> None:
    with using(backend := Refusing(error)):
        keeper = KeyringSecrets(place)
        assert reason(keeper.protect, b"secret", b"") == expected
        assert reason(keeper.reveal, Sealed(b"n" * 12, b"s" * 16), b"") == expected
    assert backend.writes == 0


@pytest.mark.parametrize("status", [-25308, -25293])
def test_macos_says_by_number_that_nobody_can_be_asked(place: Place, status: int) -> None:
    """What keyring makes of errSecInteractionNotAllowed, over SSH, is an unknown error."""
    backend = Refusing(KeyringError("unknown"), Exception(status, "Unknown Error"))
    with using(backend):
        assert reason(KeyringSecrets(place).protect, b"secret", b"") == "keychain_locked"


def test_hints_say_what_to_do(place: Place) -> None:
    for backend in (Locked(), fail.Keyring(), Forgetful()):
        with using(backend), pytest.raises(ConfigError) as caught:
            KeyringSecrets(place).protect(b"secret", b"")
        assert "--secrets file" in (caught.value.hint or "")
        assert "secret" not in caught.value.message.replace("secrets", "")


def test_no_backend_is_told(place: Place) -> None:
    with using(fail.Keyring()):
        assert reason(KeyringSecrets(place).protect, b"secret", b"") == "keychain_unavailable"


def test_a_keyring_that_keeps_nothing_is_noticed_before_anything_is_sealed(place: Place) -> None:
    with using(Forgetful()):
        assert reason(KeyringSecrets(place).protect, b"secret", b"") == "keychain_unavailable"


def test_a_keyring_that_does_not_take_the_item_is_told(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*words: str) -> None:
        raise PasswordSetError("no")

    with using(memory := Memory()):
        monkeypatch.setattr(memory, "set_password", refused)
        assert reason(KeyringSecrets(place).protect, b"secret", b"") == "keychain_unavailable"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_backend_is_no_hang_and_no_success(place: Place) -> None:
    with using(Refusing(ZeroDivisionError("a bug"))):
        assert reason(KeyringSecrets(place).protect, b"secret", b"") == "keychain_unavailable"


def test_a_keyring_that_waits_for_a_click_is_not_waited_for(place: Place) -> None:
    with using(blocking := Blocking()):
        keeper = KeyringSecrets(place, timeout_s=0.1)
        began = time.monotonic()
        for _ in range(3):
            assert reason(keeper.protect, b"secret", b"") == "keychain_locked"
        assert time.monotonic() - began < 5.0
        assert blocking.reads == 1, "one dialog, whoever asks again"
        blocking.clicked.set()
        kept = keeper.protect(b"secret", b"")
        assert keeper.reveal(kept, b"") == b"secret"
        assert blocking.writes == 1


STUCK = """
import threading
from pathlib import Path
from tests.trust.keyrings import Blocking, using
from protocol.errors import ConfigError
from trust.places import Place
from trust.secrets import KeyringSecrets

with using(Blocking()):
    try:
        KeyringSecrets(Place(Path("unused")), timeout_s=0.1).protect(b"secret", b"")
    except ConfigError as error:
        print(error.reason)
"""


def test_a_process_ends_though_its_keyring_still_waits() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=30.0
    )
    assert (done.returncode, done.stdout) == (0, "keychain_locked\n"), done.stderr


def test_two_that_start_together_make_one_item(place: Place) -> None:
    """Each finds no item; the one that comes second under the lock looks again."""
    both_looked = threading.Barrier(2)

    class Racing(Memory):
        def get_password(self, service: str, username: str) -> str | None:
            found = super().get_password(service, username)
            if self.reads <= 2:
                both_looked.wait(10.0)
            return found

    with using(racing := Racing()):
        keepers = [KeyringSecrets(Place(place.path)) for _ in range(2)]
        kept: dict[int, Kept] = {}

        def protect(number: int) -> None:
            kept[number] = keepers[number].protect(b"secret", b"")

        threads = [threading.Thread(target=protect, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert racing.writes == 1
        assert keepers[0].reveal(kept[1], b"") == keepers[1].reveal(kept[0], b"") == b"secret"


def test_what_is_chosen_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert secrets.default_choice() == "keyring"
    monkeypatch.setattr(sys, "platform", "linux")
    assert secrets.default_choice() == "file"
    assert isinstance(secrets.secrets_of("file"), PlainSecrets)
    assert isinstance(secrets.secrets_of("keyring"), KeyringSecrets)
