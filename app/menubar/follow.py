"""Follows a decoder's status as it changes: one connection, in a thread of its own.

Nothing is asked for again and again. The decoder says what changes; where none answers, it is
tried again after pauses that grow to a bound, and at once where there is reason to: the settings
have changed, the app has started a decoder, or this machine has slept.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from app.menubar.place import Place
from app.view.standing import Standing, State, known_code
from mac_decoder.reporting import traced
from protocol.errors import BatonError, PeerProtocolError
from protocol.status.snapshot import Snapshot
from protocol.status.stream import FULL_EVERY_S, Change, Full, Hello, apply, decode

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 5.0
_SLEPT_S: Final = 3.0
"""Clocks that part by so much have a sleep between them, not a correction of the time."""

FIRST_S: Final = 10.0
"""A whole snapshot is there so long after a connection is begun."""

HELD_S: Final = 1.0
"""A connection that was of use for so long may end without a word: who answers next says why. It
is no reason to try again less often, either.
"""

SILENCE_S: Final = 2.5 * FULL_EVERY_S
"""Whoever has said nothing for so long does not answer; a whole snapshot was due before."""

_MOST_BYTES: Final = 16 << 20
_SAID: Final[dict[str, State]] = {
    "decoder_starting": "starting",
    "decoder_restarting": "restarting",
    "decoder_latched_off": "latched",
    "decoder_stopping": "stopping",
    "invalid_api_key": "key_needed",
}
"""What a refused handshake says of the decoder."""


@dataclass(frozen=True)
class Told:
    """What is known at a moment: ``snapshot`` only while connected. ``place`` is where it was
    looked for, ``None`` where the settings do not say.
    """

    standing: Standing
    snapshot: Snapshot | None = None
    place: Place | None = None


@dataclass
class Pauses:
    """How long to wait before the next try: it doubles, and begins anew after a success."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S
    _next_s: float = field(default=0.0, init=False)

    def next(self) -> float:
        """Seconds to wait now."""
        found = self._next_s or self.first_s
        self._next_s = min(self.longest_s, 2 * found)
        return found

    def begin_anew(self) -> None:
        """The next pause is the first."""
        self._next_s = 0.0


