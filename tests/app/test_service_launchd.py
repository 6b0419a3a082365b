"""LaunchAgents: their property list, and what launchctl is told; on any system."""

from __future__ import annotations

import os
import plistlib
from pathlib import Path

import pytest

from app import service_launchd as launchd
from app.service import Service
from protocol.errors import ConfigError
from tests.app.fake_tools import FakeTool, put_on_path

AWKWARD = ("--model=/a b/100% <of> & it", "--served-name=\"x\" 'y'", "--state-dir=$HOME", "")
SERVICE = Service("decoder", AWKWARD, "/venv/bin/python", {"PYTHONSAFEPATH": "1"})
LABEL = "llm.baton.decoder"
TARGET = f"gui/{os.getuid()}/{LABEL}"


def test_the_agent_is_this() -> None:
    home = Path("/h")
    log = "/h/Library/Logs/Baton/decoder.log"
    assert plistlib.loads(launchd.property_list(SERVICE, home)) == {
        "Label": LABEL,
        "ProgramArguments": ["/venv/bin/python", "-m", "app.decoder", *AWKWARD],
        "EnvironmentVariables": {"PYTHONSAFEPATH": "1"},
        "RunAtLoad": True,
        "KeepAlive": {"Crashed": True},
        "ProcessType": "Interactive",
        "ExitTimeOut": 60,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }


def test_arguments_are_read_back_from_our_own_list_alone() -> None:
    content = launchd.property_list(SERVICE, Path("/h"))
    assert launchd.arguments_in(content, "decoder") == AWKWARD
    assert launchd.arguments_in(content, "producer") is None
    half = content[: len(content) // 2]
    for other in (
        b"",
        b"no list",
        half,
        plistlib.dumps({}),
        plistlib.dumps({"ProgramArguments": "x"}),
    ):
        assert launchd.arguments_in(other, "decoder") is None


def test_what_no_list_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        launchd.property_list(Service("decoder", ("a\x00b",), "/python"), Path("/h"))
    assert refused.value.reason == "option_not_for_service"


class Mac:
    """A Mac whose launchctl knows an agent as long as a file of the test is there."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.home = tmp_path / "home"
        self.loaded = tmp_path / "loaded"
        self.file = self.home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        monkeypatch.setenv("HOME", str(self.home))
        tools = put_on_path(tmp_path / "bin", monkeypatch, launchctl=self.answers())
        self.launchctl: FakeTool = tools["launchctl"]

    def answers(self, printed: str = "\tstate = running\n\tpid = 7\n", more: str = "") -> str:
        return f"""
case "$*" in
{more}
bootstrap*) touch {self.loaded};;
bootout*) rm {self.loaded};;
print*) test -e {self.loaded} || exit 113; printf '{printed}';;
esac
"""

    @property
    def told(self) -> list[str]:
        return [call for call in self.launchctl.calls if not call.startswith("print")]


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mac:
    return Mac(tmp_path, monkeypatch)


def test_installing_writes_the_agent_and_starts_it(mac: Mac) -> None:
    outcome = launchd.install(SERVICE, settle_s=0)
    assert mac.file.read_bytes() == launchd.property_list(SERVICE, mac.home)
    assert mac.told == [
        f"enable {TARGET}",
        f"bootstrap gui/{os.getuid()} {mac.file}",
    ]
    log = mac.home / "Library" / "Logs" / "Baton" / "decoder.log"
    assert outcome.log == str(log)
    assert log.parent.stat().st_mode & 0o077 == 0
    assert TARGET in outcome.stop
    (remark,) = outcome.remarks
    assert "Local Network" in remark
    assert "`baton serve` in Terminal" in remark


def test_installing_again_stops_the_old_one_first(mac: Mac) -> None:
    launchd.install(SERVICE, settle_s=0)
    launchd.install(Service("decoder", ("--model=/two",), "/venv/bin/python"), settle_s=0)
    assert [call.split()[0] for call in mac.told] == [
        "enable",
        "bootstrap",
        "bootout",
        "enable",
        "bootstrap",
    ]
    found = launchd.installed("decoder")
    assert found is not None
    assert (found.arguments, found.runs) == (("--model=/two",), True)


def test_an_installed_one_is_stopped_and_started(mac: Mac) -> None:
    launchd.install(SERVICE, settle_s=0)
    before = len(mac.told)
    launchd.stop("decoder")
    assert mac.told[before:] == [f"bootout {TARGET}"]
    assert mac.file.exists(), "it starts again at the next login"
    launchd.start("decoder")
    assert mac.told[before + 1 :] == [f"enable {TARGET}", f"bootstrap gui/{os.getuid()} {mac.file}"]
    launchd.start("decoder")  # loaded, and ended by itself
    assert mac.told[-1] == f"kickstart {TARGET}"


def test_uninstalling_stops_and_removes_it(mac: Mac) -> None:
    launchd.install(SERVICE, settle_s=0)
    assert launchd.uninstall("decoder") == LABEL
    assert mac.told[-1] == f"bootout {TARGET}"
    assert not mac.file.exists()
    assert launchd.installed("decoder") is None
    assert launchd.uninstall("decoder") is None


def test_one_that_does_not_stop_is_told_and_kept(mac: Mac) -> None:
    launchd.install(SERVICE, settle_s=0)
    mac.launchctl.becomes(mac.answers(more="bootout*) echo 'busy' >&2; exit 36;;"))
    with pytest.raises(ConfigError) as refused:
        launchd.uninstall("decoder", stop_s=-5)
    assert refused.value.reason == "service_failed"
    assert refused.value.found == "busy"
    assert mac.file.exists()


def test_one_that_ends_at_once_is_told(mac: Mac) -> None:
    mac.launchctl.becomes(mac.answers("\tstate = not running\n\tlast exit code = 78\n"))
    with pytest.raises(ConfigError) as refused:
        launchd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_failed"
    assert refused.value.found == "exit status 78"
    assert "decoder.log" in str(refused.value.hint)
    found = launchd.installed("decoder")
    assert found is not None
    assert not found.runs


def test_a_mac_that_nobody_is_logged_in_to_says_what_helps(mac: Mac) -> None:
    refusal = "bootstrap*) echo 'Bootstrap failed: 125: Domain does not support' >&2; exit 125;;"
    mac.launchctl.becomes(mac.answers(more=refusal))
    with pytest.raises(ConfigError) as refused:
        launchd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_failed"
    assert "125" in str(refused.value.found)
    assert "screen" in str(refused.value.hint)


def test_without_launchctl_there_is_no_manager(
    mac: Mac, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError) as refused:
        launchd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_manager_missing"
