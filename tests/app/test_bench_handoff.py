"""`baton bench handoff`: the figures it prints are of whole, verified, installed handoffs."""

from __future__ import annotations

import pytest

from app.bench_handoff import GROWTH_BAR_MB, measure
from protocol.layout import payload_bytes
from protocol.layouts_named import muse_glimmer


@pytest.mark.parametrize(
    ("tls", "touched"), [(True, True), pytest.param(False, False, marks=pytest.mark.soak)]
)
def test_two_processes_hand_over_and_are_measured_against_the_limit(
    tls: bool, touched: bool
) -> None:
    found = measure("muse-glimmer", 2048, 2, tls=tls, touched=touched)
    assert (found.tls, found.touched) == (tls, touched)
    assert found.payload_bytes == payload_bytes(muse_glimmer(), 0, 2047)
    assert len(found.ratios) == 2
    assert 0 < found.installed_gb_s <= found.verified_gb_s
    assert found.limit_gb_s > 0
    assert found.producer_growth_mb < GROWTH_BAR_MB
    assert found.decoder_growth_mb < GROWTH_BAR_MB
