"""What it costs to look a long prompt up. Run: python -m tests.benchmarks.lookup

A thousand conversations are held in memory and on disk. All begin with one system prompt; a few
are as long as the prompts (131,072 tokens, with a cut at the end of each of 20 turns), half end
within the block after the system prompt, the rest are of 4,096 tokens. Prompts go on from a
long conversation, part from it somewhere, or are new; each is looked up twice, since manifests
are kept for a while, first in an order in which none is kept. The bar is 10 ms.

``look`` is ``Keeper.look``, thread and all; its processor time does not move when other processes
take the cores. The parts are timed apart, on the same prompts:
``tokens`` (a tuple of integers becomes an array), ``chain`` (hashing), ``resident`` and
``durable`` (finding, with reading and authenticating manifests).
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from mac_decoder.keeper import Keeper, Looked, nothing
from mac_decoder.reuse.cut import divide
from mac_decoder.reuse.resident import Resident
from mac_decoder.store.files import RealDisk
from mac_decoder.store.publishing import Published
from mac_decoder.store.store import Store
from protocol.blocks import chain, namespace
from protocol.layout import FullLayer, Layout, regions
from protocol.layouts_named import stand_in_identity
from protocol.messages import History
from tests.benchmarks.synthetic import CAP, KEY, PREFILL, tokens

BAR_MS: Final = 10.0
SYSTEM: Final = 2048
SHORT: Final = 200
USUAL: Final = 4096
TURNS: Final = 20
LAYOUT: Final = Layout((FullLayer(0, 1, 1, 1, "bfloat16"),))
IDENTITY: Final = stand_in_identity(LAYOUT)
SPACE: Final = namespace(KEY, IDENTITY.digest())


class Unsynced(RealDisk):
    """Ten thousands of files are made here, and how they are written is not what is measured."""

    def sync(self, handle: int) -> None:
        """Nothing."""

    def barrier(self, handle: int) -> None:
        """Nothing."""

    def sync_directory(self, path: Path) -> None:
        """Nothing."""


def conversation(number: int, length: int) -> np.ndarray:
    """The system prompt of all, then tokens of its own."""
    return np.concatenate([tokens(SYSTEM, 0), tokens(length - SYSTEM, number + 1)])


def cuts(count: int, longest: int, long: int) -> Iterator[np.ndarray]:
    """The tokens of every cut that is held; the long conversations come first."""
    for number in range(count):
        if number < long:
            whole = conversation(number, longest)
            yield from (whole[: longest * turn // TURNS - turn] for turn in range(1, TURNS + 1))
        else:
            yield conversation(number, SYSTEM + SHORT if number % 2 else USUAL)


def fill(resident: Resident, store: Store, arguments: argparse.Namespace) -> int:
    """Hold every conversation in both tiers; how many cuts that are."""
    made = 0
    for text in cuts(arguments.conversations, arguments.tokens, arguments.long):
        sizes = {(r.index, r.role): r.nbytes for r in regions(LAYOUT, 0, len(text))}
        rows = {place: np.zeros(nbytes, np.uint8) for place, nbytes in sizes.items()}
        cut, blocks = divide(LAYOUT, SPACE, text, rows, (History(0, len(text), PREFILL),))
        put = resident.put(SPACE, cut, blocks, publication="published")
        done = store.publish(SPACE, IDENTITY, cut, blocks)
        if put.outcome != "stored" or not isinstance(done, Published):
            raise SystemExit(f"not held: {put.outcome}, {done}")
        made += 1
    return made


def prompts(longest: int, long: int) -> dict[str, list[tuple[int, ...]]]:
    """Prompts of ``longest`` tokens: some that go on, some that part, some that are new."""
    found: dict[str, list[tuple[int, ...]]] = {"goes on": [], "parts": [], "is new": []}
    for number in range(long):
        whole = conversation(number, longest)
        other = conversation(number + (1 << 20), longest)
        at = longest * (number + 1) // (long + 1)
        parting = np.concatenate([whole[:at], other[at:]])
        for kind, prompt in zip(found, (whole, parting, other), strict=True):
            found[kind].append(tuple(prompt.tolist()))
    return found


def took(work: Callable[[], object]) -> float:
    """Milliseconds."""
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e3


def parts(resident: Resident, store: Store, prompt: tuple[int, ...]) -> dict[str, float]:
    """Each part of one lookup."""
    array = nothing(prompt).tokens
    names = tuple(chain(SPACE, array))
    return {
        "tokens": took(lambda: nothing(prompt)),
        "chain": took(lambda: chain(SPACE, array)),
        "resident": took(lambda: resident.holding(SPACE, array, names)),
        "durable": took(lambda: store.holding(SPACE, array, names)),
        "durable again": took(lambda: store.holding(SPACE, array, names)),
    }


def summary(values: list[float]) -> dict[str, float]:
    """Median and worst."""
    return {"median": round(median(values), 3), "worst": round(max(values), 3)}


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All figures, in milliseconds."""
    keeper = Keeper(IDENTITY, LAYOUT, KEY, 1 << 40)
    store = Store.open(directory, KEY, CAP, 0, Unsynced(), keeper.heard)
    keeper.attach(store)
    resident = keeper._resident
    held = fill(resident, store, arguments)
    found: dict[str, Any] = {
        "conversations": arguments.conversations,
        "cuts": held,
        "prompt_tokens": arguments.tokens,
        "bar_ms": BAR_MS,
    }
    kinds = prompts(arguments.tokens, arguments.long)
    # Once, now: so many long tuples would be looked at in the midst of a look-up.
    gc.collect()
    first: dict[str, list[float]] = {kind: [] for kind in kinds}
    again: list[float] = []
    processor: list[float] = []
    for kind, some in kinds.items():
        for prompt in some:
            busy = time.process_time()
            first[kind].append(took(lambda p=prompt: keeper.look(p).result()))
            processor.append((time.process_time() - busy) * 1e3)
            again.append(took(lambda p=prompt: keeper.look(p).result()))
            _check(kind, keeper.look(prompt).result(), arguments.tokens)
    every = [value for values in first.values() for value in values]
    found["look"] = summary(every) | {kind: summary(values) for kind, values in first.items()}
    found["look, processor time"] = summary(processor)
    found["look again"] = summary(again)
    split = [parts(resident, store, prompt) for some in kinds.values() for prompt in some]
    found["parts"] = {name: summary([one[name] for one in split]) for name in split[0]}
    keeper.close()
    return found


def _check(kind: str, looked: Looked, length: int) -> None:
    """That both tiers found what is held, before anybody believes the times."""
    for held in (looked.resident, looked.durable):
        least = {"goes on": length - TURNS, "parts": SYSTEM + 1, "is new": SYSTEM}[kind]
        if held is None or held.shared < least or not held.offers:
            raise SystemExit(f"a prompt that {kind} was not found: {held}")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--long", type=int, default=20, help="of them as long as the prompts")
    parser.add_argument("--tokens", type=int, default=131_072, help="length of a prompt")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = measure(arguments, Path(directory))
    print(json.dumps(found, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
