"""What a durable restore costs. Run: python -m tests.benchmarks.store_restore --position 32768

A Muse-shaped cut is published, then read from cold disk and from the page cache, in turn with
mlx-lm's ``load_prompt_cache`` of equal bytes: GB/s of each in wall time and in processor time,
and the memory that a restore takes beyond the cut. ``--chat TURNS`` shows what a chat writes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mac_decoder.reuse.cut import BlockBody, CutBody, Place, block_sizes, divide
from mac_decoder.store.publishing import Published
from mac_decoder.store.store import Store
from protocol.blocks import BLOCK, namespace
from protocol.layout import Layout, payload_bytes, regions
from protocol.layouts_named import muse_glimmer, stand_in_identity
from protocol.messages import History, Recipe

KEY = bytes(32)
LAYOUT = muse_glimmer()
IDENTITY = stand_in_identity(LAYOUT)
SPACE = namespace(KEY, IDENTITY.digest())
CAP = 1 << 40


def rows(layout: Layout, position: int) -> dict[Place, np.ndarray]:
    """Random bytes; the first rows of a longer cache are those of a shorter one."""
    found = {}
    for region in regions(layout, 0, position):
        draw = np.random.default_rng((region.index, region.role, region.first))
        found[region.index, region.role] = np.frombuffer(draw.bytes(region.nbytes), np.uint8)
    return found


def made(
    position: int, longer: dict[Place, np.ndarray] | None = None
) -> tuple[CutBody, tuple[BlockBody, ...]]:
    """A cut at ``position``; rows of full layers are the first ones of ``longer``, if given."""
    tokens = np.random.default_rng(1).integers(0, 1 << 17, position, dtype=np.uint32)
    history = (History(0, position, Recipe("decoder_prefill", "cpu", "bfloat16", 2048)),)
    if longer is None:
        return divide(LAYOUT, SPACE, tokens, rows(LAYOUT, position), history)
    first = {
        (r.index, r.role): longer[r.index, r.role][: r.nbytes] for r in regions(LAYOUT, 0, position)
    }
    return divide(LAYOUT, SPACE, tokens, first, history)


def forget(directory: Path) -> None:
    """Take the files out of the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


class Peak:
    """The largest resident size of this process while it is looked at."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self.most = self.start = self._now()
        self._thread.start()

    @staticmethod
    def _now() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, self._now())

    def end(self) -> int:
        """Bytes by which it grew at most."""
        self._stop.set()
        self._thread.join()
        return self.most - self.start


class Clock:
    """Wall time, and the processor time of all threads, since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def rates(self, nbytes: int) -> dict[str, float]:
        """GB/s in wall time, and for each second of one core."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return {"gb_per_s": nbytes / wall / 1e9, "gb_per_core_s": nbytes / cpu / 1e9}


def restore(store: Store, name: bytes, position: int, *, watched: bool) -> dict[str, float]:
    """Read the cut into new memory."""
    peak = Peak() if watched else None
    memory = {(r.index, r.role): np.empty(r.nbytes, np.uint8) for r in regions(LAYOUT, 0, position)}

    def into(index: int, role: int, offset: int, nbytes: int) -> memoryview:
        return memory[index, role][offset : offset + nbytes].data

    clock = Clock()
    done = store.read(name, into)
    assert done
    found = clock.rates(done.nbytes)
    if peak:
        return {"beyond_the_cut_mib": (peak.end() - done.nbytes) / (1 << 20)}
    return found


def prompt_cache(position: int, path: Path) -> Callable[[], dict[str, float]]:
    """mlx-lm's file of a cache with equal bytes, and how fast it loads."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

    caches = []
    for index, layer in enumerate(LAYOUT.layers):
        held = min(position, getattr(layer, "window", position))
        cache = KVCache()
        shape = (1, 2, held, 128)
        keys, values = (
            mx.array(
                np.random.default_rng((index, role)).integers(0, 1 << 14, shape, np.uint16)
            ).view(mx.bfloat16)
            for role in range(2)
        )
        cache.state = (keys, values, held)
        caches.append(cache)
    save_prompt_cache(str(path), caches)
    del caches
    nbytes = payload_bytes(LAYOUT, 0, position)

    def load() -> dict[str, float]:
        clock = Clock()
        loaded: Any = load_prompt_cache(str(path))
        mx.eval([(cache.keys, cache.values) for cache in loaded])
        return clock.rates(nbytes)

    return load


def publish(position: int, directory: Path) -> dict[str, Any]:
    """Publish a cut at ``position``; its name and the rate."""
    with Store.open(directory / "cache", KEY, CAP, 0) as store:
        cut, blocks = made(position)
        clock = Clock()
        done = store.publish(SPACE, IDENTITY, cut, blocks)
        assert isinstance(done, Published)
        return {"name": done.name.hex(), "publish": clock.rates(done.written)}


def alone(*arguments: object) -> dict[str, Any]:
    """A part of the measurement in a process of its own, so that memory is its own too."""
    command = [sys.executable, "-m", "tests.benchmarks.store_restore", *map(str, arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def measured(position: int, rounds: int, directory: Path) -> dict[str, Any]:
    """The figures of one position."""
    found: dict[str, Any] = {"position": position, "bytes": payload_bytes(LAYOUT, 0, position)}
    where = ("--position", position, "--directory", directory)
    found |= alone(*where, "--part", "publish")
    name = bytes.fromhex(found.pop("name"))
    found |= alone(*where, "--part", name.hex())
    load = prompt_cache(position, directory / "cache.safetensors")
    with Store.open(directory / "cache", KEY, CAP, 0) as store:
        for cold in (True, False):
            ours, theirs = [], []
            for _ in range(rounds):
                if cold:
                    forget(directory)
                ours.append(restore(store, name, position, watched=False))
                if cold:
                    forget(directory)
                theirs.append(load())
            found["cold" if cold else "warm"] = {
                "restore": _medians(ours),
                "load_prompt_cache": _medians(theirs),
                "median_of_ratios": statistics.median(
                    a["gb_per_s"] / b["gb_per_s"] for a, b in zip(ours, theirs, strict=True)
                ),
            }
    return found


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def chat(turns: int, position: int, directory: Path) -> dict[str, Any]:
    """What a chat of so many equal turns up to ``position`` writes."""
    with Store.open(directory / "cache", KEY, CAP, 0) as store:
        kept: dict[bytes, BlockBody] = {}
        longer = rows(LAYOUT, position)
        for turn in range(turns):
            cut, blocks = made(position * (turn + 1) // turns, longer)
            # Interned, as the resident tier does.
            bodies = [kept.setdefault(body.hash, body) for body in blocks]
            assert isinstance(store.publish(SPACE, IDENTITY, cut, bodies), Published)
        stats = store.stats()
        payload = payload_bytes(LAYOUT, 0, position)
        written = stats.counts["written_bytes"]
        return {
            "turns": turns,
            "position": position,
            "payload_bytes": payload,
            "block_bytes": sum(block_sizes(LAYOUT).values()) * (position // BLOCK),
            "written_bytes": written,
            "written_of_payload": written / payload,
            "on_disk": stats.on_disk,
        }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--position", type=int, default=32_768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chat", type=int, default=0)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part == "publish":
        print(json.dumps(publish(options.position, options.directory)))
        return
    if options.part:
        name = bytes.fromhex(options.part)
        with Store.open(options.directory / "cache", KEY, CAP, 0) as store:
            print(json.dumps(restore(store, name, options.position, watched=True)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        if options.chat:
            figures = chat(options.chat, options.position, Path(directory))
        else:
            figures = measured(options.position, options.rounds, Path(directory))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
