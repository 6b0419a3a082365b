"""Pairing from the window, with a real producer: its words, and the model that it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.menubar.pairing import Pairing, is_void
from protocol.errors import BatonError
from tests.app.menubar.screen import settings
from tests.e2e.paired import Box, free_port
from tests.e2e.running import until
from trust.control import Control


@pytest.mark.soak
def test_a_producer_without_a_model_is_paired_and_sent_it(
    checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    model, state = checkpoint("llama"), tmp_path / "mac"
    settings(tmp_path, [f'model = "{model}"'])
    cache = str(tmp_path / "models")
    box = Box(
        tmp_path / "gb10",
        *("--host", "127.0.0.1", "--device", "cpu", "--pair", "--cache-dir", cache),
    )
    told: list[str] = []

    def say(title: str, done: int, total: int) -> None:
        assert done <= total
        told.append(title)

    try:
        pairing = Pairing(str(state), "file", f"http://127.0.0.1:{free_port()}", None)
        target = f"127.0.0.1:{box.pair_port}"
        code = box.code()
        with pytest.raises(BatonError) as refused:
            pairing.pair(target, "six words that are not it", say)
        assert not is_void(refused.value), "a slip costs nothing"
        paired = pairing.pair(target, code.upper(), say)
        assert paired.peer.name == "gb10"
        assert paired.lacks is not None
        assert paired.lacks.name == model.name
        said = pairing.send(paired, say)
        assert said == f"gb10 has {model.name} and loads it"
        assert any(title.startswith("Sending") for title in told)

        def serves() -> bool:
            address = paired.peer.address
            assert address is not None
            try:
                with Control.open(address, paired.peer.record) as control:
                    return control.describe().identity is not None
            except BatonError:
                return False

        until(serves, 90)
    finally:
        box.running.close()
