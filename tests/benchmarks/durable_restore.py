"""What a durable restore costs. Run: python -m tests.benchmarks.durable_restore

- GB/s of an authenticated restore of a Muse-shaped cut into a shadow, beside mlx-lm's
  ``load_prompt_cache`` of the same bytes (evaluated: it is lazy), in turn, from cold disk and from
  the page cache. Cold: every file was synced and taken out of the page cache with
  ``POSIX_FADV_DONTNEED``, and the process is checked to have read all bytes from the device.
  A restore digests what it reads, on every core: beside other work it is the slower for it. So
  each run has the cores that others took, and pairs that ran alone have a ratio of their own.
- Memory beyond the cut up to the finished shadow, in a process of its own, for each of
  ``--memory``; beside it the whole engine's on a model with Muse's cache layout, from the
  request to the finished shadow, and from there to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
import psutil
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models import muse_glimmer
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mac_decoder.engine.events import Failed, Finished, Generation, Report, Sampling, Token
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import load
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.keeper import Keeper
from mac_decoder.kv.bare import BareModel
from mac_decoder.kv.install import build, views
from mac_decoder.kv.shadow import Shadow
from mac_decoder.reuse.cut import pieces
from mac_decoder.reuse.facts import Restore
from mac_decoder.store.publishing import Published
from protocol.blocks import namespace
from protocol.checkpoint import read_checkpoint
from protocol.layout import payload_bytes
from tests import checkpoints
from tests.benchmarks.machine import Memory, alone, device_bytes, forget
from tests.benchmarks.synthetic import IDENTITY, KEY, MUSE, SPACE, cut, keeping, rows, tokens
from tests.tiny_tokenizer import VOCABULARY

MB: Final = 1e6
BARS: Final = {"speed.cold.ratio": 0.8, "beyond_the_cut_mb": 64}
ALONE: Final = 0.25
"""Cores that others may take of a run that counts as run alone."""


def _busy_s() -> float:
    """Seconds that all cores together were not idle, since the machine started."""
    spent = psutil.cpu_times()
    return sum(spent) - spent.idle - getattr(spent, "iowait", 0.0)


class Clock:
    """Wall time, processor time of this process and of others, bytes from the device."""

    def __init__(self) -> None:
        self._device, self._busy = device_bytes()[0], _busy_s()
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def rates(self, nbytes: int) -> dict[str, float]:
        """GB/s in wall time, and for each second of one core; the share that the device gave;
        the cores that others took.
        """
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        read, busy = device_bytes()[0] - self._device, _busy_s() - self._busy
        return {
            "gb_per_s": nbytes / wall / 1e9,
            "gb_per_core_s": nbytes / cpu / 1e9,
            "from_device": read / nbytes,
            "others_cores": max(0.0, busy - cpu) / wall,
        }


def restored(keeper: Keeper, name: bytes, position: int) -> Shadow:
    """A finished shadow out of the durable tier."""
    shadow = Shadow(MUSE, 0, position)
    action = Restore("durable", name, position, position)
    if keeper.restore(action, shadow.place_piece, lambda: False).result() is None:
        raise SystemExit("the cut is not held")
    shadow.check_complete()
    return shadow


def filled(position: int) -> list[Any]:
    """mlx-lm's caches with the rows that are published."""
    held, blocks = cut(tokens(position), rows(position))
    shadow = Shadow(MUSE, 0, position)
    for piece in pieces(MUSE, position, position):
        body = held.rest if piece.source < 0 else blocks[piece.source].data
        source = body[piece.index, piece.role][piece.start : piece.start + piece.nbytes]
        shadow.place_piece(piece.index, piece.role, piece.offset, piece.nbytes)[:] = source.data
    return build(BareModel(MUSE), MUSE, shadow)


def publish(position: int, directory: Path) -> dict[str, Any]:
    """Publish a cut at ``position``; its name."""
    held, blocks = cut(tokens(position), rows(position))
    with keeping(directory / "cache", 0) as (_, store):
        done = store.publish(SPACE, IDENTITY, held, blocks)
        assert isinstance(done, Published)
    return {"name": done.name.hex()}


def save(position: int, directory: Path) -> dict[str, Any]:
    """Save mlx-lm's file of the same rows; its path."""
    file = str(directory / "cache.safetensors")
    save_prompt_cache(file, filled(position))
    return {"file": file}


