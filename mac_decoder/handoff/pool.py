"""The connections to one producer: kept, looked after, retried, lent out one at a time.

A thread of its own keeps at least one proven connection alive, answers the producer on those
that nobody uses, ends what handoffs left behind (COMMITTED, ABORT), and connects again, with
growing pauses, when none is left. Whoever claims a connection owns it until it is put back;
none is ever touched by two threads at once.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import select
import shlex
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from mac_decoder.engine.power import Clocks, slept
from mac_decoder.handoff.connection import Connection, Producer
from mac_decoder.handoff.link import LinkState
from protocol.errors import (
    BatonError,
    Cancelled,
    CapacityError,
    IdentityMismatch,
    LocalProtocolError,
    TransferError,
)
from protocol.handoff import PeerAborted, Sealed, State
from protocol.messages import HelloAck, Seal
from protocol.reasons import REASONS, WITHOUT_MODEL

_log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 0.25
LONGEST_PAUSE_S: Final = 5.0
REFUSED_PAUSE_S: Final = 10.0
"""A producer with another model or key has to be changed by a person first."""

PING_EVERY_S: Final = 15.0
SILENCE_S: Final = 40.0
_LOOK_S: Final = 0.1
_ROUND_S: Final = 1.0
_CLOSE_S: Final = 5.0
_MOST_OWED: Final = 64
_RECENT_S: Final = 1.0
_SLOW_TO_FAIL: Final = frozenset({"connect_timeout", "producer_unreachable", "peer_silent"})


class Pool:
    """At most ``most`` connections. All methods may be called from any thread.

    ``besides`` is called in the pool's thread about once a second; it must not block.
    """

    def __init__(
        self,
        producer: Producer,
        most: int,
        besides: Callable[[], None] = lambda: None,
        called: str = "",
    ) -> None:
        self._producer = producer
        self._besides = besides
        self._most = most
        self.called = called
        """The name that `baton node` knows it by, which may change; empty where it knows none."""
        self._changed = threading.Condition()
        self._parked: list[Connection] = []
        """READY, free to be claimed."""
        self._ending: list[Connection] = []
        """VERIFIED or ABORTING: nobody may claim them yet."""
        self._claimed = self._opening = self._lent = 0
        """Connections that others own, that are being opened, that the keeper looks at."""
        self._orders: deque[tuple[Connection, Sealed, BatonError | None]] = deque()
        self._owed: deque[Seal] = deque(maxlen=_MOST_OWED)
        """Seals whose COMMITTED has not arrived, or nobody knows."""
        self._closing = False
        self._broken: BatonError | None = None
        """Set once the keeper has died: nobody looks after connections any more."""
        self._failure: BatonError | None = None
        self._failed_at = float("-inf")
        self._attempts = 0
        self._retry_at = 0.0
        self.ack: HelloAck | None = None
        """What the producer said of itself when it was last reached."""
        self.round_trip_s = 0.0
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._keeper = threading.Thread(target=self._keep, name="baton-link", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._keeper.start()

    def close(self) -> None:
        """Close what is kept, wait a while for what is claimed, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._wake()
        if self._keeper.ident is not None:
            self._keeper.join(_CLOSE_S)
        self._carry_out()
        with self._changed:
            self._changed.wait_for(lambda: not self._claimed + self._opening, _CLOSE_S)
        self._drop_all()
        if not self._keeper.is_alive():  # else it waits for a name server, and ends by itself
            self._wake_in.close()
            self._wake_out.close()

    @property
    def closing(self) -> bool:
        """Whether :meth:`close` was called: whoever owns a connection should stop."""
        return self._closing

    @property
    def state(self) -> LinkState:
        """Where the link stands now."""
        with self._changed:
            failure = self._failure
            if self._closing:
                return LinkState("off", "link_closed")
            if self._broken is not None:
                return LinkState("refused", self._broken.reason, self._broken.message)
            if self._total() > self._opening:
                return LinkState("ready", detail=_recipe(self.ack))
            if failure is None:
                return LinkState("connecting", "producer_connecting")
            name = "down" if _passing(failure) else "refused"
            left = max(0.0, self._retry_at - time.monotonic())
            return LinkState(name, failure.reason, self._explained(failure), self._attempts, left)

    def error(self) -> BatonError | None:
        """Why no connection can be had now; ``None`` when one can."""
        state = self.state
        if state.ready:
            return None
        with self._changed:
            failure = self._broken or self._failure
            if failure is not None and not self._closing:
                return copy.copy(failure)
        return TransferError("the producer is not connected", reason=state.reason)

    def claim(self, stopped: Callable[[], bool]) -> Connection:
        """A READY connection that now belongs to the caller, a new one if need be.

        Waits while ``most`` are in use. Raises what ``Connection.open`` raises, at once where
        that failed a moment ago or would take long, and ``Cancelled`` when ``stopped``.
        """
        with self._changed:
            while True:
                if self._closing:
                    raise TransferError("the link is closed", reason="link_closed")
                if self._broken is not None:
                    raise copy.copy(self._broken)
                while self._parked:
                    connection = self._parked.pop()
                    if connection.ready:
                        self._claimed += 1
                        return connection
                    connection.close()
                if stopped():
                    raise Cancelled("the request was withdrawn")
                if self._total() == 0:
                    self._refuse_while_down()
                # The first one is being opened: it will do, or say why not.
                first = self._total() == self._opening > 0
                if not first and not self._lent and self._total() < self._most:
                    self._opening += 1
                    break
                self._changed.wait(_LOOK_S)
        return self._open(stopped)

    def put_back(self, connection: Connection) -> None:
        """Give up a claimed connection, in whatever state it is."""
        with self._changed:
            self._claimed -= 1
            self._keep_if_open(connection)
        self._wake()

    def finish(self, connection: Connection, sealed: Sealed, error: BatonError | None) -> None:
        """Have a sealed handoff committed, or aborted for ``error``.

        Never blocks; does nothing if the handoff has ended otherwise. Where its connection was
        lost, COMMITTED goes over another one.
        """
        self._orders.append((connection, sealed, error))
        self._wake()

    # Opening

    def _total(self) -> int:
        kept = len(self._parked) + len(self._ending)
        return kept + self._claimed + self._opening + self._lent

    def _refuse_while_down(self) -> None:
        failure = self._failure
        recent = time.monotonic() - self._failed_at < _RECENT_S
        if failure is not None and (
            recent or not _passing(failure) or failure.reason in _SLOW_TO_FAIL
        ):
            raise copy.copy(failure)

    def _open(self, stopped: Callable[[], bool]) -> Connection:
        """Open a connection that was counted in ``_opening``; it is then claimed."""
        connection: Connection | None = None
        try:
            connection = Connection.open(self._producer, lambda: self._closing or stopped())
            connection.wire.ping()
        except BatonError as error:
            if error.reason != "link_closed":
                with self._changed:
                    self._failed(error)
            raise
        finally:
            with self._changed:
                self._opening -= 1
                self._claimed += connection is not None
                self._changed.notify_all()
        with self._changed:
            if self._failure is not None or self.ack is None:
                _log.info("producer connected: %s", self._producer.url)
            self.ack = connection.machine.ack
            self._failure = None
            self._attempts = 0
        return connection

    def _failed(self, error: BatonError) -> None:
        """Note that no connection could be had or kept; the lock is held."""
        if self._failure is None or _kind(self._failure) != _kind(error):
            where, why = self._producer.url, self._explained(error)
            _log.warning("producer %s not available (%s): %s", where, error.reason, why)
        # A copy: the error itself holds the frames that it passed through, with their tokens.
        self._failure = copy.copy(error)
        self._failed_at = time.monotonic()
        self._attempts += 1
        self._retry_at = self._failed_at + pause_s(self._attempts, _passing(error))

    def _explained(self, error: BatonError) -> str:
        """Why there is no producer, and what a person has to do where it needs one."""
        if _passing(error) and error.reason != WITHOUT_MODEL:
            return error.message
        components = _components(error)
        differing = f"its checkpoint differs in {', '.join(components)}"
        what = differing if components else error.message
        known = REASONS.get(error.reason)
        advice = self._sending(error) or error.hint or (known.meaning if known else "")
        return f"{what}; {advice}" if advice else what

    def _sending(self, error: BatonError) -> str:
        """How the producer is sent the model, where that helps and its name is known."""
        if not self.called:
            return ""
        command = f"baton node send {shlex.quote(self.called)}"
        if error.reason == WITHOUT_MODEL:
            return f"send it this decoder's: {command}"
        if isinstance(error, IdentityMismatch):
            return (
                f"both must hold the same files: {command} sends it this decoder's model; one that "
                "was started with --model has to be started again, without it"
            )
        return ""

    # Keeping

    def _keep(self) -> None:
        try:
            self._go_round()
        finally:
            if not self._closing:
                self._break()

    def _break(self) -> None:
        """A bug ended the keeper: say so instead of promising a connection for ever."""
        broken = LocalProtocolError("the link's own thread ended", reason="link_broken")
        _log.error("no handoffs until a restart (%s): %s", broken.reason, broken.message)
        with self._changed:
            self._broken = broken
            self._changed.notify_all()
        self._drop_all()

    def _go_round(self) -> None:
        clocks = Clocks.now()
        while not self._closing:
            now = Clocks.now()
            if slept(clocks, now):
                _log.info("this machine slept: connecting again")
                self._drop_all()
            clocks = now
            self._carry_out()
            self._look_after()
            self._connect_if_alone()
            self._besides()
            self._wait()

    def _wait(self) -> None:
        """Until a kept connection has something to say, an order comes, or time passes."""
        with self._changed:
            kept = [*self._parked, *self._ending]
            pause = _ROUND_S if self._total() else max(0.0, self._retry_at - time.monotonic())
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        for connection in kept:
            # It may be claimed and closed meanwhile; then there is nothing to see.
            if (descriptor := connection.wire.fileno()) >= 0:
                poll.register(descriptor, select.POLLIN)
        poll.poll(min(pause, _ROUND_S) * 1e3)
        with contextlib.suppress(BlockingIOError):
            self._wake_in.recv(4096)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: nobody is there
            self._wake_out.send(b"w")

    def _connect_if_alone(self) -> None:
        with self._changed:
            if self._closing or self._total() or time.monotonic() < self._retry_at:
                return
            self._opening += 1
        try:
            connection = self._open(lambda: False)
        except BatonError as error:
            _log.debug("connecting failed: %s", error.reason)
            return
        self.put_back(connection)

    def _drop_all(self) -> None:
        with self._changed:
            dropped = [*self._parked, *self._ending]
            self._parked, self._ending = [], []
            self._retry_at = 0.0
        for connection in dropped:
            connection.close()

    def _carry_out(self) -> None:
        """COMMITTED or ABORT for the handoffs that the engine is done with."""
        while self._orders:
            connection, sealed, error = self._orders.popleft()
            with self._borrowed(connection) as mine:
                if connection.closed and error is None:
                    self._owed.append(sealed.seal)
                    continue
                state, generation = connection.machine.state, sealed.begin.generation
                if not mine or state != State.VERIFIED or connection.generation != generation:
                    continue
                if error is None:
                    connection.commit(sealed.seal)
                else:
                    connection.abort(error)
        self._acknowledge()

    def _acknowledge(self) -> None:
        """COMMITTED for handoffs whose connection was lost, one connection and one at a time."""
        with self._changed:
            free = [each for each in self._parked if each.ready and not each.wire.ping_pending]
        for connection in free:
            with self._borrowed(connection) as mine:
                if mine and self._owed:
                    connection.acknowledge(self._owed.popleft())

    def _look_after(self) -> None:
        with self._changed:
            kept = [*self._parked, *self._ending]
        for connection in kept:
            with self._borrowed(connection) as mine:
                if mine:
                    self._tend(connection)

    def _tend(self, connection: Connection) -> None:
        """Answer what came, let time pass, and see that the producer is still there."""
        wire = connection.wire
        while wire.buffered and not self._closing:
            events, _ = connection.step()
            if any(isinstance(event, PeerAborted) for event in events):
                connection.release()
        connection.rest()
        if wire.round_trip_s is not None:
            self.round_trip_s = wire.round_trip_s
        silent = time.monotonic() - wire.last_heard
        if silent > SILENCE_S:
            raise TransferError("the producer fell silent", reason="peer_silent")
        if silent > PING_EVERY_S and not wire.ping_pending:
            wire.ping()

    @contextlib.contextmanager
    def _borrowed(self, connection: Connection) -> Iterator[bool]:
        """Own a kept connection for a moment; yields whether that was possible.

        An error closes the connection and is the link's failure if it was the last one.
        """
        with self._changed:
            place = next((x for x in (self._parked, self._ending) if connection in x), None)
            if place is None:
                yield False
                return
            place.remove(connection)
            self._lent += 1
        failure: BatonError | None = None
        try:
            yield True
        except BatonError as error:
            connection.close()
            failure = error
        finally:
            with self._changed:
                self._lent -= 1
                if failure is not None and not self._total():
                    if failure.reason == "connection_lost":
                        self._retry_at = 0.0  # trying again is what shows whether it is away
                    else:
                        self._failed(failure)
                self._keep_if_open(connection)

    def _keep_if_open(self, connection: Connection) -> None:
        """Sort a connection that nobody owns any more; the lock is held."""
        if self._broken is not None:
            connection.close()
        elif connection.ready:
            self._parked.append(connection)
        elif not connection.closed:
            self._ending.append(connection)
        elif (seal := connection.unheard) is not None:
            self._owed.append(seal)
        self._changed.notify_all()


def pause_s(attempts: int, passing: bool) -> float:
    """How long to wait after the ``attempts``-th failure in a row; a little at random."""
    if not passing:
        return REFUSED_PAUSE_S
    pause = min(FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 16), LONGEST_PAUSE_S)
    return pause * random.uniform(0.8, 1.0)


def _passing(error: BatonError) -> bool:
    """Whether the failure may pass by itself, as a restart or a network's does."""
    return isinstance(error, TransferError | CapacityError)


def _components(error: BatonError) -> tuple[str, ...]:
    """The parts of the identity in which the producer differs."""
    return error.components if isinstance(error, IdentityMismatch) else ()


def _kind(error: BatonError) -> tuple[str, ...]:
    """What two failures have in common that need not be told apart."""
    return (error.reason, *_components(error))


def _recipe(ack: HelloAck | None) -> str:
    """How the producer computes, for people."""
    if ack is None:
        return ""
    recipe = ack.recipe
    return f"{recipe.device}, {recipe.dtype}, tiles of {recipe.tile}"
