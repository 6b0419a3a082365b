"""Units: their text, what systemd itself reads in it, and what systemctl is told."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import service_systemd as systemd
from app.service import Service
from protocol.errors import ConfigError
from tests.app.fake_tools import FakeTool, put_on_path

AWKWARD = (
    "--model=/a b/100% of it",
    "--served-name=a \"quoted\" 'name'",
    "--state-dir=/$HOME/${USER}/%h/%%",
    "--tls-key=C:\\new\\",
    "--name=schön ; rm",
    ";",
    "",
)
SERVICE = Service("decoder", ("--model=/models/one",), "/venv/bin/python", {"PYTHONSAFEPATH": "1"})

GOLDEN = """\
# Written by `baton serve --install`, which replaces it; `baton serve --uninstall` removes it.
[Unit]
Description=Baton's decoder
StartLimitIntervalSec=600
StartLimitBurst=5

[Service]
Type=exec
ExecStart=":/venv/bin/python" "-m" "app.decoder" "--model=/models/one"
Environment="PYTHONSAFEPATH=1"
KillMode=mixed
TimeoutStopSec=60
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2 75 78
OOMPolicy=continue

[Install]
WantedBy=default.target
"""

analyze = shutil.which("systemd-analyze")


def verified(path: Path, tmp_path: Path) -> str:
    """What systemd itself finds wrong with a unit; empty if nothing is."""
    assert analyze is not None
    done = subprocess.run(
        [analyze, "--user", "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path), "SYSTEMD_LOG_LEVEL": "warning"},
    )
    return "\n".join(line for line in done.stderr.splitlines() if path.name in line)


def test_the_unit_is_this() -> None:
    assert systemd.unit(SERVICE) == GOLDEN


def test_the_producers_unit_names_the_producer_and_is_read_like_any_unit() -> None:
    read = configparser.RawConfigParser(strict=True)
    read.read_string(systemd.unit(Service("producer", ("--port=7431",), "/venv/bin/python")))
    assert read["Service"]["ExecStart"] == (
        '":/venv/bin/python" "-m" "gb10_producer" "--port=7431"'
    )
    assert read["Unit"]["Description"] == "Baton's producer"


def test_a_last_word_is_not_gone_against() -> None:
    """The supervisors end with these after they gave up, or when a person has to do something."""
    read = configparser.RawConfigParser()
    read.read_string(systemd.unit(SERVICE))
    assert {"75", "78"} <= set(read["Service"]["RestartPreventExitStatus"].split())


@pytest.mark.skipif(analyze is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("side", ["decoder", "producer"])
def test_systemd_finds_nothing_wrong(side: systemd.Side, tmp_path: Path) -> None:
    python = tmp_path / "a venv" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    service = Service(
        side, AWKWARD, str(python), {"PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": "/a %b"}
    )
    unit = tmp_path / systemd.UNITS[side]
    unit.write_text(systemd.unit(service))
    assert verified(unit, tmp_path) == ""
    unit.write_text(systemd.unit(service).replace("OOMPolicy=continue", "OOMPolicy=nonsense"))
    assert "nonsense" in verified(unit, tmp_path), "it would have been found"


@pytest.mark.skipif(analyze is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("word", [word for word in AWKWARD if word and word != ";"])
def test_systemd_reads_each_word_as_it_was_given(word: str, tmp_path: Path) -> None:
    """Of a program that cannot be run systemd says the name: what it read in our quotes."""
    python = f"/nowhere/{word.strip('/')}"
    unit = tmp_path / "baton-decoder.service"
    unit.write_text(systemd.unit(Service("decoder", (), python)))
    said = verified(unit, tmp_path)
    assert f"Command {python} is not" in said or f"special characters: {python}\n" in said


@given(st.lists(st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "))))
def test_arguments_are_read_back(arguments: list[str]) -> None:
    printable = tuple(word for word in arguments if word.isprintable())
    text = systemd.unit(Service("decoder", printable, "/a %b\\/python"))
    assert systemd.arguments_in(text, "decoder") == printable
    assert systemd.arguments_in(text, "producer") is None


@pytest.mark.parametrize("text", ["", "[Service]\nExecStart=/usr/bin/true\n", "ExecStart=\n"])
def test_a_unit_of_somebody_else_has_no_arguments(text: str) -> None:
    assert systemd.arguments_in(text, "decoder") is None


@pytest.mark.parametrize("word", ["a\nb", "a\x1b[0m", os.fsdecode(b"/models/\xff")])
def test_what_no_unit_can_hold_is_refused(word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        systemd.unit(Service("decoder", (word,), "/python"))
    assert refused.value.reason == "option_not_for_service"


class Box:
    """A machine whose systemctl keeps units in a directory of the test."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units = tmp_path / "home" / ".config" / "systemd" / "user"
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        tools = put_on_path(
            tmp_path / "bin", monkeypatch, systemctl=self.answers(), loginctl="echo yes"
        )
        self.systemctl: FakeTool = tools["systemctl"]
        self.loginctl: FakeTool = tools["loginctl"]

    def answers(self, state: str = "active", more: str = "") -> str:
        return f"""
case "$*" in
{more}
*UnitPath*) echo "{self.units}.control /etc/systemd/user {self.units}";;
*ActiveState*) printf 'ActiveState=%s\\nSubState=x\\nExecMainStatus=78\\n' {state};;
esac
"""

    @property
    def told(self) -> list[str]:
        """What systemctl was told, questions left out."""
        return [call.removeprefix("--user ") for call in self.systemctl.calls if "show" not in call]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    return Box(tmp_path, monkeypatch)


