"""The machines of the control channel: what paired machines ask each other besides handoffs.

::

    decoder                                          producer
    start()         CONTROL_HELLO ->                 start()
                                     <- CONTROL_ANSWER
                    CONTROL_PROOF ->                 verified first
    Proven                           <- CONTROL_PROOF  Proven
    describe()      DESCRIBE ->                      DescribeAsked
    Description                      <- DESCRIPTION  described()
    unpair()        UNPAIR ->                        UnpairAsked: forget it, durably
    Unpaired                         <- UNPAIRED     unpaired()
    rotate()        ROTATE ->                        RotateAsked: keep its pairing, durably
    Rekeyed                          <- ROTATED      rotated()

Rules of both machines:

1. No I/O and no clock: messages and ``now`` (monotonic seconds) go in, :meth:`outgoing` and
   events come out.
2. Whatever is refused raises a typed error, and the machine is CLOSED: the shell sends what
   ``outgoing()`` then holds, one CONTROL_REFUSED, and closes the connection.
3. The bytes of a model are the shells': machines count them. TLS authenticates them one by one,
   the digest in SEND_MODEL all of them.
4. One question at a time, and nothing after the answer to UNPAIR and ROTATE: the key that was
   proven is not the pairing's any more.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Final

from protocol.control.events import (
    DescribeAsked,
    Event,
    ModelOffered,
    Proven,
    Rekeyed,
    RotateAsked,
    Step,
    UnpairAsked,
)
from protocol.control.keys import Seals, rotated
from protocol.control.messages import (
    CONTROL_VERSION,
    NO_MAC,
    ControlAnswer,
    ControlHello,
    ControlProof,
    ControlRefused,
    Describe,
    Description,
    Message,
    ModelKept,
    ModelWanted,
    Rotate,
    Rotated,
    Sealed,
    SendModel,
    Serving,
    Unpair,
    Unpaired,
    decode,
    encode,
)
from protocol.control.models import PIECE_BYTES
from protocol.errors import BatonError, LocalProtocolError
from protocol.messages import MAX_GENERATION
from protocol.pairing import Pairing, PinnedCertificates
from protocol.pairing.record import Role
from protocol.reasons import CONTROL_REASONS, PAIRING_REASONS, REASONS, differs, refusal

PATH: Final = "/control"
"""Where on the producer's port the channel is."""
PATIENCE_S: Final = 10.0
"""How long each side waits for the other's next message of the opening, in seconds."""
ANSWER_S: Final = 30.0
"""How long the decoder waits for an answer, and the producer for the next question."""
STALL_S: Final = 60.0
"""How long each side waits until more bytes of a model have come, or were taken."""
CHECK_S: Final = 900.0
"""How long the producer may take to look at what it has of a model: it reads all of it."""
NONCE_BYTES: Final = 32

TOLD: Final = (
    CONTROL_REASONS
    | {
        code: REASONS[code]
        for code in (
            *("version_unsupported", "message_too_long", "message_malformed", "message_unknown"),
            *("message_not_canonical", "message_unexpected", "epoch_differs", "proof_differs"),
            *("frame_too_long", "frame_unexpected"),
            *(
                "pairing_revoked",
                "peer_silent",
                "capacity_exceeded",
                "producer_stopping",
                "cancelled",
            ),
        )
    }
    | {code: PAIRING_REASONS[code] for code in ("epoch_not_later",)}
)
"""Reasons that a CONTROL_REFUSED may tell; others become ``control_refused``."""

Entropy = Callable[[int], bytes]
"""Gives so many random bytes; ``secrets.token_bytes`` outside of tests."""


