"""``Baton.app``: the bundle in whose name macOS grants the local network to menu bar and decoder.

What lies in it (Apple, Bundle Programming Guide; TN3179 for the local network)::

    Baton.app/Contents/Info.plist          what it is, and why it asks for the local network
    Baton.app/Contents/MacOS/Baton         macos_launcher.c compiled here, or a script
    Baton.app/Contents/Resources/command   what that runs: this Python, with `baton app`
    Baton.app/Contents/Resources/Baton.icns
    Baton.app/Contents/_CodeSignature      codesign's, ad hoc

macOS knows a bundle that is signed ad hoc by its bytes. So one that is right already is left as
it is, and paths stand in a file beside the executable, never in it. What was granted holds until
something in it changes.
"""

from __future__ import annotations

import hashlib
import os
import plistlib
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from xml.parsers.expat import ExpatError

from app.app_icon import icns
from app.discovery import SERVICE
from app.service import Done
from protocol.errors import ConfigError

IDENTIFIER: Final = "llm.baton.app"
NAME: Final = "Baton"
MADE_BY: Final = "baton app --install"

LEAST_MACOS: Final = "14.0"
"""The oldest release that MLX's wheels run on."""

WHY_LOCAL_NETWORK: Final = (
    "Baton hands prompts to the machines on your network that you paired it with, and finds them."
)
NO_COMPILER: Final = (
    "there is no C compiler, so a script starts the app, which newer releases of macOS may refuse "
    "to open: xcode-select --install, then baton app --install again"
)

_SOURCE: Final = Path(__file__).with_name("macos_launcher.c")
_TOOL_S: Final = 120.0


