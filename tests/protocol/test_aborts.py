"""Errors cross the wire as themselves, and carry nothing that they should not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.aborts import from_abort, to_abort
from protocol.errors import (
    BatonError,
    CapacityError,
    EngineFault,
    IdentityMismatch,
    LocalProtocolError,
    TransferError,
)
from protocol.messages import decode, encode
from protocol.reasons import REASONS, refusal


@pytest.mark.parametrize("reason", sorted(set(REASONS) - {"engine_fault"}))
def test_every_reason_arrives_as_the_same_error(reason: str) -> None:
    sent = refusal(reason, "words", field="frames", found=3, expected="at most 2")
    abort = to_abort(sent, 0)
    assert decode(encode(abort)) == abort
    arrived = from_abort(abort)
    assert type(arrived) is type(sent)
    if reason != "peer_aborted":
        assert arrived.reason == reason
        assert arrived.details() == sent.details()


def test_an_engine_fault_over_there_is_none_here() -> None:
    arrived = from_abort(to_abort(EngineFault("xid", reason="anything"), 4))
    assert type(arrived) is TransferError
    assert arrived.reason == "peer_engine_fault"


def test_components_and_retry_times_travel() -> None:
    mismatch = IdentityMismatch("x", components=("weights", "made up"), reason="weights_differ")
    arrived = from_abort(to_abort(mismatch, 0))
    assert isinstance(arrived, IdentityMismatch)
    assert arrived.components == ("weights",)
    full = from_abort(to_abort(CapacityError("x", reason="queue_full", retry_after_s=2.5), 1))
    assert isinstance(full, CapacityError)
    assert full.retry_after_s == 2.5


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CapacityError("x", reason="unlisted"), "capacity_exceeded"),
        (LocalProtocolError("x"), "peer_aborted"),
        (BatonError("x"), "peer_aborted"),
    ],
)
def test_reasons_that_are_not_listed_stay_here(error: BatonError, reason: str) -> None:
    assert to_abort(error, 1).reason == reason


def test_a_reason_that_we_do_not_know_is_not_believed() -> None:
    abort = to_abort(BatonError("x"), 1)
    forged = type(abort)(1, "made_up_by_peer", "", "", "", (), 0)
    arrived = from_abort(forged)
    assert (arrived.reason, arrived.found) == ("peer_aborted", "made_up_by_peer")


@given(st.text(max_size=300), st.floats(allow_nan=False, allow_infinity=False))
def test_any_error_makes_a_valid_abort(text: str, seconds: float) -> None:
    error = CapacityError("secret words", retry_after_s=seconds, field=text, found=text)
    raw = encode(to_abort(error, 1))
    assert b"secret words" not in raw
    assert decode(raw) == to_abort(error, 1)
