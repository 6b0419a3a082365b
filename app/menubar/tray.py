"""The icon and its menu: what the decoder says is laid out, and what is chosen is done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from PySide6.QtCore import QFileSystemWatcher, QObject, Qt, QTimer, Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QApplication, QMenu, QSystemTrayIcon

from app import login_item, settings
from app.menubar import errands
from app.menubar.background import Work
from app.menubar.browser import Browser
from app.menubar.decoder import Decoder
from app.menubar.follow import Follower, Told
from app.menubar.layout import Layout
from app.menubar.logfile import LogFile
from app.menubar.picture import picture, stepped
from app.menubar.place import Given, has_model, settings_now
from app.menubar.windows import ErrorWindow, Window
from app.service_arguments import value_of
from app.view.icon import Icon, icon
from app.view.menu import Action, Around, menu
from app.view.notices import ABSENCE_S, Memory, events
from app.view.overview import headline, where
from app.view.standing import Standing, one_line
from protocol.errors import BatonError, ConfigError

REPAINT_MS: Final = 250
"""No sooner than this after one repaint comes the next."""

_CLOSED_MS: Final = 2000
"""How old a menu may be that nobody has open: some desktops do not say when it is opened."""

_NOTICE_MS: Final = 10_000


@dataclass(frozen=True)
class Options:
    """What the command line says. ``attach_only``: no decoder is started. ``trace`` is a file
    to which everything that is shown is written, for tests.
    """

    given: Given
    log: Path
    attach_only: bool = False
    trace: Path | None = None


class Tray(QObject):
    """The app while it runs."""

    _heard = Signal(object)
    _decoder_changed = Signal()
    _decoder_failed = Signal(object)

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._given, self._options = options.given, options
        self._told = Told(Standing("connecting", ""))
        self._shown: Icon | None = None
        self._memory = Memory()
        self._around = Around()
        self._started = options.attach_only
        """Whether a decoder was started by itself, which happens once."""
        self._windows: dict[str, Window] = {}
        self._menu = QMenu()
        self._layout = Layout(self._menu, self._act)
        self._browser = Browser(self)
        self._icon = QSystemTrayIcon(self)
        self._icon.setContextMenu(self._menu)
        self._is_open = False
        """Qt does not call a menu visible that the desktop itself draws."""

        self._menu.aboutToShow.connect(self._opened)
        self._menu.aboutToHide.connect(self._closed)
        self._soon = self._timer(REPAINT_MS, self._repaint)
        self._later = self._timer(_CLOSED_MS, self._lay_out)
        # One that is lost changes nothing any more: nobody would tell of it again.
        self._absence = self._timer(0, self._notice)
        self._dirty = False
        for signal, slot in (
            (self._heard, self._hear),
            (self._decoder_changed, self._looked),
            (self._decoder_failed, self._complain),
        ):
            signal.connect(slot, Qt.ConnectionType.QueuedConnection)
        self._decoder = Decoder(
            LogFile(options.log), self._decoder_changed.emit, self._decoder_failed.emit
        )
        self._follower = Follower(lambda: self._given.place(), self._heard.emit)
        self._watched = QFileSystemWatcher(self)
        self._watched.directoryChanged.connect(self._settings_changed)
        self._watched.fileChanged.connect(self._settings_changed)
        self._settings = b""
        self._follows = False

    def begin(self) -> None:
        """Show the icon, look for the decoder, and follow it."""
        self._settings = settings_now()
        self._watch()
        self._look_around()
        self._repaint()
        self._lay_out()
        self._icon.show()
        if self._given.url is None:
            self._look()  # and follow once that has answered
        else:
            self._follow()

    def end(self) -> None:
        """Take the icon away, and end what was started."""
        self._icon.hide()
        for window in [*self._windows.values()]:
            window.close()
        self._follows = True  # or not any more
        self._follower.stop()
        self._decoder.quit()

    # -- what is heard

    def _hear(self, told: Told) -> None:
        before, self._told = self._told, told
        self._notice()
        if before.standing.state != told.standing.state:
            self._look()  # a service may have been started or stopped
        if told.standing.state == "absent":
            self._start_once()
        elif told.snapshot is not None:
            self._started = True
        self._dirty = True
        if not self._soon.isActive():
            self._repaint()

    def _notice(self) -> None:
        """Tell what asks for it, now and, where somebody is missing, once that is an absence."""
        if self._told.snapshot is None:
            return
        self._memory, notices = events(self._memory, self._told.snapshot, time.monotonic())
        for notice in notices:
            self._trace("notice", asdict(notice))
            title, text = one_line(notice.title), one_line(notice.text)
            self._icon.showMessage(title, text, self._icon.icon(), _NOTICE_MS)
        missing = [
            since for name, since in self._memory.missing.items() if name not in self._memory.lost
        ]
        if missing:
            left_s = min(missing) + ABSENCE_S - time.monotonic()
            self._absence.start(1 + max(0, round(left_s * 1000)))

    def _start_once(self) -> None:
        if self._started:
            return
        self._started = True
        if self._around.has_model:
            self._start()
        else:
            self._choose_model()

    def _look(self) -> None:
        if self._given.url is None:  # elsewhere no service of this machine's matters
            self._decoder.look()

    def _looked(self) -> None:
        """Something may be known of the service that was not."""
        self._look_around()
        self._follow()

    def _follow(self) -> None:
        """Begin to follow, once it is known whether there is a service.

        That nobody listens is told before a service manager has answered; without a model in the
        settings one would be asked for, although a service has one.
        """
        if not self._follows:
            self._follows = True
            self._follower.start()

    def _start(self) -> None:
        self._decoder.start()
        self._follower.try_now()

    def _look_around(self) -> None:
        """What the menu has to know besides the decoder."""
        service = self._decoder.service
        arguments = (service and service.arguments) or ()
        if arguments != self._given.service:
            self._given = replace(self._given, service=arguments)
            self._follower.look_again()
        try:
            model = has_model() or service is not None
        except ConfigError:
            model = True  # `baton serve` says what is wrong with the file
        here = self._given.url is None
        self._around = Around(
            ours=here and self._decoder.ours,
            startable=here,
            has_model=model,
            model_follows=not value_of("--model", arguments),
            login_item=_at_login(),
        )
        self._follower.try_now()
        self._changed()

    def _changed(self) -> None:
        self._dirty = True
        if not self._soon.isActive():
            self._repaint()

    # -- what is shown

    def _timer(self, ms: int, act: Callable[[], None]) -> QTimer:
        timer = QTimer(self)
        timer.setSingleShot(True)
        timer.setInterval(ms)
        timer.timeout.connect(act)
        return timer

    @property
    def _standing(self) -> Standing:
        """Where the decoder stands; one that this app has just started does not listen yet, and
        what one says that is on its way out is of no interest.
        """
        told = self._told.standing
        if self._around.ours and self._decoder.ending:
            return Standing("stopping", told.url)
        if told.state == "absent" and self._decoder.coming:
            return Standing("starting", told.url)
        return told

    def _repaint(self) -> None:
        """Show what has changed, if anything has."""
        if not self._dirty:
            return
        self._dirty = False
        self._soon.start()
        snapshot, standing = self._told.snapshot, self._standing
        found = stepped(icon(snapshot, standing))
        if found != self._shown:
            self._shown = found
            self._icon.setIcon(picture(found))
            self._trace("icon", asdict(found))
        lines = (headline(snapshot, standing).text, where(snapshot, standing))
        said = "\n".join(map(one_line, lines))
        if said != self._icon.toolTip():
            self._icon.setToolTip(said)
        if self._is_open:
            self._lay_out()
        elif not self._later.isActive():
            self._later.start()

    def _opened(self) -> None:
        self._is_open = True
        self._lay_out()

    def _closed(self) -> None:
        self._is_open = False

    def _lay_out(self) -> None:
        around, standing = self._around, self._standing
        if standing.state != "absent":
            around = replace(around, has_model=True)  # one runs, wherever it has its model from
        items = menu(self._told.snapshot, standing, around, time.time())
        if items != self._layout.items:
            self._layout.show(items)
            self._trace("menu", [asdict(item) for item in items])

    def _trace(self, what: str, value: Any) -> None:
        if self._options.trace is not None:
            with self._options.trace.open("a") as file:
                file.write(json.dumps({what: value}) + "\n")

    # -- what is chosen

    def _act(self, action: Action, argument: str) -> None:
        match action:
            case "start":
                self._start()
            case "stop":
                self._decoder.stop()
            case "restart":
                self._decoder.restart()
            case "copy_url":
                _copy(f"{self._told.standing.url}/v1")
            case "copy_client":
                _copy(errands.client_configuration(argument, self._told))
            case "dashboard":
                self._try(self._open_dashboard)
            case "add_node":
                self._open("add_node", lambda: errands.add_node(self._told, self._given))
            case "doctor":
                self._open("doctor", lambda: errands.check_up(self._told, self._given))
            case "logs":
                self._open("logs", lambda: errands.log(self._decoder))
            case "login_item":
                self._try(_toggle_login)
                self._look_around()
            case "choose_model":
                self._choose_model()
            case "quit":
                QApplication.quit()

    def _open_dashboard(self) -> None:
        # It waits until the browser has come, which takes a moment.
        opening = errands.dashboard(self._told, self._given, self._browser.open)
        Work(lambda _: opening(), lambda _: None, self._complain, self).start()

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BatonError as error:
            self._complain(error)

    def _open(self, name: str, make: Callable[[], Window]) -> None:
        """One window of a kind: that which is there comes to the front."""
        window = self._windows.get(name)
        if window is None:
            try:
                window = make()
            except BatonError as error:
                self._complain(error)
                return
            self._windows[name] = window
            window.finished.connect(lambda *_: self._windows.pop(name, None))
        window.open_in_front()

    def _complain(self, error: BatonError) -> None:
        self._trace("error", error.details())
        before = self._windows.get("error")
        if before is not None:
            before.close()
        self._open("error", lambda: ErrorWindow("Baton", error))

    def _choose_model(self) -> None:
        self._open("first_run", lambda: errands.first_run(self._model_was_chosen))

    def _model_was_chosen(self) -> None:
        """The settings name another model now: serve it."""
        self._look_around()
        if self._around.ours:
            self._decoder.restart()
            self._follower.try_now()
        elif self._told.standing.state == "absent":
            self._start()
        else:
            self._complain(
                ConfigError(
                    "the model is written down, and not served yet",
                    reason="decoder_not_ours",
                    field="model",
                    found=self._told.standing.url,
                    hint="the decoder there was not started by this app: end it where it was "
                    "started, then choose Start the decoder",
                )
            )

    # -- settings

    def _watch(self) -> None:
        """Be told of changes of the file of settings, and of its coming and going."""
        file = settings.default_path()
        watched = {*self._watched.files(), *self._watched.directories()}
        # Of a directory that is not there yet, the next one above that is.
        near = next((one for one in (file.parent, *file.parent.parents) if one.is_dir()), None)
        for path in (file if file.exists() else None, near):
            if path is not None and str(path) not in watched:
                self._watched.addPath(str(path))

    def _settings_changed(self, *_: str) -> None:
        self._watch()  # a file that was replaced is another one
        now = settings_now()
        if now == self._settings:
            return
        self._settings = now
        self._look_around()
        self._follower.look_again()


def _at_login() -> bool | None:
    try:
        return login_item.installed()
    except BatonError:
        return None


def _toggle_login() -> None:
    if login_item.installed():
        login_item.remove()
    else:
        login_item.install()


def _copy(text: str) -> None:
    QGuiApplication.clipboard().setText(text)
