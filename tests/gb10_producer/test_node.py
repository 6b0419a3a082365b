"""The process itself: one line on stdout, clear refusals, restarts, pairings."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from gb10_producer import node, trust
from gb10_producer.attempts import unended
from gb10_producer.config import parse
from gb10_producer.memory import Ledger
from gb10_producer.prefill import Rows
from gb10_producer.received import MANIFEST
from gb10_producer.server import bind
from gb10_producer.synthetic import Synthetic
from gb10_producer.trust import make_pairing
from protocol import releases
from protocol.errors import (
    EXIT_CONFIG,
    EXIT_ENGINE_FAULT,
    CapacityError,
    ConfigError,
    EngineFault,
    TransferError,
)
from protocol.handoff import Sealed
from protocol.layout import Dtype, FullLayer
from protocol.layouts_named import muse_glimmer, stand_in_identity
from protocol.pairing.record import PairingRecord, encode_record
from tests.contexts import decoder_context
from tests.gb10_producer.peer import MIXED, Closed, Peer, expected_regions
from tests.gb10_producer.producer import wait_until
from trust.pairing_file import load_record

LAYOUT = muse_glimmer()


def key_pipe(key: bytes = b"k" * 32) -> int:
    reading, writing = os.pipe()
    os.write(writing, key)
    os.close(writing)
    return reading


@contextmanager
def producer(*words: str, key: bytes | None = b"k" * 32) -> Iterator[subprocess.Popen[str]]:
    """``python -m gb10_producer`` with the words, ended with the block."""
    passed = [key_pipe(key)] if key is not None else []
    command = [sys.executable, "-m", "gb10_producer", "--port", "0", *words]
    if passed:
        command += ["--key-fd", str(passed[0])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=passed, text=True
    )
    for descriptor in passed:
        os.close(descriptor)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=20.0)


def ready(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), line
    return line.split()[1]


def refused(*words: str, key: bytes | None = b"k" * 32) -> str:
    """What an unsupervised start says on stderr before it ends with 78."""
    with producer("--no-supervisor", *words, key=key) as process:
        output, complaint = process.communicate(timeout=30.0)
    assert (process.returncode, output) == (EXIT_CONFIG, "")
    assert "Traceback" not in complaint
    return complaint


def test_it_serves_survives_sigkill_of_its_child_and_keeps_its_address() -> None:
    with producer("--synthetic", "muse-glimmer") as process:
        url = ready(process)
        with Peer(url, LAYOUT) as peer:
            peer.handshake().start(range(20_000))
            peer.begun()
            (child,) = psutil.Process(process.pid).children()
            child.send_signal(signal.SIGKILL)
            with pytest.raises(Closed):
                peer.until(Sealed)
        child.wait(15.0)  # until then its listening socket may take another connection
        wait_until(lambda: answers(url), timeout_s=15.0)
        with Peer(url, LAYOUT) as peer:
            found = peer.handshake().fetch(range(70))
        assert found == expected_regions(LAYOUT, range(70), 0, 2048)
        process.terminate()
        output, log = process.communicate(timeout=20.0)
        assert (process.returncode, output) == (0, ""), "ready is said once"
        assert 'fault="signal SIGKILL"' in log


def answers(url: str) -> bool:
    host, port = url.split("//")[1].split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_it_ends_with_whoever_started_it() -> None:
    with producer("--synthetic", "muse-glimmer") as process:
        ready(process)
        (child,) = psutil.Process(process.pid).children()
        process.kill()
        child.wait(15.0)


LOADING = """
import sys, time
from gb10_producer import node
from gb10_producer.config import ProducerConfig

def load(config, begun):
    print("loading", flush=True)
    time.sleep(60)

node._source = load
config = ProducerConfig(synthetic="muse-glimmer", port=0, key_fd=int(sys.argv[1]))
sys.exit(node.run(config))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_while_it_still_loads_is_one_at_once(number: signal.Signals) -> None:
    """Loading a model takes seconds to minutes, in which nothing looks at an event."""
    key = key_pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", LOADING, str(key)], stdout=subprocess.PIPE, pass_fds=[key], text=True
    )
    os.close(key)
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.send_signal(number)
    assert process.wait(5.0) == 0
    process.stdout.close()


