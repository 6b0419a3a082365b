"""Chats are deltas: the benchmark `tests/benchmarks/ten_chats.py`, shorter, with its bar."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.checkpoint import read_layout
from protocol.layout import payload_bytes
from tests.benchmarks.ten_chats import TILE, figures, measure

CHATS, TURNS = 2, 3


@pytest.mark.soak
def test_every_turn_that_shares_a_tile_is_a_delta(checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("muse_glimmer")
    turns = measure(model, "remote", CHATS, TURNS, 20, TILE)
    found = figures(model, turns, TILE)
    assert found["could_be_deltas"] == CHATS * (TURNS - 1)
    assert found["share"] == 1
    assert found["sources"] == {"remote": CHATS * TURNS}
    layout = read_layout(model)
    for turn in turns:
        start = turn.baton["reused_tokens"]
        assert start == turn.baton["shared_tokens"] // TILE * TILE
        assert turn.baton["shared_tokens"] >= turn.shared
        assert turn.baton["transferred_bytes"] == payload_bytes(layout, start, turn.prompt - 1)
    assert found["shipped_bytes"] < found["full_bytes"]
    # What the producer remembers of the prompts it is not asked to compute again.
    assert found["computed_tokens"] < found["full_tokens"]
