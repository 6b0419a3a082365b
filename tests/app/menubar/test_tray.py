"""The menu's lines, chosen: with Qt, without a screen, and with a decoder of the test's own."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("PySide6.QtWidgets", reason="Qt is not installed", exc_type=ImportError)

from platformdirs import user_state_path
from PySide6.QtCore import QUrl
from PySide6.QtGui import QAction, QGuiApplication
from PySide6.QtWidgets import QApplication, QMenu

from app import install, login_item
from app.menubar import browser, errands, place, tray
from app.menubar.decoder import Decoder
from app.menubar.first_run import FirstRun
from app.menubar.follow import Told
from app.menubar.layout import Layout
from app.menubar.place import Given
from app.menubar.tray import Options, Tray
from app.menubar.windows import Window
from app.service import Installed
from app.view import notices
from app.view.menu import Item
from app.view.standing import Standing
from protocol.errors import ConfigError
from tests.app.menubar.fake import Fake, fake
from tests.app.menubar.spinning import rest, spin
from tests.app.view.snapshots import IDLE, IN_HAND, with_engine, with_node, with_requests
from tests.e2e.paired import free_port


class Calls(list[str]):
    """What the decoder was asked for instead of doing it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        for name in ("start", "stop", "restart"):
            monkeypatch.setattr(Decoder, name, lambda _, name=name: self.append(name))
        monkeypatch.setattr(Decoder, "look", lambda self: self._changed())


class Desk:
    """The app, and what it shows."""

    def __init__(self, options: Options) -> None:
        self.tray = Tray(options)
        self._trace = options.trace
        self.tray.begin()

    @property
    def menu(self) -> QMenu:
        return self.tray._menu

    def texts(self) -> list[str]:
        return [action.text() for action in self.menu.actions()]

    def line(self, text: str) -> QAction:
        for action in self.menu.actions():
            if action.text() == text:
                return action
        raise AssertionError(f"{text} is not among {self.texts()}")

    def shown(self, what: str) -> list[Any]:
        assert self._trace is not None
        lines = self._trace.read_text().splitlines() if self._trace.exists() else []
        return [value for line in lines for name, value in json.loads(line).items() if name == what]

    def open(self) -> None:
        """As a desktop does that tells when a menu is opened."""
        self.menu.aboutToShow.emit()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CONFIG", "STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    return tmp_path


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.fixture
def decoder() -> Iterator[Fake]:
    with fake() as made:
        made.begins_with(IDLE)
        yield made


@pytest.fixture
def desk(qt: QApplication, home: Path, calls: Calls, decoder: Fake) -> Iterator[Desk]:
    made = Desk(Options(Given(decoder.url), home / "log", True, home / "trace"))
    spin(lambda: [one["picture"] for one in made.shown("icon")][-1:] == ["idle"])
    made.open()
    yield made
    made.tray.end()


def clipboard() -> str:
    return QGuiApplication.clipboard().text()


def test_the_menu_is_the_views(desk: Desk) -> None:
    texts = desk.texts()
    assert texts[:2] == ["Idle", f"a-model on port {desk.tray._told.standing.port}"]
    assert "gb10: ready, 2,100 tokens/s, 1.2 GB/s" in texts
    assert not desk.line("Idle").isEnabled()
    assert desk.shown("icon")[-1]["picture"] == "idle"


def test_an_open_menu_changes_in_place(desk: Desk, decoder: Fake) -> None:
    first = desk.menu.actions()[0]
    busy = with_requests(IDLE, "prefilling_there", IN_HAND)
    decoder.says(msgspec.structs.replace(busy, revision=8))
    spin(lambda: desk.shown("icon")[-1]["picture"] == "prefilling_there")
    assert desk.menu.actions()[0] is first
    assert first.text().startswith("Prefilling")
    assert "45 % of 65,535 tokens" in first.text()
    assert desk.shown("icon")[-1]["ring"] == pytest.approx(0.45, abs=1 / 24)


