"""The machines of a pairing: from one code to one record on each side.

::

    decoder                                          producer
    start()         PAIR_HELLO ->                    start(); the code is spent
                                     <- PAIR_ANSWER
                    PAIR_CONFIRM ->                  verified first
    Paired                        <- PAIR_CONFIRMED  Paired

Rules of both machines:

1. No I/O and no clock: messages and ``now`` (monotonic seconds) go in, :meth:`outgoing` and at
   last :class:`Paired` come out.
2. Whatever is refused raises a typed error, and the machine is CLOSED: the shell sends what
   ``outgoing()`` then holds, one PAIR_REFUSED, and closes the connection.
3. The producer spends its code on the first message that arrives, whatever that is, and shows
   nothing that a guess could be compared with before the decoder has proven its own. So
   everything that fails from there on has burned the code, a lost connection too.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final

from protocol.errors import BatonError, CapacityError, LocalProtocolError
from protocol.messages import MAX_GENERATION
from protocol.pairing import PinnedCertificates
from protocol.pairing.certificates import OwnCertificate, require_certificate
from protocol.pairing.code import Code, Codes, Entropy
from protocol.pairing.keys import Guess, Keys, derive, transcript
from protocol.pairing.messages import (
    PAIRING_VERSION,
    Message,
    PairAnswer,
    PairConfirm,
    PairConfirmed,
    PairHello,
    PairRefused,
    decode,
    encode,
    require_name,
)
from protocol.pairing.record import PairingRecord, Role, fingerprint
from protocol.reasons import PAIRING_REASONS, REASONS, differs, refusal

PATIENCE_S: Final = 10.0
"""How long each side waits for the other's next message, in seconds."""
NONCE_BYTES: Final = 32

_SHARED: Final = (
    "version_unsupported",
    "message_too_long",
    "message_malformed",
    "message_unknown",
    "message_not_canonical",
    "message_unexpected",
    "peer_silent",
    "capacity_exceeded",
    "cancelled",
)
TOLD: Final = {**{code: REASONS[code] for code in _SHARED}, **PAIRING_REASONS}
"""Reasons that a PAIR_REFUSED may tell; others become ``pairing_refused``."""


class Step(StrEnum):
    """Where one side of an exchange stands."""

    START = "START"
    LISTENING = "LISTENING"
    """Producer: PAIR_HELLO must come; no code is spent yet."""
    HELLO_SENT = "HELLO_SENT"
    """Decoder: PAIR_HELLO is out."""
    ANSWERED = "ANSWERED"
    """Producer: PAIR_ANSWER is out; the decoder's proof must come first."""
    CONFIRM_SENT = "CONFIRM_SENT"
    """Decoder: its proof is out; the producer's must come."""
    PAIRED = "PAIRED"
    CLOSED = "CLOSED"


@dataclass(frozen=True)
class Paired:
    """Both sides have proven the same code: keep ``record``, of the machine called ``name``.

    ``port``: where the producer serves handoffs.
    """

    record: PairingRecord
    name: str
    port: int


