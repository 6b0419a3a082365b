"""``/v1/chat/completions`` as the official client sees it: whole, streamed, sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.mac_decoder.api.answers import (
    USER,
    chat,
    checked_chat,
    ends,
    joined,
    streamed,
)
from tests.mac_decoder.api.recital import Recital
from tests.mac_decoder.api.serving import Server

PATH = "/v1/chat/completions"


def whole(http: httpx.Client, **fields: Any) -> tuple[ChatCompletion, dict[str, Any]]:
    response = http.post(PATH, json=chat(**fields))
    assert response.status_code == 200, response.text
    return checked_chat(response.json()), response.json()


def test_an_answer_has_all_that_openai_s_type_asks_for(
    http: httpx.Client, recital: Recital
) -> None:
    answer, payload = whole(http, logit_bias=recital.bias("greeting"))
    assert answer.choices[0].message.content == "Good morning, runner!!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "tiny"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint
    assert payload["usage"]["completion_tokens"] == 4
    assert payload["baton"]["source"] == "local"
    assert payload["baton"]["prefilled_tokens"] == payload["usage"]["prompt_tokens"] - 1
    assert payload["baton"]["reasons"] == ["no_producer"]
    assert "ignored" not in payload["baton"]


def test_the_official_client_sync(client: openai.OpenAI, recital: Recital) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_completion_tokens=24,
        logit_bias=recital.bias("greeting"),
    )
    assert answer.choices[0].message.content == "Good morning, runner!!"
    assert answer._request_id == answer.id


def test_the_official_client_streams(client: openai.OpenAI, recital: Recital) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        logit_bias=recital.bias("greeting"),
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == (
        "Good morning, runner!!"
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_official_client_async(server: Server, recital: Recital) -> None:
    async def ask() -> tuple[ChatCompletion, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked: dict[str, Any] = {
                "model": "tiny",
                "messages": USER,
                "temperature": 0,
                "logit_bias": recital.bias("greeting"),
            }
            answer = await client.chat.completions.create(**asked)
            text = ""
            async for chunk in await client.chat.completions.create(**asked, stream=True):
                text += chunk.choices[0].delta.content or ""
            return answer, text

    answer, text = asyncio.run(ask())
    assert answer.choices[0].message.content == text == "Good morning, runner!!"


def test_the_client_s_accumulating_stream(client: openai.OpenAI, recital: Recital) -> None:
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        logit_bias=recital.bias("greeting"),
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Good morning, runner!!"
    assert final.choices[0].finish_reason == "stop"


def test_a_stream_s_last_chunk_carries_the_reason_and_the_report(
    http: httpx.Client, recital: Recital
) -> None:
    chunks = streamed(http, PATH, chat(logit_bias=recital.bias("greeting")))
    assert joined(chunks) == "Good morning, runner!!"
    assert ends(chunks) == {0: "stop"}
    assert chunks[-1]["baton"]["source"] == "local"
    assert all("usage" not in chunk for chunk in chunks)


def test_usage_comes_alone_in_the_last_chunk_when_it_is_asked_for(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(logit_bias=recital.bias("greeting"), stream_options={"include_usage": True})
    *chunks, last = streamed(http, PATH, body)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    assert last["baton"]["source"] == "local"
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_the_limit_ends_an_answer_with_length(
    http: httpx.Client, recital: Recital, name: str
) -> None:
    body = chat(logit_bias=recital.bias("endless")) | {"max_tokens": None, name: 3}
    answer = checked_chat(http.post(PATH, json=body).json())
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "la li lu"
    chunks = streamed(http, PATH, body)
    assert (joined(chunks), ends(chunks)) == ("la li lu", {0: "length"})


def test_without_a_limit_the_end_of_the_context_is_one(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(messages=[{"role": "user", "content": "the runner " * 900}], max_tokens=None)
    body["logit_bias"] = recital.bias("endless")
    answer = checked_chat(http.post(PATH, json=body).json())
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 2048


def test_the_same_prompt_whole_and_streamed_gives_the_same_text(
    http: httpx.Client, recital: Recital
) -> None:
    for name in ("spaced", "thoughtful", "nearly", "bad_tool"):
        body = chat(logit_bias=recital.bias(name))
        answer = checked_chat(http.post(PATH, json=body).json())
        assert joined(streamed(http, PATH, body)) == answer.choices[0].message.content


# -- characters


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("emoji", "smile 😀 end of smile"),
        ("accent", "e for \u0301 accent"),
        ("cut", "half "),
    ],
)
def test_a_character_split_over_tokens_is_never_a_replacement_character(
    http: httpx.Client, recital: Recital, name: str, text: str
) -> None:
    chunks = streamed(http, PATH, chat(logit_bias=recital.bias(name)))
    assert joined(chunks) == text
    assert "\ufffd" not in json.dumps(chunks, ensure_ascii=False)


@pytest.mark.parametrize("limit", range(1, 7))
def test_a_limit_inside_a_character_drops_its_beginning(
    http: httpx.Client, recital: Recital, limit: int
) -> None:
    body = chat(logit_bias=recital.bias("emoji"), max_tokens=limit)
    content = checked_chat(http.post(PATH, json=body).json()).choices[0].message.content
    assert content == (
        "smile " if limit < 5 else "smile 😀" if limit < 6 else "smile 😀 end of smile"
    )


# -- stop strings


@pytest.mark.parametrize("stop", ["STOP", ["nothing", "STOP"], ["OP o", "STOP omega"]])
def test_a_stop_string_is_found_across_token_borders_and_never_told(
    http: httpx.Client, recital: Recital, stop: Any
) -> None:
    body = chat(logit_bias=recital.bias("stopped"), stop=stop)
    expected = "alpha ST" if "OP o" in stop else "alpha "
    answer = checked_chat(http.post(PATH, json=body).json())
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "stop"
    chunks = streamed(http, PATH, body)
    assert (joined(chunks), ends(chunks)) == (expected, {0: "stop"})
    assert chunks[-1]["baton"]["source"] == "local"


@pytest.mark.parametrize(
    ("name", "text"), [("nearly", "beta STOLEN goods"), ("ends_open", "gamma ST")]
)
def test_the_beginning_of_a_stop_string_alone_is_text(
    http: httpx.Client, recital: Recital, name: str, text: str
) -> None:
    body = chat(logit_bias=recital.bias(name), stop="STOP")
    assert joined(streamed(http, PATH, body)) == text


def test_what_is_held_back_is_told_when_the_limit_ends_the_answer(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(logit_bias=recital.bias("nearly"), stop="STOP", max_tokens=1)
    chunks = streamed(http, PATH, body)
    assert (joined(chunks), ends(chunks)) == ("beta ST", {0: "length"})


def test_a_stopped_answer_frees_its_slot_and_says_where_its_prompt_came_from(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(logit_bias=recital.bias("endless"), stop="lu", max_tokens=2000)
    answer = http.post(PATH, json=body).json()
    assert answer["choices"][0]["message"]["content"] == "la li "
    assert answer["baton"]["prefilled_tokens"] == answer["usage"]["prompt_tokens"] - 1
    assert answer["usage"]["completion_tokens"] == 3
    assert http.get("/status").json()["engine"]["open"] == 0


# -- reasoning


def test_reasoning_is_told_apart(http: httpx.Client, recital: Recital) -> None:
    _, payload = whole(http, logit_bias=recital.bias("thoughtful"))
    message = payload["choices"][0]["message"]
    assert message["reasoning_content"] == "pondering deeply"
    assert message["content"] == "The answer"
    assert payload["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3
    chunks = streamed(http, PATH, chat(logit_bias=recital.bias("thoughtful")))
    assert joined(chunks, "reasoning_content") == "pondering deeply"
    assert joined(chunks) == "The answer"


# -- sampling


def test_a_seed_repeats_an_answer(http: httpx.Client, recital: Recital) -> None:
    body = chat(temperature=2.0, seed=7, logit_bias={str(n): 100 for n in range(20, 200)})
    first, second = (http.post(PATH, json=body).json() for _ in range(2))
    other = http.post(PATH, json=body | {"seed": 8}).json()
    assert first["choices"] == second["choices"]
    assert first["choices"] != other["choices"]


def test_several_choices_are_generated_side_by_side(http: httpx.Client, recital: Recital) -> None:
    body = chat(n=3, temperature=2.0, seed=7, logit_bias={str(n): 100 for n in range(20, 200)})
    payload = http.post(PATH, json=body).json()
    answer = checked_chat(payload)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    one = http.post(PATH, json=body | {"n": 1}).json()
    assert one["choices"][0] == payload["choices"][0]
    assert payload["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert payload["usage"]["completion_tokens"] == 3 * 24
    chunks = streamed(http, PATH, body)
    assert set(ends(chunks)) == {0, 1, 2}
    for choice in answer.choices:
        assert joined(chunks, index=choice.index) == choice.message.content


def test_penalties_and_filters_are_served(http: httpx.Client, recital: Recital) -> None:
    body = chat(
        logit_bias=recital.bias("greeting"),
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.01,
        repetition_penalty=1.0,
    )
    answer = checked_chat(http.post(PATH, json=body).json())
    assert answer.choices[0].message.content == "Good morning, runner!!"


def test_a_logit_bias_against_a_token_keeps_it_away(http: httpx.Client, recital: Recital) -> None:
    body = chat(logit_bias={str(head): -100 for head in recital.heads.values()}, max_tokens=1)
    content = checked_chat(http.post(PATH, json=body).json()).choices[0].message.content
    assert content == ""


# -- log probabilities


def test_log_probabilities_tell_every_token_of_the_answer(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(logit_bias=recital.bias("greeting"), logprobs=True, top_logprobs=3)
    payload = http.post(PATH, json=body).json()
    checked_chat(payload)
    entries = payload["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["Good", " morning", ", runner", "!!"]
    for entry in entries:
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-6)
    chunks = streamed(http, PATH, body)
    told = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        for entry in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in told] == [entry["token"] for entry in entries]


def test_bytes_of_a_split_character_are_told_as_bytes(http: httpx.Client, recital: Recital) -> None:
    body = chat(logit_bias=recital.bias("emoji"), logprobs=True)
    payload = http.post(PATH, json=body).json()
    entries = payload["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == "smile 😀 end of smile"
    assert entries[1]["token"] == "bytes:\\xf0"
    assert entries[0]["top_logprobs"] == []


def test_no_token_of_a_stop_string_is_told(http: httpx.Client, recital: Recital) -> None:
    for stop, tokens in (("STOP", []), ("TOP", ["alpha S"]), ("OP omega", ["alpha S"])):
        body = chat(logit_bias=recital.bias("stopped"), stop=stop, logprobs=True)
        entries = http.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == tokens, stop


def test_tokens_of_reasoning_are_no_part_of_the_answer_s_log_probabilities(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(logit_bias=recital.bias("thoughtful"), logprobs=True)
    payload = http.post(PATH, json=body).json()
    entries = payload["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["The answer"]


# -- messages


def test_every_role_and_form_of_content_is_read(http: httpx.Client, recital: Recital) -> None:
    messages = [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}],
        },
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_time", "arguments": '{"zone": "UTC"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "name": "ann", "content": "Thanks"},
    ]
    body = chat(messages=messages, logit_bias=recital.bias("greeting"))
    checked_chat(http.post(PATH, json=body).json())


def test_a_developer_s_message_is_a_system_message_to_this_template(
    http: httpx.Client, recital: Recital
) -> None:
    counts = []
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be short."}, *USER]
        body = chat(messages=messages, logit_bias=recital.bias("greeting"))
        counts.append(http.post(PATH, json=body).json()["usage"]["prompt_tokens"])
    assert counts[0] == counts[1]


def test_what_has_no_bearing_is_accepted_and_what_is_unknown_is_named(
    http: httpx.Client, recital: Recital
) -> None:
    body = chat(
        logit_bias=recital.bias("greeting"),
        user="ann",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        response_format={"type": "text"},
        modalities=["text"],
        reasoning_effort="low",
        verbosity="medium",
        max_token=7,
        baton={"lane": "local", "lanes": "remote"},
        stream_options=None,
    )
    payload = http.post(PATH, json=body).json()
    checked_chat(payload)
    assert sorted(payload["baton"]["ignored"]) == ["baton.lanes", "max_token", "reasoning_effort"]


def test_template_variables_reach_the_template(http: httpx.Client, recital: Recital) -> None:
    bias = recital.bias("greeting")
    plain = http.post(PATH, json=chat(logit_bias=bias)).json()["usage"]["prompt_tokens"]
    body = chat(logit_bias=bias, chat_template_kwargs={"enable_thinking": False})
    calm = http.post(PATH, json=body).json()["usage"]["prompt_tokens"]
    effort = http.post(PATH, json=chat(logit_bias=bias, reasoning_effort="none")).json()
    assert calm > plain
    assert effort["usage"]["prompt_tokens"] == calm


def test_the_lane_can_be_chosen(client: openai.OpenAI, recital: Recital) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        logit_bias=recital.bias("greeting"),
        extra_body={"baton": {"lane": "local"}},
    )
    assert answer.model_extra is not None
    assert answer.model_extra["baton"]["reasons"] == ["lane_local"]