def test_a_closed_menu_is_laid_out_less_often(desk: Desk, decoder: Fake) -> None:
    desk.menu.aboutToHide.emit()
    before = len(desk.shown("menu"))
    for step in range(12):
        told = msgspec.structs.replace(IN_HAND, processed=5_000 * step)
        busy = with_requests(IDLE, "prefilling_there", told)
        decoder.says(msgspec.structs.replace(busy, revision=30 + step))
        rest(0.1)
    assert len(desk.shown("menu")) <= before + 1
    desk.open()
    assert "83 %" in desk.texts()[0], "and is as new as can be when it is opened"


def test_a_model_with_an_ampersand_has_it_in_the_menu(qt: QApplication) -> None:
    menu = QMenu()
    Layout(menu, lambda *_: None).show([Item("Q&A")])
    assert menu.actions()[0].text() == "Q&&A"


def test_what_is_chosen_is_what_the_line_says_after_the_menu_was_rebuilt(qt: QApplication) -> None:
    menu, chosen = QMenu(), list[tuple[str, str]]()
    layout = Layout(menu, lambda action, argument: chosen.append((action, argument)))
    clients = (Item("A", "copy_client", "a"), Item("B", "copy_client", "b"))
    layout.show([Item("Start", "start"), Item("More", children=clients)])
    layout.show([Item("told"), Item(), Item("More", children=clients[::-1]), Item("Stop", "stop")])
    inner = menu.actions()[2].menu()
    assert isinstance(inner, QMenu)
    for action in (*inner.actions(), menu.actions()[3]):
        action.trigger()
    assert chosen == [("copy_client", "b"), ("copy_client", "a"), ("stop", "")]
    assert menu.actions()[1].isSeparator()


def test_the_icon_is_painted_four_times_a_second_at_most(desk: Desk, decoder: Fake) -> None:
    before, began = len(desk.shown("icon")), time.monotonic()
    for step in range(40):
        told = msgspec.structs.replace(IN_HAND, processed=1_600 * step)
        decoder.says(
            msgspec.structs.replace(
                with_requests(IDLE, "prefilling_there", told), revision=100 + step
            )
        )
        rest(0.04)
    took = time.monotonic() - began
    assert len(desk.shown("icon")) - before <= took * 4 + 2
    spin(lambda: desk.shown("icon")[-1]["ring"] == pytest.approx(0.95, abs=1 / 24))


def test_what_changes_nothing_that_is_shown_paints_nothing(desk: Desk, decoder: Fake) -> None:
    before = len(desk.shown("icon"))
    for revision in range(20, 25):
        counted = with_engine(IDLE, generated_tokens=revision)
        decoder.says(msgspec.structs.replace(counted, revision=revision))
    spin(lambda: desk.tray._told.snapshot.revision == 24)
    rest(0.6)
    assert len(desk.shown("icon")) == before


def test_the_base_url_and_a_clients_configuration_are_copied(desk: Desk, decoder: Fake) -> None:
    desk.line("Copy base URL").trigger()
    assert clipboard() == f"{decoder.url}/v1"
    inner = desk.line("Copy client configuration").menu()
    assert isinstance(inner, QMenu)
    for action in inner.actions():
        action.trigger()
        assert f"{decoder.url}/v1" in clipboard()
        # That one asks the decoder for the names of its models.
        assert ("a-model" in clipboard()) != (action.text() == "Open WebUI")


def test_a_decoder_that_is_not_ours_cannot_be_stopped(desk: Desk) -> None:
    assert not desk.line("Stop the decoder").isEnabled()
    assert not desk.line("Restart the decoder").isEnabled()


def test_nor_can_one_elsewhere_although_a_service_runs_here(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "ours", True)
    desk.tray._look_around()
    desk.open()
    assert not desk.line("Stop the decoder").isEnabled()