class _Exchange(ABC):
    """What both sides of an exchange do; see the two subclasses for their calls."""

    ROLE: ClassVar[Role]
    STEPS: ClassVar[Mapping[tuple[Step, str], Step]]

    def __init__(
        self, *, name: str, own: OwnCertificate, peer_certificate: bytes, entropy: Entropy
    ) -> None:
        require_name(name)
        require_certificate(peer_certificate)
        self._name = name
        self._own = own
        self._peer_certificate = peer_certificate
        self._entropy = entropy
        self._step = Step.START
        self._queue: list[bytes] = []
        self._due: float | None = None
        self._keys: Keys | None = None
        self._epoch = 0
        self._port = 0
        self._peer_name = ""

    @property
    def step(self) -> Step:
        """Where the machine stands in its table."""
        return self._step

    def outgoing(self) -> list[bytes]:
        """The messages to send now, in order; each is returned once."""
        queued, self._queue = self._queue, []
        return queued

    def deadline(self) -> float | None:
        """When :meth:`tick` must be called at the latest, in seconds of the shell's clock."""
        return self._due

    def start(self, now: float) -> None:
        """The connection is there: the exchange begins."""
        target = self.STEPS.get((self._step, "start"))
        if target is None:
            raise LocalProtocolError(f"the exchange has begun: {self._step}")
        self._step = target
        self._due = now + PATIENCE_S

    def receive(self, raw: bytes, now: float) -> Paired | None:
        """Take one message in; returns :class:`Paired` once the other side has proven the code.

        Raises PeerProtocolError (``message_...``, ``version_unsupported``,
        ``element_malformed``, ``epoch_not_later``), IntegrityError ``code_differs``,
        TransferError ``peer_silent``, what :meth:`Codes.spend` raises, and what a PAIR_REFUSED
        tells; the machine is then CLOSED.
        """
        if self._step in (Step.START, Step.PAIRED, Step.CLOSED):
            raise LocalProtocolError(f"nothing can be received in {self._step}")
        self.tick(now)
        with self._refusing():
            self._arrived(now)
            message = decode(raw)
            if isinstance(message, PairRefused):
                self._close()
                raise _told(message)
            target = self._target(message)
            paired = self._on_message(message, raw)
            # Only now: a message that was refused leads to CLOSED and nowhere else.
            self._step = target
            self._due = None if paired else now + PATIENCE_S
            return paired

    def tick(self, now: float) -> None:
        """Let time pass. Raises TransferError ``peer_silent``; the machine is then CLOSED."""
        with self._refusing():
            if self._due is not None and now >= self._due:
                text = f"the other side owed a message in {self._step}"
                raise refusal("peer_silent", text, field="state", found=self._step)

    def eof(self) -> None:
        """The connection has ended; a closed connection never means paired.

        Raises TransferError ``connection_lost`` if a code was under way.
        """
        step = self._step
        self._close()
        if step in (Step.HELLO_SENT, Step.ANSWERED, Step.CONFIRM_SENT):
            text = f"the connection closed in {step}"
            raise refusal("connection_lost", text, field="state", found=step)

    def shut(self, error: BatonError) -> None:
        """End the exchange for ``error``: one PAIR_REFUSED is all that is still sent."""
        if self._step not in (Step.PAIRED, Step.CLOSED):
            self._close()
            seconds = error.retry_after_s if isinstance(error, CapacityError) else 0.0
            reason = error.reason if error.reason in TOLD else "pairing_refused"
            milliseconds = int(min(max(seconds, 0.0), 86_400.0) * 1000)
            self._send(PairRefused(reason=reason, retry_after_ms=milliseconds))

    # what the subclasses supply

    @abstractmethod
    def _on_message(self, message: Message, raw: bytes) -> Paired | None:
        """Take a message that the table allows."""

    @abstractmethod
    def _arrived(self, now: float) -> None:
        """A message is here, of which nothing is known yet."""

    # steps

    def _send(self, message: Message) -> bytes:
        raw = encode(message)
        self._queue.append(raw)
        return raw

    def _target(self, message: Message) -> Step:
        """Where the table leads with a message that arrived."""
        trigger = str(message.__struct_config__.tag).upper()
        target = self.STEPS.get((self._step, trigger))
        if target is None:
            text = f"{trigger} is not allowed in {self._step}"
            raise refusal("message_unexpected", text, field=trigger, found=self._step)
        return target

    def _derive(self, guess: Guess, element: bytes, hello: bytes, answer: bytes) -> Keys:
        """The keys, once both first messages are here."""
        own, peer = fingerprint(self._own.certificate), fingerprint(self._peer_certificate)
        if self.ROLE == "decoder":
            seen = PinnedCertificates(decoder=own, producer=peer)
        else:
            seen = PinnedCertificates(decoder=peer, producer=own)
        return derive(guess.secret(element), transcript(hello, answer, seen))

    def _paired(self, keys: Keys) -> Paired:
        """The end: what this side keeps."""
        self._keys = None
        record = PairingRecord(
            version=1,
            role=self.ROLE,
            epoch=self._epoch,
            key=keys.pairing,
            certificate=self._own.certificate,
            private_key=self._own.private_key,
            peer_certificate=self._peer_certificate,
        )
        return Paired(record, self._peer_name, self._port)

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
        self._keys = None
        self._queue.clear()


