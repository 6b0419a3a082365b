"""Store format 1, frozen: the same cut makes the same files, and the old files still restore.

``python -m tests.golden.test_store_v1 > tests/golden/store_v1.json`` made the file. A released
file is never made again; a new format gets a new file beside it.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from mac_decoder.reuse.cut import divide
from mac_decoder.store.files import RealDisk
from mac_decoder.store.store import Store
from protocol.blocks import namespace
from protocol.identity import Identity
from protocol.layout import FullLayer, Layout, RecurrentLayer, SlidingLayer, StateArray, regions
from protocol.messages import History, Recipe
from tests.mac_decoder.store.made import Destination

FILE = Path(__file__).parent / "store_v1.json"
KEY = bytes(range(32))
IDENTITY = Identity(*(f"{number:064x}" for number in range(1, 8)), "none")
SPACE = namespace(KEY, IDENTITY.digest())
LAYOUT = Layout(
    (
        FullLayer(0, 1, 2, 1, "float16"),
        SlidingLayer(1, 1, 1, 1, "bfloat16", 3),
        RecurrentLayer(
            2, (StateArray("conv", (2, 2), "bfloat16"), StateArray("s", (1,), "float32"))
        ),
    )
)
TOKENS = [(number * 2_654_435_761) % (1 << 32) for number in range(258)]
HISTORY = (
    History(0, 200, Recipe("producer", "cuda", "bfloat16", 512)),
    History(200, 258, Recipe("decoder_decode", "mlx", "bfloat16", 1)),
)


def rows() -> dict[tuple[int, int], bytes]:
    """All bytes of the cache, each place its own pattern."""
    return {
        (r.index, r.role): bytes((7 * r.index + 3 * r.role + at) % 251 for at in range(r.nbytes))
        for r in regions(LAYOUT, 0, len(TOKENS))
    }


def written(directory: Path) -> dict[str, str]:
    """The files of a store with this one cut, as base64, by path."""
    arrays = {place: np.frombuffer(data, np.uint8) for place, data in rows().items()}
    cut, blocks = divide(LAYOUT, SPACE, TOKENS, arrays, HISTORY)
    with Store.open(directory, KEY, 1 << 30, 0) as store:
        store.publish(SPACE, IDENTITY, cut, blocks)
    return {
        found.path: base64.b64encode((directory / found.path).read_bytes()).decode()
        for found in sorted(RealDisk().walk(directory))
        if found.path.endswith(".safetensors")
    }


def test_the_same_cut_makes_the_same_files(tmp_path: Path) -> None:
    assert written(tmp_path) == json.loads(FILE.read_text())


def test_the_frozen_files_still_restore(tmp_path: Path) -> None:
    Store.open(tmp_path, KEY, 1 << 30, 0).close()
    for path, data in json.loads(FILE.read_text()).items():
        (tmp_path / path).write_bytes(base64.b64decode(data))
    (tmp_path / "index.sqlite").unlink()
    with Store.open(tmp_path, KEY, 1 << 30, 0) as store:
        holding = store.holding(SPACE, TOKENS)
        (offer,) = holding.offers
        memory = Destination(LAYOUT, len(TOKENS))
        done = store.read(bytes(offer.key), memory.into)  # type: ignore[call-overload]
        assert done
        assert done.manifest.tokens.tolist() == TOKENS
        assert (done.manifest.identity, done.manifest.layout) == (IDENTITY, LAYOUT)
        assert (done.manifest.history, done.manifest.role) == (HISTORY, "turn")
        assert all(memory.arrays[place].tobytes() == data for place, data in rows().items())
        assert store.verify().bad == []


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        json.dump(written(Path(directory)), sys.stdout, indent=1)
        print()
