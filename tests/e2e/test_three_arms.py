"""Full, prefix and delta in decoder processes of their own: every byte and every token agree.

Each arm is a process that shares nothing with the others but the producer, so that no state of
this test's process can make them agree. The prefix arm is asked for the shared part alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from protocol.checkpoint import read_checkpoint
from protocol.layout import payload_bytes
from tests.benchmarks import smollm2
from tests.e2e.arm import Arm, Found, Run
from tests.e2e.linked import KEY
from tests.e2e.running import RunningProducer
from tests.mac_decoder.engine.drive import prompt
from tests.tiny_models import WINDOW

TILE = WINDOW // 2
AROUND = range(WINDOW - TILE, WINDOW + 2 * TILE + 1, TILE)
"""Depths on the grid below, at and above the window, at which a decoder holds a prefix."""
REST = (1, TILE, WINDOW - 1, WINDOW, WINDOW + 1)
"""Rows past it: fewer than a window has, as many, and more."""


@dataclass(frozen=True)
class Case:
    """A prompt with a cache at ``end``, ``held`` of which a decoder holds already.

    ``other`` is the position of a held token that the prompt has otherwise, ``start`` where the
    delta must begin: 0 for a full handoff.
    """

    held: int
    end: int
    start: int
    count: int = 1
    other: int | None = None

    def target(self, salt: int) -> tuple[int, ...]:
        return prompt(self.end + 1, salt)

    def before(self, salt: int) -> tuple[int, ...]:
        """A prompt that leaves a cut at ``held``."""
        held = [*self.target(salt)[: self.held + 1]]
        held[self.held] ^= 1
        if self.other is not None:
            held[self.other] ^= 1
        return tuple(held)


@pytest.fixture
def started() -> Iterator[list[Arm]]:
    made: list[Arm] = []
    yield made
    for arm in made:
        arm.close()


def produced(produce: Callable[..., RunningProducer], path: Path, tile: int) -> RunningProducer:
    args = ("--model", str(path), "--port", "0", "--device", "cpu", "--tile", str(tile))
    return produce(*args, key=KEY).await_ready()


def check(
    producers: tuple[RunningProducer, RunningProducer],
    path: Path,
    cases: list[Case],
    tile: int,
    state: Path,
    started: list[Arm],
    timeout_s: float = 120.0,
) -> None:
    """The full arm asks the first producer, and has ended before the others begin."""
    layout = read_checkpoint(path).layout

    def arm(producer: RunningProducer, runs: list[Run]) -> Arm:
        started.append(Arm(path, producer.url, state, tile, runs))
        return started[-1]

    def runs(prompts: Callable[[Case, int], tuple[tuple[tuple[int, ...], int], ...]]) -> list[Run]:
        return [Run(prompts(case, salt), case.start) for salt, case in enumerate(cases)]

    def whole(case: Case, salt: int) -> tuple[tuple[int, ...], int]:
        return case.target(salt), case.count

    cold, warm = producers
    full = arm(cold, runs(lambda case, salt: (whole(case, salt),))).found(timeout_s)
    prefix_arm = arm(warm, runs(lambda case, salt: ((case.before(salt), 1),)))
    delta_arm = arm(warm, runs(lambda case, salt: ((case.before(salt), 1), whole(case, salt))))
    prefix, delta = prefix_arm.found(timeout_s), delta_arm.found(timeout_s)
    for case, alone, part, found in zip(cases, full, prefix, delta, strict=True):
        assert (alone.source, alone.reused) == ("remote", 0), case
        assert alone.transferred == payload_bytes(layout, 0, case.end), case
        assert part.transferred == payload_bytes(layout, 0, case.held), case
        assert (found.source, found.reused) == ("remote", case.start), case
        assert found.transferred == payload_bytes(layout, case.start, case.end), case
        assert agree(alone, found), case
        assert len(found.tokens) == case.count
        if case.start:
            assert part.lower == alone.lower == found.lower, case
            assert part.lower, case


def agree(one: Found, other: Found) -> bool:
    return (one.position, one.digests, one.tokens) == (other.position, other.digests, other.tokens)


def answers(count: int) -> list[Case]:
    """Long ones; controls with another first token and with another last one."""
    return [
        Case(300, 449, 288, count),
        Case(300, 449, 0, count, other=0),
        Case(300, 449, 272, count, other=287),
    ]


EVERYWHERE = [Case(held, held + rest, held) for held in AROUND for rest in REST]
OFF_THE_GRID = [Case(WINDOW + 5, WINDOW + rest, WINDOW) for rest in (6, WINDOW, 2 * WINDOW)]


@pytest.mark.both_blas
@pytest.mark.parametrize(
    ("name", "cases"),
    [
        ("muse_glimmer", [*EVERYWHERE[::3], *OFF_THE_GRID[:1], *answers(16)]),
        pytest.param("lfm2", answers(32), marks=pytest.mark.soak),
        *(
            pytest.param(name, [*EVERYWHERE, *OFF_THE_GRID, *answers(256)], marks=pytest.mark.soak)
            for name in ("muse_glimmer", "lfm2", "qwen3_next", "llama")
        ),
    ],
)
def test_three_processes_agree(
    produce: Callable[..., RunningProducer],
    checkpoint: Callable[..., Path],
    name: str,
    cases: list[Case],
    started: list[Arm],
    tmp_path: Path,
) -> None:
    path = checkpoint(name)
    one = produced(produce, path, TILE)
    check((one, one), path, cases, TILE, tmp_path, started)


@pytest.mark.soak
@pytest.mark.both_blas
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_three_processes_agree_on_a_real_model(
    produce: Callable[..., RunningProducer], name: str, started: list[Arm], tmp_path: Path
) -> None:
    """A producer for the full arm alone: what one remembers is of no help to the other."""
    path = smollm2.checkpoints() / name
    cases = [Case(600, 900, 512, 256), Case(600, 900, 0, 16, other=0)]
    producers = produced(produce, path, 256), produced(produce, path, 256)
    check(producers, path, cases, 256, tmp_path, started, 1800.0)
