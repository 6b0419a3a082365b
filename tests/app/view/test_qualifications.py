"""The history of a producer's qualifications, the latest first."""

from __future__ import annotations

from app.view.qualifications import history
from mac_decoder.qualify.verdicts import Past, Verdict
from protocol.messages import Recipe
from tests.app.view.snapshots import NOW

VERDICT = Verdict(
    version=1,
    identity=b"i" * 32,
    recipe=Recipe("producer", "cuda", "bfloat16", 2048),
    here="mlx 0.32.4",
    turn=1,
    past=(
        Past(int(NOW) - 7200, False, 1.5, 1.0, "layer 3, keys"),
        Past(int(NOW) - 60, True, 4.07e-06, 0.00014, ""),
    ),
    tokens_per_s=2100.0,
    link_bytes_per_s=1e9,
    round_trip_ms=0.4,
)


def test_the_latest_comes_first_with_figures_however_small() -> None:
    found = history(VERDICT, NOW)
    assert found is not None
    assert (found.here, found.there) == ("mlx 0.32.4", "cuda, bfloat16, tiles of 2,048 tokens")
    latest, first = found.past
    assert (latest.ago, latest.rows.text, latest.rows.tone) == ("1 min ago", "alike", "good")
    assert (latest.apart, latest.allowed, latest.where) == ("4.1 × 10⁻⁶", "1.4 × 10⁻⁴", "–")
    assert (first.rows.text, first.rows.tone, first.where) == ("differ", "bad", "layer 3, keys")


def test_nothing_on_record_is_nothing() -> None:
    assert history(None, NOW) is None
