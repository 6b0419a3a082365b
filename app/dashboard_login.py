"""Opening the dashboard in a browser, logged in as the user whose decoder it is.

A token in an address on a command line would be shown to every user of the machine by its list of
processes. So the browser is given a private file, which leads it to the address with the token.
"""

from __future__ import annotations

import html
import shutil
import tempfile
import time
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import httpx

from mac_decoder.api.once import VALID_S, Once
from protocol.addresses import is_loopback
from protocol.errors import ConfigError, TransferError

_LOOK_S: Final = 0.1
_ASK_S: Final = 5.0

_PAGE: Final = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    '<meta name="referrer" content="no-referrer"><meta name="color-scheme" content="light dark">'
    '<meta http-equiv="refresh" content="0; url={address}"><title>Baton</title></head>'
    "<body><p>Opening Baton …</p></body></html>"
)


def open_logged_in(url: str, state: Path, browser: Callable[[str], bool] = webbrowser.open) -> None:
    """Open the dashboard of the decoder at ``url`` (``scheme://host:port``), whose state directory
    is ``state``, and wait until it is logged in.

    Raises ``TransferError`` (``decoder_unreachable``; ``login_unused``: nobody came within a
    minute), ``ConfigError`` (``login_elsewhere``, ``dashboard_absent``, ``browser_missing``), and
    what ``Once.leave`` does.
    """
    url = _of_this_machine(url)
    require_dashboard(url)
    once = Once(state, _port(url))
    token = once.leave()
    directory = Path(tempfile.mkdtemp(prefix="baton-"))  # for this user alone
    try:
        page = directory / "dashboard.html"
        page.touch(mode=0o600)
        page.write_text(_PAGE.format(address=html.escape(f"{url}/login?once={token}")))
        _open(page.as_uri(), browser)
        until = time.monotonic() + VALID_S
        while once.waits(token):
            if time.monotonic() >= until:
                raise TransferError(
                    "the browser did not come to the dashboard",
                    reason="login_unused",
                    found=f"nothing within {VALID_S:.0f} s",
                    hint="it may not be allowed to read the file that leads there; "
                    "`baton dashboard --print` prints the address",
                )
            time.sleep(_LOOK_S)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        once.forget(token)


def logged_in_address(url: str, state: Path) -> str:
    """An address that logs in whoever goes there first, within a minute: for this user's own
    terminal. Raises as :func:`open_logged_in`, but for what a browser does.
    """
    url = _of_this_machine(url)
    require_dashboard(url)
    return f"{url}/login?once={Once(state, _port(url)).leave()}"


def open_plainly(url: str, browser: Callable[[str], bool] = webbrowser.open) -> None:
    """Open the dashboard without logging in. Raises as :func:`open_logged_in`."""
    require_dashboard(url)
    _open(f"{url}/", browser)


def require_dashboard(url: str) -> None:
    """Raise ``TransferError`` (``decoder_unreachable``) if nobody answers at ``url``, and
    ``ConfigError`` (``dashboard_absent``) if whoever does has no dashboard.
    """
    try:
        # Nothing secret is sent, and nothing of the answer believed that matters.
        with httpx.Client(timeout=_ASK_S, verify=False, trust_env=False) as asking:
            answer = asking.get(f"{url}/login", headers={"accept": "text/html"})
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise TransferError(
            f"no decoder answers at {url}",
            reason="decoder_unreachable",
            field="url",
            found=type(error).__name__,
            hint="start one with `baton serve`, or give its address: baton dashboard HOST:PORT",
        ) from error
    # 503 is a decoder that starts: its supervisor's page leads on by itself.
    shows = answer.headers.get("content-type", "").startswith("text/html")
    if not shows or answer.status_code not in (200, 503):
        raise ConfigError(
            f"what answers at {url} shows no dashboard",
            reason="dashboard_absent",
            field="url",
            found=answer.status_code,
            hint="start the decoder with `baton serve`, without --no-dashboard",
        )


def _of_this_machine(url: str) -> str:
    """``url`` by this machine's own number; no other host is led to with a token of this one.

    Raises ``ConfigError`` (``login_elsewhere``).
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not is_loopback(host):
        raise ConfigError(
            f"{host} may be another machine, and is given no login of this one's decoder",
            reason="login_elsewhere",
            field="url",
            found=host,
            expected="127.0.0.1, [::1] or localhost",
            hint="open it to look only, with --no-login; to change things, run `baton dashboard` "
            "on the decoder's machine",
        )
    # What a name leads to is for resolvers to say, and a browser may ask another one.
    if host == "localhost":
        parts = parts._replace(netloc=parts.netloc.lower().replace(host, "127.0.0.1", 1))
    return parts.geturl()


def _open(address: str, browser: Callable[[str], bool]) -> None:
    if not browser(address):
        raise ConfigError(
            "no browser can be opened from here",
            reason="browser_missing",
            hint="`baton dashboard --print` prints the address",
        )


def _port(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or (443 if parts.scheme == "https" else 80)
