"""``/v1/completions``: text and tokens, several prompts, log probabilities of the older form."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from tests.mac_decoder.api.answers import checked_text, streamed, text
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.serving import Server

PATH = "/v1/completions"


def told(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(
        choice["text"] for c in chunks for choice in c["choices"] if choice["index"] == index
    )


def test_a_prompt_is_continued(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.completions.create(model="tiny", prompt="[greeting]", temperature=0)
    assert answer.choices[0].text == "Good morning, runner!!"
    assert answer.choices[0].finish_reason == "stop"
    payload = http.post(PATH, json=text()).json()
    assert checked_text(payload).choices[0].text == "Good morning, runner!!"
    assert payload["id"].startswith("cmpl-")


def test_a_stream_gives_the_same_text(client: openai.OpenAI, http: httpx.Client) -> None:
    stream = client.completions.create(
        model="tiny", prompt="[greeting]", temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "Good morning, runner!!"
    body = text(stream_options={"include_usage": True})
    *chunks, last = streamed(http, PATH, body)
    assert told(chunks) == "Good morning, runner!!"
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4


def test_the_async_client(server: Server) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            found = ""
            async for chunk in await client.completions.create(
                model="tiny", prompt="[emoji]", temperature=0, stream=True
            ):
                found += chunk.choices[0].text
            return found

    assert asyncio.run(ask()) == "smile 😀 end of smile"


def test_the_default_limit_is_sixteen_tokens(http: httpx.Client) -> None:
    answer = checked_text(http.post(PATH, json=text("[endless]")).json())
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


def test_a_leading_space_is_part_of_the_continuation(http: httpx.Client) -> None:
    assert http.post(PATH, json=text("[spaced]")).json()["choices"][0]["text"] == " leading space"
    assert told(streamed(http, PATH, text("[spaced]"))) == " leading space"


def test_marks_are_plain_text_here(http: httpx.Client) -> None:
    found = http.post(PATH, json=text("[thoughtful]")).json()["choices"][0]["text"]
    assert found == "<think>pondering deeply</think>The answer"
    found = http.post(PATH, json=text("[bad_tool]")).json()["choices"][0]["text"]
    assert found == "<tool_call>no call at all</tool_call> sorry"


def test_several_prompts_are_answered_in_order(http: httpx.Client) -> None:
    body = text(["[greeting]", "[spaced]", "[emoji]"], n=2)
    answer = checked_text(http.post(PATH, json=body).json())
    texts = ["Good morning, runner!!", " leading space", "smile 😀 end of smile"]
    assert [choice.text for choice in answer.choices] == [t for t in texts for _ in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 2 * (4 + 2 + 6)
    chunks = streamed(http, PATH, body)
    assert [told(chunks, index) for index in range(6)] == [t for t in texts for _ in range(2)]


def test_tokens_are_a_prompt(http: httpx.Client, recital: Recital) -> None:
    head = recital.heads["greeting"]
    answer = checked_text(http.post(PATH, json=text([head])).json())
    assert answer.choices[0].text == " morning, runner!!"
    other = recital.heads["spaced"]
    answer = checked_text(http.post(PATH, json=text([[head], [1, other]])).json())
    assert [choice.text for choice in answer.choices] == [" morning, runner!!", " space"]


def test_log_probabilities_of_the_older_form(http: httpx.Client) -> None:
    body = text(logprobs=2)
    payload = http.post(PATH, json=body).json()
    checked_text(payload)
    found = payload["choices"][0]["logprobs"]
    assert found["tokens"] == ["Good", " morning", ", runner", "!!"]
    assert found["text_offset"] == [0, 4, 12, 20]
    assert all(value <= 0 for value in found["token_logprobs"])
    assert [len(top) for top in found["top_logprobs"]] == [2, 2, 2, 2]
    for token, top in zip(found["tokens"], found["top_logprobs"], strict=True):
        assert token in top
    chunks = streamed(http, PATH, body)
    streams = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [t for part in streams for t in part["tokens"]] == found["tokens"]
    assert [o for part in streams for o in part["text_offset"]] == found["text_offset"]


def test_with_zero_the_chosen_token_alone_is_told(http: httpx.Client) -> None:
    found = http.post(PATH, json=text(logprobs=0)).json()["choices"][0]["logprobs"]
    assert found["top_logprobs"] is None
    assert len(found["token_logprobs"]) == 4


def test_no_log_probabilities_unless_asked_for(http: httpx.Client) -> None:
    assert http.post(PATH, json=text()).json()["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("stop", ["runner", [", ", "!!"]])
def test_a_stop_string_ends_the_text_before_it(http: httpx.Client, stop: Any) -> None:
    body = text(stop=stop)
    expected = "Good morning, " if stop == "runner" else "Good morning"
    assert http.post(PATH, json=body).json()["choices"][0]["text"] == expected
    assert told(streamed(http, PATH, body)) == expected