class DecoderPairing(_Exchange):
    """The decoder's side: tries one code at one producer."""

    ROLE: ClassVar[Role] = "decoder"
    STEPS: ClassVar[Mapping[tuple[Step, str], Step]] = {
        (Step.START, "start"): Step.HELLO_SENT,
        (Step.HELLO_SENT, "PAIR_ANSWER"): Step.CONFIRM_SENT,
        (Step.CONFIRM_SENT, "PAIR_CONFIRMED"): Step.PAIRED,
    }

    def __init__(
        self,
        *,
        code: Code,
        name: str,
        own: OwnCertificate,
        peer_certificate: bytes,
        earlier_epoch: int = 0,
        entropy: Entropy = secrets.token_bytes,
    ) -> None:
        """``own`` was shown in TLS, and ``peer_certificate`` (DER) was seen there.

        ``earlier_epoch``: the largest epoch that this machine has with this producer; the
        pairing's will be larger. Raises ConfigError ``name_malformed``, PeerProtocolError
        ``certificate_unusable``; LocalProtocolError for an epoch that is out of range.
        """
        super().__init__(name=name, own=own, peer_certificate=peer_certificate, entropy=entropy)
        if not 0 <= earlier_epoch < MAX_GENERATION:
            raise LocalProtocolError("the earlier epoch is out of range")
        self._earlier = earlier_epoch
        self._guess = Guess("decoder", code, entropy)
        self._hello = b""

    def start(self, now: float) -> None:
        """The connection is there: PAIR_HELLO is queued."""
        super().start(now)
        self._hello = self._send(
            PairHello(
                version=PAIRING_VERSION,
                nonce=self._entropy(NONCE_BYTES),
                name=self._name,
                earlier=self._earlier,
                element=self._guess.element,
            )
        )

    def _arrived(self, now: float) -> None:
        """The code was spent at the other side, if at all."""

    def _on_message(self, message: Message, raw: bytes) -> Paired | None:
        if isinstance(message, PairAnswer):
            return self._on_answer(message, raw)
        assert isinstance(message, PairConfirmed)
        return self._on_confirmed(message)

    def _on_answer(self, message: PairAnswer, raw: bytes) -> None:
        if message.epoch <= self._earlier:
            expected = f"above {self._earlier}"
            raise differs("epoch_not_later", "epoch", message.epoch, expected)
        keys = self._derive(self._guess, message.element, self._hello, raw)
        self._keys, self._epoch, self._peer_name = keys, message.epoch, message.name
        self._port = message.port
        self._send(PairConfirm(mac=keys.proof("decoder")))

    def _on_confirmed(self, message: PairConfirmed) -> Paired:
        keys = self._keys
        assert keys is not None
        keys.verify("producer", message.mac)
        return self._paired(keys)


class ProducerPairing(_Exchange):
    """The producer's side of one connection: lets the other side try the open code, once."""

    ROLE: ClassVar[Role] = "producer"
    STEPS: ClassVar[Mapping[tuple[Step, str], Step]] = {
        (Step.START, "start"): Step.LISTENING,
        (Step.LISTENING, "PAIR_HELLO"): Step.ANSWERED,
        (Step.ANSWERED, "PAIR_CONFIRM"): Step.PAIRED,
    }

    def __init__(
        self,
        *,
        codes: Codes,
        name: str,
        own: OwnCertificate,
        peer_certificate: bytes,
        epoch: int,
        port: int,
        entropy: Entropy = secrets.token_bytes,
    ) -> None:
        """``codes``: the one object of this producer. Certificates: as the decoder's side.

        ``epoch``: larger than all that this machine has with this decoder; the pairing's is
        this, or a larger one if the decoder has larger ones. ``port``: where handoffs are served.
        Raises like :class:`DecoderPairing`.
        """
        super().__init__(name=name, own=own, peer_certificate=peer_certificate, entropy=entropy)
        if not 1 <= epoch <= MAX_GENERATION:
            raise LocalProtocolError("the epoch is out of range")
        if not 1 <= port <= 65535:
            raise LocalProtocolError("the port is out of range")
        self._port = port
        self._codes = codes
        self._least_epoch = epoch
        self._code: Code | None = None

    def _arrived(self, now: float) -> None:
        if self._code is None:
            self._code = self._codes.spend(now)

    def _on_message(self, message: Message, raw: bytes) -> Paired | None:
        if isinstance(message, PairHello):
            return self._on_hello(message, raw)
        assert isinstance(message, PairConfirm)
        return self._on_confirm(message)

    def _on_hello(self, message: PairHello, raw: bytes) -> None:
        if message.earlier >= MAX_GENERATION:
            raise differs("epoch_not_later", "earlier", message.earlier, f"below {MAX_GENERATION}")
        self._epoch = max(self._least_epoch, message.earlier + 1)
        self._peer_name = message.name
        assert self._code is not None
        guess = Guess("producer", self._code, self._entropy)
        answer = encode(
            PairAnswer(
                nonce=self._entropy(NONCE_BYTES),
                name=self._name,
                epoch=self._epoch,
                port=self._port,
                element=guess.element,
            )
        )
        self._keys = self._derive(guess, message.element, raw, answer)
        self._queue.append(answer)

    def _on_confirm(self, message: PairConfirm) -> Paired:
        keys = self._keys
        assert keys is not None
        keys.verify("decoder", message.mac)
        self._send(PairConfirmed(mac=keys.proof("producer")))
        assert self._code is not None
        self._codes.succeed(self._code)
        return self._paired(keys)


def _told(refused: PairRefused) -> BatonError:
    """The error that a PAIR_REFUSED tells of; what it says is believed of nothing else."""
    if refused.reason not in TOLD:
        text = "the other side ended the pairing"
        return refusal("pairing_refused", text, field="reason", found=refused.reason)
    error = refusal(
        refused.reason, f"the other side ended the pairing: {TOLD[refused.reason].meaning}"
    )
    if isinstance(error, CapacityError) and refused.retry_after_ms:
        error.retry_after_s = refused.retry_after_ms / 1000
    return error
