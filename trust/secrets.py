"""How secrets lie in this machine's files: plainly, or sealed under a key in the keyring.

With ``--secrets file`` the files' mode alone keeps them. With ``--secrets keyring`` the
system's keyring holds one item, a wrapping key of 32 bytes, and each file's secret is sealed
under it with AES-GCM together with everything public in the file and the file's name: a file
that was copied to another machine, renamed or altered does not open.

One item, written once and read once per start, since some systems ask the user at each
reading, and lock the keyring where nobody can be asked (over SSH, without a login). So it is
asked in a thread, for a limited time, and whatever goes wrong it is never written over.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import secrets
import sys
import threading
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from platformdirs import user_state_path

from protocol.errors import ConfigError
from trust.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from keyring.backend import KeyringBackend

Choice = Literal["keyring", "file"]

SERVICE: Final = "baton"
ITEM: Final = "wrapping key"
KEY_BYTES: Final = 32
TIMEOUT_S: Final = 20.0
"""How long the keyring is waited for: long enough for somebody to type a password."""

_NONCE_BYTES: Final = 12
_MACOS_LOCKED: Final = (-25308, -25293)
"""errSecInteractionNotAllowed, errSecAuthFailed: the keyring's library names neither."""

_FILE_HINT: Final = "start with --secrets file to keep secrets in private files instead"


class Plain(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="plain"):
    """A secret as it is. Its ``repr`` shows nothing of it."""

    secret: Annotated[bytes, msgspec.Meta(max_length=65536)]

    def __repr__(self) -> str:
        return "Plain()"


class Sealed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sealed"):
    """A secret under the wrapping key."""

    nonce: Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]
    sealed: Annotated[bytes, msgspec.Meta(min_length=16, max_length=65536)]


Kept = Plain | Sealed


class Secrets(Protocol):
    """How secrets are kept in files. Methods may be called from any thread."""

    def protect(self, secret: bytes, bound: bytes) -> Kept:
        """The secret as it goes into a file; ``bound`` is everything else that the file says.

        Raises ``ConfigError``: ``keychain_locked``, ``keychain_unavailable``,
        ``keychain_unreadable``.
        """
        ...

    def reveal(self, kept: Kept, bound: bytes) -> bytes:
        """The secret of a file. Raises ``ConfigError``.

        Of this file: ``secret_not_sealed``, ``secret_sealed`` (kept in the other way),
        ``secret_altered``. Of all: as :meth:`protect`, and ``keychain_item_missing``.
        """
        ...


class PlainSecrets:
    """``--secrets file``: nothing but the files' mode keeps them."""

    def protect(self, secret: bytes, bound: bytes) -> Kept:
        return Plain(secret)

    def reveal(self, kept: Kept, bound: bytes) -> bytes:
        if isinstance(kept, Plain):
            return kept.secret
        raise ConfigError(
            "The secret is sealed under a key in the system's keyring.",
            reason="secret_sealed",
            field="secrets",
            hint="start with --secrets keyring, or pair again",
        )