@dataclass(frozen=True)
class Command:
    """What the bundle runs: words, the first a path; variables; and where its output goes."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


class Launcher(NamedTuple):
    """The bundle's executable. ``kind`` names what it was made from; the same kind does the same.

    ``remark`` is what to tell about it, if anything.
    """

    content: bytes
    kind: str
    remark: str | None = None


class Put(NamedTuple):
    """What became of an installation: where it is, whether anything was written, what to tell."""

    path: Path
    changed: bool
    remarks: tuple[str, ...]


def running() -> Path | None:
    """The bundle that this process was started from, as its launcher says."""
    named = os.environ.get("BATON_BUNDLE", "")
    return Path(named) if named.endswith(".app") and Path(named).is_dir() else None


def path(home: Path) -> Path:
    """Where the bundle is put."""
    return home / "Applications" / f"{NAME}.app"


def information(version: str, kind: str) -> dict[str, Any]:
    """``Info.plist``; ``kind`` as in :class:`Launcher`."""
    return {
        "CFBundleIdentifier": IDENTIFIER,
        "CFBundleName": NAME,
        "CFBundleDisplayName": NAME,
        "CFBundleExecutable": NAME,
        "CFBundlePackageType": "APPL",
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleShortVersionString": version,
        "CFBundleVersion": version,
        "CFBundleIconFile": f"{NAME}.icns",
        "LSMinimumSystemVersion": LEAST_MACOS,
        # Lives in the menu bar: neither in the Dock nor among the windows.
        "LSUIElement": True,
        "NSHighResolutionCapable": True,
        "NSLocalNetworkUsageDescription": WHY_LOCAL_NETWORK,
        "NSBonjourServices": [SERVICE.removesuffix(".local.")],
        "BatonMadeBy": MADE_BY,
        "BatonLauncher": kind,
    }


def command_file(command: Command) -> bytes:
    """``Resources/command``, as the launcher reads it.

    Raises ``ConfigError`` (``app_path_unusable``).
    """
    _require_printable(command)
    lines = [f"log {command.log}"]
    lines += [f"env {name}={value}" for name, value in command.environment.items()]
    lines += [f"arg {word}" for word in command.words]
    return "".join(f"{line}\n" for line in lines).encode()


def script(command: Command) -> bytes:
    """The launcher of a machine without a compiler: it stays while its child runs, too.

    Raises ``ConfigError`` (``app_path_unusable``).
    """
    _require_printable(command)
    variables = (f"export {name}={shlex.quote(v)}" for name, v in command.environment.items())
    lines = [
        "#!/bin/sh",
        f"# Written by `{MADE_BY}`.",
        *variables,
        f"exec >>{shlex.quote(str(command.log))} 2>&1",
        f"{shlex.join(command.words)} &",
        "child=$!",
        "trap 'kill -TERM \"$child\"' TERM INT HUP",
        # A signal ends the waiting, not the child.
        'while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done',
        'exit "$status"',
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def ours(bundle: Path) -> bool:
    """Whether `baton app --install` made what lies there."""
    return _found(bundle).get("BatonMadeBy") == MADE_BY


def install(command: Command, version: str, home: Path) -> Put:
    """Put the bundle into the user's Applications, unless it is there and right already.

    Raises ``ConfigError``: ``app_not_ours`` (another bundle of this name), ``app_unwritable``,
    ``app_path_unusable``, ``app_signing_failed``, ``app_tool_missing``.
    """
    bundle = path(home)
    if (bundle.exists() or bundle.is_symlink()) and not ours(bundle):
        raise _not_ours(bundle)
    kept = command_file(command)
    _write_directory(command.log.parent)
    _write_directory(bundle.parent)
    if _is_right(bundle, kept, version):
        return Put(bundle, changed=False, remarks=())
    try:
        with tempfile.TemporaryDirectory(prefix=".baton-app-", dir=bundle.parent) as scratch:
            launcher = _launcher(command, Path(scratch))
            made = Path(scratch) / bundle.name
            _lay_out(made, launcher, kept, version)
            _sign(made)
            _swap(made, bundle, Path(scratch) / "before")
    except OSError as error:
        raise _unwritable(bundle, error) from error
    return Put(bundle, changed=True, remarks=(launcher.remark,) if launcher.remark else ())


def standalone(directory: Path, version: str) -> Path:
    """Lay out a bundle that is to hold a Python of its own, in ``Resources/python``, and be signed.

    For a build that others get (``docs/packaging.md``); no path of this machine is in it, and
    `baton app` neither replaces nor removes it. Raises ``ConfigError``: ``app_tool_missing``,
    ``app_not_ours`` (something is there), ``app_unwritable``.
    """
    bundle = directory / f"{NAME}.app"
    if bundle.exists():
        raise _not_ours(bundle)
    python = "@resources/python/bin/python3"
    # -I: what the user has set or installed for another Python is not for this one.
    words = (python, "-I", "-m", "app.cli", "app")
    log = Path("~") / "Library" / "Logs" / NAME / "app.log"
    kept = command_file(Command(words, {}, log))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".baton-app-", dir=directory) as scratch:
            launcher = _compiled(Path(scratch))
            if isinstance(launcher, str):
                raise ConfigError(
                    "the app's launcher could not be compiled",
                    reason="app_tool_missing",
                    field="install",
                    found=launcher or "no compiler",
                    hint="xcode-select --install",
                )
            _lay_out(bundle, launcher, kept, version)
            _write_information(bundle, information(version, launcher.kind), but="BatonMadeBy")
    except OSError as error:
        raise _unwritable(bundle, error) from error
    return bundle


def uninstall(home: Path) -> Path | None:
    """Remove the bundle if it is ours; where it was, or ``None`` if none of ours was there.

    Raises ``ConfigError`` (``app_unwritable``).
    """
    bundle = path(home)
    if not ours(bundle):
        return None
    try:
        shutil.rmtree(bundle)
    except OSError as error:
        raise _unwritable(bundle, error) from error
    return bundle


def _found(bundle: Path) -> dict[str, Any]:
    """The ``Info.plist`` of a bundle; empty where there is none that can be read."""
    if bundle.is_symlink():
        return {}
    try:
        found = plistlib.loads((bundle / "Contents" / "Info.plist").read_bytes())
    except (OSError, plistlib.InvalidFileException, ExpatError, ValueError, LookupError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_right(bundle: Path, kept: bytes, version: str) -> bool:
    kind = _kind() if _compiler() else _found(bundle).get("BatonLauncher", "")
    if _found(bundle) != information(version, kind):
        return False
    try:
        same = (bundle / "Contents" / "Resources" / "command").read_bytes() == kept
    except OSError:
        return False
    return same and _tool("codesign", "--verify", "--strict", str(bundle)).status == 0


def _kind() -> str:
    return f"native {hashlib.sha256(_SOURCE.read_bytes()).hexdigest()}"


def _compiler() -> bool:
    """Whether there is one: without the tools, macOS's ``cc`` opens a window instead."""
    return _tool("xcode-select", "-p").status == 0


