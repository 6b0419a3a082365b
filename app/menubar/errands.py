"""What the menu's lines lead to: windows, and texts to be copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from app import settings
from app.dashboard_login import open_logged_in, open_plainly
from app.doctor import Asked, examine
from app.doctor_findings import Finding
from app.menubar.add_node import AddNode
from app.menubar.decoder import Decoder
from app.menubar.first_run import FirstRun
from app.menubar.follow import Told
from app.menubar.logfile import tail
from app.menubar.pairing import Pairing
from app.menubar.place import Given
from app.menubar.windows import CheckUp, LogWindow
from app.service import ask
from app.view.clients import Endpoint, configuration
from mac_decoder.config import DecoderConfig
from protocol.addresses import is_loopback
from trust.secrets import Choice


def client_configuration(client: str, told: Told) -> str:
    """What to copy for a client; empty where no decoder has said what it serves."""
    snapshot = told.snapshot
    if snapshot is None:
        return ""
    certificate = None if told.place is None else told.place.certificate
    secured = told.standing.url.startswith("https://")
    return configuration(
        client,
        Endpoint(
            told.standing.url,
            snapshot.decoder.model,
            snapshot.decoder.context_tokens,
            snapshot.door.keys_demanded,
            str(certificate) if secured and certificate is not None else "",
        ),
    )


def dashboard(told: Told, given: Given, browser: Callable[[str], bool]) -> Callable[[], None]:
    """What opens the dashboard with ``browser``, and waits until that is there: not for Qt's
    thread.

    With the right to change things where the decoder is this machine's. Raises as
    ``settings.named``; what is returned, as ``open_logged_in``.
    """
    url, state = told.standing.url, decoders_state(given)
    if not is_loopback(urlsplit(url).hostname or ""):
        return lambda: open_plainly(url, browser)
    return lambda: open_logged_in(url, state, browser)


def decoders_state(given: Given) -> Path:
    """The decoder's state directory. Raises as ``settings.named``."""
    return DecoderConfig(model="", state_dir=given.state_dir()).state_path


def add_node(told: Told, given: Given) -> AddNode:
    """The window in which a producer is added. Raises as ``settings.named``."""
    keys = given.keys_file()
    return AddNode(Pairing(given.state_dir(), _secrets(given), told.standing.url, keys))


def check_up(told: Told, given: Given) -> CheckUp:
    """The window that says what this machine lacks. Raises as ``settings.named``."""
    state, url = given.state_dir(), told.standing.url
    asked = Asked(
        port=told.standing.port,
        url=url,
        key=None if told.place is None else told.place.key,
        state_dir=Path(state) if state else None,
        secrets=_secrets(given),
    )
    found: Callable[[], Sequence[Finding]] = lambda: list(examine(asked))  # noqa: E731
    return CheckUp(found)


def log(decoder: Decoder) -> LogWindow:
    """The window with the decoder's log: that of its service, or of the one started here."""
    service = decoder.service
    if service is None:
        file = decoder.log.path
        return LogWindow(
            f"{file} (of a decoder that this app has started; any other writes its log where it "
            "was started)",
            lambda: tail(file),
            file,
        )
    if service.log.startswith("journalctl"):
        command = [*service.log.split(), "--no-pager"]
        return LogWindow(service.log, lambda: ask(command, timeout_s=20).said, None)
    file = Path(service.log)
    return LogWindow(service.log, lambda: tail(file), file)


def first_run(chosen: Callable[[], None]) -> FirstRun:
    """The window in which a model is chosen, or another one than the settings name now;
    ``chosen`` is called once they name it. Raises as ``settings.named``.
    """
    window = FirstRun(now=settings.named("serve", "model") or "")
    window.chosen.connect(lambda *_: chosen())
    return window


def _secrets(given: Given) -> Choice | None:
    found = given.option("secrets")
    return found if found in ("keyring", "file") else None
