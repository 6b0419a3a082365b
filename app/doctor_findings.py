"""What `baton doctor` says about this machine: pure functions of facts, one for each check."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from app.doctor_facts import (
    Clock,
    Device,
    Directory,
    Disk,
    Memory,
    Model,
    Package,
    Port,
    Registry,
    Running,
    System,
)
from app.service import COMMANDS, Installed, Side
from app.view.words import human_bytes
from protocol import releases
from protocol.errors import BatonError, ConfigError
from protocol.halves import install_command

Verdict = Literal["ok", "remark", "wrong"]

EARLIEST: Final = 2025
LATEST: Final = 2100
"""Years between which a clock is believed."""

_CLOCKS_APART_S: Final = 30.0
_LEAST_FREE_DISK: Final = 1_000_000_000
_CLOSED: Final = 0o077


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; ``what_to_do`` is empty where nothing is to be done."""

    subject: str
    verdict: Verdict
    found: str
    what_to_do: str = ""


def python(system: System) -> Finding:
    """Which Python, and on what."""
    return Finding("python", "ok", f"{system.python} on {system.told}")


def package(found: Package) -> Finding:
    """Whether a framework is a release that Baton was measured with."""
    if not found.measured:
        return Finding(found.name, "ok", found.version or "unknown")
    try:
        remarks = releases.require_measured({found.name: found.version})
    except ConfigError as error:
        return Finding(found.name, "wrong", error.message, error.hint or error.reason)
    if remarks:
        return Finding(
            found.name, "remark", remarks[0], f"pip install '{found.name}=={found.measured}'"
        )
    return Finding(found.name, "ok", found.version)


def sides(lacking: Mapping[Side, Sequence[str]]) -> Finding:
    """Which of the two sides this machine can run."""
    able = [side for side, missing in lacking.items() if not missing]
    if able:
        return Finding("can run", "ok", " and ".join(able))
    return Finding("can run", "wrong", "neither side", install_command("decoder"))


def decoders_device(found: Device, system: System) -> Finding:
    """What MLX computes on."""
    subject = "MLX"
    if found.error:
        return _broken(subject, found)
    if found.gpu:
        return Finding(subject, "ok", f"Metal: {found.gpu}")
    if system.is_macos:
        return Finding(
            subject,
            "wrong",
            "no Metal device",
            "use a Python for Apple silicon (arm64) on the Mac itself, not in a virtual machine",
        )
    told = "no Metal: a decoder here computes on the processor"
    if not found.blas:
        return Finding(
            subject,
            "remark",
            f"{told}, with MLX's own slow library",
            "install OpenBLAS (apt install libopenblas0-pthread), which baton serve then uses: "
            "float32 is twenty times as fast with it",
        )
    return Finding(
        subject,
        "remark",
        f"{told}, with {found.blas}",
        "run the decoder on a Mac, unless this is a trial",
    )


def producers_device(found: Device, system: System) -> Finding:
    """What torch computes on."""
    subject = "torch"
    if found.error:
        return _broken(subject, found)
    if found.gpu:
        return Finding(subject, "ok", found.gpu)
    if found.driver:
        return Finding(
            subject,
            "wrong",
            "NVIDIA's driver is loaded, but torch sees no CUDA device",
            f"install the CUDA build of torch {releases.MEASURED['torch']}, and see nvidia-smi",
        )
    if system.is_macos:
        return Finding(subject, "ok", "the processor: good for trials and for --exact")
    return Finding(
        subject,
        "remark",
        "no CUDA: a producer here computes on the processor",
        "run the producer on an NVIDIA machine, unless this is a trial",
    )


def _broken(subject: str, found: Device) -> Finding:
    return Finding(
        subject,
        "wrong",
        f"cannot be used: {found.error}",
        f"try: python -c 'import {'mlx.core' if found.framework == 'mlx' else 'torch'}'",
    )


def memory(found: Memory, devices: Iterable[Device], model: Model | None) -> Finding:
    """Whether there is room, by the operating system's count."""
    text = f"{human_bytes(found.available)} of {human_bytes(found.total)} available"
    if any(device.shared for device in devices):
        text += ", which the GPU shares: it has none of its own"
    if model is not None and not isinstance(model, BatonError):
        text += f"; the weights take {human_bytes(model.nbytes)}"
        if model.nbytes >= found.available:
            choose = "close other programs, or choose a smaller or quantised model"
            return Finding("memory", "wrong", text, choose)
    if found.available < found.total // 10:
        return Finding("memory", "remark", text, "close other programs")
    return Finding("memory", "ok", text)


def disk(found: Disk) -> Finding:
    """Whether caches can be kept on disk."""
    free = f"{human_bytes(found.free)} free at {found.place}"
    if found.free < _LEAST_FREE_DISK:
        return Finding("disk", "wrong", free, "free some space")
    if found.free <= found.floor:
        return Finding(
            "disk",
            "remark",
            f"{free}: no caches are kept on disk below {human_bytes(found.floor)}",
            "free some space, or give --cache-dir a directory on another volume",
        )
    limits = f"caches take at most {human_bytes(found.cap)} and leave {human_bytes(found.floor)}"
    return Finding("disk", "ok", f"{free}; {limits} unless --cache-max says otherwise")


