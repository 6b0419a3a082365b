"""Shows codes to whoever sits at this machine, until somebody has paired.

Codes go to people, on stderr, and nowhere else: no log line has one.
"""

from __future__ import annotations

import logging
import math
import queue
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protocol.errors import BatonError, CapacityError
from protocol.pairing.certificates import OwnCertificate
from protocol.pairing.code import CODE_LIFE_S, Code
from trust.invitation import Invitation
from trust.peers import Peer, Peers

log = logging.getLogger(__name__)

_TRYING_S = 25.0
"""How long a code that was spent in its last moment may still be under way."""


def tell(text: str) -> None:
    """Tell a person something."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Paired:
    peer: Peer


@dataclass(frozen=True)
class _Burned:
    reason: str


class _Stop:
    """The producer stops."""


class Welcome:
    """Opens one code after the other, as many as may be, until one has paired somebody.

    :meth:`start` once, :meth:`stop` once.
    """

    def __init__(
        self,
        listener: socket.socket,
        peers: Peers,
        own: OwnCertificate,
        *,
        name: str,
        port: int,
        called: Sequence[str],
        paired: Callable[[Peer], None] = lambda peer: None,
        opened: Callable[[bool], None] = lambda open: None,
        say: Callable[[str], None] = tell,
    ) -> None:
        """``listener`` is bound, for codes, and closed in the end; ``port`` is for handoffs.

        ``called``: what may be typed at the decoder, the best first. ``paired`` is called once
        a peer is kept; ``opened`` when codes can be tried, and when they cannot any more. Raises
        ``ConfigError`` as ``Invitation`` does.
        """
        self._called = called
        self._paired = paired
        self._opened = opened
        self._say = say
        self._events: queue.Queue[_Paired | _Burned | _Stop] = queue.Queue()
        self._invitation = Invitation(
            listener,
            peers,
            own=own,
            name=name,
            port=port,
            paired=self._keep,
            burned=lambda reason: self._events.put(_Burned(reason)),
        )
        self._thread = threading.Thread(target=self._run, name="welcome", daemon=True)
        self._code: Code | None = None

    def start(self) -> None:
        """Show the first code. Raises ``ConfigError`` where nobody could be kept."""
        self._code = self._invitation.open()
        self._invitation.start()
        self._opened(True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until somebody has paired, or :meth:`stop`; whether one of them has happened."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Withdraw the code; idempotent."""
        self._events.put(_Stop())
        if self._thread.ident is not None:
            self._thread.join(5.0)
        self._invitation.stop()

    def _keep(self, peer: Peer) -> None:
        self._paired(peer)
        self._events.put(_Paired(peer))

    def _run(self) -> None:
        try:
            while (again := self._one_code()) is not None:
                if not self._open(again):
                    return
        finally:
            self._opened(False)
            self._invitation.stop()

    def _one_code(self) -> str | None:
        """Show the open code and wait for what becomes of it: why another is needed, if it is."""
        code, self._code = self._code, None
        assert code is not None
        self._say(_shown(code, self._called))
        event = self._next(CODE_LIFE_S)
        if event is None and self._invitation.left_s() <= 0:
            event = self._next(_TRYING_S)
        match event:
            case _Stop():
                return None
            case _Paired(peer=peer):
                self._say(f"Paired with {peer.name}.")
                return None
            case _Burned(reason=reason):
                return f"The code was tried and is void ({reason})."
            case _:
                return "The code has expired."

    def _open(self, why: str) -> bool:
        """Open the next code, now or as soon as one may be opened; false if it is not wanted."""
        while self._code is None:
            try:
                self._code = self._invitation.open()
            except CapacityError as paused:
                wait = math.ceil(paused.retry_after_s)
                self._say(f"{why} Too many codes were shown; the next one comes in {wait} s.")
                if isinstance(self._next(wait), _Stop):
                    return False
                continue
            except BatonError as error:
                log.error("no code can be opened", extra=error.details())
                self._say(f"{why} No other can be shown: {error.message}")
                return False
        self._say(why)
        return True

    def _next(self, timeout_s: float) -> _Paired | _Burned | _Stop | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            return None


def _shown(code: Code, called: Sequence[str]) -> str:
    minutes = CODE_LIFE_S / 60
    first, *others = (f"baton node add {shlex.quote(one)}\n" for one in called)
    return (
        f"\nTo pair, type on the Mac:  {first}"
        + "".join(f"                       or:  {other}" for other in others)
        + f"and there this code:       {' '.join(code.words)}\n"
        f"It can be tried once, within {minutes:.0f} minutes.\n"
    )
