"""Breaks one rule of the reuse ladder, or of a tier, at a time and shows that a test notices.

    python -m tests.mutants [NAME ...] [--json]

Each mutant is a small change of one file, made in a copy of the project; the tests named with
it, which pass in ``make test``, must then fail. Exit status 1 where a mutant survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
COPIED = ("protocol", "trust", "mac_decoder", "gb10_producer", "app", "tests", "conftest.py")
ENGINE = "tests/mac_decoder/engine/test_reuse.py"
MACHINES = "tests/machines/test_resume.py"
RESUMED = "tests/e2e/test_resume.py"
TRANSFERS = "tests/gb10_producer/test_transfers.py"
PREFIXES = "tests/gb10_producer/test_prefix_cache.py"
EXTRA = "tests/e2e/test_extra_cuts.py"
COMPARED = "tests/mac_decoder/qualify/test_compare.py"
QUALIFIED = "tests/mac_decoder/qualify/test_qualifier.py"


class Mutant(NamedTuple):
    """``before`` occurs exactly once in ``path``; ``tests`` are pytest's arguments."""

    name: str
    path: str
    before: str
    after: str
    tests: tuple[str, ...]


MUTANTS = (
    Mutant(
        "ring order",
        "mac_decoder/kv/sliding.py",
        "if stop < cache.offset and stop < array.shape[2]:",
        "if False:",
        ("tests/mac_decoder/kv/test_sliding.py",),
    ),
    Mutant(
        "durable cap",
        "mac_decoder/reuse/ladder.py",
        "return min(offer.position, durable.shared)",
        "return offer.position",
        ("tests/mac_decoder/reuse/test_ladder.py",),
    ),
    Mutant(
        "a damaged cut is not served from memory",
        "mac_decoder/reuse/ladder.py",
        'case "refused" | "invalid":\n            return 0',
        'case "refused" | "invalid":\n            return offer.position',
        ("tests/mac_decoder/reuse/test_ladder.py",),
    ),
    Mutant(
        "turn cut: where the answer ended",
        "mac_decoder/engine/sequences.py",
        'kept = self._taken(request, Cut(left.caches, position, "turn"), tokens)',
        "kept = None",
        (ENGINE, "-k", "end_of_a_turn"),
    ),
    Mutant(
        "turn cut: where the next turn parts",
        "mac_decoder/engine/cuts.py",
        '    roles |= {position: "turn" for position in turns if 0 < position < end}\n',
        "",
        (ENGINE, "-k", "others_will_share"),
    ),
    Mutant(
        "token comparison",
        "mac_decoder/reuse/radix.py",
        "if child is None or child.parent is not node or child.tokens != ahead:",
        "if child is None or child.parent is not node:",
        ("tests/mac_decoder/reuse/test_radix.py",),
    ),
    Mutant(
        "token comparison, live",
        "mac_decoder/reuse/radix.py",
        "return int(parted.argmax()) if parted.any() else count",
        "return count",
        (ENGINE, "-k", "not_held_is_computed or replay_of and live and llama"),
    ),
    Mutant(
        "API keys apart, live",
        "mac_decoder/engine/live.py",
        "if held.space == space\n        )\n        return tuple",
        "if held.space\n        )\n        return tuple",
        (ENGINE, "-k", "salts"),
    ),
    Mutant(
        "rows that are no numbers",
        "mac_decoder/engine/fill.py",
        "self._sequences.keep(request, cut, finite=True)",
        "self._sequences.keep(request, cut)",
        (ENGINE, "-k", "prefill_that_broke"),
    ),
    Mutant(
        "decoded spans stay apart",
        "mac_decoder/reuse/cut.py",
        'prefilled = span.recipe.who != "decoder_decode"',
        "prefilled = True",
        (ENGINE, "-k", "one_more_token and muse_glimmer"),
    ),
    Mutant(
        "digest of a block",
        "mac_decoder/store/reading.py",
        "if source.digest() != manifest.files[number]:",
        "if False:",
        ("tests/mac_decoder/store/test_damage.py", "tests/mac_decoder/store/test_reading.py"),
    ),
    Mutant(
        "digest of a rest",
        "mac_decoder/store/reading.py",
        "if source.digest() != self.manifest.rest[list(offsets).index(place)]:",
        "if False:",
        (ENGINE, "-k", "damaged_file"),
    ),
    Mutant(
        "the boundary token is never restored",
        "mac_decoder/reuse/facts.py",
        "return self.tokens - 1",
        "return self.tokens",
        ("tests/mac_decoder/reuse/test_ladder.py",),
    ),
    Mutant(
        "a state is captured at its position",
        "mac_decoder/engine/fill.py",
        "            cut = Cut(prefill.caches, stop.end, stop.role)",
        "            cut = Cut(prefill.caches, stop.end, stop.role)\n            prefill.advance()",
        (ENGINE, "-k", "others_will_share and lfm2"),
    ),
    Mutant(
        "a restored state is the saved one",
        "mac_decoder/tiers/restores.py",
        "np.copyto(target[start : start + _CHUNK], rows[start : start + _CHUNK])",
        "target[start : start + _CHUNK].fill(0)",
        (ENGINE, "-k", "replay_of and resident and qwen3_next"),
    ),
    Mutant(
        "token comparison, producer",
        "gb10_producer/prefix_cache.py",
        " or not np.array_equal(tile.tokens, piece):",
        ":",
        (PREFIXES, "-k", "a_hash"),
    ),
    Mutant(
        "what lies before a tile, producer",
        "gb10_producer/prefix_cache.py",
        "tile.parent is not parent or ",
        "",
        (PREFIXES, "-k", "what_lies_before_it"),
    ),
    Mutant(
        "a window's last rows, producer",
        "gb10_producer/prefix_cache.py",
        "kept, attended = tile, window - 1",
        "kept, attended = tile, max(window - 2, 0)",
        (PREFIXES, "-k", "windows_go_on"),
    ),
    Mutant(
        "a state lies in memory as it did, producer",
        "gb10_producer/prefix_cache.py",
        "flat.as_strided(state.shape, state.stride())",
        "flat.view(state.shape)",
        (PREFIXES, "-k", "lies_in_memory"),
    ),
    Mutant(
        "a pass that failed leaves nothing, producer",
        "gb10_producer/prefill.py",
        "self._prefixes.clear()\n            raise",
        "raise",
        (PREFIXES, "-k", "fails_leaves_nothing"),
    ),
    Mutant(
        "what a job goes on from is forgotten last, producer",
        "gb10_producer/prefix_cache.py",
        "                break\n            chain.tiles.append(tile)\n        self._touch(chain)",
        "                break\n            chain.tiles.append(tile)",
        (PREFIXES, "-k", "jobs_come_before"),
    ),
    Mutant(
        "a frame that came in half comes again",
        "mac_decoder/handoff/transfer.py",
        "            reception.forget_last(self._order.layout)",
        "            reception._pending.pop()",
        (RESUMED, "-k", "twenty_offsets and close"),
    ),
    Mutant(
        "what was sealed is not made anew",
        "protocol/sending.py",
        "        elif sequence > self._stream.frames:",
        "        else:\n            self._stream.add(digest, nbytes)\n"
        "        if sequence > self._stream.frames:",
        (MACHINES, "-k", "sent_again"),
    ),
    Mutant(
        "a transfer is for its own request",
        "protocol/sending.py",
        "            and hmac.compare_digest(resume.prefill, self.name)\n",
        "",
        (MACHINES, "-k", "another_request"),
    ),
    Mutant(
        "nothing below what arrived",
        "gb10_producer/transfers.py",
        "require_resumable(resume, transfer.arrived)",
        "require_resumable(resume, 0)",
        (TRANSFERS, "-k", "acknowledged_cannot"),
    ),
    Mutant(
        "rows are kept until they arrived",
        "gb10_producer/serving.py",
        "transfer.ticket.reader.sent_to(serving.passing.popleft()[1])",
        "transfer.ticket.reader.pass_to(serving.passing.popleft()[1])",
        (RESUMED, "-k", "twice_in_one"),
    ),
    Mutant(
        "spaces are kept apart, producer",
        "gb10_producer/prefix_cache.py",
        "else self._seed + self._space",
        "else self._seed",
        (PREFIXES, "-k", "another_space"),
    ),
    Mutant(
        "an extra cut lies in the last tile",
        "protocol/layout.py",
        "lowest = max(cut + 1, (end - 1) // tile * tile, ",
        "lowest = max(cut + 1, ",
        ("tests/protocol/test_layout.py",),
    ),
    Mutant(
        "an extra cut lies within the windows",
        "protocol/layout.py",
        "end - min(windows, default=end))",
        "0)",
        ("tests/protocol/test_layout.py",),
    ),
    Mutant(
        "an extra cut ends a tile",
        "protocol/layout.py",
        "last = min((stop for stop in extra if first < stop < grid), default=grid)",
        "last = grid",
        ("tests/gb10_producer/test_prefill.py", "-k", "extra_cut"),
    ),
    Mutant(
        "a tile that an extra cut divides is not taken from what is kept",
        "gb10_producer/prefill.py",
        "self._prefixes.find(tokens, extra[0] if extra else end)",
        "self._prefixes.find(tokens, end)",
        (PREFIXES, "-k", "extra_cuts"),
    ),
    Mutant(
        "the windows of an extra cut are its own",
        "mac_decoder/kv/install.py",
        "_cut_off(rows, shadow.end - stop, count)",
        "_cut_off(rows, 0, count)",
        (EXTRA, "-k", "muse_glimmer"),
    ),
    Mutant(
        "the states of an extra cut are its own",
        "mac_decoder/kv/shadow.py",
        "at = slot.last if slot.role >= STATE else self.end",
        "at = self.end",
        (EXTRA, "-k", "lfm2"),
    ),
    Mutant(
        "held windows reach back to an extra cut",
        "mac_decoder/engine/handoffs.py",
        "not supplies_delta(layout, delta.held, start, found[0])",
        "False",
        (EXTRA, "-k", "held_window"),
    ),
    Mutant(
        "an extra cut's rows were computed up to it",
        "protocol/manifest.py",
        "if part.first < extra < part.last and extra % part.recipe.tile:",
        "if False:",
        ("tests/protocol/test_manifest.py",),
    ),
    Mutant(
        "nobody asks a producer without a verdict",
        "mac_decoder/qualify/gate.py",
        "if verdict is None or verdict.recipe != recipe:",
        "if verdict is not None and verdict.recipe != recipe:",
        (QUALIFIED, "-k", "honest and llama"),
    ),
    Mutant(
        "rows that differ make a producer unfit",
        "mac_decoder/qualify/compare.py",
        "return self.excess <= 1.0",
        "return True",
        (QUALIFIED, "-k", "computes_something_else and float32"),
    ),
    Mutant(
        "every row of the first layer counts",
        "mac_decoder/qualify/compare.py",
        "most = median if behind else float(apart.max())",
        "most = median",
        (COMPARED,),
    ),
    Mutant(
        "a layer is compared with those before",
        "mac_decoder/qualify/compare.py",
        "min(growth * so_far + bound.slack, bound.worst)",
        "bound.worst",
        (COMPARED,),
    ),
    Mutant(
        "each probe has its turn",
        "mac_decoder/qualify/qualifier.py",
        "one = every[known.turn % len(every)]",
        "one = every[0]",
        (QUALIFIED, "-k", "has_its_turn"),
    ),
    Mutant(
        "the recipe is that of the connection that is used",
        "mac_decoder/qualify/gate.py",
        "recipe=verdict.recipe if verdict is not None else None,",
        "recipe=None,",
        (QUALIFIED, "-k", "on_the_connection_that_is_used or just_sending"),
    ),
    Mutant(
        "another release here is compared anew",
        "mac_decoder/qualify/verdicts.py",
        "(self.identity, self.here, self.recipe) == (identity, here, recipe)",
        "(self.identity, self.recipe) == (identity, recipe)",
        ("tests/mac_decoder/qualify/test_verdicts.py",),
    ),
)


def check(mutant: Mutant) -> bool:
    """Whether the mutant's tests fail with it."""
    with tempfile.TemporaryDirectory(prefix="baton-mutant-") as made:
        copy = Path(made)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for name in ("pyproject.toml", "README.md", "constraints.txt"):
            shutil.copy(ROOT / name, copy / name)
        path = copy / mutant.path
        text = path.read_text()
        if text.count(mutant.before) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.path} has changed; mend the mutant")
        path.write_text(text.replace(mutant.before, mutant.after))
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
            check=False,
        )
        # 1: tests ran and failed. Anything else is no verdict about the mutant.
        if done.returncode not in (0, 1):
            raise SystemExit(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout}")
        return done.returncode == 1


def main() -> int:
    """Check the mutants that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wanted = [one for one in MUTANTS if not options.names or one.name in options.names]
    found: dict[str, bool] = {}
    for mutant in wanted:
        found[mutant.name] = check(mutant)
        if not options.json:
            print(f"{'noticed' if found[mutant.name] else 'SURVIVES':<9} {mutant.name}", flush=True)
    if options.json:
        print(json.dumps(found))
    return 0 if found and all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
