"""Chats over HTTP: where the next request's cache comes from, beside a control without it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from mac_decoder.api.keys import KeyFiles
from mac_decoder.api.settings import ApiSettings
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import load
from mac_decoder.engine.settings import EngineSettings
from mac_decoder.keeper import Keeper
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.serving import MODEL, Server, serving
from tests.mac_decoder.engine.drive import loaded_copy
from tests.ordinary import usual
from tests.tiny_tokenizer import think

KINDS = ("llama", "muse_glimmer", "lfm2")
SYSTEM = "You answer about trains, ferries and the bicycles that they carry. " * 8
DOTS = 5


@dataclass
class Chat:
    """One conversation; ``id_of_dot`` forces answers whose tokens are known."""

    http: httpx.Client
    id_of_dot: int
    messages: list[dict[str, str]] = field(default_factory=list)

    def say(self, text: str, *, forced: bool = True, **baton: Any) -> dict[str, Any]:
        """Add a message, get the answer and add it too; the whole response."""
        self.messages.append({"role": "user", "content": text})
        answer = self.again(forced=forced, **baton)
        message = answer["choices"][0]["message"]
        self.messages.append({"role": "assistant", "content": message["content"] or ""})
        return answer

    def again(self, *, forced: bool = True, **baton: Any) -> dict[str, Any]:
        """Ask for an answer to the messages as they are."""
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": self.messages,
            "temperature": 0,
            "max_tokens": DOTS,
            "baton": baton,
        }
        if forced:
            body["logit_bias"] = {str(self.id_of_dot): 100}
        response = self.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def branch(self, keep: int) -> Chat:
        """A conversation that has the first ``keep`` messages in common."""
        return Chat(self.http, self.id_of_dot, self.messages[:keep])


def end_of(answer: dict[str, Any]) -> int:
    """The position of the cache when the answer ended: its prompt and all that was fed.

    The last token of an answer that its length ends is fed to nothing.
    """
    (choice,) = answer["choices"]
    usage = answer["usage"]
    unfed = choice["finish_reason"] == "length"
    return usage["prompt_tokens"] + usage["completion_tokens"] - unfed


def source(answer: dict[str, Any]) -> tuple[str, int]:
    """Where the prompt came from, and how many tokens of it were reused."""
    baton = answer["baton"]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == baton["reused_tokens"]
    assert baton["prefilled_tokens"] == answer["usage"]["prompt_tokens"] - 1 - cached
    return baton["source"], cached


@pytest.fixture
def served(
    checkpoint: Callable[..., Path], name: str, tmp_path: Path
) -> Iterator[tuple[Server, httpx.Client, int]]:
    path = checkpoint(name.split()[-1], reasoning="thinking" in name)
    if "thinking" in name:
        path = Path(shutil.copytree(path, tmp_path / "thinking"))
        think(path)
    dot = loaded_copy(path).tokenizer.encode(".", add_special_tokens=False)
    assert len(dot) == 1
    known = read_checkpoint(path)
    keeper = Keeper(known.identity, known.layout, bytes(32))
    settings = EngineSettings(prefill_step=64, ram_bytes=1 << 28)
    with (
        serving(
            lambda: Engine(lambda: load(known), settings, keeper=keeper), ApiSettings()
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        yield server, http, dot[0]
    keeper.close()


Served = tuple[Server, httpx.Client, int]


def started(served: Served) -> Chat:
    _server, http, dot = served
    return Chat(http, dot, [{"role": "system", "content": SYSTEM}])


@pytest.mark.parametrize("name", usual(KINDS, ["muse_glimmer", "lfm2"]))
def test_a_chat_goes_on_where_its_last_answer_ended(served: Served) -> None:
    chat = started(served)
    first = chat.say("When does the ferry leave?")
    assert source(first) == ("local", 0)
    second = chat.say("And the next one?")
    assert source(second) == ("live", end_of(first))
    third = chat.say("Does it carry bicycles?", forced=False)
    assert source(third) == ("live", end_of(second))
    del chat.messages[-1]
    control = chat.again(forced=False, reuse=False)
    assert source(control) == ("local", 0)
    assert control["choices"] == third["choices"]


@pytest.mark.parametrize("name", usual(KINDS, ["muse_glimmer", "lfm2"]))
def test_the_same_request_again_is_served_from_memory(served: Served) -> None:
    chat = started(served)
    first = chat.say("When does the ferry leave?", forced=False)
    del chat.messages[-1]
    again = chat.again(forced=False)
    assert source(again) == ("resident", first["usage"]["prompt_tokens"] - 1)
    assert again["choices"] == first["choices"]
    assert source(chat.again(forced=False)) == source(again)


@pytest.mark.parametrize("name", usual(KINDS, ["muse_glimmer", "lfm2"]))
def test_an_edited_message_keeps_what_comes_before_it(served: Served) -> None:
    """The last message is another: everything up to it is reused, by every kind of cache."""
    chat = started(served)
    first = chat.say("When does the ferry leave?")
    edited = chat.branch(1)
    answer = edited.say("Which train is the last?", forced=False)
    where, reused = source(answer)
    assert where == "resident"
    # The system message and the mark of a user's; blocks are all that full rows alone need.
    floor = 256 if len(SYSTEM) > 256 else 0
    assert floor <= reused < first["usage"]["prompt_tokens"]
    assert answer["baton"]["parts_at"] >= reused
    del edited.messages[-1]
    assert edited.again(forced=False, reuse=False)["choices"] == answer["choices"]
    # The first conversation is none the worse for it.
    assert source(chat.say("And back?")) == ("live", end_of(first))


@pytest.mark.parametrize("name", usual(KINDS, ["muse_glimmer", "lfm2"]))
def test_three_chats_in_rotation_each_go_on_from_their_own_end(served: Served) -> None:
    chats = [started(served) for _ in range(3)]
    ends = [
        end_of(chat.say(f"Number {number} asks about the {what}."))
        for number, (chat, what) in enumerate(zip(chats, ("ferry", "tram", "train"), strict=True))
    ]
    for turn in range(2):
        for number, chat in enumerate(chats):
            answer = chat.say(f"Turn {turn}: go on.")
            assert source(answer) == ("live", ends[number])
            ends[number] = end_of(answer)
    texts = [chat.messages[1]["content"] for chat in chats]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("name", ["thinking muse_glimmer", "thinking lfm2"])
def test_a_reasoning_model_goes_on_before_its_thoughts(served: Served) -> None:
    """Its next turn drops them: what both share ends where they began, and is reused."""
    chat = started(served)
    first = chat.say("When does the ferry leave?")
    assert first["choices"][0]["message"]["reasoning_content"]
    second = chat.say("And the next one?", forced=False)
    where, reused = source(second)
    assert where == "resident"
    # All but the mark that opens the thoughts and its line feed.
    assert reused == first["usage"]["prompt_tokens"] - 2
    # A cut ends there, from which the prompt goes on: nothing parts.
    assert second["baton"]["parts_at"] is None
    del chat.messages[-1]
    control = chat.again(forced=False, reuse=False)
    assert control["choices"] == second["choices"]


@pytest.mark.parametrize("name", ["llama"])
def test_an_answer_that_a_stop_word_ends_is_a_turn_like_any_other(served: Served) -> None:
    server, http, dot = served
    body = {
        "model": MODEL,
        "prompt": list(range(3, 203)),
        "max_tokens": 50,
        "temperature": 0,
        "stop": "...",
        "logit_bias": {str(dot): 100},
    }
    answer = http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    server.engine._worker.idle()
    status = http.get("/status").json()
    assert status["engine"]["ended"] == {"stop": 1}
    assert status["cache"]["live"]["sequences"] == 1


@pytest.mark.parametrize("name", ["llama"])
def test_what_another_chat_said_is_never_answered_from(served: Served) -> None:
    """Two prompts of equal length under one system message: only that is shared."""
    chat, other = started(served), started(served)
    chat.say("The code word is heron.", forced=False)
    answer = other.say("The code word is otter.", forced=False)
    del other.messages[-1]
    control = other.again(forced=False, reuse=False)
    assert answer["choices"] == control["choices"]
    assert answer["baton"]["reused_tokens"] <= answer["baton"]["parts_at"]


@pytest.mark.parametrize("name", ["llama"])
def test_the_status_tells_what_is_kept_and_no_text(served: Served) -> None:
    chat = started(served)
    chat.say("A secret that no page may show.")
    chat.say("Another.")
    server, http, _dot = served
    # A sequence is set aside after its answer is out.
    server.engine._worker.idle()
    raw = http.get("/status").text
    cache = http.get("/status").json()["cache"]
    assert "secret" not in raw
    assert cache["live"]["sequences"] == 1
    assert cache["resident"]["cuts"] >= 2
    assert cache["durable"] is None
    assert cache["counters"]["session_continuation_hits"] == 1
    metrics = http.get("/metrics").text
    assert 'baton_cache_total{counter="session_continuation_hits"} 1.0' in metrics
    assert cache["derived"]["joules_saved"] == {"value": None, "tag": "unavailable"}


@pytest.mark.parametrize("given", [False, True], ids=["created", "given"])
def test_no_api_key_learns_by_cached_tokens_what_another_asked(
    checkpoint: Callable[..., Path], tmp_path: Path, *, given: bool
) -> None:
    """Whoever guesses a prompt would see it in the count, and by the time."""
    files = KeyFiles(tmp_path)
    if given:
        first, second = "first-key-of-all-of-them", "second-key-of-all-of-them"
        api = ApiSettings(api_keys=(first, second), keys_demanded=True)
    else:
        first, second = files.create("first"), files.create("second")
        api = ApiSettings(keys_demanded=True)
    with keyed(checkpoint, api, files) as cached:
        whole = PROMPT - 1
        assert cached(first) == 0
        assert cached(second) == 0
        assert (cached(first), cached(second)) == (whole, whole)
        if not given:
            files.revoke("second")
            again = KeyFiles(tmp_path).create("second")
            time.sleep(1.1)
            assert cached(again) == 0, "another key of that name"


def test_keys_that_share_caches_share_them_with_each_other_and_with_nobodys(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    files = KeyFiles(tmp_path)
    alone = files.create("alone")
    pair = [files.create(name, shares_caches=True) for name in ("one", "other")]
    with keyed(checkpoint, ApiSettings(), files) as cached:
        assert cached(alone) == 0
        assert cached(pair[0]) == 0, "not what the key with its own caches asked"
        assert cached(pair[1]) == PROMPT - 1
        assert cached(None) == PROMPT - 1


def test_all_keys_may_share_caches(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    files = KeyFiles(tmp_path)
    keys = [files.create(name) for name in ("one", "other")]
    api = ApiSettings(keys_demanded=True, share_caches=True)
    with keyed(checkpoint, api, files) as cached:
        assert [cached(key) for key in keys] == [0, PROMPT - 1]


PROMPT = 300


@contextmanager
def keyed(
    checkpoint: Callable[..., Path], api: ApiSettings, files: KeyFiles
) -> Iterator[Callable[[str | None], int]]:
    """A way to ask the same prompt with any key: how many tokens of it were cached."""
    known = read_checkpoint(checkpoint("llama"))
    keeper = Keeper(known.identity, known.layout, bytes(32))
    settings = EngineSettings(prefill_step=64, ram_bytes=1 << 28)
    with (
        serving(
            lambda: Engine(lambda: load(known), settings, keeper=keeper), api, stored=files
        ) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):

        def ask(key: str | None) -> int:
            answer = http.post(
                "/v1/completions",
                headers={} if key is None else {"authorization": f"Bearer {key}"},
                json={"model": MODEL, "prompt": list(range(3, 3 + PROMPT)), "max_tokens": 2},
            )
            assert answer.status_code == 200, answer.text
            where, cached = source(answer.json())
            assert (where == "local") == (cached == 0)
            return cached

        yield ask
    keeper.close()
