"""Sessions of browsers: who has logged in, for how long, and what such a one may do.

A browser cannot send a bearer key with a page, so it gets a cookie. The cookie is 256 random
bits, of which this process keeps the SHA-256 alone, and nothing outlives the process. Where it
came from decides what it is good for: whoever can write into the state directory is this user
and may manage; whoever knows an API key may look and try, as long as the key is valid.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from mac_decoder.api.keys import Keys, digest

LIFE_S: Final = 12 * 3600.0
MOST: Final = 32
"""Sessions of each sort; for one more, the oldest of the sort ends."""

MOST_COOKIES: Final = 8
"""Of one request, under this server's name, that are looked at."""

_SECRET_BYTES: Final = 32
_TOKEN_LENGTH: Final = 43


@dataclass(frozen=True, eq=False)
class Session:
    """One browser's. ``key`` is the digest of the API key that opened it, if one did.

    It tells nothing of whether it still holds: that is ``Sessions.holds``.
    """

    may_manage: bool
    ends_at: float
    key: bytes | None = None


class Sessions:
    """Those of one process, in memory. Belongs to the event loop's thread."""

    SCOPE: Final = "baton.session"
    """Where ``KeyGuard`` leaves the session of a request, ``None`` if it has none."""

    def __init__(
        self,
        keys: Keys,
        *,
        port: int = 0,
        secured: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``port`` keeps apart the cookies of two decoders on one host, for which cookies know
        no ports; ``secured`` says that there is TLS.
        """
        self.cookie: Final = f"{'__Host-' if secured else ''}baton-{port}"
        self._keys = keys
        self._secured = secured
        self._clock = clock
        self._open: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open_for_user(self) -> str:
        """A session of whoever runs this process: it may manage. Returns what its cookie holds."""
        return self._begin(Session(True, self._clock() + LIFE_S))

    def open_for_key(self, key: str) -> str | None:
        """A session as good as an API key, as long as that is; ``None`` if it is no valid one."""
        if self._keys.salt_of(key) is None:
            return None
        return self._begin(Session(False, self._clock() + LIFE_S, digest(key)))

    def end(self, token: str) -> None:
        """Forget the session of a cookie, if there is one."""
        self._open.pop(digest(token), None)

    def find(self, cookies: Iterable[str]) -> Session | None:
        """The session that holds of a request with these Cookie headers."""
        for token in self.tokens(cookies):
            asked = digest(token)
            for known, session in self._open.items():
                if hmac.compare_digest(known, asked) and self.holds(session):
                    return session
        return None

    def tokens(self, cookies: Iterable[str]) -> list[str]:
        """What the Cookie headers hold under this server's name, and could be a token: at most
        ``MOST_COOKIES``, each once.

        More than one is a browser's doing: a page of another port of this host may have set its
        own, which the browser may send first.
        """
        pairs = (pair.partition("=") for line in cookies for pair in line.split(";"))
        found = [value.strip() for name, _, value in pairs if name.strip() == self.cookie]
        formed = [one for one in found if len(one) == _TOKEN_LENGTH and one.isascii()]
        return list(dict.fromkeys(formed))[:MOST_COOKIES]

    def holds(self, session: Session) -> bool:
        """Whether it is still good: not ended, not too old, its API key not revoked."""
        if session not in self._open.values() or self._clock() >= session.ends_at:
            return False
        return session.key is None or self._keys.salt_by(session.key) is not None

    def may_manage(self, session: Session | None) -> bool:
        """Whether its user may change things now; asked again when something is done."""
        return session is not None and session.may_manage and self.holds(session)

    def salt(self, session: Session) -> bytes | None:
        """What keeps the caches of its user apart (see ``Keys.salt_of``); ``None``: it ended."""
        if not self.holds(session):
            return None
        return b"" if session.key is None else self._keys.salt_by(session.key)

    def set_cookie(self, token: str) -> str:
        """The Set-Cookie header that hands out a session, or ends one where ``token`` is empty.

        Strict, so that no other site's link comes with it.
        """
        parts = [f"{self.cookie}={token}", "Path=/", "HttpOnly", "SameSite=Strict"]
        parts += ["Secure"] if self._secured else []
        return "; ".join(parts if token else [*parts, "Max-Age=0"])

    def _begin(self, session: Session) -> str:
        self._open = {name: one for name, one in self._open.items() if self.holds(one)}
        alike = [name for name, one in self._open.items() if one.may_manage == session.may_manage]
        if len(alike) >= MOST:
            del self._open[alike[0]]
        token = secrets.token_urlsafe(_SECRET_BYTES)
        self._open[digest(token)] = session
        return token
