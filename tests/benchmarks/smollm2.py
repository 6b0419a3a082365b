"""SmolLM2-135M-Instruct as fp32, bf16, q4 and q8, for benchmarks and long tests.

    python -m tests.benchmarks.smollm2 [DIRECTORY]

Prints the directory that holds the four, under the platform's cache unless said otherwise;
they are made when they are missing, fp32 from the demo's model and the others from fp32.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from app import convert
from app.demo_model import cache_root, ensure


def checkpoints(root: Path | None = None) -> Path:
    """The directory of the four checkpoints; each has its name only once it is whole."""
    home = cache_root(root) / "smollm2"
    home.mkdir(parents=True, exist_ok=True)
    fp32 = home / "fp32"
    if not fp32.exists():
        fp32.symlink_to(ensure(root).resolve(), target_is_directory=True)
    for name in ("bf16", "q4", "q8"):
        if (home / name).exists():
            continue
        half = home / f".making-{name}"
        shutil.rmtree(half, ignore_errors=True)
        half.mkdir()
        if name == "bf16":
            convert.from_directory(fp32, half, "bfloat16")
        else:
            convert.quantise(fp32, half, int(name[1:]))
        half.rename(home / name)
    return home


if __name__ == "__main__":
    print(checkpoints(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
