"""One decoder's connection: its socket, the protocol machine on it, and how both end.

One thread runs :meth:`Connection.run` and alone touches machine and socket; others only wake
it. What is handed off is ``serving.py``'s, the control channel is ``control.py``'s.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import Counter
from typing import Protocol

from gb10_producer.serving import Service, Stock, loggable
from gb10_producer.trust import Admitted, Trust
from gb10_producer.wire import Rejection, Wire
from protocol.control import PATH as CONTROL_PATH
from protocol.deadlines import Timing
from protocol.errors import (
    BatonError,
    CapacityError,
    ConfigError,
    IdentityMismatch,
    IntegrityError,
    LocalProtocolError,
    TransferError,
)
from protocol.handoff import (
    Committed,
    Credited,
    Event,
    Interrupted,
    Late,
    PeerAborted,
    ProducerHandoff,
    Ready,
    Released,
    Requested,
    State,
)
from protocol.reasons import refusal

log = logging.getLogger(__name__)

HANDOFF_PATH = "/"
_CLOSE_S = 2.0
_HOSTS = 64
"""Of how many hosts it is remembered why they were refused."""
_GOING_AWAY, _POLICY, _NORMAL = 1001, 1008, 1000
_LOST = ("connection_lost", "peer_stalled")
"""Ends of a connection after which its decoder may go on over another."""


class Refusals:
    """Which refusals were logged: a decoder that may not connect tries again for ever.

    Every reason is news once for each host, and again after that host has connected. All
    methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._known: dict[str, set[tuple[str, ...]]] = {}
        self._lock = threading.Lock()

    def news(self, host: str, error: BatonError) -> bool:
        """Whether ``host`` was not refused for this reason before; from now on it was."""
        components = error.components if isinstance(error, IdentityMismatch) else ()
        kind = (error.reason, *components)
        with self._lock:
            if host not in self._known and len(self._known) >= _HOSTS:
                del self._known[next(iter(self._known))]
            known = self._known.setdefault(host, set())
            if kind in known:
                return False
            known.add(kind)
            return True

    def count(self, error: BatonError) -> None:
        """A connection was refused before its peer had proven anything."""
        with self._lock:
            self._counts[error.reason] += 1

    @property
    def counts(self) -> dict[str, int]:
        """How many were refused, by reason."""
        with self._lock:
            return dict(self._counts)

    def connected(self, host: str) -> None:
        """Forget why ``host`` was refused."""
        with self._lock:
            self._known.pop(host, None)


class House(Protocol):
    """What a connection belongs to: the server. Methods may be called from any thread."""

    trust: Trust
    timing: Timing
    refusals: Refusals

    @property
    def stock(self) -> Stock | None:
        """What handoffs are served from; ``None`` while the model is loaded."""
        ...

    def reject(self, path: str) -> Rejection | None:
        """Why nobody is let in at that path now; ``None`` if somebody is."""
        ...

    def promote(self, connection: Connection) -> None:
        """It has proven the key, for handoffs. Raises ``CapacityError``."""
        ...

    def control(self, connection: Connection, wire: Wire, admitted: Admitted) -> None:
        """Serve the control channel until it ends. Raises ``BatonError``."""
        ...


