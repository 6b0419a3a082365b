"""Kills a writing process again and again: ``python -m tests.mac_decoder.store.killed DIR N SEED``.

The ledger of what was acknowledged is a file outside of the store. Every life first proves all
that is in it, byte for byte, then publishes until it is killed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from mac_decoder.store.events import Deleting, Event
from mac_decoder.store.limits import MIN_CAP
from mac_decoder.store.publishing import Published
from mac_decoder.store.store import Store
from protocol.layout import FullLayer, Layout, SlidingLayer
from tests.mac_decoder.store.made import (
    IDENTITY,
    KEY,
    SPACE,
    conversation,
    made,
    name_of,
    serves,
)

LAYOUT = Layout((FullLayer(0, 2, 64, 64, "float32"), SlidingLayer(1, 1, 4, 4, "float32", 64)))
"""1 KiB a row of the full layer: a few hundred cuts fill the cap, so that deletions run too."""


END = "."
"""Ends every line of the ledger that is whole."""


def text(seed: int, length: int) -> list[int]:
    """Conversations in groups of four that share a beginning."""
    return conversation(length, seed, shared=256) if seed % 4 else conversation(length, seed)


def acknowledged(ledger: Path) -> dict[bytes, tuple[int, int]]:
    """Cuts of whole lines: published, and not announced as deleted since."""
    held: dict[bytes, tuple[int, int]] = {}
    files: dict[str, bytes] = {}
    for line in ledger.read_text().split("\n"):
        kind, *rest = line.split() or [""]
        if not rest or rest.pop() != END:
            continue  # its writer was killed before it was whole, and told nobody
        if kind == "published":
            name = bytes.fromhex(rest[0])
            held[name] = (int(rest[2]), int(rest[3]))
            files[rest[1]] = name
        else:
            held.pop(files.get(rest[0], b""), None)
    return held


def live(directory: Path, ledger: Path, seed: int, ready: int) -> None:
    """One life; never returns by itself."""
    dice = random.Random(seed)
    book = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(*words: object) -> None:
        os.write(book, (" ".join(map(str, (*words, END))) + "\n").encode())

    def heard(event: Event) -> None:
        if isinstance(event, Deleting):
            note("deleting", event.path)

    os.write(book, b"\n")  # the last life may have been killed in the middle of a line
    known = acknowledged(ledger)
    store = Store.open(directory, KEY, MIN_CAP, 0, listener=heard)
    # Start-up may make room: what it announced is not promised any more.
    known = {name: known[name] for name in acknowledged(ledger)}
    for number, length in known.values():
        assert serves(store, LAYOUT, text(number, length)), (number, length)
    found = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    assert store.stats().on_disk == found <= MIN_CAP
    os.write(ready, b"1")
    while True:
        number, length = dice.randrange(40), dice.choice((5, 256, 300, 700, 1000))
        tokens = text(number, length)
        cut, blocks = made(LAYOUT, tokens)
        role = "step" if length in (256, 300) else "turn"
        done = store.publish(SPACE, IDENTITY, cut, blocks, role=role)
        assert isinstance(done, Published)
        name = name_of(LAYOUT, tokens)
        file = store._held.ledger.cuts[name].file
        note("published", name.hex(), f"cuts/{file.hex()}.safetensors", number, length)


def main(directory: Path, lives: int, seed: int) -> int:
    """Let ``lives`` processes die; 0 if none of them found anything wrong."""
    dice = random.Random(seed)
    ledger = directory.with_suffix(".ledger")
    ledger.touch()
    for life in range(lives):
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ready)
            live(directory, ledger, seed * 1_000_003 + life, tell)
        os.close(tell)
        proven = os.read(ready, 1)
        os.close(ready)
        if proven:
            time.sleep(dice.random() ** 2 * 0.15)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not proven or not os.WIFSIGNALED(status):
            print(f"life {life} found something wrong", file=sys.stderr)
            return 1
    print(len(acknowledged(ledger)), ledger.read_text().count("published"))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