def speed(position: int, rounds: int, directory: Path) -> dict[str, Any]:
    """Both arms in turn, cold and warm."""
    name = bytes.fromhex(
        alone("durable_restore", "--part", "--publish", position, directory)["name"]
    )
    file = alone("durable_restore", "--part", "--save", position, directory)["file"]
    nbytes = payload_bytes(MUSE, 0, position)
    found: dict[str, Any] = {"position": position, "bytes": nbytes}
    with keeping(directory / "cache", 0) as (keeper, _):

        def ours() -> dict[str, float]:
            clock = Clock()
            restored(keeper, name, position)
            return clock.rates(nbytes)

        def theirs() -> dict[str, float]:
            clock = Clock()
            caches: Any = load_prompt_cache(file)
            mx.eval([cache.state for cache in caches])
            return clock.rates(nbytes)

        for kind in ("cold", "warm"):
            arms: dict[Callable[[], dict[str, float]], list[dict[str, float]]] = {
                ours: [],
                theirs: [],
            }
            for number in range(rounds + (kind == "warm")):
                for arm in (ours, theirs) if number % 2 else (theirs, ours):
                    if kind == "cold":
                        forget(directory)
                    arms[arm].append(arm())
                    mx.clear_cache()
            pairs = list(zip(arms[ours], arms[theirs], strict=True))[kind == "warm" :]
            if kind == "cold" and any(run["from_device"] < 0.99 for pair in pairs for run in pair):
                raise SystemExit("not cold: not all bytes came from the device")
            found[kind] = {
                "restore": _medians([mine for mine, _ in pairs]),
                "load_prompt_cache": _medians([base for _, base in pairs]),
                **_ratios(pairs),
                "alone": _ratios([p for p in pairs if all(r["others_cores"] <= ALONE for r in p)]),
            }
        _check_same(build(BareModel(MUSE), MUSE, restored(keeper, name, position)), file, position)
    return found


def _medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {figure: statistics.median(run[figure] for run in runs) for figure in runs[0]}