def port(found: Port) -> Finding:
    """Whether a port can be had, or Baton has it already."""
    subject = f"port {found.number}"
    if not found.holder:
        return Finding(subject, "ok", f"free for {found.purpose}")
    if found.is_baton:
        return Finding(subject, "ok", f"taken by Baton: {found.holder}")
    return Finding(
        subject,
        "wrong",
        f"taken by {found.holder}, wanted for {found.purpose}",
        "end that program, or choose another port with --port",
    )


def directories(found: Sequence[Directory]) -> Iterator[Finding]:
    """Whether what holds secrets and prompts is closed to others."""
    wrong = False
    for one in found:
        if not one.ours:
            wrong = True
            yield Finding(
                "directory",
                "wrong",
                f"{one.path} belongs to another user",
                f"run Baton as one user; or: sudo chown -R $(whoami) {one.path}",
            )
        elif one.mode & _CLOSED:
            wrong = True
            yield Finding(
                "directory",
                "wrong",
                f"others have access to {one.path} (mode {one.mode:04o})",
                f"chmod 700 {one.path}",
            )
    if not wrong:
        text = f"{len(found)} of Baton's own are closed to others" if found else "none made yet"
        yield Finding("directories", "ok", text)


def secrets(found: Registry, keyring_usable: bool) -> Iterator[Finding]:
    """Whether the secrets of paired machines can be read."""
    subject = f"{found.side}'s secrets"
    if found.refusal is not None:
        yield Finding(
            subject, "wrong", found.refusal.message, found.refusal.hint or found.refusal.reason
        )
        return
    if found.choice == "keyring" and not keyring_usable:
        yield Finding(
            subject,
            "wrong",
            "this login has no keyring",
            "start with --secrets file to keep secrets in private files instead",
        )
        return
    for name, error in found.faults:
        yield Finding(
            f"{subject[:-1]} {name[:16]}", "wrong", error.message, error.hint or error.reason
        )
    place = "sealed under the keyring" if found.choice == "keyring" else "in private files"
    paired = ", ".join(sorted(peer.name for peer in found.peers)) or "nobody yet"
    yield Finding(subject, "ok", f"{place}; paired with {paired}")


def clock(found: Clock) -> Finding:
    """Whether the clock can be right."""
    here = f"{found.now:%Y-%m-%d %H:%M:%S} UTC"
    how = "set the clock: timedatectl set-ntp true; on macOS System Settings, General, Date & Time"
    if not EARLIEST <= found.now.year < LATEST:
        return Finding("clock", "wrong", here, how)
    if found.decoders is not None:
        apart = abs((found.decoders - found.now).total_seconds())
        if apart > _CLOCKS_APART_S:
            return Finding("clock", "remark", f"{here}; the decoder's is {apart:.0f} s off", how)
    return Finding("clock", "ok", here)


def service(side: Side, found: Installed | None) -> Iterator[Finding]:
    """Whether an installed service runs; nothing where none is installed."""
    if found is None:
        return
    subject = f"{side}'s service"
    if found.runs:
        yield Finding(subject, "ok", f"{found.name} runs; log: {found.log}")
        return
    yield Finding(
        subject,
        "wrong",
        f"{found.name} is installed and does not run",
        f"its log says why: {found.log}\nthen install it again; {COMMANDS[side]} --uninstall "
        "removes it",
    )


def model(found: Model) -> Iterator[Finding]:
    """Whether a checkpoint is whole and can be carried over, and what it is."""
    if isinstance(found, BatonError):
        yield Finding("model", "wrong", found.message, found.hint or found.reason)
        return
    yield Finding("model", "ok", f"{found.config['model_type']}, {found.dtype} cache")
    yield Finding("identity", "ok", found.identity.digest().hex()[:16])


def running(found: Running, port_is_batons: bool) -> Finding:
    """What the decoder says of itself. ``port_is_batons``: one listens where it was asked."""
    subject = "decoder"
    if found.status is None:
        waits = found.reason in ("decoder_starting", "decoder_restarting", "decoder_stopping")
        if found.reason == "decoder_unreachable" and port_is_batons:
            return Finding(
                subject,
                "remark",
                f"one runs here, but does not answer at {found.url}",
                "if it speaks TLS: SSL_CERT_FILE=certificate.pem baton doctor --url https://…, "
                "as docs/door.md says",
            )
        if found.reason == "decoder_unreachable":
            return Finding(subject, "ok", f"none runs at {found.url}")
        if waits:
            return Finding(subject, "remark", found.message, "look again in a minute")
        if found.reason == "invalid_api_key":
            return Finding(subject, "remark", found.message, found.hint or "give --api-keys-file")
        hint = found.hint or "see the log of `baton serve`, then start it again"
        return Finding(subject, "wrong", found.message, hint)
    engine = found.status.get("engine") or {}
    if fault := engine.get("fault"):
        return Finding(subject, "wrong", f"it failed: {fault}", "see the log of `baton serve`")
    if not engine.get("ready"):
        return Finding(subject, "remark", "its model is being loaded", "look again in a minute")
    again = (found.status.get("supervisor") or {}).get("restarts")
    text = f"{found.status.get('model')} at {found.url}"
    if again:
        last = (found.status.get("supervisor") or {}).get("last_fault")
        text += f"; started again {again} times, the last after {last}"
        return Finding(subject, "remark", text, "see the log of `baton serve`")
    return Finding(subject, "ok", text)