UNIT = "baton-decoder.service"


def test_installing_writes_the_unit_and_starts_it(box: Box) -> None:
    outcome = systemd.install(SERVICE, settle_s=0)
    assert (box.units / UNIT).read_text() == GOLDEN
    assert [path.name for path in box.units.iterdir()] == [UNIT]
    assert box.told == [
        "daemon-reload",
        f"enable {UNIT}",
        f"reset-failed {UNIT}",
        f"restart {UNIT}",
    ]
    assert outcome.name == UNIT
    assert UNIT in outcome.log
    assert UNIT in outcome.stop
    assert outcome.remarks == ()


def test_installing_again_replaces_it(box: Box) -> None:
    systemd.install(SERVICE, settle_s=0)
    systemd.install(Service("decoder", ("--model=/models/two",), "/venv/bin/python"), settle_s=0)
    found = systemd.installed("decoder")
    assert found is not None
    assert (found.name, found.arguments, found.runs) == (UNIT, ("--model=/models/two",), True)
    assert box.told.count(f"restart {UNIT}") == 2


def test_an_installed_one_is_stopped_and_started(box: Box) -> None:
    systemd.install(SERVICE, settle_s=0)
    before = len(box.told)
    systemd.stop("decoder")
    systemd.start("decoder")
    assert box.told[before:] == [f"stop {UNIT}", f"reset-failed {UNIT}", f"start {UNIT}"]
    assert (box.units / UNIT).exists()


def test_uninstalling_stops_and_removes_it(box: Box) -> None:
    systemd.install(SERVICE, settle_s=0)
    before = len(box.told)
    assert systemd.uninstall("decoder") == UNIT
    assert not (box.units / UNIT).exists()
    assert box.told[before:] == [
        f"disable --now {UNIT}",
        "daemon-reload",
        f"reset-failed {UNIT}",
    ]
    assert systemd.installed("decoder") is None
    assert systemd.uninstall("decoder") is None


@pytest.mark.parametrize("answer", ["echo no", "echo 'Failed to look up user' >&2; exit 1"])
def test_on_a_box_without_a_screen_it_is_said_how_it_stays(box: Box, answer: str) -> None:
    box.loginctl.becomes(answer)
    (remark,) = systemd.install(SERVICE, settle_s=0).remarks
    assert "loginctl enable-linger" in remark


@pytest.mark.parametrize("state", ["failed", "inactive"])
def test_a_service_that_ends_at_once_is_told(box: Box, state: str) -> None:
    box.systemctl.becomes(box.answers(state))
    with pytest.raises(ConfigError) as refused:
        systemd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_failed"
    assert refused.value.found == f"{state}, exit status 78"
    assert "journalctl" in str(refused.value.hint)


@pytest.mark.parametrize("verb", ["daemon-reload", "enable", "restart"])
def test_a_manager_that_refuses_is_quoted(box: Box, verb: str) -> None:
    box.systemctl.becomes(box.answers(more=f"*{verb}*) echo 'no room for it' >&2; exit 4;;"))
    with pytest.raises(ConfigError) as refused:
        systemd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_failed"
    assert refused.value.found == "no room for it"
    assert verb in refused.value.message


def test_a_service_that_does_not_stop_keeps_its_unit(box: Box) -> None:
    systemd.install(SERVICE, settle_s=0)
    box.systemctl.becomes(box.answers(more="*disable*) echo 'busy' >&2; exit 1;;"))
    with pytest.raises(ConfigError) as refused:
        systemd.uninstall("decoder")
    assert refused.value.reason == "service_failed"
    assert (box.units / UNIT).exists()


def test_a_login_without_a_user_manager_is_told_what_helps(box: Box) -> None:
    box.systemctl.becomes("echo 'Failed to connect to bus: No medium found' >&2; exit 1")
    with pytest.raises(ConfigError) as refused:
        systemd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_manager_missing"
    assert "enable-linger" in str(refused.value.hint)
    assert not box.units.exists()


def test_a_machine_without_systemd_says_so(
    box: Box, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(ConfigError) as refused:
        systemd.install(SERVICE, settle_s=0)
    assert refused.value.reason == "service_manager_missing"


def test_a_real_manager_runs_stops_and_removes_it(tmp_path: Path) -> None:
    """The whole way, where this user has a manager; another unit of this name is left alone."""
    try:
        there = systemd.installed("producer")
    except ConfigError as error:
        pytest.skip(f"no user manager of systemd here: {error.found}")
    if there is not None:
        pytest.skip("a producer is installed on this machine")
    sleeper = tmp_path / "a python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o755)
    try:
        systemd.install(Service("producer", ("--model=/a b",), str(sleeper)), settle_s=0.5)
        found = systemd.installed("producer")
        assert found is not None
        assert (found.runs, found.arguments) == (True, ("--model=/a b",))
    finally:
        systemd.uninstall("producer")
    assert systemd.installed("producer") is None