def test_ours_can(
    free: Callable[..., Desk],
    home: Path,
    calls: Calls,
    decoder: Fake,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    says(home, f"port = {decoder.port}", 'model = "m"')
    monkeypatch.setattr(Decoder, "ours", True)
    desk = free()
    spin(lambda: desk.tray._told.snapshot is not None)
    desk.open()
    desk.line("Stop the decoder").trigger()
    desk.line("Restart the decoder").trigger()
    assert calls == ["stop", "restart"]


@pytest.mark.parametrize("ours", [True, False])
def test_another_model_is_served_by_the_next_one(
    free: Callable[..., Desk],
    home: Path,
    calls: Calls,
    decoder: Fake,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ours: bool,
) -> None:
    asked: list[FirstRun] = []
    first_run = errands.first_run

    def remembered(chosen: Callable[[], None]) -> FirstRun:
        asked.append(first_run(chosen))
        return asked[0]

    monkeypatch.setattr(errands, "first_run", remembered)
    says(home, f"port = {decoder.port}", 'model = "/m"')
    monkeypatch.setattr(Decoder, "ours", True)
    desk = free()
    spin(lambda: desk.tray._told.snapshot is not None)
    desk.open()
    desk.line("Change the model…").trigger()
    assert asked[0].path.text() == "/m"
    # Somebody else's may have come in its place while the window was open.
    monkeypatch.setattr(Decoder, "ours", ours)
    asked[0].chosen.emit(Path("/another"))
    asked[0].close()
    assert calls == (["restart"] if ours else [])
    told = [error["reason"] for error in desk.shown("error")]
    assert told == ([] if ours else ["decoder_not_ours"])


def test_one_that_is_asked_to_end_is_in_no_trouble(
    free: Callable[..., Desk], home: Path, decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(home, f"port = {decoder.port}", 'model = "m"')
    monkeypatch.setattr(Decoder, "ours", True)
    desk = free()
    spin(lambda: [one["picture"] for one in desk.shown("icon")][-1:] == ["idle"])
    monkeypatch.setattr(Decoder, "ending", True)
    decoder.says(msgspec.structs.replace(with_engine(IDLE, doing="trouble"), revision=9))
    spin(lambda: desk.shown("icon")[-1]["picture"] != "idle")
    assert desk.shown("icon")[-1]["picture"] == "off"
    desk.open()
    assert desk.texts()[0] == "The decoder stops"


def test_a_decoder_that_is_gone_leaves_no_number_behind(desk: Desk, decoder: Fake) -> None:
    decoder.refusal = (503, "decoder_restarting")
    decoder.hangs_up()
    spin(lambda: desk.texts()[0] == "The decoder starts again after a fault")
    assert desk.shown("icon")[-1]["picture"] == "trouble"
    texts = desk.texts()
    assert not [text for text in texts if "tokens/s" in text or "Memory" in text]
    assert not desk.line("Copy base URL").isEnabled()


def test_launching_at_login_is_a_box_that_is_ticked(desk: Desk) -> None:
    if not desk.line("Launch at login").isCheckable():
        pytest.fail("no box")
    assert not desk.line("Launch at login").isChecked()
    desk.line("Launch at login").trigger()
    assert login_item.installed()
    desk.open()
    assert desk.line("Launch at login").isChecked()
    desk.line("Launch at login").trigger()
    desk.open()
    assert not login_item.installed()
    assert not desk.line("Launch at login").isChecked()


def test_a_window_of_a_kind_is_opened_once(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Window] = []

    def make(*_: object) -> Window:
        made.append(Window("a window", 200, 100))
        return made[-1]

    for name, line in (("add_node", "Add a node…"), ("check_up", "Check-up…"), ("log", "Logs")):
        monkeypatch.setattr(errands, name, make)
        before = len(made)
        desk.line(line).trigger()
        desk.line(line).trigger()
        assert len(made) == before + 1
        assert made[-1].isVisible()
        made[-1].close()
        QApplication.processEvents()
        desk.line(line).trigger()
        assert len(made) == before + 2


def test_the_dashboard_is_opened_beside_the_window_and_what_goes_wrong_is_shown(
    desk: Desk, decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, Path]] = []

    def fails(url: str, state: Path, browser: object) -> None:
        assert threading.current_thread() is not threading.main_thread()
        opened.append((url, state))
        raise ConfigError("no browser", reason="browser_missing", hint="open it yourself")

    monkeypatch.setattr(errands, "open_logged_in", fails)
    desk.line("Open dashboard").trigger()
    spin(lambda: bool(desk.shown("error")))
    assert opened == [(decoder.url, user_state_path("baton") / "decoder")]
    assert desk.shown("error")[-1] == {"reason": "browser_missing", "hint": "open it yourself"}
    assert desk.tray._windows["error"].isVisible()


@pytest.mark.parametrize("there", [True, False])
def test_the_browser_is_opened_in_qts_thread(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    opened: list[tuple[str, bool]] = []

    class Services:
        @staticmethod
        def openUrl(url: QUrl) -> bool:
            here = threading.current_thread() is threading.main_thread()
            opened.append((url.toString(), here))
            return there

    def plainly(url: str, state: Path, browser: Callable[[str], bool]) -> None:
        if not browser(f"{url}/"):
            raise ConfigError("no browser", reason="browser_missing")
        raise ConfigError("it came", reason="it_came")

    monkeypatch.setattr(browser, "QDesktopServices", Services)
    monkeypatch.setattr(errands, "open_logged_in", plainly)
    desk.line("Open dashboard").trigger()
    spin(lambda: bool(desk.shown("error")))
    assert opened == [(f"{desk.tray._told.standing.url}/", True)]
    assert desk.shown("error")[-1]["reason"] == ("it_came" if there else "browser_missing")


def test_another_machines_dashboard_is_opened_without_a_login(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(errands, "open_plainly", lambda url, browser: opened.append(url))
    told = Told(Standing("connected", "https://desk.local:8000"))
    errands.dashboard(told, Given(), pytest.fail)()
    assert opened == ["https://desk.local:8000"]


def test_a_producer_that_is_lost_is_told_once(
    desk: Desk, decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    # Its own alone: an event loop of another test's would sleep until this clock has caught up.
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time)
    monkeypatch.setattr(tray, "time", clock)
    down = with_node(IDLE, state="down", reason="producer_down")
    for step in range(4):
        now[0] = 100.0 + 30 * step
        decoder.says(msgspec.structs.replace(down, revision=50 + step))
        revision = 50 + step
        spin(lambda wanted=revision: desk.tray._told.snapshot.revision == wanted)
        rest(0.4)
    assert [one["kind"] for one in desk.shown("notice")] == ["producer_lost"]
    assert desk.shown("icon")[-1]["attention"] is True


def test_one_that_is_lost_is_told_of_although_nothing_changes_any_more(
    desk: Desk, decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (tray, notices):
        monkeypatch.setattr(module, "ABSENCE_S", 0.5)
    decoder.says(with_node(IDLE, state="down", reason="producer_down"))
    spin(lambda: bool(desk.tray._memory.missing))
    assert not desk.shown("notice")
    spin(lambda: [one["kind"] for one in desk.shown("notice")] == ["producer_lost"])
    rest(0.8)
    assert len(desk.shown("notice")) == 1


def says(home: Path, *lines: str) -> None:
    file = home / "config" / "baton" / "config.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["[serve]", *lines, ""]))


@pytest.fixture
def free(qt: QApplication, home: Path, calls: Calls) -> Iterator[Callable[..., Desk]]:
    """The app as the settings have it, without a decoder given."""
    made: list[Desk] = []

    def begin(*, attach_only: bool = False) -> Desk:
        options = Options(Given(), home / "log", attach_only, home / "trace")
        made.append(Desk(options))
        return made[-1]

    yield begin
    for one in made:
        one.tray.end()


def test_it_starts_a_decoder_where_none_runs_and_once(
    free: Callable[..., Desk], home: Path, calls: Calls
) -> None:
    says(home, f"port = {free_port()}", 'model = "m"')
    desk = free()
    spin(lambda: calls == ["start"])
    desk.open()
    desk.line("Start the decoder").trigger()
    rest(1)
    assert calls == ["start", "start"], "started by itself, and once more because it was chosen"


def test_a_service_that_is_looked_up_slowly_is_started_and_no_model_is_asked_for(
    qt: QApplication, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def installed(side: str) -> Installed:
        time.sleep(1.0)  # a process of the service manager's
        return Installed("unit", home / "unit", (f"--port={port}",), False, "/log")

    def first_run(_: Callable[[], None]) -> Window:
        asked.append("model")
        return Window("first run", 100, 100)

    port = free_port()
    says(home, f"port = {port}")
    monkeypatch.setattr(install, "installed", installed)
    monkeypatch.setattr(errands, "first_run", first_run)
    monkeypatch.setattr(Decoder, "start", lambda _: asked.append("start"))
    desk = Desk(Options(Given(), home / "log", False, home / "trace"))
    try:
        spin(lambda: bool(asked))
        assert asked == ["start"]
    finally:
        desk.tray.end()


def test_one_that_is_ended_before_it_has_looked_ends(
    qt: QApplication, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decoder, "look", lambda _: None)
    desk = Desk(Options(Given(), home / "log", True, home / "trace"))
    desk.tray.end()
    desk.tray._looked()
    assert not desk.tray._follower._thread.is_alive()


def test_one_that_was_started_and_does_not_listen_yet_is_starting(
    free: Callable[..., Desk], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(home, f"port = {free_port()}", 'model = "m"')
    monkeypatch.setattr(Decoder, "coming", True)
    desk = free()
    spin(lambda: desk.tray._told.standing.state == "absent")
    rest(0.4)
    desk.open()
    assert desk.texts()[0] == "The decoder starts"
    assert desk.shown("icon")[-1]["picture"] == "starting"


def test_it_attaches_to_one_that_runs(
    free: Callable[..., Desk], home: Path, calls: Calls, decoder: Fake
) -> None:
    says(home, f"port = {decoder.port}", 'model = "m"')
    desk = free()
    spin(lambda: desk.tray._told.snapshot is not None)
    decoder.refusal = (503, "decoder_stopping")
    decoder.close()
    spin(lambda: desk.tray._told.standing.state == "absent")
    assert calls == [], "one that somebody has stopped was started again"


def test_attach_only_starts_none(free: Callable[..., Desk], home: Path, calls: Calls) -> None:
    says(home, f"port = {free_port()}", 'model = "m"')
    desk = free(attach_only=True)
    spin(lambda: desk.tray._told.standing.state == "absent")
    assert calls == []


def test_another_port_in_the_settings_is_followed(
    free: Callable[..., Desk], home: Path, decoder: Fake
) -> None:
    says(home, f"port = {free_port()}", 'model = "m"')
    desk = free(attach_only=True)
    spin(lambda: desk.tray._told.standing.state == "absent")
    says(home, f"port = {decoder.port}", 'model = "m"')
    spin(lambda: desk.tray._told.snapshot is not None, 4)


def test_settings_that_come_into_being_are_noticed(
    free: Callable[..., Desk], home: Path, decoder: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody may have a decoder where one is by default.
    monkeypatch.setattr(place, "DEFAULT_URL", f"http://127.0.0.1:{free_port()}")
    desk = free(attach_only=True)
    spin(lambda: desk.tray._told.standing.state == "absent")
    desk.open()
    assert "Choose a model…" in desk.texts()
    says(home, f"port = {decoder.port}", 'model = "m"')
    spin(lambda: desk.tray._told.snapshot is not None, 4)


def test_without_a_model_it_is_asked_for_one_and_then_serves_it(
    free: Callable[..., Desk], home: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Callable[[], None]] = []

    def first_run(chosen: Callable[[], None]) -> Window:
        asked.append(chosen)
        return Window("first run", 100, 100)

    monkeypatch.setattr(errands, "first_run", first_run)
    says(home, f"port = {free_port()}")
    desk = free()
    spin(lambda: bool(asked))
    assert calls == []
    says(home, f"port = {free_port()}", 'model = "m"')
    asked[0]()
    assert calls == ["start"]
    desk.open()
    assert "Choose a model…" not in desk.texts()
