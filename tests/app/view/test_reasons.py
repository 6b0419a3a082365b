"""Reason codes in words."""

from __future__ import annotations

from app.view.reasons import meaning
from protocol.reasons import REASONS


def test_what_a_user_deleted_is_not_put_down_to_the_disk_alone() -> None:
    """Pruning on purpose has the same code as a disk without room."""
    said = meaning("durable_out_of_space")
    assert "no room" in said
    assert "deleted" in said


def test_what_ends_a_handoff_is_explained_too() -> None:
    assert meaning("connection_lost")
    assert all(meaning(reason) for reason in REASONS)
    assert meaning("of_another_release") == ""
