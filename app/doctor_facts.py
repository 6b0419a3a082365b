"""What `baton doctor` finds out about this machine: facts, and the looking. No judgement.

Every fact is a record that a test can write down, for any system. Looking asks little: no
framework is imported into this process, nothing is written, and what cannot be read is said.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, Literal

import httpx
import psutil

from app.install import installed as installed_service
from app.service import Installed, Side
from app.status import base_url, fetch_status
from mac_decoder.config import DecoderConfig
from mac_decoder.store.limits import default_limits
from protocol import halves, releases
from protocol.checkpoint import Checkpoint, read_checkpoint
from protocol.errors import BatonError, ConfigError, TransferError
from trust.peers import Fault, Peer, Peers
from trust.secrets import Choice, secrets_of

LINK_PORT: Final = 7431
PAIRING_PORT: Final = 7432

_DEVICE_S: Final = 120.0
"""A first import of torch on a cold disk takes its time; one that hangs is a finding."""

# Here a framework may hang or end the process, as with a broken driver.
_LOOK: Final[Mapping[str, str]] = {
    "mlx": """
import json
from mac_decoder import blas
used = blas.use(blas.AUTO)
import mlx.core as mx
found = mx.metal.is_available()
name = mx.device_info().get("device_name", "Metal") if found else ""
print(json.dumps({"gpu": str(name), "shared": found, "blas": used}))
""",
    "torch": """
import json
import torch
found = torch.cuda.is_available()
gpu = torch.cuda.get_device_properties(0) if found else None
name = f"{gpu.name}, CUDA {torch.version.cuda}" if gpu else ""
print(json.dumps({"gpu": name, "shared": bool(gpu and gpu.is_integrated)}))
""",
}


@dataclass(frozen=True)
class System:
    """``name`` as ``platform.system`` says it, ``told`` for people."""

    name: str
    told: str
    python: str

    @property
    def is_macos(self) -> bool:
        return self.name == "Darwin"


@dataclass(frozen=True)
class Package:
    """``version`` is empty where it is not installed, ``measured`` where any will do."""

    name: str
    version: str
    measured: str = ""


@dataclass(frozen=True)
class Device:
    """What a framework computes on: a GPU's name, empty for the processor.

    ``shared`` says that the GPU has no memory of its own; ``driver`` that NVIDIA's is loaded;
    ``blas``: what multiplies on the processor instead of MLX's own library. ``error``: why the
    framework cannot be used.
    """

    framework: str
    gpu: str = ""
    shared: bool = False
    driver: bool = False
    blas: str = ""
    error: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes, by the operating system's count."""

    total: int
    available: int


@dataclass(frozen=True)
class Disk:
    """The volume of a directory in bytes; ``cap`` and ``floor`` as the durable tier has them."""

    place: Path
    free: int
    cap: int
    floor: int


@dataclass(frozen=True)
class Port:
    """``holder`` is empty where the port is free, else a program's name."""

    number: int
    purpose: str
    holder: str = ""
    is_baton: bool = False


@dataclass(frozen=True)
class Directory:
    """A directory that there is, whose it is, and its mode."""

    path: Path
    mode: int
    ours: bool


@dataclass(frozen=True)
class Registry:
    """Whom a side of this machine is paired with; ``refusal`` if nobody can tell."""

    side: Side
    choice: Choice
    peers: tuple[Peer, ...] = ()
    faults: tuple[Fault, ...] = ()
    refusal: BatonError | None = None


@dataclass(frozen=True)
class Clock:
    """This machine's time, and that of the decoder, if that is on another machine."""

    now: datetime
    decoders: datetime | None = None


@dataclass(frozen=True)
class Running:
    """What the decoder at ``url`` says of itself, or why it says nothing."""

    url: str
    status: Mapping[str, Any] | None = None
    reason: str = ""
    message: str = ""
    hint: str = ""

    @property
    def links(self) -> Sequence[Mapping[str, Any]]:
        """Its links to producers."""
        return ((self.status or {}).get("engine") or {}).get("links") or []


Model = Checkpoint | BatonError
"""A checkpoint that was read, or why it cannot be."""


def system() -> System:
    """This machine's system."""
    return System(platform.system(), platform.platform(), platform.python_version())


def sides() -> dict[Side, tuple[str, ...]]:
    """Each side, and the modules that it lacks here."""
    names: tuple[Side, ...] = ("decoder", "producer")
    return {name: halves.missing(name) for name in names}


def packages(able: Iterable[Side]) -> list[Package]:
    """Baton itself, and the frameworks of the sides that this machine can run."""
    wanted = {"decoder": releases.DECODER, "producer": releases.PRODUCER}
    names = dict.fromkeys(name for side in able for name in wanted[side])
    found = releases.installed(("baton-llm", *names))
    return [Package(name, found[name], releases.MEASURED.get(name, "")) for name in found]