class Connection:
    """Serves one socket until it closes; :meth:`run` never raises for what a peer does."""

    def __init__(self, sock: socket.socket, peer: str, house: House) -> None:
        self.peer = peer
        self._house = house
        self._wire = Wire(sock, stall_s=house.timing.idle_s)
        self._machine: ProducerHandoff | None = None
        self._service: Service | None = None
        self._superseded = threading.Event()
        self.handshake_until = time.monotonic() + house.timing.handshake_s
        self._ready = False
        self._unsettled = threading.Event()
        self.stopping = threading.Event()
        """Set when this connection is to end, whatever it does."""

    def run(self) -> None:
        """Serve until the peer leaves, breaks the protocol, or :meth:`stop` is called."""
        code, reason = _NORMAL, ""
        try:
            self._open()
        except BatonError as error:
            code, reason = _POLICY, error.reason
            if reason in _LOST and self._service is not None:
                self._service.let_go()
            self._log_end(error)
            if self._service is not None:
                self._service.flush()
        finally:
            if self._service is not None:
                self._service.end()
            if self.stopping.is_set():
                code = _GOING_AWAY
            self._wire.close(code, reason, _CLOSE_S)

    @property
    def _host(self) -> str:
        return self.peer.rpartition(":")[0]

    def _log_end(self, error: BatonError) -> None:
        """A decoder that is refused is a person's business, everything else is routine."""
        facts = {"peer": self.peer, **loggable(error)}
        if not self._ready:
            self._house.refusals.count(error)
        wrong = isinstance(error, IdentityMismatch | IntegrityError | ConfigError)
        if self._ready or not (wrong or error.reason == "version_unsupported"):
            log.info("connection ended", extra=facts)
        elif self._house.refusals.news(self._host, error):
            log.warning("decoder refused", extra=facts)
        else:
            log.debug("decoder refused again", extra=facts)

    def stop(self) -> None:
        """Abort what runs, tell the peer, and close. Any thread."""
        self.stopping.set()
        self._wire.wake()

    def make_room(self) -> None:
        """End a handshake at once, whatever it waits for; it is stopping. Any thread."""
        self._wire.cut()

    def reconsider(self) -> None:
        """Whom this producer trusts has changed: end if that was this peer. Any thread."""
        self._unsettled.set()
        self._wire.wake()

    def give_up(self) -> None:
        """Another connection goes on with the transfer: this one is dead, and ends. Any thread."""
        self._superseded.set()
        self._wire.wake()

    def _open(self) -> None:
        house, wire = self._house, self._wire
        wire.secure(house.trust.context, self.handshake_until)
        admitted = house.trust.admit(wire.peer_certificate())
        wire.open(self.handshake_until, house.reject)
        if wire.path == CONTROL_PATH:
            house.control(self, wire, admitted)
            return
        stock = house.stock
        assert stock is not None, "nobody is let in before there is one"
        pairing, *earlier = admitted.pairings
        machine = ProducerHandoff(
            identity=stock.offer.identity,
            layout=stock.offer.layout,
            recipe=stock.offer.recipe,
            limits=stock.offer.limits,
            pairing=pairing,
            earlier=earlier[0] if earlier else None,
            nonce=os.urandom(32),
            now=time.monotonic(),
            certificates=admitted.certificates,
            timing=house.timing,
        )
        self._machine = machine
        self._service = Service(stock, wire, machine, self.peer, self)
        self._serve(machine, self._service, admitted)

    def _serve(self, machine: ProducerHandoff, service: Service, admitted: Admitted) -> None:
        wire = self._wire
        while True:
            wire.limit_text(machine.text_limit)
            deadline = self._deadline(machine, service)
            for raw in wire.poll(max(0.0, deadline - time.monotonic())):
                self._handle(machine.receive_text(raw, time.monotonic()), service, admitted)
                service.flush()
            if wire.closing or self._superseded.is_set():
                if not wire.left:
                    service.let_go()
                service.end()
                machine.eof(time.monotonic())
                return
            self._let_pass(machine, service, admitted, time.monotonic())
            service.advance()
            service.flush()
            if self._unsettled.is_set() and not self._stands(service):
                self._leave(machine, service, refusal("pairing_revoked", "its pairing was ended"))
                return
            if self.stopping.is_set():
                fault = self._house.stock and self._house.stock.device.fault
                self._leave(machine, service, fault or _stopping_error())
                return

    def _deadline(self, machine: ProducerHandoff, service: Service) -> float:
        """When the loop must look again, whatever the socket does."""
        now = time.monotonic()
        times = [machine.deadline(), service.due(now)]
        if not self._ready:
            times.append(self.handshake_until)
        return min((at for at in times if at is not None), default=now + 60.0)

    def _let_pass(
        self, machine: ProducerHandoff, service: Service, admitted: Admitted, now: float
    ) -> None:
        if not self._ready and now >= self.handshake_until:
            raise TransferError("The handshake took too long.", reason="handshake_timeout")
        due = machine.deadline()
        if due is not None and now >= due:
            self._handle(machine.tick(now), service, admitted)

    def _handle(self, events: list[Event], service: Service, admitted: Admitted) -> None:
        machine = self._machine
        assert machine is not None
        for event in events:
            match event:
                case Requested():
                    service.accept(event)
                case PeerAborted(error=error):
                    log.info("decoder withdrew", extra={"peer": self.peer, "reason": error.reason})
                    service.end(error.reason)
                    machine.release(time.monotonic())
                case Committed(generation=generation):
                    log.info("committed", extra={"peer": self.peer, "generation": generation})
                    service.end("transfer_committed")
                case Interrupted(resume=resume):
                    service.interrupted(resume)
                case Late(committed=committed):
                    service.commit_late(committed)
                case Ready():
                    self._admit(machine, service, admitted)
                case Credited() | Released():
                    pass  # the loop looks at credit and state by itself
                case _:
                    raise LocalProtocolError(f"a producer has no {type(event).__name__}")

    def _admit(self, machine: ProducerHandoff, service: Service, admitted: Admitted) -> None:
        """The decoder has proven its key."""
        service.owner = admitted.owner(machine.pairing)
        self._ready = True
        self._house.refusals.connected(self._host)
        self._house.promote(self)
        self._house.trust.proven(service.owner)
        # What changed before the owner was known was seen by nobody.
        self._unsettled.set()
        name = {"decoder": admitted.name} if admitted.name else {}
        log.info("decoder connected", extra={"peer": self.peer, **name})

    def _stands(self, service: Service) -> bool:
        """Whether the peer is still trusted, or has not yet proven who it is."""
        self._unsettled.clear()
        return not self._ready or self._house.trust.stands(service.owner)

    def _leave(self, machine: ProducerHandoff, service: Service, error: BatonError) -> None:
        """Tell the decoder why it is left, whatever it waits for: an answer, a commit, nothing."""
        service.withdraw(error)
        if machine.state != State.ABORTING:
            machine.shut(error)
            service.flush()


def _stopping_error() -> BatonError:
    return CapacityError("The producer is stopping.", reason="producer_stopping")