def _launcher(command: Command, scratch: Path) -> Launcher:
    made = _compiled(scratch)
    if isinstance(made, Launcher):
        return made
    why = f" (cc: {made})" if made else ""
    return Launcher(script(command), "script", NO_COMPILER + why)


def _compiled(scratch: Path) -> Launcher | str:
    """The launcher, or what the compiler said last instead; nothing if there is none."""
    if not _compiler():
        return ""
    to = scratch / "launcher"
    least = f"MACOSX_DEPLOYMENT_TARGET={LEAST_MACOS}"
    done = _tool("env", least, "cc", "-O2", "-o", str(to), str(_SOURCE))
    if done.status or not to.is_file():
        return done.said.splitlines()[-1] if done.said else f"status {done.status}"
    return Launcher(to.read_bytes(), _kind())


def _lay_out(made: Path, launcher: Launcher, kept: bytes, version: str) -> None:
    for name, content, mode in (
        ("PkgInfo", b"APPL????", 0o644),
        (f"MacOS/{NAME}", launcher.content, 0o755),
        ("Resources/command", kept, 0o644),
        (f"Resources/{NAME}.icns", icns(), 0o644),
    ):
        file = made / "Contents" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
        file.chmod(mode)
    _write_information(made, information(version, launcher.kind))
    # The scratch directory is closed to others; what is made in it need not be.
    made.chmod(0o755)


def _write_information(made: Path, found: dict[str, Any], but: str = "") -> None:
    found.pop(but, None)
    file = made / "Contents" / "Info.plist"
    file.write_bytes(plistlib.dumps(found, sort_keys=False))
    file.chmod(0o644)


def _sign(made: Path) -> None:
    done = _tool("codesign", "--force", "--sign", "-", str(made))
    if done.status:
        raise ConfigError(
            f"{made.name} could not be signed, and macOS runs nothing that is not",
            reason="app_signing_failed",
            field="install",
            found=done.said or f"status {done.status}",
            hint="the app works from a terminal all the same: baton app",
        )


def _swap(made: Path, bundle: Path, before: Path) -> None:
    """Have ``made`` take the bundle's place; the earlier one is back if it cannot."""
    if not bundle.exists():
        os.rename(made, bundle)
        return
    os.rename(bundle, before)
    try:
        os.rename(made, bundle)
    except OSError:
        os.rename(before, bundle)
        raise


def _tool(*words: str) -> Done:
    """Run a tool of macOS. Raises ``ConfigError`` (``app_tool_missing``)."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TOOL_S,
        )
    except subprocess.TimeoutExpired:
        return Done(1, f"no answer within {_TOOL_S:g} s")
    except OSError as error:
        raise ConfigError(
            f"{words[0]}, which belongs to macOS, cannot be run: {error.strerror}",
            reason="app_tool_missing",
            field="install",
            found=words[0],
            hint="the app works from a terminal all the same: baton app",
        ) from error
    return Done(done.returncode, f"{done.stdout}{done.stderr}".strip())


def _write_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(directory, error) from error


def _require_printable(command: Command) -> None:
    texts: Sequence[str] = (*command.words, *command.environment.values(), str(command.log))
    for text in texts:
        if not text.isprintable():
            raise ConfigError(
                "what the app runs lies where its name is no printable text",
                reason="app_path_unusable",
                field="install",
                found=ascii(text),
                hint="make Baton's environment in another directory",
            )


def _not_ours(bundle: Path) -> ConfigError:
    return ConfigError(
        f"{bundle} was not made by `{MADE_BY}`, and stays as it is",
        reason="app_not_ours",
        field="install",
        found=_found(bundle).get("CFBundleIdentifier") or "no bundle of ours",
        expected=IDENTIFIER,
        hint="move it away, then install again",
    )


def _unwritable(where: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{where} cannot be written: {error.strerror or type(error).__name__}",
        reason="app_unwritable",
        field="install",
    )