FROZEN = """
import gc, sys
from gb10_producer import node
from gb10_producer.config import ProducerConfig

config = ProducerConfig(synthetic="muse-glimmer", port=0, key_fd=int(sys.argv[1]))

def ready(url):
    print(gc.get_freeze_count(), len(gc.get_objects()), flush=True)

sys.exit(node.run(config, ready))
"""


def test_no_search_for_garbage_goes_through_what_stays() -> None:
    key = key_pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", FROZEN, str(key)], stdout=subprocess.PIPE, pass_fds=[key], text=True
    )
    os.close(key)
    assert process.stdout is not None
    frozen, others = map(int, process.stdout.readline().split())
    process.terminate()
    assert process.wait(15.0) == 0
    process.stdout.close()
    assert frozen > 100 * others


KILLED = """
import os, signal, sys, time
from gb10_producer import node
from gb10_producer.config import parse

def load(config, begun):
    begun()
    print("loading", config.model.name, flush=True)
    if sys.stdin.readline() == "die\\n":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)

node._source = load
sys.exit(node.run(parse(sys.argv[1:]).config))
"""


@contextmanager
def loading(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A producer that loads, or waits beside, the received model ``one``."""
    places = ["--state-dir", str(tmp_path / "state"), "--cache-dir", str(tmp_path / "cache")]
    words = ["--host", "127.0.0.1", "--port", "0", "--secrets", "file", *places]
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.fixture
def received(tmp_path: Path) -> Path:
    model = tmp_path / "cache" / "models" / "one"
    model.mkdir(parents=True)
    (model / MANIFEST).write_text("[]")
    return model


def test_a_received_model_that_has_the_process_killed_is_loaded_twice_and_no_more(
    tmp_path: Path, received: Path
) -> None:
    """As by the kernel, for its memory: nobody is left to say why."""
    for count in (1, 2):
        with loading(tmp_path) as process:
            assert said(process) == "loading one\n"
            process.communicate("die\n", timeout=20.0)
            assert process.returncode == -signal.SIGKILL
        assert unended(received) == count
    with loading(tmp_path) as process:
        assert said(process).startswith("waiting ws")
        process.terminate()
        _, told = process.communicate(timeout=20.0)
        assert process.returncode == 0
    assert "one was received, and is not loaded" in told
    assert "baton node send" in told


def test_who_stops_a_producer_while_it_loads_says_nothing_against_the_model(
    tmp_path: Path, received: Path
) -> None:
    with loading(tmp_path) as process:
        assert said(process) == "loading one\n"
        assert unended(received) == 1
        process.terminate()
        assert process.wait(5.0) == 0
    assert unended(received) == 0


def test_two_machines_pair_by_two_files(tmp_path: Path) -> None:
    with producer("--make-pairing", str(tmp_path), key=None) as process:
        output, _ = process.communicate(timeout=20.0)
    files = [Path(line) for line in output.splitlines()]
    assert [path.name for path in files] == ["producer.pairing", "decoder.pairing"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    assert {json.loads(path.read_bytes())["role"] for path in files} == {"producer", "decoder"}
    record = load_record(files[1], "decoder")
    words = ["--no-supervisor", "--synthetic", "muse-glimmer", "--pairing", str(files[0])]
    with producer(*words, "--host", "0.0.0.0", key=None) as process:
        url = ready(process)
        assert url.startswith("wss://0.0.0.0:")
        with Peer(
            url,
            LAYOUT,
            pairing=record.pairing,
            context=decoder_context(record),
            certificates=record.fingerprints,
        ) as peer:
            peer.handshake().fetch(range(40))


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = refused("--synthetic", "muse-glimmer", "--port", port)
    assert "port_taken" in said
    assert port in said


def test_too_little_memory_is_named() -> None:
    assert "not_enough_memory" in refused("--synthetic", "muse-glimmer", "--memory-limit", "1M")


# The rest needs no process of its own


def refusal(*words: str) -> ConfigError:
    """The refusal of a start inside this process."""
    config = parse(["--port", "0", *words, "--key-fd", str(key_pipe())]).config
    with pytest.raises(ConfigError) as caught:
        node.serve(config)
    return caught.value


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    assert refusal("--model", str(tmp_path / "none")).reason == "model_missing"


@pytest.mark.parametrize("exists", [False, True], ids=["nowhere", "empty"])
def test_nobody_is_invited_to_pair_for_a_model_that_is_missing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], exists: bool
) -> None:
    model, state = tmp_path / "none", tmp_path / "state"
    if exists:
        model.mkdir()
    words = ["--pair", "--pair-port", "0", "--port", "0", "--host", "127.0.0.1"]
    words += ["--state-dir", str(state), "--secrets", "file", "--model", str(model)]
    with pytest.raises(ConfigError) as caught:
        node.serve(parse(words).config)
    assert caught.value.reason == "model_missing"
    assert not state.exists()
    assert capfd.readouterr() == ("", "")


def test_an_architecture_that_cannot_be_carried_over_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "jamba"}')
    error = refusal("--model", str(tmp_path))
    assert error.reason == "architecture_unsupported"
    assert "jamba" in f"{error.message} {error.found}"


def test_a_checkpoint_without_its_tokenizer_names_the_file(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The producer computes on numbers, but no decoder would have the same identity."""
    path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))
    (path / "tokenizer.json").unlink()
    error = refusal("--model", str(path))
    assert error.reason == "tokenizer_missing"
    assert "tokenizer.json" in error.message