class Clocks:
    """Tells a sleep of the machine: the time of day goes on in it, the monotonic clock does not."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._wall, self.monotonic = wall, monotonic
        self._apart = wall() - monotonic()

    def slept(self) -> bool:
        """Whether this machine has slept since the last time this was asked."""
        apart = self._wall() - self.monotonic()
        before, self._apart = self._apart, apart
        return apart - before > _SLEPT_S


class Follower:
    """Follows from :meth:`start` to :meth:`stop`.

    ``find`` says where the decoder is, before each try; ``hear`` is called with everything
    that is new, in this follower's thread. ``clocks`` and ``pauses`` are this machine's and the
    usual ones, but in tests.
    """

    def __init__(
        self,
        find: Callable[[], Place],
        hear: Callable[[Told], None],
        clocks: Clocks | None = None,
        pauses: Pauses | None = None,
    ) -> None:
        self._find, self._hear = find, hear
        self._clocks = clocks or Clocks()
        self._pauses = pauses or Pauses()
        self._thread = threading.Thread(target=self._run, name="baton-follow", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._begun = threading.Event()
        self._nudged = asyncio.Event()
        """Waiting is over."""

        self._elsewhere = asyncio.Event()
        """So is the connection that there is."""

        self._stopping = False
        self._last: Told | None = None

    def start(self) -> None:
        """Begin, in a thread of its own."""
        self._thread.start()
        self._begun.wait()

    def stop(self) -> None:
        """End, if it has begun; returns when nothing is heard any more."""
        self._stopping = True
        self._call(self._leave)
        if self._loop is not None:
            self._thread.join()

    def try_now(self) -> None:
        """Somebody has reason to think that the decoder is there now. Any thread."""
        self._call(self._wake)

    def look_again(self) -> None:
        """The settings may name another place: connect to what they say now. Any thread."""
        self._call(self._leave)

    def _call(self, what: Callable[[], None]) -> None:
        # The loop may have ended with the thread.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(what)

    def _wake(self) -> None:
        self._pauses.begin_anew()
        self._nudged.set()

    def _leave(self) -> None:
        self._elsewhere.set()
        self._wake()

    def _run(self) -> None:
        asyncio.run(self._follow())

    async def _follow(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._begun.set()
        while not self._stopping:
            self._nudged.clear()
            self._elsewhere.clear()
            told = await self._tried()
            if self._stopping:
                return
            if told is not None:
                self._tell(told)
            await self._rest(self._pauses.next())

    async def _tried(self) -> Told | None:
        """One time, beyond which nothing is raised: what breaks is told, and this thread goes on.

        As :meth:`_once`.
        """
        trying = asyncio.create_task(self._once())
        await asyncio.wait({trying})
        error = trying.exception()
        if error is None:
            return trying.result()
        log.error("following the status broke: %s", traced(error))
        url = self._last.standing.url if self._last else ""
        return Told(Standing("refused", url, "internal_error", _BROKE))

    async def _once(self) -> Told | None:
        """Connect and follow until that ends; what to tell of the end.

        ``None``: a connection that was of use for a while has ended; who answers now will say why.
        """
        try:
            place = self._find()
        except BatonError as error:
            # The address is what was last known, if any. What is wrong here is for this app to say.
            before = self._last.standing.url if self._last else ""
            return Told(Standing("refused", before, error.reason, error.message))
        if self._last is None or self._last.standing.url != place.url:
            self._tell(Told(Standing("connecting", place.url), place=place))
        try:
            await self._connected(place)
        except ConnectionClosed:
            return _without(place, "refused", "connection_lost")
        except InvalidStatus as error:
            code = _code(error.response.body)
            return _without(place, _SAID.get(code, "refused"), code or "not_a_decoder")
        except PeerProtocolError as error:
            differs = error.reason == "status_version_differs"
            return _without(place, "version_differs" if differs else "refused", error.reason)
        except BatonError as error:
            # A certificate of the decoder's own is made at its first start.
            missing = error.reason == "certificate_missing"
            return _without(place, "absent" if missing else "refused", error.reason)
        except ssl.SSLError:
            return _without(place, "refused", "certificate_differs")
        except TimeoutError:
            return _without(place, "refused", "no_answer")
        except OSError:
            return _without(place, "absent")
        except WebSocketException:
            return _without(place, "refused", "not_a_decoder")
        return None

    async def _connected(self, place: Place) -> None:
        """Follow one connection to its end, or until it is to be given up, in whatever state it
        is then; raises what ends it.
        """
        left = asyncio.create_task(_until(self._elsewhere))
        following = asyncio.create_task(self._let_in(place))
        try:
            await asyncio.wait({left, following}, return_when=asyncio.FIRST_COMPLETED)
            if following.done():
                await following
        finally:
            left.cancel()
            following.cancel()
            await asyncio.gather(left, following, return_exceptions=True)

    async def _let_in(self, place: Place) -> None:
        """Follow; over TLS, with the key from the first, else only where it is asked for."""
        key = place.key if place.url.startswith("https://") else None
        try:
            await self._with(key, place)
        except InvalidStatus as error:
            asked = _code(error.response.body) == "invalid_api_key"
            if key is not None or place.key is None or not asked:
                raise
            await self._with(place.key, place)

    async def _with(self, key: str | None, place: Place) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with (
            asyncio.timeout(FIRST_S) as patience,
            _Directly(
                place.stream,
                ssl=place.context(),
                additional_headers=headers,
                user_agent_header=None,
                open_timeout=None,
                close_timeout=1.0,
                # The stream is never silent for long; pings would wake this thread for nothing.
                ping_interval=None,
                max_size=_MOST_BYTES,
                compression=None,
                proxy=None,
                logger=_quiet,
            ) as connection,
        ):
            await self._listen(connection, place, lambda: patience.reschedule(None))

    async def _listen(
        self, connection: ClientConnection, place: Place, begun: Callable[[], None]
    ) -> None:
        """Tell what is said, until that ends in a way that asks for no word: the connection has
        held, or this machine has slept. ``begun`` is called with the first snapshot.

        Raises what else ends it: ``ConnectionClosed``, ``TimeoutError`` after a silence, and
        ``PeerProtocolError``: ``status_out_of_place`` (a second hello, a change of nothing), and
        what ``decode`` and ``apply`` do.
        """
        greeted = False
        snapshot: Snapshot | None = None
        begun_at: float | None = None
        self._clocks.slept()
        try:
            while (message := await self._next(connection)) is not None:
                match decode(message):
                    case Hello() if not greeted:
                        greeted = True
                        continue
                    case Full() as full if greeted:
                        snapshot = full.snapshot
                    case Change() as change if snapshot is not None:
                        snapshot = apply(change, snapshot)
                    case _:
                        raise PeerProtocolError(
                            "a message of the status came where it has no place",
                            reason="status_out_of_place",
                            field="type",
                        )
                if begun_at is None:
                    begun_at = self._clocks.monotonic()
                    begun()
                if self._held(begun_at):
                    self._pauses.begin_anew()
                self._tell(Told(Standing("connected", place.url), snapshot, place))
        except (ConnectionClosed, PeerProtocolError) as error:
            # One that ends as soon as it has begun is told, and not made again as fast as that
            # goes: a snapshot of a moment ago is not what is there.
            if not (self._held(begun_at) and _may_go_on(error)):
                raise
            self._pauses.begin_anew()

    def _held(self, begun_at: float | None) -> bool:
        return begun_at is not None and self._clocks.monotonic() - begun_at >= HELD_S

    async def _next(self, connection: ClientConnection) -> str | bytes | None:
        """The next message; ``None``: the machine has slept, and the connection with it. Raises
        ``TimeoutError`` where nothing comes.
        """
        coming = asyncio.create_task(connection.recv())
        try:
            for _ in range(2):
                # A whole snapshot is due within this time: nothing else wakes an idle thread.
                done, _ = await asyncio.wait({coming}, timeout=SILENCE_S / 2)
                if done:
                    return await coming
                if self._clocks.slept():
                    self._pauses.begin_anew()
                    return None
            raise TimeoutError
        finally:
            if not coming.done():
                coming.cancel()

    async def _rest(self, pause_s: float) -> None:
        """Wait, but not through a wake of the machine, nor when somebody knows better."""
        until = time.monotonic() + pause_s
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudged.wait(), min(left, 1.0))
            if self._nudged.is_set():
                return
            if self._clocks.slept():
                self._pauses.begin_anew()
                return

    def _tell(self, told: Told) -> None:
        if told != self._last:
            self._last = told
            self._hear(told)


class _Directly(connect):
    """Goes nowhere else: no decoder sends anybody on, and what does is to be named."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


def _without(place: Place, state: State, reason: str = "") -> Told:
    # What has a sentence of its own needs no code beside it.
    shown = reason if state == "refused" else ""
    return Told(Standing(state, place.url, shown), place=place)


def _may_go_on(error: ConnectionClosed | PeerProtocolError) -> bool:
    """Whether the next connection makes it good: a whole snapshot comes with that."""
    return isinstance(error, ConnectionClosed) or error.reason == "status_out_of_order"


def _code(body: bytes | bytearray | memoryview | None) -> str:
    """The reason in the error object of a refused handshake; empty where there is none."""
    try:
        found = json.loads(bytes(body or b""))["error"]["code"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return "" if found is None else known_code(found)


async def _until(event: asyncio.Event) -> None:
    await event.wait()


_BROKE: Final = "Something in this app broke; its log says where"

_quiet: Final = logging.getLogger("baton.follow.websockets")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False
