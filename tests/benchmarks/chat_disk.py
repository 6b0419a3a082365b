"""What a chat writes to disk. Run: python -m tests.benchmarks.chat_disk

A chat on Muse Glimmer's cache layout (random rows, no model) grows to 131,072 tokens in 40 turns.
Cuts are kept as the engine keeps them: on the way through each prompt (``engine/cuts``), at its
N-1, at the end of the answer. Told are the bytes that the store wrote, those that reached the
device, what is left on disk, and the write amplification: bytes written for each byte of the
cache at the end. ``paced``: a cut is on disk before the next one comes, as in a slow prefill;
``at once``: the cuts of a turn come together, and steps that a later cut extends are not
written. Beside it, what rewriting the whole cache after every turn would write.

Then ten conversations with one system prompt of 4,096 tokens: its blocks must be there once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np

from mac_decoder.engine.cuts import segments
from mac_decoder.keeper import Keeper, Kept, Line
from mac_decoder.reuse.cut import Bytes, Place, block_sizes
from mac_decoder.store.manifest import Role
from protocol.blocks import BLOCK
from protocol.layout import payload_bytes, regions, row_bytes
from protocol.messages import History
from tests.benchmarks.machine import device_bytes
from tests.benchmarks.synthetic import MUSE, PREFILL, SPACE, keeping, tokens

ANSWER: Final = 256
"""Tokens of an answer; the rest of a turn is prompt."""

HEADER: Final = 4
"""Tokens of a message before its text: where another last message would part."""

RAM: Final = 4 << 30
SYSTEM: Final = 4096
CONVERSATIONS: Final = 10
_POOL: Final = 4 << 20


class Rows:
    """Rows of caches at any position up to ``longest``: views, as the engine's are."""

    def __init__(self, longest: int, seed: int = 0) -> None:
        self._full: dict[Place, Bytes] = {}
        for index, role in block_sizes(MUSE):
            width = row_bytes(MUSE.layers[index], role)
            draw = np.random.default_rng((seed, index, role))
            self._full[index, role] = np.frombuffer(draw.bytes(longest * width), np.uint8)
        self._pool = np.frombuffer(np.random.default_rng(seed).bytes(_POOL), np.uint8)

    def at(self, position: int, known: int) -> dict[Place, Bytes]:
        """Of full layers what lies past ``known`` blocks; of sliding ones other bytes each time."""
        found: dict[Place, Bytes] = {}
        for region in regions(MUSE, 0, position):
            place = (region.index, region.role)
            whole = self._full.get(place)
            if whole is not None:
                first = known * BLOCK * (region.nbytes // position)
                found[place] = whole[first : region.nbytes]
                continue
            first = (position * 64 + region.index) % (_POOL - region.nbytes)
            found[place] = self._pool[first : first + region.nbytes]
        return found


class Sequence:
    """One conversation as the engine hands it to the keeper."""

    def __init__(self, keeper: Keeper, text: np.ndarray, rows: Rows, *, paced: bool) -> None:
        self._keeper = keeper
        self._text = text
        self._rows = rows
        self._paced = paced
        self._line = Line()
        self._at = 0
        self.cuts = 0

    def turn(self, end: int) -> None:
        """A prompt, and an answer that ends at ``end``."""
        stops = segments(end - ANSWER, (self._at + HEADER,))
        for stop in stops:
            if stop.end > self._at:
                self._keep(stop.end, stop.role)
        self._keep(end, "turn")
        self._settle()
        self._at = end

    def end(self) -> None:
        """The conversation is over."""
        self._keeper.let_go(self._line)

    def _keep(self, position: int, role: Role) -> None:
        ready = self._keeper.ready(self._line, position, role)
        if ready is None:
            raise SystemExit("the keeper is behind")
        line, known = ready
        self._line = line
        kept = Kept(
            line,
            SPACE,
            self._text[:position],
            self._rows.at(position, known),
            known,
            (History(0, position, PREFILL),),
            role,
        )
        line.blocks = position // BLOCK
        self._keeper.keep(kept)
        self.cuts += 1
        if self._paced:
            self._settle()

    def _settle(self) -> None:
        if not self._keeper.drain(600.0):
            raise SystemExit("a cut was not kept")


def chat(turns: int, position: int, directory: Path, *, paced: bool) -> dict[str, Any]:
    """What one long chat writes."""
    rows = Rows(position)
    ends = [position * (turn + 1) // turns for turn in range(turns)]
    with keeping(directory, RAM) as (keeper, store):
        before, began = device_bytes()[1], time.perf_counter()
        sequence = Sequence(keeper, tokens(position), rows, paced=paced)
        for end in ends:
            sequence.turn(end)
        sequence.end()
        seconds = time.perf_counter() - began
        stats = store.stats()
        written = stats.counts["written_bytes"]
        payload = payload_bytes(MUSE, 0, position)
        blocks = position // BLOCK * sum(block_sizes(MUSE).values())
        return {
            "turns": turns,
            "position": position,
            "cuts": sequence.cuts,
            "cuts_on_disk": stats.cuts,
            "cache_bytes": payload,
            "block_bytes": blocks,
            "written_bytes": written,
            "device_written_bytes": device_bytes()[1] - before,
            "on_disk": stats.on_disk,
            "amplification": round(written / payload, 3),
            "of_blocks": round(stats.block_bytes / blocks, 4),
            "rewriting_bytes": sum(payload_bytes(MUSE, 0, end) for end in ends),
            "seconds": round(seconds, 1),
        }


def shared(directory: Path) -> dict[str, Any]:
    """Ten conversations that begin alike."""
    own = 2 * BLOCK
    length = SYSTEM + own + ANSWER
    rows = Rows(length)
    with keeping(directory, RAM) as (keeper, store):
        for number in range(CONVERSATIONS):
            text = np.concatenate([tokens(SYSTEM), tokens(length - SYSTEM, 100 + number)])
            sequence = Sequence(keeper, text, rows, paced=False)
            sequence.turn(length)
            sequence.end()
        stats = store.stats()
        found = {
            "conversations": CONVERSATIONS,
            "system_tokens": SYSTEM,
            "blocks": stats.blocks,
            "blocks_on_disk": len(list((directory / "blocks").iterdir())),
            "referenced": stats.referenced,
            "on_disk": stats.on_disk,
        }
    once = SYSTEM // BLOCK + CONVERSATIONS * (length - SYSTEM) // BLOCK
    if found["blocks"] != once or found["blocks_on_disk"] != once:
        raise SystemExit(f"the system prompt's blocks are not there once: {found}, not {once}")
    return found


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--position", type=int, default=131_072)
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    for name in ("paced", "at once"):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
            paced = name == "paced"
            found[name] = chat(arguments.turns, arguments.position, Path(place), paced=paced)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as place:
        found["shared"] = shared(Path(place))
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
