"""One arm of a comparison: a decoder process that answers prompts and says what it holds.

    python -m tests.e2e.arm < ORDER > FOUND

Its order is one JSON object on standard input: ``model``, ``url`` of a producer that holds
``linked.KEY``, ``state``, ``step`` and ``runs``. A run is a list of ``[tokens, count]``, asked one
after another of the lane ``remote``; the last one is reported, with a digest of every layer's bytes
where it ended, and of the first ``lower`` rows of the full layers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """Prompts and how many tokens to answer each with; how deep to digest rows on their own."""

    prompts: tuple[tuple[tuple[int, ...], int], ...]
    lower: int = 0


@dataclass(frozen=True)
class Found:
    """The last prompt of a run: its answer, its handoff, and digests by ``layer:role``."""

    tokens: list[int]
    source: str
    reused: int
    transferred: int
    reasons: list[str]
    position: int
    digests: dict[str, str]
    lower: dict[str, str]


class Arm:
    """A process of its own; ``found`` waits for what it found."""

    def __init__(self, model: Path, url: str, state: Path, step: int, runs: Sequence[Run]) -> None:
        order = {
            "model": str(model),
            "url": url,
            "state": str(state),
            "step": step,
            "runs": [{"prompts": run.prompts, "lower": run.lower} for run in runs],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.arm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode())
        self._process.stdin.close()
        self._process.stdin = None

    def found(self, timeout_s: float = 120.0) -> list[Found]:
        """What each run found; the process has ended well."""
        printed, _ = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0
        return [Found(**each) for each in json.loads(printed)]

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


def _digests(rows: dict[tuple[int, int], Any]) -> dict[str, str]:
    return {
        f"{layer}:{role}": hashlib.sha256(array.tobytes()).hexdigest()
        for (layer, role), array in sorted(rows.items())
    }


async def _main(order: dict[str, Any]) -> list[dict[str, Any]]:
    from mac_decoder.engine.settings import EngineSettings
    from mac_decoder.kv.install import extract
    from protocol.checkpoint import read_checkpoint
    from protocol.layout import KEY, VALUE, FullLayer, row_bytes
    from tests.e2e.linked import linked
    from tests.mac_decoder.engine.drive import ask, running, told
    from tests.mac_decoder.engine.test_reuse import keeper_for, last_live, settled

    path = Path(order["model"])
    known = read_checkpoint(path)
    full = {
        (index, role): row_bytes(layer, role)
        for index, layer in enumerate(known.layout.layers)
        if isinstance(layer, FullLayer)
        for role in (KEY, VALUE)
    }
    settings = EngineSettings(prefill_step=order["step"], remote_threshold=1)
    found: list[dict[str, Any]] = []
    with linked(order["url"], known.identity, known.layout, Path(order["state"])) as link:
        async with running(path, settings, link, keeper_for(path)) as engine:
            for run in order["runs"]:
                for tokens, count in run["prompts"]:
                    answer = await told(engine, ask(tokens, count, lane="remote"))
                    await settled(engine)
                live, report = last_live(engine), answer.finished.report
                rows = extract(live.caches, known.layout, live.position)
                lower = {at: rows[at][: run["lower"] * width] for at, width in full.items()}
                found.append(
                    {
                        "tokens": answer.tokens,
                        "source": report.source,
                        "reused": report.reused_tokens,
                        "transferred": report.transferred_bytes,
                        "reasons": report.reasons,
                        "position": live.position,
                        "digests": _digests(rows),
                        "lower": _digests(lower),
                    }
                )
    return found


if __name__ == "__main__":
    # A decoder's machine has no torch, and starts faster without it.
    sys.modules["torch"] = None  # type: ignore[assignment]
    print(json.dumps(asyncio.run(_main(json.load(sys.stdin)))))