class _Channel(ABC):
    """What both sides do; see the two subclasses for their calls."""

    ROLE: ClassVar[Role]
    PEER: ClassVar[Role]
    STEPS: ClassVar[Mapping[tuple[Step, str], Step]]

    def __init__(self, certificates: PinnedCertificates, entropy: Entropy) -> None:
        self._certificates = certificates
        self._entropy = entropy
        self._nonce = entropy(NONCE_BYTES)
        self._step = Step.START
        self._queue: list[bytes] = []
        self._due: float | None = None
        self._seals: Seals | None = None
        self._nonces = (b"", b"")
        self._share = b""
        self._left = 0

    @property
    def step(self) -> Step:
        """Where the machine stands in its table."""
        return self._step

    @property
    def left(self) -> int:
        """How many bytes of a model are still to come, or to be sent."""
        return self._left

    def outgoing(self) -> list[bytes]:
        """The messages to send now, in order; each is returned once."""
        queued, self._queue = self._queue, []
        return queued

    def deadline(self) -> float | None:
        """When :meth:`tick` must be called at the latest, in seconds of the shell's clock."""
        return self._due

    def start(self, now: float) -> None:
        """The connection is there."""
        self._call("start", now)

    def receive(self, raw: bytes, now: float) -> Event | None:
        """Take one message in; returns what it means, if anything.

        Raises PeerProtocolError (``message_...``, ``version_unsupported``,
        ``epoch_not_later``), ConfigError ``epoch_differs``, IntegrityError ``proof_differs``,
        TransferError ``peer_silent``, and what a CONTROL_REFUSED tells; the machine is then
        CLOSED.
        """
        if self._step in (Step.START, Step.CLOSED):
            raise LocalProtocolError(f"nothing can be received in {self._step}")
        self.tick(now)
        with self._refusing():
            message = decode(raw)
            if isinstance(message, ControlRefused):
                self._close()
                raise _told(message)
            target = self._target(message)
            event = self._on_message(message, raw)
            self._step = target
            self._rearm(now)
            return event

    def tick(self, now: float) -> None:
        """Let time pass. Raises TransferError ``peer_silent``; the machine is then CLOSED."""
        with self._refusing():
            if self._due is not None and now >= self._due:
                text = f"the other side owed a message in {self._step}"
                raise refusal("peer_silent", text, field="state", found=self._step)

    def eof(self) -> None:
        """The connection has ended; that never means that anything was done.

        Raises TransferError ``connection_lost`` unless nothing was under way.
        """
        step = self._step
        self._close()
        if step not in (Step.START, Step.LISTENING, Step.READY, Step.ENDED, Step.CLOSED):
            text = f"the connection closed in {step}"
            raise refusal("connection_lost", text, field="state", found=step)

    def shut(self, error: BatonError) -> None:
        """End the connection for ``error``: one CONTROL_REFUSED is all that is still sent."""
        if self._step != Step.CLOSED:
            self._close()
            reason = error.reason if error.reason in TOLD else "control_refused"
            self._queue.append(encode(ControlRefused(reason=reason)))

    # what the subclasses supply

    @abstractmethod
    def _on_message(self, message: Message, raw: bytes) -> Event | None:
        """Take a message that the table allows."""

    @abstractmethod
    def _patience(self) -> float | None:
        """How long the peer may be silent in this step, in seconds; None: for ever."""

    # steps

    def _call(self, trigger: str, now: float) -> None:
        """Follow the table for one of our own calls."""
        target = self.STEPS.get((self._step, trigger))
        if target is None:
            raise LocalProtocolError(f"{trigger} is not allowed in {self._step}")
        self._step = target
        self._rearm(now)

    def _target(self, message: Message) -> Step:
        """Where the table leads with a message that arrived."""
        trigger = str(message.__struct_config__.tag).upper()
        target = self.STEPS.get((self._step, trigger))
        if target is None:
            text = f"{trigger} is not allowed in {self._step}"
            raise refusal("message_unexpected", text, field=trigger, found=self._step)
        return target

    def _rearm(self, now: float) -> None:
        patience = self._patience()
        self._due = None if patience is None else now + patience

    def _send(self, message: Sealed) -> None:
        assert self._seals is not None
        self._queue.append(encode(self._seals.seal(self.ROLE, message)))

    def _verify(self, message: Sealed) -> None:
        assert self._seals is not None
        self._seals.verify(self.PEER, message)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Close the machine and tell the peer when the step inside refuses."""
        try:
            yield
        except BatonError as error:
            self.shut(error)
            raise

    def _close(self) -> None:
        self._step = Step.CLOSED
        self._due = None
        self._seals = None
        self._queue.clear()


class DecoderControl(_Channel):
    """The decoder's side: asks."""

    ROLE: ClassVar[Role] = "decoder"
    PEER: ClassVar[Role] = "producer"
    STEPS: ClassVar[Mapping[tuple[Step, str], Step]] = {
        (Step.START, "start"): Step.HELLO_SENT,
        (Step.HELLO_SENT, "CONTROL_ANSWER"): Step.PROOF_SENT,
        (Step.PROOF_SENT, "CONTROL_PROOF"): Step.READY,
        (Step.READY, "describe"): Step.DESCRIBING,
        (Step.DESCRIBING, "DESCRIPTION"): Step.READY,
        (Step.READY, "unpair"): Step.UNPAIRING,
        (Step.UNPAIRING, "UNPAIRED"): Step.ENDED,
        (Step.READY, "rotate"): Step.ROTATING,
        (Step.ROTATING, "ROTATED"): Step.ENDED,
        (Step.READY, "send_model"): Step.OFFERING,
        (Step.OFFERING, "MODEL_WANTED"): Step.SENDING,
        (Step.SENDING, "data"): Step.SENDING,
        (Step.SENDING, "all_sent"): Step.KEEPING,
        (Step.KEEPING, "MODEL_KEPT"): Step.READY,
    }

    def __init__(
        self,
        pairing: Pairing,
        certificates: PinnedCertificates,
        entropy: Entropy = secrets.token_bytes,
    ) -> None:
        """``certificates``: both fingerprints as TLS showed them on this connection."""
        super().__init__(certificates, entropy)
        self._pairing = pairing
        self._hello = b""

    def start(self, now: float) -> None:
        """The connection is there: CONTROL_HELLO is queued."""
        super().start(now)
        self._hello = encode(
            ControlHello(version=CONTROL_VERSION, nonce=self._nonce, epoch=self._pairing.epoch)
        )
        self._queue.append(self._hello)

    def describe(self, now: float) -> None:
        """Ask what the producer is; the answer is :class:`Description`."""
        self._call("describe", now)
        self._send(Describe(mac=NO_MAC))

    def unpair(self, now: float) -> None:
        """Ask to be forgotten; the answer is :class:`Unpaired`."""
        self._call("unpair", now)
        self._send(Unpair(mac=NO_MAC))

    def rotate(self, now: float) -> None:
        """Ask for a new key; the answer is :class:`Rekeyed`.

        Raises LocalProtocolError also where there is no later epoch.
        """
        if self._pairing.epoch >= MAX_GENERATION:
            raise LocalProtocolError("there is no later epoch: pair again")
        self._call("rotate", now)
        self._share = self._entropy(NONCE_BYTES)
        self._send(Rotate(epoch=self._pairing.epoch + 1, share=self._share, mac=NO_MAC))

    def send_model(self, offer: SendModel, now: float) -> None:
        """Offer a model; the answer is :class:`ModelWanted`. Then come :meth:`data`."""
        self._call("send_model", now)
        self._left = offer.nbytes
        self._send(offer)

    def data(self, nbytes: int, now: float) -> None:
        """So many bytes of the model are sent, in one BINARY message."""
        self._call("data", now)
        if not 0 < nbytes <= min(PIECE_BYTES, self._left):
            raise LocalProtocolError("so many bytes are not to be sent")
        self._left -= nbytes

    def all_sent(self, now: float) -> None:
        """Nothing of the model is :attr:`left`; the answer is :class:`ModelKept`."""
        if self._left:
            raise LocalProtocolError("not all of the model was sent")
        self._call("all_sent", now)

    def _on_message(self, message: Message, raw: bytes) -> Event | None:
        match message:
            case ControlAnswer(nonce=nonce):
                self._nonces = (self._nonce, nonce)
                self._seals = Seals(self._pairing, self._hello, raw, self._certificates)
                self._send(ControlProof(mac=NO_MAC))
                return None
            case ControlProof():
                self._verify(message)
                return Proven(self._pairing)
            case Rotated(share=share):
                self._verify(message)
                shares = (self._share, share)
                return Rekeyed(rotated(self._pairing, self._nonces, shares, self._certificates))
            case ModelWanted(offset=offset):
                self._verify(message)
                if offset > self._left:
                    raise differs("message_malformed", "offset", offset, f"at most {self._left}")
                self._left -= offset
                return message
            case _:
                assert isinstance(message, Description | Unpaired | ModelKept)
                self._verify(message)
                return message

    def _patience(self) -> float | None:
        match self._step:
            case Step.HELLO_SENT | Step.PROOF_SENT:
                return PATIENCE_S
            case Step.OFFERING | Step.KEEPING:
                return CHECK_S
            case Step.SENDING:
                return STALL_S
            case Step.DESCRIBING | Step.UNPAIRING | Step.ROTATING:
                return ANSWER_S
            case _:
                return None


