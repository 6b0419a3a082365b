"""When a producer is started again, when not, and what reaches its child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from gb10_producer.config import ProducerConfig, parse
from gb10_producer.supervisor import Supervisor
from protocol.errors import EXIT_ENGINE_FAULT, EXIT_START_AGAIN
from protocol.restarts import Policy

QUICK = Policy(first_pause_s=0.01, longest_pause_s=0.02, settled_s=5.0, quick_deaths=5)


@pytest.mark.parametrize("status", [0, 1, 2, 78])
def test_other_exit_statuses_are_the_last_word(tmp_path: Path, status: int) -> None:
    child = f"""
        print("ready ws://127.0.0.1:4711", flush=True)
        sys.exit({status})
    """
    supervisor, log = supervised(tmp_path, child)
    assert supervisor.run() == status
    assert len(starts(log)) == 1


def test_dying_soon_after_every_start_latches_later(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = """
        print("ready ws://127.0.0.1:4711", flush=True)
        sys.exit(75)
    """
    supervisor, log = supervised(tmp_path, child)
    assert supervisor.run() == EXIT_ENGINE_FAULT
    assert len(starts(log)) == QUICK.quick_deaths
    assert "producer_latched_off" in capfd.readouterr().err


def supervised(tmp_path: Path, child: str, **config: object) -> tuple[Supervisor, Path]:
    """A supervisor whose child is this Python text; it appends its arguments to a file."""
    log = tmp_path / "starts"
    text = f"import os, sys, time, signal\nopen({str(log)!r}, 'a').write(sys.argv[1] + '\\n')\n"
    text += textwrap.dedent(child)
    known = ProducerConfig(synthetic="muse-glimmer", **config)  # type: ignore[arg-type]

    def command(config: ProducerConfig) -> list[str]:
        return [sys.executable, "-c", text, " ".join(config.arguments())]

    return Supervisor(known, policy=QUICK, grace_s=0.3, command=command), log


def starts(log: Path) -> list[str]:
    return log.read_text().splitlines()


def test_faults_restart_the_child_and_then_latch(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    supervisor, log = supervised(tmp_path, "sys.exit(75)")
    assert supervisor.run() == EXIT_ENGINE_FAULT
    assert len(starts(log)) == 3
    assert "producer_latched_off" in capfd.readouterr().err


def test_a_signal_is_a_fault_and_the_port_stays(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    child = """
        first = "--port 0" in sys.argv[1]
        print("ready ws://127.0.0.1:4711", flush=True)
        if first:
            os.kill(os.getpid(), signal.SIGSEGV)
        sys.exit(0)
    """
    supervisor, log = supervised(tmp_path, child, port=0)
    assert supervisor.run() == 0
    first, second = starts(log)
    assert "--port 0" in first
    assert "--port 4711" in second
    assert capfd.readouterr().out == "ready ws://127.0.0.1:4711\n", "said once"


def test_another_model_is_no_fault(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """More often than any policy allows faults, and without a pause."""
    child = f"""
        count = len(open({str(tmp_path / "starts")!r}).readlines())
        print("waiting wss://127.0.0.1:4711" if count == 1 else "ready wss://127.0.0.1:4711")
        sys.stdout.flush()
        sys.exit({EXIT_START_AGAIN} if count < 12 else 0)
    """
    supervisor, log = supervised(tmp_path, child, port=0)
    assert supervisor.run() == 0
    first, *others = starts(log)
    assert len(others) == 11
    assert "--port 0" in first
    assert all("--port 4711" in other for other in others)
    said = capfd.readouterr().out.splitlines()
    assert said == ["waiting wss://127.0.0.1:4711", "ready wss://127.0.0.1:4711"]


def test_one_that_dies_while_it_waits_had_started(tmp_path: Path) -> None:
    child = """
        print("waiting wss://127.0.0.1:4711", flush=True)
        sys.exit(75)
    """
    supervisor, log = supervised(tmp_path, child)
    assert supervisor.run() == EXIT_ENGINE_FAULT
    assert len(starts(log)) == QUICK.quick_deaths


def test_a_configuration_error_is_passed_on(tmp_path: Path) -> None:
    supervisor, log = supervised(tmp_path, "sys.exit(78)")
    assert supervisor.run() == 78
    assert len(starts(log)) == 1


def test_every_child_gets_the_key_from_a_pipe_of_its_own(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"s" * 32)
    os.close(writing)
    child = """
        words = sys.argv[1].split()
        key = os.read(int(words[words.index("--key-fd") + 1]), 33)
        sys.exit(75 if key == b"s" * 32 else 3)
    """
    supervisor, log = supervised(tmp_path, child, key_fd=reading)
    assert supervisor.run() == EXIT_ENGINE_FAULT
    assert len(starts(log)) == 3
    assert all("s" * 32 not in line for line in starts(log))


SUPERVISE = """
import sys
from gb10_producer.config import ProducerConfig
from gb10_producer.supervisor import Policy, Supervisor
child = sys.argv[1]
supervisor = Supervisor(
    ProducerConfig(synthetic="muse-glimmer", port=0),
    grace_s=float(sys.argv[2]),
    command=lambda config: [sys.executable, "-c", child, *config.arguments()],
)
sys.exit(supervisor.run())
"""


def supervising(child: str, grace_s: float) -> subprocess.Popen[str]:
    """A supervisor in a process of its own, with this Python text as its child."""
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, child, str(grace_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("polite", [True, False])
def test_signals_reach_the_child_and_end_both(number: signal.Signals, polite: bool) -> None:
    manners = "lambda *_: sys.exit(0)" if polite else "signal.SIG_IGN"
    child = "import signal, sys, time, os\n"
    child += f"signal.signal({int(number)}, {manners})\n"
    child += "print(f'ready ws://h:{os.getpid()}', flush=True)\ntime.sleep(30)"
    process = supervising(child, grace_s=0.5)
    assert process.stdout is not None
    pid = int(process.stdout.readline().rsplit(":", 1)[1])
    began = time.monotonic()
    process.send_signal(number)
    assert process.wait(10.0) == 0
    assert time.monotonic() - began < 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_at_once_that_it_stops_and_does_not_wait_when_asked_again(
    number: signal.Signals,
) -> None:
    child = "import os, signal, time\n"
    child += "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
    child += "print(f'ready ws://h:{os.getpid()}', flush=True)\ntime.sleep(30)"
    process = supervising(child, grace_s=60.0)
    assert process.stdout is not None
    assert process.stderr is not None
    pid = int(process.stdout.readline().rsplit(":", 1)[1])
    began = time.monotonic()
    process.send_signal(number)
    assert process.stderr.readline() == "stopping…\n"
    time.sleep(0.2)
    assert process.poll() is None, "the child has its time"
    process.send_signal(number)
    assert process.wait(5.0) == 0
    assert time.monotonic() - began < 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    process.communicate()


def test_arguments_come_back_as_the_same_configuration(tmp_path: Path) -> None:
    config = ProducerConfig(
        model=tmp_path,
        host="0.0.0.0",
        port=0,
        device="cpu",
        tile=64,
        threads=2,
        pairing=tmp_path / "p",
        waiting=0,
        connections=3,
        memory_limit=1 << 30,
        backlog_bytes=1 << 20,
        link_mbps=12.5,
        cache_dir=tmp_path / "c",
        log_level="DEBUG",
        lifeline_fd=9,
    )
    assert parse(config.arguments()).config == config
