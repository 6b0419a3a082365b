"""Every reason code of a refusal on the wire, with its error type: the only list of them.

``refusal(code, ...)`` builds the error; nothing else in this package names a reason. The
table of ``protocol/README.md`` is compared with this list by a test. A reason may reach
the other side in an ABORT, where :func:`from_abort` makes it the same error again. Codes
that are not listed here never leave this process and are not believed when they arrive.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from protocol.errors import (
    BatonError,
    Cancelled,
    CapacityError,
    ConfigError,
    EngineFault,
    IdentityMismatch,
    IntegrityError,
    PeerProtocolError,
    RequestError,
    TransferError,
)


class Reason(NamedTuple):
    """What a code means and which error carries it."""

    error: type[BatonError]
    meaning: str


COMPONENTS: Final = (
    "weights",
    "revision",
    "quantisation",
    "adapter",
    "tokenizer",
    "template",
    "context",
    "engine",
)
"""Components of an identity, in the order in which differences are named."""


def component_reason(component: str) -> str:
    """The reason code that says that this identity component differs."""
    return "weights_differ" if component == "weights" else f"{component}_differs"


_COMPONENT_MEANINGS: Final = {
    "weights": "The two sides hold other weights: load the decoder's checkpoint on both.",
    "revision": "`config.json` differs.",
    "quantisation": "The weights are quantised in another way.",
    "adapter": "Another adapter, or one on one side only.",
    "tokenizer": "The tokenizer's files differ.",
    "template": "The chat template differs.",
    "context": "RoPE scaling, maximum length or overflow policy differ.",
    "engine": "Layout, KV dtype or the cache format's version differs.",
}

REASONS: Final[dict[str, Reason]] = {
    # version and form
    "version_unsupported": Reason(PeerProtocolError, "HELLO or a frame speaks another version."),
    "message_too_long": Reason(PeerProtocolError, "A control message exceeds this state's limit."),
    "message_malformed": Reason(PeerProtocolError, "Not JSON, or fields missing, extra or wrong."),
    "message_unknown": Reason(PeerProtocolError, "The tag names no message of this version."),
    "message_not_canonical": Reason(
        PeerProtocolError, "Valid JSON, but not the one encoding a message has."
    ),
    "message_unexpected": Reason(PeerProtocolError, "The state does not allow this message now."),
    "too_many_messages": Reason(PeerProtocolError, "More PROGRESS than a handoff may have."),
    # identity and layout
    **{
        component_reason(name): Reason(IdentityMismatch, meaning)
        for name, meaning in _COMPONENT_MEANINGS.items()
    },
    "layout_differs": Reason(IdentityMismatch, "The two sides count cache bytes differently."),
    "layout_not_carriable": Reason(ConfigError, "A row of this model does not fit a frame."),
    "identity_digest_differs": Reason(
        IdentityMismatch, "PREFILL names another identity than HELLO did."
    ),
    # trust
    "epoch_differs": Reason(ConfigError, "The sides hold keys of different pairings: pair again."),
    "proof_differs": Reason(IntegrityError, "The peer does not hold the pairing key."),
    "pairing_revoked": Reason(
        TransferError, "The producer has forgotten this decoder, or its key was replaced."
    ),
    # request
    "prompt_too_long": Reason(CapacityError, "More tokens than the producer's limit."),
    "cut_invalid": Reason(PeerProtocolError, "A cut, or an extra cut, lies outside the request."),
    "credit_invalid": Reason(PeerProtocolError, "More frames credited than the limits allow."),
    "generation_used": Reason(PeerProtocolError, "This generation has been used before."),
    "generation_unknown": Reason(PeerProtocolError, "No request with this generation is open."),
    "generation_differs": Reason(
        PeerProtocolError, "A message names another handoff than the current one."
    ),
    "nonce_differs": Reason(PeerProtocolError, "The generation is open with another nonce."),
    "progress_invalid": Reason(PeerProtocolError, "PROGRESS goes back, or past the end."),
    # manifest
    "cut_not_accepted": Reason(PeerProtocolError, "BEGIN starts at a cut that was not offered."),
    "end_differs": Reason(PeerProtocolError, "BEGIN ends elsewhere than the request."),
    "tile_differs": Reason(PeerProtocolError, "BEGIN names another tile than HELLO_ACK did."),
    "frames_differ": Reason(PeerProtocolError, "Frame count other than the schedule's."),
    "frames_too_many": Reason(PeerProtocolError, "The schedule has more frames than allowed."),
    "bytes_differ": Reason(PeerProtocolError, "Payload bytes other than the layout's."),
    "spans_differ": Reason(PeerProtocolError, "Spans other than the layout's."),
    "tokens_differ": Reason(IntegrityError, "The rows were computed from other tokens."),
    "history_invalid": Reason(
        PeerProtocolError,
        "The history does not cover the rows exactly, or an extra cut lies inside of rows that "
        "were computed in one go.",
    ),
    "computed_invalid": Reason(PeerProtocolError, "More tokens computed than the prompt has."),
    # frames
    "frame_malformed": Reason(PeerProtocolError, "Not a frame header: size, magic, reserved."),
    "frame_too_long": Reason(PeerProtocolError, "A payload above one frame's limit."),
    "frame_unexpected": Reason(PeerProtocolError, "A frame outside of RECEIVING or past the last."),
    "frame_out_of_order": Reason(PeerProtocolError, "Another sequence number than the next one."),
    "frame_differs": Reason(PeerProtocolError, "A header field differs from the schedule."),
    "length_differs": Reason(PeerProtocolError, "Payload length differs from header or schedule."),
    "credit_exceeded": Reason(PeerProtocolError, "A frame came without credit for it."),
    "digest_differs": Reason(IntegrityError, "A frame's bytes are not the bytes it claims."),
    # seal
    "frames_missing": Reason(TransferError, "SEAL came before the last frame."),
    "stream_digest_differs": Reason(IntegrityError, "SEAL names other frame digests."),
    "seal_differs": Reason(IntegrityError, "SEAL does not authenticate this request and stream."),
    "transfer_differs": Reason(PeerProtocolError, "A message names another transfer."),
    "commit_differs": Reason(IntegrityError, "COMMITTED does not answer this seal."),
    # resuming
    "transfer_unknown": Reason(TransferError, "No transfer is kept for this PREFILL."),
    "transfer_expired": Reason(
        TransferError, "The transfer was kept as long as was said, or made room for others."
    ),
    "transfer_committed": Reason(TransferError, "The transfer was installed already."),
    "resume_differs": Reason(PeerProtocolError, "RESUME names another request's transfer."),
    "offset_differs": Reason(
        TransferError, "RESUME's offset was never sent, or its rows are not kept any more."
    ),
    # endings
    "peer_silent": Reason(TransferError, "The peer owed an answer and gave none in time."),
    "deadline_exceeded": Reason(TransferError, "The handoff took longer than its deadline."),
    "connection_lost": Reason(TransferError, "The connection closed before the end."),
    "cancelled": Reason(Cancelled, "The request was withdrawn."),
    "capacity_exceeded": Reason(CapacityError, "No room: memory or connections."),
    "queue_full": Reason(CapacityError, "The producer's queue is full."),
    "memory_exceeded": Reason(CapacityError, "The producer lacks memory for this prompt."),
    "producer_stopping": Reason(CapacityError, "The producer is shutting down or restarting."),
    "engine_fault": Reason(EngineFault, "The sender's accelerator failed."),
    "peer_engine_fault": Reason(TransferError, "ABORT said `engine_fault`."),
    "peer_aborted": Reason(TransferError, "ABORT came for a reason that is not listed here."),
}

PAIRING_REASONS: Final[dict[str, Reason]] = {
    "code_malformed": Reason(RequestError, "What was typed cannot be a code; nothing was tried."),
    "code_differs": Reason(
        IntegrityError, "The sides hold other codes, or somebody sits between them."
    ),
    "code_burned": Reason(ConfigError, "The code was tried once and is void: open a new one."),
    "code_expired": Reason(ConfigError, "The code is too old: open a new one."),
    "pairing_closed": Reason(ConfigError, "The producer has no code open."),
    "pairing_paused": Reason(CapacityError, "Too many codes were opened; new ones have to wait."),
    "pairing_refused": Reason(TransferError, "The other side gave a reason that is not listed."),
    "element_malformed": Reason(PeerProtocolError, "Not a SPAKE2 message of the other side."),
    "epoch_not_later": Reason(PeerProtocolError, "An epoch that is not above the earlier ones."),
    "name_malformed": Reason(ConfigError, "A machine's name that cannot travel."),
    "certificate_unusable": Reason(
        PeerProtocolError, "The other side showed no certificate, or one that cannot be kept."
    ),
}
"""Reasons of pairing alone. They never travel in an ABORT, and none is believed there."""

CONTROL_REASONS: Final[dict[str, Reason]] = {
    "control_refused": Reason(TransferError, "The other side gave a reason that is not listed."),
    "trust_not_kept": Reason(ConfigError, "The producer could not write it down: see its log."),
    "models_not_taken": Reason(ConfigError, "The producer serves no model that could be replaced."),
    "model_transfer_busy": Reason(CapacityError, "The producer is receiving a model already."),
    "model_manifest_invalid": Reason(
        PeerProtocolError, "The list of a model's files is not as it must be."
    ),
    "model_digest_differs": Reason(
        IntegrityError, "A file of the model is another than announced: it is not kept."
    ),
    "model_identity_differs": Reason(
        IntegrityError, "What came is another model than announced: it is not kept."
    ),
    "model_unusable": Reason(
        ConfigError, "What came is no checkpoint that the producer can read: it is not kept."
    ),
    "model_unsupported": Reason(
        ConfigError,
        "The producer's release cannot read a model of this kind; what came of it is kept.",
    ),
    "model_not_kept": Reason(ConfigError, "The producer could not write the model: see its log."),
    "disk_full": Reason(
        CapacityError, "The producer's disk has no room for the model, or would be left too full."
    ),
}
"""Reasons of the control channel alone; what holds for those of pairing holds for them."""

REASON_HEADER: Final = "Baton-Reason"
"""A producer that answers a decoder's connection with HTTP 503 may say in this header why."""
WITHOUT_MODEL: Final = "producer_without_model"
"""A code that it has: there is nothing to prefill with until it was sent a model."""
LOADING: Final = "producer_loading"
"""The other one: its model is not in memory yet."""

_EVERY: Final = REASONS | PAIRING_REASONS | CONTROL_REASONS


def refusal(
    code: str,
    message: str,
    *,
    field: str | None = None,
    found: object = None,
    expected: object = None,
    hint: str | None = None,
) -> BatonError:
    """The error of a listed reason; the caller raises it.

    ``found`` and ``expected`` are numbers, names or hexadecimal digests, never content.
    Raises ``KeyError`` for a code that is not listed.
    """
    return _EVERY[code].error(
        message, reason=code, field=field, found=found, expected=expected, hint=hint
    )


def differs(code: str, field: str, found: object, expected: object) -> BatonError:
    """The error for a field that was found to be another than expected; bytes become hex."""
    shown_found = found.hex() if isinstance(found, bytes) else found
    shown_expected = expected.hex() if isinstance(expected, bytes) else expected
    return refusal(
        code,
        f"{field}: found {shown_found}, expected {shown_expected}",
        field=field,
        found=shown_found,
        expected=shown_expected,
    )