class ProducerControl(_Channel):
    """The producer's side of one connection: answers."""

    ROLE: ClassVar[Role] = "producer"
    PEER: ClassVar[Role] = "decoder"
    STEPS: ClassVar[Mapping[tuple[Step, str], Step]] = {
        (Step.START, "start"): Step.LISTENING,
        (Step.LISTENING, "CONTROL_HELLO"): Step.ANSWERED,
        (Step.ANSWERED, "CONTROL_PROOF"): Step.READY,
        (Step.READY, "DESCRIBE"): Step.DESCRIBING,
        (Step.DESCRIBING, "described"): Step.READY,
        (Step.READY, "UNPAIR"): Step.UNPAIRING,
        (Step.UNPAIRING, "unpaired"): Step.ENDED,
        (Step.READY, "ROTATE"): Step.ROTATING,
        (Step.ROTATING, "rotated"): Step.ENDED,
        (Step.READY, "SEND_MODEL"): Step.OFFERING,
        (Step.OFFERING, "wanted"): Step.SENDING,
        (Step.SENDING, "data"): Step.SENDING,
        (Step.SENDING, "all_received"): Step.KEEPING,
        (Step.KEEPING, "kept"): Step.READY,
    }

    def __init__(
        self,
        pairings: Sequence[Pairing],
        certificates: PinnedCertificates,
        entropy: Entropy = secrets.token_bytes,
    ) -> None:
        """``pairings``: those that this decoder may prove. ``certificates``: as the decoder's."""
        super().__init__(certificates, entropy)
        self._pairings = {pairing.epoch: pairing for pairing in pairings}
        self._pairing: Pairing | None = None

    def described(self, description: Description, now: float) -> None:
        """Answer DESCRIBE."""
        self._call("described", now)
        self._send(description)

    def unpaired(self, now: float) -> None:
        """Answer UNPAIR, once the decoder is forgotten."""
        self._call("unpaired", now)
        self._send(Unpaired(mac=NO_MAC))

    def rotated(self, now: float) -> None:
        """Answer ROTATE, once the new pairing is kept."""
        self._call("rotated", now)
        self._send(Rotated(share=self._share, mac=NO_MAC))

    def wanted(self, offset: int, now: float) -> None:
        """Answer SEND_MODEL: take the stream from byte ``offset`` on."""
        if not 0 <= offset <= self._left:
            raise LocalProtocolError("the stream does not have so many bytes")
        self._call("wanted", now)
        self._left -= offset
        self._send(ModelWanted(offset=offset, mac=NO_MAC))

    def data(self, nbytes: int, now: float) -> None:
        """So many bytes of the model came, in one BINARY message.

        Raises PeerProtocolError ``frame_unexpected``, ``frame_too_long``; the machine is then
        CLOSED.
        """
        with self._refusing():
            if self._step is not Step.SENDING:
                text = f"no bytes of a model belong into {self._step}"
                raise refusal("frame_unexpected", text, field="state", found=self._step)
            most = min(PIECE_BYTES, self._left)
            if not 0 < nbytes <= most:
                raise differs("frame_too_long", "length", nbytes, f"1 to {most}")
            self._call("data", now)
            self._left -= nbytes

    def all_received(self, now: float) -> None:
        """Nothing of the model is :attr:`left`, and it is being looked at."""
        if self._left:
            raise LocalProtocolError("not all of the model has come")
        self._call("all_received", now)

    def kept(self, name: str, serving: Serving, now: float) -> None:
        """Answer the last bytes of a model, once it is kept."""
        self._call("kept", now)
        self._send(ModelKept(name=name, serving=serving, mac=NO_MAC))

    def _on_message(self, message: Message, raw: bytes) -> Event | None:
        match message:
            case ControlHello():
                return self._on_hello(message, raw)
            case ControlProof():
                self._verify(message)
                self._send(ControlProof(mac=NO_MAC))
                assert self._pairing is not None
                return Proven(self._pairing)
            case Describe():
                self._verify(message)
                return DescribeAsked()
            case Unpair():
                self._verify(message)
                return UnpairAsked()
            case SendModel():
                self._verify(message)
                return self._on_send_model(message)
            case _:
                assert isinstance(message, Rotate)
                self._verify(message)
                return self._on_rotate(message)

    def _on_hello(self, message: ControlHello, raw: bytes) -> None:
        pairing = self._pairings.get(message.epoch)
        if pairing is None:
            expected = max(self._pairings)
            raise differs("epoch_differs", "epoch", message.epoch, expected)
        answer = encode(ControlAnswer(nonce=self._nonce))
        self._pairing, self._nonces = pairing, (message.nonce, self._nonce)
        self._seals = Seals(pairing, raw, answer, self._certificates)
        self._queue.append(answer)

    def _on_send_model(self, offer: SendModel) -> ModelOffered:
        if offer.manifest_bytes > offer.nbytes:
            raise differs("model_manifest_invalid", "nbytes", offer.nbytes, offer.manifest_bytes)
        self._left = offer.nbytes
        return ModelOffered(offer)

    def _on_rotate(self, message: Rotate) -> RotateAsked:
        old = self._pairing
        assert old is not None
        if message.epoch != old.epoch + 1:
            raise differs("epoch_not_later", "epoch", message.epoch, old.epoch + 1)
        self._share = self._entropy(NONCE_BYTES)
        shares = (message.share, self._share)
        return RotateAsked(rotated(old, self._nonces, shares, self._certificates))

    def _patience(self) -> float | None:
        match self._step:
            case Step.LISTENING | Step.ANSWERED:
                return PATIENCE_S
            case Step.READY:
                return ANSWER_S
            case Step.SENDING:
                return STALL_S
            case _:
                return None


def _told(refused: ControlRefused) -> BatonError:
    """The error that a CONTROL_REFUSED tells of; what it says is believed of nothing else."""
    if refused.reason not in TOLD:
        text = "the other side ended the connection"
        return refusal("control_refused", text, field="reason", found=refused.reason)
    meaning = TOLD[refused.reason].meaning
    return refusal(refused.reason, f"the other side ended the connection: {meaning}")
