"""Baton.app: what lies in it, what macOS's tools are told, the launcher at work; on any system."""

from __future__ import annotations

import os
import plistlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app import app_bundle
from app.app_bundle import Command
from app.discovery import SERVICE
from gb10_producer import advertise
from protocol.errors import ConfigError
from tests.app.fake_tools import FakeTool, put_on_path

CC = shutil.which("cc")
needs_cc = pytest.mark.skipif(CC is None, reason="there is no C compiler")

COMPILES = """
out=
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
printf 'compiled' > "$out"
"""


class Mac:
    """A Mac with its tools; ``codesign`` accepts what it signed."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = tmp_path / "home dir"
        self.bundle = self.home / "Applications" / "Baton.app"
        tools = put_on_path(
            tmp_path / "bin",
            monkeypatch,
            **{"xcode-select": "echo /Library/Developer", "cc": COMPILES, "codesign": ""},
        )
        self.cc: FakeTool = tools["cc"]
        self.codesign: FakeTool = tools["codesign"]
        self.xcode_select: FakeTool = tools["xcode-select"]

    def install(self, version: str = "1.2.3", python: str = "/v env/bin/python") -> app_bundle.Put:
        return app_bundle.install(self.command(python), version, self.home)

    def command(self, python: str = "/v env/bin/python") -> Command:
        log = self.home / "Library" / "Logs" / "Baton" / "app.log"
        return Command((python, "-m", "app.cli", "app"), {"PYTHONSAFEPATH": "1"}, log)

    def information(self) -> dict[str, object]:
        return plistlib.loads((self.bundle / "Contents" / "Info.plist").read_bytes())

    def files(self) -> dict[str, tuple[bytes, int]]:
        return {
            str(file.relative_to(self.bundle)): (file.read_bytes(), file.stat().st_mode & 0o777)
            for file in self.bundle.rglob("*")
            if file.is_file()
        }


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    return Mac(tmp_path, monkeypatch)


def test_it_says_what_it_is_and_asks_for_the_local_network(mac: Mac) -> None:
    mac.install()
    found = mac.information()
    kind = found.pop("BatonLauncher")
    assert str(kind).startswith("native ")
    assert found == {
        "CFBundleIdentifier": "llm.baton.app",
        "CFBundleName": "Baton",
        "CFBundleDisplayName": "Baton",
        "CFBundleExecutable": "Baton",
        "CFBundlePackageType": "APPL",
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleShortVersionString": "1.2.3",
        "CFBundleVersion": "1.2.3",
        "CFBundleIconFile": "Baton.icns",
        "LSMinimumSystemVersion": "14.0",
        "LSUIElement": True,
        "NSHighResolutionCapable": True,
        "NSLocalNetworkUsageDescription": app_bundle.WHY_LOCAL_NETWORK,
        "NSBonjourServices": ["_baton._tcp"],
        "BatonMadeBy": "baton app --install",
    }


def test_the_service_that_it_names_is_the_one_that_producers_answer_to(mac: Mac) -> None:
    (named,) = app_bundle.information("1", "native")["NSBonjourServices"]
    assert f"{named}.local." == SERVICE == advertise.SERVICE


def test_what_lies_in_it(mac: Mac) -> None:
    put = mac.install()
    assert put == (mac.bundle, True, ())
    files = mac.files()
    assert {name: mode for name, (_, mode) in files.items()} == {
        "Contents/Info.plist": 0o644,
        "Contents/PkgInfo": 0o644,
        "Contents/MacOS/Baton": 0o755,
        "Contents/Resources/command": 0o644,
        "Contents/Resources/Baton.icns": 0o644,
    }
    assert files["Contents/MacOS/Baton"][0] == b"compiled"
    assert files["Contents/Resources/Baton.icns"][0][:4] == b"icns"
    assert files["Contents/Resources/command"][0].decode() == (
        f"log {mac.home}/Library/Logs/Baton/app.log\n"
        "env PYTHONSAFEPATH=1\n"
        "arg /v env/bin/python\narg -m\narg app.cli\narg app\n"
    )
    assert mac.bundle.stat().st_mode & 0o777 == 0o755
    assert (mac.home / "Library" / "Logs" / "Baton").is_dir()


def test_it_is_signed_ad_hoc_before_it_takes_its_place(mac: Mac) -> None:
    mac.codesign.becomes('test ! -e "$HOME/Applications/Baton.app"')
    mac.install()
    (signed,) = mac.codesign.calls
    assert signed.startswith("--force --sign - ")
    assert signed.endswith("/Baton.app")
    assert os.listdir(mac.bundle.parent) == ["Baton.app"], "nothing is left beside it"


def test_one_that_is_right_is_left_as_it_is(mac: Mac) -> None:
    mac.install()
    before = mac.bundle.stat().st_ino
    compiled = len(mac.cc.calls)
    assert mac.install() == (mac.bundle, False, ())
    assert mac.bundle.stat().st_ino == before
    assert len(mac.cc.calls) == compiled
    assert mac.codesign.calls[-1] == f"--verify --strict {mac.bundle}"


def test_another_release_python_or_signature_replaces_it(mac: Mac) -> None:
    mac.install()
    assert mac.install("1.2.4").changed
    assert mac.information()["CFBundleVersion"] == "1.2.4"
    assert mac.install("1.2.4", "/other/python").changed
    assert b"arg /other/python\n" in mac.files()["Contents/Resources/command"][0]
    mac.codesign.becomes('test "$1" != --verify')
    assert mac.install("1.2.4", "/other/python").changed


def test_without_a_compiler_a_script_starts_it_and_the_user_is_told(mac: Mac) -> None:
    mac.xcode_select.becomes("exit 2")
    put = mac.install()
    assert put.remarks == (app_bundle.NO_COMPILER,)
    assert mac.cc.calls == [], "macOS would open a window"
    assert mac.files()["Contents/MacOS/Baton"][0].startswith(b"#!/bin/sh\n")
    assert mac.information()["BatonLauncher"] == "script"
    assert not mac.install().changed
    mac.xcode_select.becomes("")
    assert mac.install().changed, "once there is one, it is used"
    assert mac.files()["Contents/MacOS/Baton"][0] == b"compiled"


def test_a_compiler_that_fails_is_named(mac: Mac) -> None:
    mac.cc.becomes("echo 'You have not agreed to the licence' >&2; exit 69")
    (remark,) = mac.install().remarks
    assert "You have not agreed to the licence" in remark


def test_one_that_cannot_be_signed_changes_nothing(mac: Mac) -> None:
    mac.install()
    before = mac.files()
    mac.codesign.becomes("echo 'no identity' >&2; exit 1")
    with pytest.raises(ConfigError) as refused:
        mac.install("9")
    assert (refused.value.reason, refused.value.found) == ("app_signing_failed", "no identity")
    assert mac.files() == before
    assert os.listdir(mac.bundle.parent) == ["Baton.app"]


def test_a_missing_tool_is_named(mac: Mac, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError) as refused:
        mac.install()
    assert (refused.value.reason, refused.value.found) == ("app_tool_missing", "xcode-select")


@pytest.mark.parametrize("made", ["signed build", "link", "file", "damaged"])
def test_a_bundle_that_is_not_ours_stays(mac: Mac, tmp_path: Path, made: str) -> None:
    contents = mac.bundle / "Contents"
    if made == "link":
        mac.install()
        elsewhere = tmp_path / "elsewhere.app"
        os.rename(mac.bundle, elsewhere)
        mac.bundle.symlink_to(elsewhere)
    elif made == "file":
        mac.bundle.parent.mkdir(parents=True)
        mac.bundle.write_text("x")
    else:
        contents.mkdir(parents=True)
        information = {"CFBundleIdentifier": app_bundle.IDENTIFIER}
        content = plistlib.dumps(information) if made == "signed build" else b"<plist"
        (contents / "Info.plist").write_bytes(content)
    with pytest.raises(ConfigError) as refused:
        mac.install()
    assert refused.value.reason == "app_not_ours"
    assert app_bundle.uninstall(mac.home) is None
    assert os.path.lexists(mac.bundle)


def test_uninstalling_removes_it_once(mac: Mac) -> None:
    mac.install()
    assert app_bundle.uninstall(mac.home) == mac.bundle
    assert not mac.bundle.exists()
    assert app_bundle.uninstall(mac.home) is None


@pytest.mark.parametrize("text", ["/a\nb/python", "/a\x00b", "/\udcff/python"])
def test_what_no_line_can_hold_is_refused(mac: Mac, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        mac.install(python=text)
    assert refused.value.reason == "app_path_unusable"
    assert not mac.bundle.exists()


def test_where_nothing_can_be_written_the_refusal_says_so(mac: Mac) -> None:
    mac.home.mkdir()
    (mac.home / "Applications").write_text("a file")
    with pytest.raises(ConfigError) as refused:
        mac.install()
    assert refused.value.reason == "app_unwritable"


def test_a_build_for_others_has_no_path_of_this_machine_and_is_nobodys_installation(
    mac: Mac, tmp_path: Path
) -> None:
    bundle = app_bundle.standalone(tmp_path / "build", "1.2.3")
    assert bundle == tmp_path / "build" / "Baton.app"
    found = plistlib.loads((bundle / "Contents" / "Info.plist").read_bytes())
    assert found["CFBundleIdentifier"] == "llm.baton.app"
    assert found["NSBonjourServices"] == ["_baton._tcp"]
    assert not app_bundle.ours(bundle)
    assert mac.codesign.calls == []
    for file in bundle.rglob("*"):
        assert file.is_dir() or str(tmp_path).encode() not in file.read_bytes()
    with pytest.raises(ConfigError) as refused:
        app_bundle.standalone(tmp_path / "build", "1.2.3")
    assert refused.value.reason == "app_not_ours"
    mac.xcode_select.becomes("exit 2")
    with pytest.raises(ConfigError) as refused:
        app_bundle.standalone(tmp_path / "other", "1.2.3")
    assert refused.value.reason == "app_tool_missing"
    assert [*(tmp_path / "other").iterdir()] == []


# The launcher itself, and the script that stands in for it, run here as they would on a Mac.


class Built:
    """A bundle whose launcher runs ``program`` with this Python."""

    def __init__(self, directory: Path, kind: str, program: str, port: int) -> None:
        contents = directory / "A b.app" / "Contents"
        self.executable = contents / "MacOS" / "Baton"
        self.log = directory / "log dir" / "app.log"
        for place in (self.executable.parent, contents / "Resources", self.log.parent):
            place.mkdir(parents=True)
        file = directory / "program.py"
        file.write_text(program)
        command = Command((sys.executable, str(file)), {"SAID": "it's $HOME"}, self.log)
        (contents / "Resources" / "command").write_bytes(app_bundle.command_file(command))
        if kind == "script":
            self.executable.write_bytes(app_bundle.script(command))
            self.executable.chmod(0o755)
            return
        assert CC is not None
        source = Path(app_bundle.__file__).with_name("macos_launcher.c")
        asked = ['-DBATON_ASKED="127.0.0.1"', f"-DBATON_ASKED_PORT={port}"]
        strict = ["-Wall", "-Wextra", "-Werror"]
        subprocess.run([CC, *strict, *asked, "-o", str(self.executable), str(source)], check=True)

    def start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen([str(self.executable)], cwd="/")

    def logged(self, line: str) -> None:
        until = time.monotonic() + 20
        while line not in (self.log.read_text() if self.log.exists() else ""):
            assert time.monotonic() < until, "the child did not say it"
            time.sleep(0.01)


KINDS = [pytest.param("native", marks=needs_cc), "script"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_launcher_stays_while_its_child_runs_and_ends_as_it_does(
    tmp_path: Path, kind: str
) -> None:
    program = "import os,sys; print(os.environ['SAID'], os.getppid(), flush=True); sys.exit(7)"
    built = Built(tmp_path, kind, program, 9)
    running = built.start()
    assert running.wait(20) == 7
    assert built.log.read_text() == f"it's $HOME {running.pid}\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_to_it_reaches_the_child_and_the_child_decides(tmp_path: Path, kind: str) -> None:
    program = (
        "import signal,sys,time\n"
        "def asked(*_):\n"
        "    print('asked', flush=True); time.sleep(0.3); print('done', flush=True); sys.exit(3)\n"
        "signal.signal(signal.SIGTERM, asked)\n"
        "print('ready', flush=True)\n"
        "time.sleep(30)\n"
    )
    built = Built(tmp_path, kind, program, 9)
    running = built.start()
    built.logged("ready")
    running.send_signal(signal.SIGTERM)
    assert running.wait(20) == 3
    assert built.log.read_text() == "ready\nasked\ndone\n"


@needs_cc
def test_the_launcher_itself_touches_the_local_network(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.settimeout(10)
        built = Built(tmp_path, "native", "pass", listening.getsockname()[1])
        assert built.start().wait(20) == 0
        query = listening.recv(512)
    assert query[:12] == bytes([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0])
    labels = b"".join(bytes([len(one)]) + one.encode() for one in SERVICE.rstrip(".").split("."))
    assert query[12:] == labels + b"\0" + b"\0\x0c\0\x01", "a question for its PTR records"


@needs_cc
def test_a_build_for_others_finds_its_python_and_its_log_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_on_path(tmp_path / "bin", monkeypatch, **{"xcode-select": ""})
    bundle = app_bundle.standalone(tmp_path / "build", "1")
    elsewhere = tmp_path / "moved here" / "Baton.app"
    elsewhere.parent.mkdir()
    os.rename(bundle, elsewhere)
    python = elsewhere / "Contents" / "Resources" / "python" / "bin" / "python3"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$0|$*|$BATON_BUNDLE"\n')
    python.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    log = tmp_path / "Library" / "Logs" / "Baton" / "app.log"
    log.parent.parent.mkdir(parents=True)
    assert subprocess.run([elsewhere / "Contents" / "MacOS" / "Baton"], timeout=20).returncode == 0
    assert log.read_text() == f"{python}|-I -m app.cli app|{elsewhere}\n"


@needs_cc
def test_the_end_of_a_killed_child_is_told(tmp_path: Path) -> None:
    built = Built(tmp_path, "native", "import os; os.kill(os.getpid(), 9)", 9)
    assert built.start().wait(20) == 128 + 9


@needs_cc
def test_a_bundle_without_its_command_is_broken(tmp_path: Path) -> None:
    built = Built(tmp_path, "native", "pass", 9)
    command = built.executable.parents[1] / "Resources" / "command"
    command.write_text("env A=1\n")
    assert built.start().wait(20) == 78
    command.unlink()
    assert built.start().wait(20) == 78


@needs_cc
def test_a_long_log_is_moved_away(tmp_path: Path) -> None:
    built = Built(tmp_path, "native", "print('new')", 9)
    built.log.write_bytes(b"x" * ((4 << 20) + 1))
    assert built.start().wait(20) == 0
    assert built.log.read_text() == "new\n"
    assert built.log.with_name("app.log.1").stat().st_size == (4 << 20) + 1
