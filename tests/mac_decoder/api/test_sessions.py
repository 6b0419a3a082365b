"""Sessions: how long they hold, how many there are, and what a cookie is worth."""

from __future__ import annotations

from pathlib import Path

import pytest

from mac_decoder.api.keys import KeyFiles, Keys
from mac_decoder.api.sessions import LIFE_S, MOST, Sessions

GIVEN = "a-key-of-the-settings"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(tmp_path: Path) -> KeyFiles:
    return KeyFiles(tmp_path)


@pytest.fixture
def sessions(files: KeyFiles, clock: Clock) -> Sessions:
    return Sessions(Keys([GIVEN], files, clock), port=8000, clock=clock)


def cookie(token: str, name: str = "baton-8000") -> list[str]:
    return [f"other=1; {name}={token}"]


def test_a_session_is_found_by_its_cookie_and_by_no_other(sessions: Sessions) -> None:
    token = sessions.open_for_user()
    assert sessions.may_manage(sessions.find(cookie(token)))
    for other in ([], ["x"], cookie(""), cookie(token[:-1]), cookie(token, "baton-8001")):
        assert sessions.find(other) is None
    changed = ("a" if token[0] != "a" else "b") + token[1:]
    assert sessions.find(cookie(changed)) is None


def test_a_cookie_of_another_page_of_the_host_hides_none(sessions: Sessions) -> None:
    token = sessions.open_for_user()
    junk = [f"baton-8000={letter * 43}" for letter in "abcdefg"]
    for sent in ([*junk, f"baton-8000={token}"], ["; ".join([*junk, f"baton-8000={token}"])]):
        assert sessions.find(sent) is not None
    ended = sessions.open_for_user()
    sessions.end(ended)
    assert sessions.find([f"baton-8000={ended}; baton-8000={token}"]) is not None


def test_a_flood_of_cookies_is_not_looked_through(sessions: Sessions) -> None:
    flood = "; ".join(f"baton-8000={number:043}" for number in range(1000))
    assert len(sessions.tokens([flood])) == 8


def test_it_ends_after_twelve_hours(sessions: Sessions, clock: Clock) -> None:
    found = sessions.find(cookie(token := sessions.open_for_user()))
    clock.now += LIFE_S - 1
    assert sessions.may_manage(found)
    clock.now += 1
    assert not sessions.may_manage(found)
    assert sessions.find(cookie(token)) is None


def test_an_api_key_opens_one_that_may_not_manage(sessions: Sessions) -> None:
    token = sessions.open_for_key(GIVEN)
    assert token is not None
    found = sessions.find(cookie(token))
    assert found is not None
    assert sessions.holds(found)
    assert not sessions.may_manage(found)


@pytest.mark.parametrize("key", ["", "another-key-altogether", "baton-unknown"])
def test_what_is_no_key_opens_none(sessions: Sessions, key: str) -> None:
    assert sessions.open_for_key(key) is None
    assert len(sessions) == 0


def test_it_ends_with_its_key(sessions: Sessions, files: KeyFiles, clock: Clock) -> None:
    token = sessions.open_for_key(files.create("laptop"))
    assert token is not None
    found = sessions.find(cookie(token))
    assert found is not None
    assert sessions.salt(found)
    files.revoke("laptop")
    files.create("laptop")  # the same name is another key
    clock.now += 2
    assert not sessions.holds(found)
    assert sessions.salt(found) is None
    assert sessions.find(cookie(token)) is None


def test_an_ended_one_may_nothing(sessions: Sessions) -> None:
    token = sessions.open_for_user()
    found = sessions.find(cookie(token))
    sessions.end(token)
    assert not sessions.may_manage(found)
    assert sessions.find(cookie(token)) is None


def test_they_are_bounded_and_a_sort_does_not_push_out_the_other(sessions: Sessions) -> None:
    mine = sessions.open_for_user()
    first = sessions.open_for_key(GIVEN)
    assert first is not None
    for _ in range(MOST):
        sessions.open_for_key(GIVEN)
    assert len(sessions) == MOST + 1
    assert sessions.find(cookie(mine)) is not None
    assert sessions.find(cookie(first)) is None


def test_only_a_digest_is_kept(sessions: Sessions) -> None:
    token = sessions.open_for_user()
    assert token not in repr(vars(sessions))


def test_the_cookie_is_for_this_server_alone(files: KeyFiles) -> None:
    plain = Sessions(Keys([], files), port=8000).set_cookie("t")
    assert plain == "baton-8000=t; Path=/; HttpOnly; SameSite=Strict"
    behind_tls = Sessions(Keys([], files), port=8000, secured=True).set_cookie("t")
    assert behind_tls == "__Host-baton-8000=t; Path=/; HttpOnly; SameSite=Strict; Secure"
    assert "Max-Age=0" in Sessions(Keys([], files)).set_cookie("")
