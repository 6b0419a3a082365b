"""The app in a real tray, with a real decoder and a real producer: every icon, and the menu."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from protocol.status.stream import Full, encode
from tests.app.menubar.fake import fake
from tests.app.menubar.screen import (
    WIDTH,
    App,
    Screen,
    needs_screen,
    running,
    screen,
    settings,
    settle,
)
from tests.app.view.snapshots import IDLE
from tests.e2e.paired import free_port
from tests.e2e.running import RunningProducer, until

pytestmark = needs_screen

ICONS = (
    *("starting", "idle", "prefilling_there", "prefilling_here", "decoding"),
    *("producer_gone", "trouble"),
)
LONG = "a tide is what the moon makes of the sea and the sea of the shore; " * 40


@pytest.fixture
def tray(tmp_path: Path) -> Iterator[Screen]:
    with screen(tmp_path) as made:
        yield made


class Producer:
    """A paired producer that can be killed and started again in the same place."""

    def __init__(self, model: Path, home: Path) -> None:
        made = home / "pairing"
        command = [sys.executable, "-m", "gb10_producer", "--make-pairing", str(made)]
        subprocess.run(command, check=True, capture_output=True)
        self.pairing = made / "decoder.pairing"
        self.port = free_port()
        self._home = home
        self._arguments = (
            *("--model", str(model), "--port", str(self.port), "--host", "127.0.0.1"),
            *("--pairing", str(made / "producer.pairing"), "--device", "cpu", "--tile", "64"),
            "--no-supervisor",
        )
        self.running = self._started()

    @property
    def url(self) -> str:
        return f"wss://127.0.0.1:{self.port}"

    def _started(self) -> RunningProducer:
        return RunningProducer(self._home, *self._arguments)

    def kill(self) -> None:
        self.running.process.kill()
        self.running.process.wait(10)
        assert self.running.process.stdout is not None
        self.running.process.stdout.close()

    def start_again(self) -> None:
        self.running = self._started().await_ready()


@contextmanager
def in_slow_motion(pid: int) -> Iterator[None]:
    """A process computes for a few milliseconds at a time, as a large model would a tile."""
    process, done = psutil.Process(pid), threading.Event()

    def halt_now_and_then() -> None:
        while not done.wait(0.02):
            process.suspend()
            done.wait(0.25)
            process.resume()

    thread = threading.Thread(target=halt_now_and_then)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def ask(url: str, lane: str, tokens: int, text: str = LONG) -> threading.Thread:
    """A request in a thread of its own; it may fail."""

    def run() -> None:
        name = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        body = {
            "model": name,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": tokens,
            "baton": {"lane": lane, "reuse": False},
        }
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@contextmanager
def answering(url: str) -> Iterator[None]:
    """A request that decodes for as long as somebody listens."""
    body = {
        "model": httpx.get(f"{url}/v1/models").json()["data"][0]["id"],
        "prompt": list(range(3, 20)),
        "max_tokens": 2000,
        "logit_bias": {"5": 100},
        "stream": True,
        "baton": {"lane": "local", "reuse": False},
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200
        yield


@pytest.mark.timeout(600)
def test_a_day_of_the_app(tray: Screen, checkpoint, tmp_path: Path) -> None:
    model = checkpoint("llama")
    producer = Producer(model, tmp_path)
    port = free_port()
    settings(
        tmp_path,
        [
            f'model = "{model}"',
            f"port = {port}",
            f'state-dir = "{tmp_path / "decoder-state"}"',
            f'cache-dir = "{tmp_path / "decoder-cache"}"',
            f'producer = ["{producer.url}"]',
            f'pairing = ["{producer.pairing}"]',
            "qualify-every = 0",
            "remote-threshold = 16",
            "prefill-step = 64",
        ],
    )
    url = f"http://127.0.0.1:{port}"
    with running(App(tray, tmp_path)) as app:
        try:
            _walk(app, tray, producer, url)
            _faults(app, tray)
            _every_icon_differs(tray)
            began = time.monotonic()
            assert app.quit() == 0, app.log.read_text()
            assert time.monotonic() - began < 20
            # What it has started went with it, and nothing of it is left.
            with pytest.raises(httpx.TransportError):
                httpx.get(f"{url}/health")
        finally:
            if producer.running.process.poll() is None:
                producer.kill()


def _walk(app: App, tray: Screen, producer: Producer, url: str) -> None:
    app.await_picture("off", "starting")
    settle()
    tray.picture("starting")
    producer.running.await_ready()
    app.await_picture("idle")
    until(lambda: any("ready" in line for line in app.lines()), 30)
    settle()
    tray.picture("idle")

    with in_slow_motion(producer.running.process.pid):
        asked = ask(url, "remote", 8)
        app.await_picture("prefilling_there")
        until(lambda: len(_rings(app, "prefilling_there")) >= 4)
        tray.picture("prefilling_there")
        open_menu(tray, "menu_prefilling")
    asked.join()
    app.await_picture("idle")
    rings = _rings(app, "prefilling_there")
    assert rings == sorted(rings), "a ring that goes back"

    with in_slow_motion(engine(app).pid):
        asked = ask(url, "local", 8, LONG)
        app.await_picture("prefilling_here")
        until(lambda: len(_rings(app, "prefilling_here")) >= 4)
        tray.picture("prefilling_here")
    asked.join()
    app.await_picture("idle")

    with in_slow_motion(engine(app).pid), answering(url):
        app.await_picture("decoding")
        settle()
        tray.picture("decoding")
        open_menu(tray, "menu_decoding")
    app.await_picture("idle")

    producer.kill()
    until(lambda: app.shown("icon")[-1]["attention"], 30)
    settle()
    tray.picture("producer_gone")
    until(lambda: [one["kind"] for one in app.shown("notice")] == ["producer_lost"], 40)
    open_menu(tray, "menu_producer_gone")
    producer.start_again()
    until(lambda: not app.shown("icon")[-1]["attention"], 60)
    until(
        lambda: [one["kind"] for one in app.shown("notice")] == ["producer_lost", "producer_back"],
        20,
    )


def _faults(app: App, tray: Screen) -> None:
    """Something kills it whenever it starts: it gives up, and is started again by hand."""

    def has_given_up() -> bool:
        with suppress(psutil.NoSuchProcess):
            for process in decoders(app)[0].children():
                process.kill()
        return any("three times in a row" in line for line in app.lines())

    until(has_given_up, 60)
    assert app.picture == "trouble"
    settle()
    tray.picture("trouble")
    open_menu(tray, "menu_trouble")
    choose(app, tray, "Restart the decoder")
    app.await_picture("idle")


def _every_icon_differs(tray: Screen) -> None:
    icons = {name: tray.icon_in(name) for name in ICONS}
    assert len(set(icons.values())) == len(icons), icons


def _rings(app: App, which: str) -> list[float]:
    return [
        one["ring"]
        for one in app.shown("icon")
        if one["picture"] == which and one["ring"] is not None
    ]


def open_menu(tray: Screen, name: str) -> None:
    """Open the menu as a user does, photograph it, and close it."""
    tray.click(WIDTH - 13, 12, 3)
    settle()
    tray.picture(name)
    tray.press("Escape")
    settle(0.2)


def choose(app: App, tray: Screen, text: str) -> None:
    """Open the menu and choose a line by keyboard: those that only tell are passed over."""
    items = [item for item in app.shown("menu")[-1] if item["enabled"] and item["text"]]
    place = [item["text"] for item in items].index(text)
    tray.click(WIDTH - 13, 12, 3)
    settle()
    tray.press(*["Down"] * (place + 1), "Return")


@pytest.mark.soak
def test_the_menu_stops_starts_and_moves_the_decoder(
    tray: Screen, checkpoint, tmp_path: Path
) -> None:
    model, ports = checkpoint("llama"), (free_port(), free_port())
    where = [f'model = "{model}"', "no-disk = true", f'state-dir = "{tmp_path / "decoder"}"']
    settings(tmp_path, [*where, f"port = {ports[0]}"])
    url, other = (f"http://127.0.0.1:{port}" for port in ports)
    with running(App(tray, tmp_path)) as app:
        app.await_picture("idle")
        settle(2.5)
        first = decoders(app)
        assert len(first) == 1
        choose(app, tray, "Stop the decoder")
        app.await_picture("off")
        assert "trouble" not in [one["picture"] for one in app.shown("icon")]
        until(lambda: not decoders(app), 20)
        settle(2.5)
        choose(app, tray, "Start the decoder")
        app.await_picture("idle")
        assert decoders(app) != first

        # Another port: nobody is there, until the decoder is started with it.
        settings(tmp_path, [*where, f"port = {ports[1]}"])
        app.await_picture("off")
        settle(2.5)
        choose(app, tray, "Start the decoder")
        app.await_picture("idle")
        assert httpx.get(f"{other}/ready").status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{url}/health")

        # A fault is shown, and what comes after it.
        (decoder,) = decoders(app)
        engine(app).kill()
        app.await_picture("trouble", "starting")
        app.await_picture("idle")
        assert not app.shown("notice")
        settle(2.5)
        choose(app, tray, "Quit Baton")
        assert app.process.wait(60) == 0
        assert not psutil.pid_exists(decoder.pid)
        assert not app.shown("error")


def engine(app: App) -> psutil.Process:
    """The process that computes, below the decoder's supervisor."""
    (decoder,) = decoders(app)
    (below,) = decoder.children()
    return below


def decoders(app: App) -> list[psutil.Process]:
    """The decoders that the app has started."""
    below = psutil.Process(app.process.pid).children(recursive=True)
    found: list[psutil.Process] = []
    for one in below:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            words = one.cmdline()
            if "serve" in words and "app.lifeline" not in words:
                found.append(one)
    return found


@pytest.mark.soak
def test_idle_it_costs_less_than_a_hundredth_of_a_core(tray: Screen, tmp_path: Path) -> None:
    with fake() as decoder:
        decoder.begins_with(IDLE)
        with running(App(tray, tmp_path, "--url", decoder.url)) as app:
            app.await_picture("idle")
            settle(3.0)
            process, before = psutil.Process(app.process.pid), sum(used(app))
            for revision in range(1, 4):
                settle(10.0)
                decoder.says_raw(encode(Full(at=0.0, snapshot=IDLE)))
                assert process.num_threads() < 16, revision
            assert sum(used(app)) - before < 0.01 * 30


def used(app: App) -> tuple[float, float]:
    """The seconds of a core that the app has used."""
    times = psutil.Process(app.process.pid).cpu_times()
    return times.user, times.system