class KeyringSecrets:
    """``--secrets keyring``: sealed under the wrapping key, which is read when first needed.

    ``place`` holds the lock under which the item is made: two processes that start together
    must not write it twice.
    """

    def __init__(self, place: Place | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._place = place or Place(user_state_path("baton", appauthor=False) / "keyring")
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._key: bytes | None = None
        self._asking: _Asking | None = None

    def protect(self, secret: bytes, bound: bytes) -> Kept:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return Sealed(nonce, AESGCM(self._wrapping_key(make=True)).encrypt(nonce, secret, bound))

    def reveal(self, kept: Kept, bound: bytes) -> bytes:
        if isinstance(kept, Plain):
            # Whoever can write files, but not read the keyring, would otherwise pair himself.
            raise ConfigError(
                "The secret lies in the file plainly, not sealed under the keyring's key.",
                reason="secret_not_sealed",
                field="secrets",
                hint="start with --secrets file if that was meant, or pair again",
            )
        key = self._wrapping_key(make=False)
        try:
            return AESGCM(key).decrypt(kept.nonce, kept.sealed, bound)
        except InvalidTag as error:
            raise ConfigError(
                "The file is not as this machine sealed it, or was sealed under another key.",
                reason="secret_altered",
                field="secrets",
                hint="remove the file and pair again",
            ) from error

    def _wrapping_key(self, *, make: bool) -> bytes:
        with self._lock:
            if self._key is None:
                self._key = self._ask(_read_item)
            if self._key is None and make:
                self._key = self._ask(self._make_item)
            if self._key is None:
                raise ConfigError(
                    "The key that the secrets were sealed under is not in the system's keyring.",
                    reason="keychain_item_missing",
                    field="secrets",
                    hint="log in as the user, and to the keyring, that paired; or pair again",
                )
            return self._key

    def _make_item(self) -> bytes | None:
        with self._place.alone():
            found = _read_item()
            if found is None:
                _write_item(secrets.token_bytes(KEY_BYTES))
                found = _read_item()
        if found is None:
            raise _unavailable("it does not keep what it is given")
        return found

    def _ask(self, question: Callable[[], bytes | None]) -> bytes | None:
        # One that still waits, for the user perhaps, is waited for again: no second dialog.
        if self._asking is None:
            self._asking = _Asking(question)
        self._asking.join(self._timeout_s)
        if self._asking.is_alive():
            raise ConfigError(
                f"The system's keyring did not answer within {self._timeout_s:g} seconds.",
                reason="keychain_locked",
                field="secrets",
                hint=f"unlock it, or answer its dialog, and try again; or {_FILE_HINT}",
            )
        asked, self._asking = self._asking, None
        return asked.answer()


def default_choice() -> Choice:
    """``keyring`` on macOS, where every login has one; ``file`` elsewhere."""
    return "keyring" if sys.platform == "darwin" else "file"


def secrets_of(choice: Choice) -> Secrets:
    """What ``--secrets`` chose. The keyring is not asked before a secret is needed."""
    return KeyringSecrets() if choice == "keyring" else PlainSecrets()


class _Asking(threading.Thread):
    """A question to the keyring, under way; a daemon, for nobody can end it."""

    def __init__(self, question: Callable[[], bytes | None]) -> None:
        super().__init__(name="keyring", daemon=True)
        self._question = question
        self._answer: bytes | None = None
        self._refusal: ConfigError | None = _unavailable("its library failed")
        self.start()

    def run(self) -> None:
        """Ask. What is no refusal of the keyring's is a bug there, and ends up on stderr."""
        try:
            self._answer = self._question()
            self._refusal = None
        except ConfigError as error:
            self._refusal = error

    def answer(self) -> bytes | None:
        """The answer, once the thread has ended. Raises ``ConfigError``."""
        if self._refusal is not None:
            raise self._refusal
        return self._answer


def _read_item() -> bytes | None:
    with _refusals():
        found = _keyring().get_password(SERVICE, ITEM)
    if found is None:
        return None
    try:
        key = base64.b64decode(found, validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(
            f"The item {ITEM!r} of {SERVICE!r} in the system's keyring is not Baton's key.",
            reason="keychain_unreadable",
            field="secrets",
            hint=f"restore it, or remove it and pair again; or {_FILE_HINT}",
        )
    return key


def _write_item(key: bytes) -> None:
    with _refusals():
        _keyring().set_password(SERVICE, ITEM, base64.b64encode(key).decode())


def _keyring() -> KeyringBackend:
    # Only here: with secrets in files no keyring is looked for.
    import keyring

    return keyring.get_keyring()


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    from keyring.errors import KeyringError, KeyringLocked

    try:
        yield
    except KeyringLocked as error:
        raise _locked() from error
    except KeyringError as error:
        status = error.__cause__.args[:1] if error.__cause__ else ()
        if status and status[0] in _MACOS_LOCKED:
            raise _locked() from error
        raise _unavailable(type(error).__name__) from error


def _locked() -> ConfigError:
    return ConfigError(
        "The system's keyring is locked.",
        reason="keychain_locked",
        field="secrets",
        hint=f"unlock it (over SSH on macOS: security unlock-keychain), or {_FILE_HINT}",
    )


def _unavailable(why: str) -> ConfigError:
    return ConfigError(
        f"The system's keyring cannot be used: {why}.",
        reason="keychain_unavailable",
        field="secrets",
        hint=_FILE_HINT,
    )
