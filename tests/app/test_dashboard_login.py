"""`baton dashboard`: what the browser is given, and that no secret is anywhere else."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from typer.testing import CliRunner

from app import dashboard_login
from app.commands import app
from app.dashboard_login import open_logged_in, open_plainly
from mac_decoder.api.once import Once
from mac_decoder.config import DecoderConfig
from protocol.errors import ConfigError, TransferError


class Answers(BaseHTTPRequestHandler):
    """A decoder, as far as this command sees it."""

    status = 200
    kind = "text/html; charset=utf-8"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-type", self.kind)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def answers() -> Iterator[type[Answers]]:
    yield Answers
    Answers.status, Answers.kind = 200, "text/html; charset=utf-8"


@pytest.fixture
def url(answers: type[Answers]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_browser_gets_a_private_file_that_leads_there_and_is_gone_afterwards(
    url: str, tmp_path: Path
) -> None:
    once = Once(tmp_path, urlsplit(url).port or 0)
    seen: list[Path] = []

    def browser(address: str) -> bool:
        page = Path(unquote(urlsplit(address).path))
        seen.append(page)
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
        text = page.read_text()
        assert '<meta name="referrer" content="no-referrer">' in text
        found = re.search(rf"url={re.escape(url)}/login\?once=([\w-]+)", text)
        assert found is not None
        assert found[1] not in address
        assert once.take(found[1])
        return True

    open_logged_in(url, tmp_path, browser)
    assert len(seen) == 1
    assert not seen[0].parent.exists()


def test_a_browser_that_does_not_come_is_not_waited_for_for_ever(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_login, "VALID_S", 0.3)
    seen: list[str] = []
    with pytest.raises(TransferError) as caught:
        open_logged_in(url, tmp_path, lambda address: not seen.append(address))
    assert caught.value.reason == "login_unused"
    assert not Path(unquote(urlsplit(seen[0]).path)).exists()
    assert [one for one in (tmp_path / "logins").iterdir() if one.name != ".lock"] == []


@pytest.mark.parametrize(
    "host", ["desk.local", "192.168.1.7", "localhost.example", "127.1", "[fe80::1]", "0.0.0.0"]
)
def test_another_host_is_given_no_token(
    host: str, answers: type[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_login, "require_dashboard", pytest.fail)
    monkeypatch.setattr(dashboard_login.webbrowser, "open", pytest.fail)
    with pytest.raises(ConfigError) as caught:
        open_logged_in(f"http://{host}:8000", tmp_path, pytest.fail)
    assert (caught.value.reason, caught.value.found) == ("login_elsewhere", host.strip("[]"))
    assert "--no-login" in (caught.value.hint or "")
    assert not (tmp_path / "logins").exists()
    asked = ["dashboard", f"{host}:8000", "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(app, asked)
    assert isinstance(done.exception, ConfigError)
    assert done.exception.reason == "login_elsewhere"


def test_without_a_login_any_host_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("app.dashboard_command.open_plainly", opened.append)
    asked = ["dashboard", "desk.local:8000", "--no-login"]
    CliRunner().invoke(app, asked, catch_exceptions=False)
    assert opened == ["http://desk.local:8000"]


@pytest.mark.parametrize("name", ["localhost", "LocalHost"])
def test_localhost_is_the_number_and_no_name_that_may_lead_elsewhere(
    url: str, tmp_path: Path, name: str
) -> None:
    def browser(address: str) -> bool:
        text = Path(unquote(urlsplit(address).path)).read_text()
        found = re.search(rf"url={re.escape(url)}/login\?once=([\w-]+)", text)
        assert found is not None
        return Once(tmp_path, urlsplit(url).port or 0).take(found[1])

    open_logged_in(url.replace("127.0.0.1", name), tmp_path, browser)


def test_without_a_browser_nothing_is_left_behind(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_logged_in(url, tmp_path, lambda _: False)
    assert caught.value.reason == "browser_missing"
    assert [one for one in (tmp_path / "logins").iterdir() if one.name != ".lock"] == []


def test_without_a_login_the_address_alone_is_opened(url: str) -> None:
    seen: list[str] = []
    open_plainly(url, lambda address: not seen.append(address))
    assert seen == [f"{url}/"]


@pytest.mark.parametrize(
    ("status", "kind"), [(404, "application/json"), (401, "application/json"), (404, "text/html")]
)
def test_what_shows_no_dashboard_is_sent_no_token(
    url: str, answers: type[Answers], tmp_path: Path, status: int, kind: str
) -> None:
    answers.status, answers.kind = status, kind
    with pytest.raises(ConfigError) as caught:
        open_logged_in(url, tmp_path, pytest.fail)
    assert caught.value.reason == "dashboard_absent"
    assert not (tmp_path / "logins").exists()


def test_a_decoder_that_starts_is_opened_all_the_same(url: str, answers: type[Answers]) -> None:
    answers.status = 503
    open_plainly(url, lambda _: True)


def test_nobody_there_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TransferError) as caught:
        open_logged_in("http://127.0.0.1:9", tmp_path, pytest.fail)
    assert caught.value.reason == "decoder_unreachable"


def test_the_printed_address_logs_in_once(url: str, tmp_path: Path) -> None:
    asked = ["dashboard", url, "--print", "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    start, _, token = done.output.strip().partition("/login?once=")
    assert start == url
    once = Once(
        DecoderConfig(model="", state_dir=str(tmp_path)).state_path, urlsplit(url).port or 0
    )
    assert once.take(token)
    assert not once.take(token)


def test_without_a_login_the_printed_address_holds_no_token(tmp_path: Path) -> None:
    asked = ["dashboard", "127.0.0.1:8123", "--print", "--no-login", "--state-dir", str(tmp_path)]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.output == "http://127.0.0.1:8123/\n"
    assert list(tmp_path.iterdir()) == []