def test_binding_elsewhere_needs_a_pairing() -> None:
    assert refusal("--synthetic", "muse-glimmer", "--host", "0.0.0.0").reason == "pairing_required"
    assert refusal("--synthetic", "muse-glimmer", "--host", "::").reason == "pairing_required"


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        node.bind("192.0.2.1", 0)
    assert caught.value.reason == "address_unusable"


def test_a_layout_without_that_name_is_named() -> None:
    assert refusal("--synthetic", "no-such").reason == "layout_unknown"


@pytest.mark.parametrize("key", [b"", b"short", b"x" * 33])
def test_a_key_has_32_bytes(key: bytes) -> None:
    config = parse(["--synthetic", "muse-glimmer", "--key-fd", str(key_pipe(key))]).config
    with pytest.raises(ConfigError) as caught:
        node.serve(config)
    assert caught.value.reason == "key_unreadable"


@pytest.mark.parametrize(
    "words",
    [
        ["--key-fd", "3"],
        ["--pairing", "p"],
        ["--pair", "--model", "m", "--key-fd", "3"],
        ["--pair", "--model", "m", "--pairing", "p"],
        ["--model", "m", "--pair", "--pair-port", "65536"],
        ["--model", "m", "--synthetic", "s", "--key-fd", "3"],
        ["--model", "m", "--key-fd", "3", "--pairing", "p"],
        ["--model", "m", "--key-fd", "3", "--link-mbps", "0"],
        ["--model", "m", "--key-fd", "3", "--connections", "0"],
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert caught.value.reason == "config_invalid"


@pytest.mark.parametrize(
    ("words", "address"),
    [
        (["--key-fd", "3"], "127.0.0.1"),
        (["--pairing", "p"], "127.0.0.1"),
        ([], "0.0.0.0"),
        (["--pair"], "0.0.0.0"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
    ],
)
def test_a_producer_with_a_registry_is_for_other_machines(words: list[str], address: str) -> None:
    assert parse(["--model", "m", *words]).config.address == address


def test_a_name_that_cannot_travel_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--model", "m", "--name", 'a"b'])
    assert caught.value.reason == "name_malformed"


def test_what_a_child_is_told_is_what_was_asked_for() -> None:
    words = ["--model", "m", "--pair", "--pair-port", "0", "--name", "a b", "--secrets", "file"]
    config = parse([*words, "--state-dir", "s"]).config
    assert parse(config.arguments()).config == config


@pytest.mark.parametrize("size", ["much", "8GB", "", "inf"])
def test_what_is_no_size_is_told_in_words(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--synthetic", "muse-glimmer", "--key-fd", "9", "--memory-limit", size])
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("baton produce: error: argument --memory-limit: ")
    assert "is no size" in told


@pytest.mark.parametrize("name", ["producer.pairing", "decoder.pairing"])
def test_a_pairing_is_written_whole_or_not_at_all(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("of another pairing")
    with pytest.raises(ConfigError) as caught:
        make_pairing(tmp_path, epoch=1)
    assert caught.value.reason == "pairing_exists"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "of another pairing"


def test_a_full_disk_leaves_no_half_of_a_pairing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(record: PairingRecord) -> bytes:
        if record.role == "decoder":
            raise OSError(28, "No space left on device")
        return encode_record(record)

    monkeypatch.setattr(trust, "encode_record", full)
    with pytest.raises(ConfigError) as caught:
        make_pairing(tmp_path, epoch=1)
    assert caught.value.reason == "directory_unusable"
    assert list(tmp_path.iterdir()) == []


def test_a_release_that_was_not_measured_is_refused_before_anything_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(releases, "installed", lambda names: {"torch": "1.0"})
    config = parse(["--model", "nowhere", "--key-fd", "3"]).config
    with pytest.raises(ConfigError) as caught:
        node._model_source(config, Path("nowhere"), lambda: None)
    assert caught.value.reason == "release_not_measured"


@pytest.mark.parametrize("host", ["a" * 64, "a..b", "a\0b"])
def test_a_host_that_is_no_name_is_refused(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bind(host, 0)
    assert caught.value.reason == "address_unusable"


def test_a_port_beyond_the_last_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--model", "m", "--key-fd", "3", "--port", "65536"])
    assert caught.value.reason == "config_invalid"


def test_a_pairing_file_that_others_read_or_of_the_other_side_is_refused(tmp_path: Path) -> None:
    ours, theirs = make_pairing(tmp_path, epoch=1)
    with pytest.raises(ConfigError) as caught:
        load_record(theirs, "producer")
    assert caught.value.reason == "pairing_of_other_side"
    ours.chmod(0o644)
    with pytest.raises(ConfigError) as caught:
        load_record(ours, "producer")
    assert caught.value.reason == "pairing_exposed"
    with pytest.raises(ConfigError) as caught:
        make_pairing(tmp_path, epoch=2)
    assert caught.value.reason == "pairing_exists"
    with pytest.raises(ConfigError) as caught:
        load_record(tmp_path / "none", "producer")
    assert caught.value.reason == "pairing_missing"
    theirs.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        load_record(theirs, "decoder")
    assert caught.value.reason == "pairing_unreadable"


class Short(Synthetic):
    """Loses the last item of every prefill."""

    def prefill(self, tokens, cut, end, emit, cancelled, progress, extra=()):
        held: list[Rows] = []
        computed = super().prefill(tokens, cut, end, held.append, cancelled, progress)
        for item in held[:-1]:
            emit(item)
        return computed


def test_the_probe_counts_what_a_prefill_emits() -> None:
    node.probe(Synthetic(MIXED, 16), Ledger(1 << 30))
    with pytest.raises(EngineFault) as failed:
        node.probe(Short(MIXED, 16), Ledger(1 << 30))
    assert failed.value.reason == "probe_failed"
    with pytest.raises(CapacityError):
        node.probe(Synthetic(MIXED, 16), Ledger(1000))


class Numbers(Synthetic):
    """Rows and states of zeros, as a model of the device "cpu"; ``spoilt`` of one layer is NaN."""

    def __init__(self, spoilt: int | None = None) -> None:
        super().__init__(MIXED, 16)
        self.recipe = msgspec.structs.replace(self.recipe, device="cpu")
        self._spoilt = spoilt

    def prefill(self, tokens, cut, end, emit, cancelled, progress, extra=()):
        def numbers(item):
            fill = b"\xff" if item.index == self._spoilt else b"\x00"
            views = {
                name: memoryview(fill * value.nbytes)
                for name, value in item._asdict().items()
                if isinstance(value, memoryview)
            }
            emit(item._replace(**views))

        return super().prefill(tokens, cut, end, numbers, cancelled, progress)


def test_the_probe_refuses_weights_that_are_not_finite() -> None:
    node.probe(Numbers(), Ledger(1 << 30))
    for index in range(len(MIXED.layers)):
        with pytest.raises(ConfigError) as refused:
            node.probe(Numbers(index), Ledger(1 << 30))
        assert refused.value.reason == "model_not_finite"
        assert refused.value.found == str(index)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_what_is_finite_is_told_from_the_bits(dtype: Dtype) -> None:
    layer = FullLayer(layer=0, heads=1, key_dim=2, value_dim=0, dtype=dtype)

    def finite(value: float) -> bool:
        raw = torch.tensor([1.0, value]).to(getattr(torch, dtype))
        key = memoryview(raw.view(torch.uint8).numpy().tobytes())
        return node.all_finite(Rows(0, 0, 1, key, memoryview(b"")), layer)

    largest = torch.finfo(getattr(torch, dtype)).max
    assert all(map(finite, (0.0, -1.0, largest, -largest)))
    assert not any(map(finite, (float("nan"), float("inf"), -float("inf"))))


class Broken(Synthetic):
    """Works for the probe, then never again."""

    def prefill(self, tokens, cut, end, emit, cancelled, progress, extra=()):
        if end > 40:
            raise EngineFault("the device is gone")
        return super().prefill(tokens, cut, end, emit, cancelled, progress)


def test_a_device_fault_ends_the_process_with_75(monkeypatch: pytest.MonkeyPatch) -> None:
    source = node.Source(Broken(MIXED, 16), stand_in_identity(MIXED), 1000, 1000)
    monkeypatch.setattr(node, "_source", lambda config, begun: source)
    config = parse(["--synthetic", "x", "--port", "0", "--key-fd", str(key_pipe())]).config
    urls: queue.Queue[str] = queue.Queue()
    statuses: queue.Queue[int] = queue.Queue()
    thread = threading.Thread(target=lambda: statuses.put(node.serve(config, None, urls.put)))
    thread.start()
    with Peer(urls.get(timeout=10.0)) as peer:
        peer.handshake().start(range(60))
        with pytest.raises(TransferError) as failed:
            peer.until(Sealed)
    assert failed.value.reason == "peer_engine_fault"
    assert statuses.get(timeout=10.0) == EXIT_ENGINE_FAULT
    thread.join()


class Keeping(Synthetic):
    """Notes what it may keep of prompts, and what it prefilled before it was told."""

    told: tuple[int, int] | None = None

    def keep_prefixes(self, ledger, budget):
        self.told = ledger.limit, budget

    def prefill(self, tokens, cut, end, emit, cancelled, progress, extra=()):
        assert self.told is None, "nobody's prompt is kept"
        return super().prefill(tokens, cut, end, emit, cancelled, progress)


@pytest.mark.parametrize("size", [None, "0", "3M"])
def test_half_of_the_caches_memory_keeps_prefixes(
    size: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefiller = Keeping(MIXED, 16)
    source = node.Source(prefiller, stand_in_identity(MIXED), 1000, 1000)
    monkeypatch.setattr(node, "_source", lambda config, begun: source)
    options = [] if size is None else ["--prefix-cache", size]
    words = ["--synthetic", "x", "--port", "0", "--key-fd", str(key_pipe()), *options]
    stop = threading.Event()
    node.serve(parse(words).config, node.Asked(stop), lambda url: stop.set())
    assert prefiller.told is not None
    limit, budget = prefiller.told
    assert budget == {None: limit // 2, "0": 0, "3M": 3 << 20}[size]


def test_less_than_nothing_cannot_be_kept() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(["--model", "m", "--key-fd", "3", "--prefix-cache=-1"])
    assert (caught.value.reason, caught.value.field) == ("config_invalid", "prefix_cache")


def test_quantised_weights_are_counted_as_they_will_be_in_memory() -> None:
    assert node.loaded_bytes(1000, None, "bfloat16") == 1000
    four_bit = {"bits": 4, "group_size": 64}
    assert node.loaded_bytes(1000, four_bit, "bfloat16") == int(1000 * 2 / (0.5 + 4 / 64))


def test_nothing_is_logged_of_a_prompt(caplog: pytest.LogCaptureFixture) -> None:
    from tests.gb10_producer.producer import running

    tokens = [54321, 54322, 54323] * 9
    with (
        caplog.at_level("DEBUG", "gb10_producer"),
        running(Synthetic(MIXED, 16)) as serving,
        Peer(serving.url) as peer,
    ):
        peer.handshake().fetch(tokens)
        time.sleep(0.05)
    assert caplog.records
    said = " ".join(str(record.__dict__) for record in caplog.records)
    assert "5432" not in said
