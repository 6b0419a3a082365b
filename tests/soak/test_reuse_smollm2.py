"""Warm equals cold on a real model: SmolLM2 in bf16 and quantised to 4 bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.smollm2 import checkpoints
from tests.mac_decoder.engine.drive import loaded_copy
from tests.mac_decoder.engine.test_reuse import TIERS, Tier, check_warm


@pytest.mark.soak
@pytest.mark.both_blas
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["bf16", "q4"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_real_model_is_a_replay_of_its_history(name: str, tier: Tier, tmp_path: Path) -> None:
    path = checkpoints() / name
    check_warm(path, loaded_copy(path), tier, (1, 257), tmp_path, count=64)
