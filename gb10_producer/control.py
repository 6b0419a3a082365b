"""The producer's side of the control channel: it describes itself, forgets, takes keys and models.

Served over a connection's socket by its thread. Whatever changes whom this producer trusts is
kept durably before it is answered.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gb10_producer.received import Kept, ReceivedModels
from gb10_producer.receiving import News, Receipt, Wanted
from gb10_producer.serving import Stock
from gb10_producer.trust import Admitted, Owner, RegistryTrust
from gb10_producer.wire import Wire
from protocol.control import (
    DescribeAsked,
    Event,
    ModelOffered,
    ProducerControl,
    Proven,
    RotateAsked,
    Step,
    UnpairAsked,
)
from protocol.control.messages import MAX_MESSAGE, Description, SendModel, Serving, note
from protocol.control.models import PIECE_BYTES
from protocol.errors import BatonError, ConfigError, TransferError
from protocol.pairing import Pairing
from protocol.reasons import refusal

log = logging.getLogger(__name__)

_LONGEST_POLL_S: Final = 60.0
_LOOK_S: Final = 1.0
_WIRE_BYTES: Final = 2 * PIECE_BYTES
"""Of a model, what the wire holds before it reads no more."""


@dataclass(frozen=True)
class Profile:
    """How a producer describes itself. ``model``: the name of what it serves.

    ``waiting``: it serves nothing until a model is sent.
    """

    name: str
    version: str
    model: str
    waiting: bool = False


@dataclass(frozen=True)
class Taking:
    """Where models that are sent go; ``received`` is told of each, and says what becomes of it."""

    models: ReceivedModels
    received: Callable[[Path], Serving]


class Desk:
    """Answers the control connections of a producer that has a registry. Any thread.

    ``profile`` may be replaced at any time.
    """

    def __init__(
        self, trust: RegistryTrust, profile: Profile, taking: Taking | None = None
    ) -> None:
        """``taking``: where models go; ``None`` if none is taken."""
        self._trust = trust
        self.profile = profile
        self._taking = taking

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
        visit = _Visit(
            self, self._trust, self._taking, wire, machine, admitted, peer, stock, proven
        )
        try:
            visit.run(opened_until, stopping)
        except BatonError as error:
            machine.shut(error)
            visit.flush()
            raise
        finally:
            visit.leave()


@dataclass
class _Visit:
    """One connection."""

    desk: Desk
    trust: RegistryTrust
    taking: Taking | None
    wire: Wire
    machine: ProducerControl
    admitted: Admitted
    peer: str
    stock: Callable[[], Stock | None]
    proven: Callable[[], None]
    pairing: Pairing | None = None
    receipt: Receipt | None = None
    began: float = 0.0

    def run(self, opened_until: float, stopping: threading.Event) -> None:
        machine, wire = self.machine, self.wire
        wire.limit_text(MAX_MESSAGE)
        machine.start(time.monotonic())
        while machine.step is not Step.ENDED:
            # Once for this turn: while the disk made room, nobody was silent.
            writing = self._writing
            due = self._deadline(opened_until, writing)
            for raw in wire.poll(max(0.0, due - time.monotonic())):
                event = machine.receive(raw, time.monotonic())
                if event is not None:
                    self._handle(event, stopping)
                self.flush()
            self._receive()
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
            if not writing:
                machine.tick(time.monotonic())

    def leave(self) -> None:
        """What was received of a model stays as it is."""
        if self.receipt is not None:
            self.receipt.stop()
            self.receipt = None

    def flush(self) -> None:
        """Queue what the machine wants to say; a wire that is closing says nothing more."""
        for raw in self.machine.outgoing():
            if not self.wire.closing:
                self.wire.send_text(raw)

    @property
    def _owner(self) -> Owner:
        assert self.pairing is not None
        return self.admitted.owner(self.pairing)

    def _deadline(self, opened_until: float, writing: bool) -> float:
        now = time.monotonic()
        due = now + _LOOK_S if writing else self.machine.deadline() or now + _LONGEST_POLL_S
        return due if self.pairing is not None else min(due, opened_until)

    @property
    def _writing(self) -> bool:
        """Whether it is this side's disk that is waited for, and not the decoder."""
        return self.receipt is not None and not self.receipt.has_room

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
            case ModelOffered(offer=offer):
                self._take(offer)

    def _take(self, offer: SendModel) -> None:
        """Begin to receive a model."""
        if self.taking is None:
            raise refusal("models_not_taken", "this producer serves no model that is received")
        self._log("model offered", model=offer.name, bytes=offer.nbytes)
        self.began = time.monotonic()
        self.receipt = Receipt(self.taking.models, offer, self.wire.wake, self._unheard)
        self.receipt.start()

    def _unheard(self, path: Path) -> None:
        """A model is whole whose sender is gone. The receipt's thread, or this one."""
        assert self.taking is not None
        self._log("model kept", model=path.name, serving=self.taking.received(path))

    def _receive(self) -> None:
        """Pass on what has come of a model, and say what became of it. Raises ``BatonError``."""
        receipt, machine = self.receipt, self.machine
        if receipt is None:
            return
        while receipt.has_room and (piece := self.wire.binary()) is not None:
            machine.data(len(piece), time.monotonic())
            receipt.add(piece)
            if not machine.left:
                machine.all_received(time.monotonic())
        while (news := receipt.news()) is not None:
            self._tell(news)
        self.flush()

    def _tell(self, news: News) -> None:
        machine, now = self.machine, time.monotonic()
        match news:
            case Wanted(offset=offset):
                machine.wanted(offset, now)
                self._log("model wanted", offset=offset)
                if machine.left:
                    self.wire.take_binary(_WIRE_BYTES, PIECE_BYTES)
                else:
                    machine.all_received(now)
            case Kept(path=path):
                assert self.taking is not None
                self.leave()
                self.wire.take_binary(0)
                serving = self.taking.received(path)
                seconds = round(now - self.began, 1)
                self._log("model kept", model=path.name, serving=serving, seconds=seconds)
                machine.kept(note(path.name), serving, now)
            case _:
                raise news

    def _keep(self, change: Callable[[], None]) -> None:
        try:
            change()
        except ConfigError as error:
            self._log("trust not kept", error=error.message, reason=error.reason)
            raise refusal("trust_not_kept", "the change could not be written down") from error

    def _log(self, message: str, **facts: object) -> None:
        log.info(message, extra={"peer": self.peer, "decoder": self.admitted.name, **facts})

    def _description(self, stopping: threading.Event) -> Description:
        stock, profile = self.stock(), self.desk.profile
        absent = "waiting" if profile.waiting else "loading"
        state = absent if stock is None else "ready"
        return Description(
            name=profile.name,
            version=profile.version,
            state="stopping" if stopping.is_set() else state,
            model=note(profile.model),
            identity=None if stock is None else stock.offer.identity,
            recipe=None if stock is None else stock.offer.recipe,
        )
