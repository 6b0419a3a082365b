"""The producer's side of the control channel: it describes itself, forgets, takes a new key.

Served over a connection's socket by its thread. Whatever changes whom this producer trusts is
kept durably before it is answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gb10_producer.serving import Stock
from gb10_producer.trust import Admitted, Owner, RegistryTrust
from gb10_producer.wire import Wire
from protocol.control import (
    DescribeAsked,
    Event,
    ProducerControl,
    Proven,
    RotateAsked,
    Step,
    UnpairAsked,
)
from protocol.control.messages import MAX_MESSAGE, Description, note
from protocol.errors import BatonError, ConfigError, TransferError
from protocol.pairing import Pairing
from protocol.reasons import refusal

log = logging.getLogger(__name__)

_LONGEST_POLL_S = 60.0


@dataclass(frozen=True)
class Profile:
    """How a producer describes itself. ``model``: the name of what it serves."""

    name: str
    version: str
    model: str


class Desk:
    """Answers the control connections of a producer that has a registry. Any thread."""

    def __init__(self, trust: RegistryTrust, profile: Profile) -> None:
        self._trust = trust
        self._profile = profile

    def visit(
        self,
        wire: Wire,
        admitted: Admitted,
        *,
        peer: str,
        opened_until: float,
        stock: Callable[[], Stock | None],
        proven: Callable[[], None],
        stopping: threading.Event,
    ) -> None:
        """Serve a connection until it ends.

        ``opened_until``: when the key must be proven. ``proven`` is called then, and may raise
        ``CapacityError``. Raises ``BatonError`` for what the peer did, after telling it.
        """
        assert admitted.certificates is not None
        machine = ProducerControl(admitted.pairings, admitted.certificates)
        visit = _Visit(self._trust, self._profile, wire, machine, admitted, peer, stock, proven)
        try:
            visit.run(opened_until, stopping)
        except BatonError as error:
            machine.shut(error)
            visit.flush()
            raise


@dataclass
class _Visit:
    """One connection."""

    trust: RegistryTrust
    profile: Profile
    wire: Wire
    machine: ProducerControl
    admitted: Admitted
    peer: str
    stock: Callable[[], Stock | None]
    proven: Callable[[], None]
    pairing: Pairing | None = None

    def run(self, opened_until: float, stopping: threading.Event) -> None:
        machine, wire = self.machine, self.wire
        wire.limit_text(MAX_MESSAGE)
        machine.start(time.monotonic())
        while machine.step is not Step.ENDED:
            for raw in wire.poll(max(0.0, self._deadline(opened_until) - time.monotonic())):
                event = machine.receive(raw, time.monotonic())
                if event is not None:
                    self._handle(event, stopping)
                self.flush()
            if machine.step is Step.ENDED:
                return
            if wire.closing:
                machine.eof()
                return
            if stopping.is_set():
                raise refusal("producer_stopping", "the producer is stopping")
            if self.pairing is not None and not self.trust.stands(self._owner):
                raise refusal("pairing_revoked", "its pairing was ended")
            if self.pairing is None and time.monotonic() >= opened_until:
                raise TransferError("The handshake took too long.", reason="handshake_timeout")
            machine.tick(time.monotonic())

    def flush(self) -> None:
        """Queue what the machine wants to say; a wire that is closing says nothing more."""
        for raw in self.machine.outgoing():
            if not self.wire.closing:
                self.wire.send_text(raw)

    @property
    def _owner(self) -> Owner:
        assert self.pairing is not None
        return self.admitted.owner(self.pairing)

    def _deadline(self, opened_until: float) -> float:
        due = self.machine.deadline() or time.monotonic() + _LONGEST_POLL_S
        return due if self.pairing is not None else min(due, opened_until)

    def _handle(self, event: Event, stopping: threading.Event) -> None:
        now = time.monotonic()
        match event:
            case Proven(pairing=pairing):
                self.pairing = pairing
                self.proven()
                self.trust.proven(self._owner)
            case DescribeAsked():
                self.machine.described(self._description(stopping), now)
            case UnpairAsked():
                self._keep(lambda: self.trust.forget(self._owner))
                self._log("decoder unpaired")
                self.machine.unpaired(now)
            case RotateAsked(pairing=new):
                old = self.pairing
                assert old is not None
                self._keep(lambda: self.trust.rekey(self._owner, old, new))
                self._log("key rotated", epoch=new.epoch)
                self.machine.rotated(now)

    def _keep(self, change: Callable[[], None]) -> None:
        try:
            change()
        except ConfigError as error:
            self._log("trust not kept", error=error.message, reason=error.reason)
            raise refusal("trust_not_kept", "the change could not be written down") from error

    def _log(self, message: str, **facts: object) -> None:
        log.info(message, extra={"peer": self.peer, "decoder": self.admitted.name, **facts})

    def _description(self, stopping: threading.Event) -> Description:
        stock, profile = self.stock(), self.profile
        state = "loading" if stock is None else "ready"
        return Description(
            name=profile.name,
            version=profile.version,
            state="stopping" if stopping.is_set() else state,
            model=note(profile.model),
            identity=None if stock is None else stock.offer.identity,
            recipe=None if stock is None else stock.offer.recipe,
        )
