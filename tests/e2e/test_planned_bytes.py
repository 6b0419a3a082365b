"""What a handoff ships is what `baton plan` says, to the byte, counted on the wire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.commands import app
from mac_decoder.engine.settings import EngineSettings
from protocol.checkpoint import read_checkpoint
from protocol.layout import Layout, payload_bytes
from protocol.layouts_named import muse_glimmer, stand_in_identity
from tests import checkpoints
from tests.e2e.linked import KEY, linked
from tests.e2e.running import RunningProducer
from tests.mac_decoder.engine.drive import ask, prompt, running, told
from tests.mac_decoder.engine.test_reuse import keeper_for, settled
from tests.mac_decoder.handoff.producer import Memory
from tests.proxy import Proxy
from tests.tiny_models import WINDOW, muse_glimmer_in_depth

Produce = Callable[..., RunningProducer]
TILE = WINDOW // 2

TINY = [
    (1, 0, 0),
    (2, 0, 0),
    (WINDOW, 0, 0),
    (100, 0, 0),
    (100, 15, 0),
    (100, 16, 16),
    (100, 64, 64),
    (98, 64, 64),
    (97, 64, 64),
    (96, 64, 64),
    (82, 70, 64),
    (100, 96, 96),
    (98, 96, 96),
    (97, 95, 80),
]
"""Prompt, held, and where the delta begins: suffixes longer, as long and shorter than a window."""

DEEP = [
    (2_048, 1_024, 1_024),
    (3_000, 0, 0),
    (4_096, 1_024, 1_024),
    (3_073, 1_024, 1_024),
]
"""Of the real layout, with tiles of 1,024. A suffix of 3,071 outruns the window, 2,048 fills it."""


def planned(prompt: int, held: int, *source: str) -> int:
    """The payload bytes that the command prints."""
    arguments = ["plan", "--prompt", str(prompt), "--held", str(held), *source, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    return json.loads(result.stdout)["payload_bytes"]


def check_handoffs(
    produce: Produce, path: Path, tile: int, cases: Sequence[tuple[int, int, int]], state: Path
) -> dict[tuple[int, int], int]:
    """Hold, hand off, count; returns the bytes that were counted, by prompt and held."""
    producer = produce(
        *("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(tile)), key=KEY
    ).await_ready()
    known = read_checkpoint(path)
    settings = EngineSettings(prefill_step=tile, remote_threshold=1)
    counted: dict[tuple[int, int], int] = {}

    async def main(proxy: Proxy) -> None:
        with linked(proxy.url, known.identity, known.layout, state) as link:
            async with running(path, settings, link, keeper_for(path)) as engine:
                for salt, (length, held, cut) in enumerate(cases):
                    tokens = prompt(length, salt)
                    if held:
                        before = (*tokens[:held], tokens[held] ^ 1)
                        await told(engine, ask(before, 1, lane="remote"))
                        await settled(engine)
                    passed = proxy.payload_bytes
                    answer = await told(engine, ask(tokens, 1, lane="remote"))
                    await settled(engine)
                    report = answer.finished.report
                    found = counted[length, held] = proxy.payload_bytes - passed
                    assert found == payload_bytes(known.layout, cut, length - 1), (length, held)
                    assert found == planned(length, cut, "--model", str(path))
                    assert found == report.transferred_bytes
                    assert report.reused_tokens == cut

    with Proxy(producer.url) as proxy:
        asyncio.run(main(proxy))
    return counted


@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("muse_glimmer", TINY),
        pytest.param(
            "lfm2", [(1, 0, 0), (2, 0, 0), (98, 64, 64), (97, 95, 80)], marks=pytest.mark.soak
        ),
    ],
)
def test_a_handoff_ships_what_was_planned(
    produce: Produce,
    checkpoint: Callable[..., Path],
    name: str,
    cases: Sequence[tuple[int, int, int]],
    tmp_path: Path,
) -> None:
    counted = check_handoffs(produce, checkpoint(name), TILE, cases, tmp_path)
    assert counted[1, 0] == 0 < counted[2, 0]


@pytest.mark.soak
def test_the_designs_figures_are_those_of_real_handoffs(produce: Produce, tmp_path: Path) -> None:
    """Muse Glimmer's 52 layers, window and heads; two to three minutes on two cores."""
    path = checkpoints.save(muse_glimmer_in_depth, tmp_path / "muse", dtype="bfloat16")
    assert read_checkpoint(path).layout == muse_glimmer()
    counted = check_handoffs(produce, path, 1024, DEEP, tmp_path)
    assert counted[2_048, 1_024] == 54_472_704


def over_the_wire(
    produce: Produce, layout: Layout, cases: Sequence[tuple[int, int, int]], state: Path
) -> None:
    producer = produce("--synthetic", "muse-glimmer", "--port", "0", key=KEY).await_ready()
    with (
        Proxy(producer.url) as proxy,
        linked(proxy.url, stand_in_identity(layout), layout, state) as link,
    ):
        for length, cut, expected in cases:
            passed = proxy.payload_bytes
            with link.fetch(list(range(length)), Memory(layout, cut, length - 1)) as handoff:
                handoff.committed()
            assert proxy.payload_bytes - passed == expected
            assert planned(length, cut, "--layout", "muse-glimmer") == expected


def test_a_row_of_the_designs_table_crosses_the_wire(produce: Produce, tmp_path: Path) -> None:
    over_the_wire(produce, muse_glimmer(), [(2_048, 1_024, 54_472_704)], tmp_path)


@pytest.mark.soak
def test_the_designs_table_crosses_the_wire(produce: Produce, tmp_path: Path) -> None:
    """Two gigabytes, from a producer without a model; fifteen seconds."""
    table = [
        (65_536, 0, 954_190_848),
        (32_769, 0, 517_996_544),
        (65_536, 32_768, 517_983_232),
    ]
    over_the_wire(produce, muse_glimmer(), table, tmp_path)