def _ratios(pairs: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """Our GB/s over theirs: the median, and all of them."""
    found = sorted(round(mine["gb_per_s"] / base["gb_per_s"], 3) for mine, base in pairs)
    return {"ratio": statistics.median(found) if found else None, "ratios": found}


def _check_same(caches: list[Any], file: str, position: int) -> None:
    """That both arms gave the same bytes."""
    ours, theirs = (views(each, MUSE, position) for each in (caches, load_prompt_cache(file)))
    if any(not np.array_equal(ours[place], theirs[place]) for place in ours):
        raise SystemExit("the two arms did not load the same")


def memory(name: bytes, position: int, directory: Path) -> dict[str, Any]:
    """What a restore takes beyond the cut; to be run in a process of its own."""
    with keeping(directory / "cache", 0) as (keeper, _):
        mx.eval(mx.zeros(1))
        watch = Memory()
        shadow = restored(keeper, name, position)
        watch.end()
        return {"beyond_the_cut_mb": (watch.growth() - shadow.nbytes) / MB}


# -- the whole engine


def wide(directory: Path) -> Path:
    """A checkpoint with the cache layout of Muse Glimmer, and as little else as there can be."""
    path = checkpoints.make("muse_glimmer", directory / "wide")
    config = json.loads((path / "config.json").read_text())
    text = config["text_config"]
    count = len(MUSE.layers)
    text |= {"num_hidden_layers": count, "layer_types": ["sliding_attention"] * count}
    text["layer_types"][3::4] = ["full_attention"] * (count // 4)
    base = text["rope_parameters"]["rope_theta"]
    text["layer_rope_theta"] = [base if kind[0] == "s" else 0 for kind in text["layer_types"]]
    text |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
    text |= {"sliding_window": 2048, "max_position_embeddings": 1 << 18}
    config["dtype"] = "bfloat16"
    (path / "config.json").write_text(json.dumps(config))
    model = muse_glimmer.Model(muse_glimmer.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    random = tree_map_with_path(
        lambda _, array: (0.1 * mx.random.normal(array.shape)).astype(mx.bfloat16),
        model.parameters(),
    )
    mx.save_safetensors(
        str(path / "model.safetensors"), dict(tree_flatten(random)), {"format": "mlx"}
    )
    if read_checkpoint(path).layout != MUSE:
        raise SystemExit("the wide model does not have Muse's layout")
    return path


def prompt(position: int) -> np.ndarray:
    """The prompt whose cut at N-1 is at ``position``."""
    return tokens(position + 1) % VOCABULARY


def publish_for(model: Path, position: int, directory: Path) -> dict[str, Any]:
    """Publish random rows as the cut that the engine on ``model`` finds for the prompt."""
    identity = read_checkpoint(model).identity
    space = namespace(KEY, identity.digest())
    held, blocks = cut(prompt(position)[:-1], rows(position), space)
    with keeping(directory / "wide-cache", 0, identity) as (_, store):
        assert isinstance(store.publish(space, identity, held, blocks), Published)
    return {}


async def through_engine(
    model: Path, position: int, directory: Path, ram_bytes: int
) -> dict[str, Any]:
    """Memory of the whole process, from the request to its first token."""
    checkpoint = read_checkpoint(model)
    text = tuple(int(token) for token in prompt(position))
    nbytes = payload_bytes(MUSE, 0, position)
    with keeping(directory / "wide-cache", ram_bytes, checkpoint.identity) as (keeper, _):
        settings = EngineSettings(ram_bytes=ram_bytes)
        engine = Engine(lambda: load(checkpoint), settings, keeper=keeper)
        await engine.start()
        watch = Memory()
        asked = time.perf_counter()
        first, report = 0.0, None
        async with engine.submit(Generation("bench", text, 2, Sampling(temperature=0.0))) as events:
            async for event in events:
                if isinstance(event, Token):
                    first = first or time.perf_counter()
                elif isinstance(event, Finished):
                    report = event.report
                elif isinstance(event, Failed):
                    raise SystemExit(f"the request failed: {event.error.reason}")
        watch.end()
        await engine.close()
    if not isinstance(report, Report) or (report.source, report.reused_tokens) != (
        "durable",
        position,
    ):
        raise SystemExit(f"not the restore that is measured: {report}")
    before = ("queue", "lookup", "read", "verify", "place")
    finished = asked + sum(report.phases[name] for name in before) / 1e3
    return {
        "beyond_the_cut_mb": (watch.growth(asked, finished) - nbytes) / MB,
        "install_to_first_token_mb": (watch.growth(finished, first) - nbytes) / MB,
        "cut_mb": nbytes / MB,
        "ttft_ms": report.ttft_ms,
        "phases": dict(report.phases),
    }


def footprint(position: int, directory: Path) -> dict[str, Any]:
    """All figures of memory at one position, each from a process of its own."""
    name = alone("durable_restore", "--part", "--publish", position, directory)["name"]
    found = alone("durable_restore", "--part", "--restore", name, position, directory)
    model = alone("durable_restore", "--part", "--wide", directory)["model"]
    alone("durable_restore", "--part", "--publish-for", model, position, directory)
    for ram, key in ((0, "engine"), (8 << 30, "engine_with_ram_tier")):
        found[key] = alone("durable_restore", "--part", "--engine", model, position, directory, ram)
    return {"position": position, **found}


def parts(arguments: list[str]) -> dict[str, Any]:
    """What this module does in a process of its own."""
    match arguments:
        case ["--publish", position, directory]:
            return publish(int(position), Path(directory))
        case ["--save", position, directory]:
            return save(int(position), Path(directory))
        case ["--restore", name, position, directory]:
            return memory(bytes.fromhex(name), int(position), Path(directory))
        case ["--wide", directory]:
            return {"model": str(wide(Path(directory)))}
        case ["--publish-for", model, position, directory]:
            return publish_for(Path(model), int(position), Path(directory))
        case ["--engine", model, position, directory, ram]:
            work = through_engine(Path(model), int(position), Path(directory), int(ram))
            return asyncio.run(work)
    raise SystemExit(f"no such part: {arguments}")


def main() -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--position", type=int, default=32_000, help="of the cut that is timed")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", type=int, nargs="*", default=[32_768, 131_072])
    parser.add_argument("--directory", type=Path, help="on the disk that is to be measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--part", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(parts(options.part)))
        return
    found: dict[str, Any] = {"bars": BARS}
    if options.rounds:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            found["speed"] = speed(options.position, options.rounds, Path(directory))
    for position in options.memory:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            found[f"memory at {position}"] = footprint(position, Path(directory))
    print(json.dumps(found, indent=None if options.json else 1))


if __name__ == "__main__":
    main()