def device(framework: Literal["mlx", "torch"]) -> Device:
    """What a framework computes on, asked in another process."""
    driver = Path("/proc/driver/nvidia/version").exists()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK[framework]],
            capture_output=True,
            text=True,
            timeout=_DEVICE_S,
            stdin=subprocess.DEVNULL,
        )
        found = json.loads(done.stdout)
        return Device(framework, found["gpu"], found["shared"], driver, found.get("blas", ""))
    except subprocess.TimeoutExpired:
        return Device(framework, driver=driver, error=f"no answer within {_DEVICE_S:.0f} s")
    except (ValueError, LookupError, TypeError):
        said = done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"]
        return Device(framework, driver=driver, error=said[-1])


def memory() -> Memory:
    """This machine's memory: where the GPU shares it, no other figure says anything."""
    found = psutil.virtual_memory()
    return Memory(int(found.total), int(found.available))


def disk(place: Path) -> Disk:
    """The volume on which the decoder's caches are, or would be."""
    existing = next(path for path in (place, *place.parents) if path.exists())
    limits = default_limits(existing)
    return Disk(place, shutil.disk_usage(existing).free, limits.cap_bytes, limits.floor_bytes)


def port(number: int, purpose: str) -> Port:
    """Who listens on a port of this machine."""
    if not _listens(number):
        return Port(number, purpose)
    for process in psutil.process_iter(["name", "cmdline"]):
        try:
            listening = any(
                one.status == psutil.CONN_LISTEN and one.laddr.port == number
                for one in process.net_connections("tcp")
            )
        except psutil.Error:
            continue  # somebody else's, or gone
        if listening:
            words = process.info["cmdline"] or []
            known = {"mac_decoder", "app.decoder", "gb10_producer", "app.cli"}
            is_baton = any(word in known or Path(word).name == "baton" for word in words)
            return Port(number, purpose, f"{process.info['name']} ({process.pid})", is_baton)
    return Port(number, purpose, "a program of another user")


def _listens(number: int) -> bool:
    """Whether a port is taken on loopback or on every address."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        if probe.connect_ex(("127.0.0.1", number)) == 0:
            return True
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", number))
        except OSError:
            return True
    return False


def directories(paths: Iterable[Path]) -> list[Directory]:
    """Those of the paths that there are."""
    found: list[Directory] = []
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        mode = stat.S_IMODE(status.st_mode)
        found.append(Directory(path, mode, status.st_uid == os.geteuid()))
    return found


def private_directories(config: DecoderConfig) -> list[Path]:
    """Where secrets and caches are, which is prompts in another form."""
    decoder = config.state_path
    producer = decoder.parent / "producer"
    held = ("peers", "own", "api-keys", "https", "qualified")
    state = [side / name for side in (decoder, producer) for name in held]
    return [decoder, producer, *state, config.cache_path]


def registry(side: Side, directory: Path, choice: Choice) -> Registry:
    """Whom a side is paired with. The keyring is asked only if somebody is."""
    try:
        found = Peers(directory, side, secrets_of(choice)).all()
    except ConfigError as error:
        return Registry(side, choice, refusal=error)
    return Registry(side, choice, found.peers, found.faults)


def keyring_usable() -> bool:
    """Whether this login has a keyring at all; nothing is read from it."""
    import keyring
    from keyring.backends import fail

    return not isinstance(keyring.get_keyring(), fail.Keyring)


def running(url: str, key: str | None) -> Running:
    """What a decoder at ``url`` says, if there is one."""
    try:
        return Running(url, fetch_status(url, timeout_s=5.0, key=key))
    except TransferError as error:
        return Running(url, None, error.reason, error.message, error.hint or "")


def clock(found: Running, *, elsewhere: bool) -> Clock:
    """The time here, and where the decoder is."""
    now = datetime.now(UTC)
    if not elsewhere or found.reason == "decoder_unreachable":
        return Clock(now)
    try:
        said = httpx.get(f"{base_url(found.url)}/health", timeout=5.0).headers.get("date", "")
        return Clock(datetime.now(UTC), parsedate_to_datetime(said).astimezone(UTC))
    except (httpx.HTTPError, ValueError, TypeError):
        return Clock(now)


def service(side: Side) -> Installed | None:
    """The installed service of a side, where there is a manager that could be asked."""
    try:
        return installed_service(side)
    except ConfigError:
        return None


def model(path: Path) -> Model:
    """A checkpoint, read and hashed."""
    try:
        return read_checkpoint(path)
    except BatonError as error:
        return error


def baton_version() -> str:
    """The release of Baton that runs here."""
    return importlib.metadata.version("baton-llm")
