"""Requests as pydantic models: OpenAI's parameters, and the few of ours.

A parameter is served, refused with a reason, or has no bearing on the answer (``user``,
``metadata``). One that is unknown here is not an error, since clients send each other's
extensions; it is named in the answer's ``baton.ignored``, so that a typing error shows.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from pydantic_core import from_json

from mac_decoder.engine.events import MAX_TOP_LOGPROBS, Lane
from protocol.errors import RequestError

MAX_STOPS = 4
MAX_STOP_LENGTH = 1024
MAX_TOOLS = 512
MAX_COMPLETION_LOGPROBS = 5
MAX_BIASES = 300
"""OpenAI's limit."""
MAX_MESSAGES = 1 << 14
"""Messages, parts of them and calls in them, together."""
MAX_CONTAINERS = 1 << 17
"""Lists and objects in a body. Millions of them keep the garbage collector busy for seconds."""
MAX_VARIABLES = 64
MAX_TOKEN = 1 << 32
MAX_PROMPTS = 2048
"""OpenAI's limit; how many a server takes at once is in its settings."""

THREAD_BYTES = 1 << 16
"""Longer bodies are read in a thread, so that streams of others go on."""
_INT64 = 1 << 63

# One wrong item of a list is reported, not a million of them.
Items = Field(fail_fast=True)

ShortText = Annotated[str, StringConstraints(max_length=128)]
StopText = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_LENGTH)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class Part(_Model):
    """One part of a message's content; only text can be served."""

    type: ShortText
    text: str | None = None
    refusal: str | None = None


class CalledFunction(_Model):
    """A function that an earlier answer called; ``arguments`` is JSON text."""

    name: ShortText
    arguments: str | dict[str, Any] = "{}"


class Call(_Model):
    """A tool call of an earlier answer."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(_Model):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Items] | None = None
    name: ShortText | None = None
    tool_calls: Annotated[list[Call], Items] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ToolFunction(_Model):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Model):
    """A tool; only functions can be served."""

    type: ShortText
    function: ToolFunction | None = None


class NamedFunction(_Model):
    """The name in a ``tool_choice``."""

    name: ShortText


class NamedChoice(_Model):
    """``tool_choice`` as an object."""

    type: ShortText
    function: NamedFunction | None = None


class ResponseFormat(_Model):
    """``response_format``; only ``text`` can be served."""

    type: ShortText


class StreamOptions(_Model):
    """``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class BatonOptions(_Model):
    """Baton's own: who may prefill this prompt, and whether kept caches may serve it (and its
    own be kept).
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    lane: Lane | None = None
    reuse: bool = True


class _Request(_Model):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    model: Annotated[str, StringConstraints(max_length=1024)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Probability | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    n: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    stop: StopText | Annotated[list[StopText], Items, Field(max_length=MAX_STOPS)] | None = None
    # Common extensions, with mlx-lm's meaning.
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Probability | None = None
    repetition_penalty: Annotated[float, Field(gt=0.001, le=100)] | None = None
    baton: BatonOptions | None = None
    # Without bearing on the answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None

    @property
    def streamed(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.stream)

    @property
    def with_usage(self) -> bool:
        """Whether a stream's last chunk tells the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, in the order given."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class ChatRequest(_Request):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Items, Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Items, Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: ShortText | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None


class TextRequest(_Request):
    """The body of ``POST /v1/completions``."""

    # Text, token ids, or a list of either; checked by ``prompts``, since millions of ids are
    # too many for a model's validators.
    prompt: Any
    logprobs: Annotated[int, Field(ge=0, le=MAX_COMPLETION_LOGPROBS)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or several, as texts or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        return [self.prompt] if isinstance(self.prompt[0], int) else self.prompt


R = TypeVar("R", bound=_Request)

_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})

_DRAFT = ("draft_model_unsupported", "draft models are not part of a cache's identity")
_ADAPTER = ("adapter_unsupported", "adapters are fixed when the model is loaded")
_GRAMMAR = ("response_format_unsupported", "constrained decoding is not supported")
_OTHER = ("parameter_unsupported", "this parameter is not supported")
_FUNCTIONS = ("parameter_unsupported", "deprecated functions are not supported; use tools")

REFUSED: Mapping[str, tuple[str, str]] = {
    "draft_model": _DRAFT,
    "num_draft_tokens": _DRAFT,
    "speculative_config": _DRAFT,
    "speculative": _DRAFT,
    "prediction": _DRAFT,
    "adapter": _ADAPTER,
    "adapters": _ADAPTER,
    "lora": _ADAPTER,
    "audio": ("unsupported_modality", "only text can be produced"),
    "functions": _FUNCTIONS,
    "function_call": _FUNCTIONS,
    "guided_json": _GRAMMAR,
    "guided_regex": _GRAMMAR,
    "guided_choice": _GRAMMAR,
    "guided_grammar": _GRAMMAR,
    "structured_outputs": _GRAMMAR,
    "grammar": _GRAMMAR,
    "json_schema": _GRAMMAR,
    "store": ("parameter_unsupported", "answers are not stored"),
    "moderation": _OTHER,
    "web_search_options": _OTHER,
    "continue_final_message": _OTHER,
    "prompt_logprobs": _OTHER,
    "use_beam_search": _OTHER,
    "chat_template": _OTHER,
    "echo": _OTHER,
    "suffix": _OTHER,
}
"""Parameters that would change the answer and cannot be served: reason and sentence."""

_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "modalities": (None, ["text"]),
    "verbosity": (None, "medium"),
    "best_of": (None, 1),
}
"""Parameters of which only what is the case anyway is accepted."""


async def parsed(model: type[R], body: bytes) -> R:
    """:func:`parse`, in a thread where it takes a while."""
    if len(body) <= THREAD_BYTES:
        return parse(model, body)
    return await asyncio.to_thread(parse, model, body)


def parse(model: type[R], body: bytes) -> R:
    """``body`` as a request, or a ``RequestError`` that names the parameter at fault."""
    _require_few_containers(body)
    try:
        given = from_json(body, allow_inf_nan=False)
    except ValueError:
        raise RequestError("the body is not valid JSON", reason="invalid_json") from None
    if isinstance(given, dict):
        _require_few(given)
    try:
        request = model.model_validate(given)
    except ValidationError as error:
        raise _explained(error) from None
    if isinstance(request, TextRequest):
        _require_prompt(request.prompt)
    extra = request.model_extra or {}
    for name, (reason, sentence) in REFUSED.items():
        value = extra.get(name, getattr(request, name, None))
        if value not in _NEUTRAL:
            raise RequestError(f"{name}: {sentence}", reason=reason, field=name)
    for name, allowed in _ALLOWED.items():
        value = extra.get(name, getattr(request, name, None))
        if value not in allowed:
            reason = "unsupported_modality" if name == "modalities" else "parameter_unsupported"
            raise RequestError(f"{name} cannot be chosen here", reason=reason, field=name)
    if request.stream_options is not None and not request.streamed:
        raise RequestError(
            "stream_options is only for streams", reason="invalid_value", field="stream_options"
        )
    return request


_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A JSON string, or what began as one. It never goes back, so that its time is linear."""


def _require_few_containers(body: bytes) -> None:
    """Refuse a body with too many lists and objects before any of them is made."""
    if _containers(body) > MAX_CONTAINERS and _containers(_STRING.sub(b"", body)) > MAX_CONTAINERS:
        raise RequestError(
            f"the body has more than {MAX_CONTAINERS} lists and objects", reason="invalid_value"
        )


def _containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _require_few(given: dict[str, Any]) -> None:
    """Refuse counts that validation would take long over; it checks what is left."""
    biases, messages = given.get("logit_bias"), given.get("messages")
    if isinstance(biases, dict) and len(biases) > MAX_BIASES:
        raise _too_many("logit_bias", MAX_BIASES)
    if not isinstance(messages, list):
        return
    count = len(messages)
    if count <= MAX_MESSAGES:
        inner = (message for message in messages if isinstance(message, dict))
        lists = ((message.get("content"), message.get("tool_calls")) for message in inner)
        count += sum(len(one) for pair in lists for one in pair if isinstance(one, list))
    if count > MAX_MESSAGES:
        raise _too_many("messages", MAX_MESSAGES)


def _require_prompt(prompt: Any) -> None:
    """Refuse what is neither text, nor token ids, nor a list of one of them; in C's loops."""
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, list):
        raise RequestError("prompt: neither text nor a list", reason="invalid_type", field="prompt")
    if not prompt:
        raise RequestError("prompt: an empty list", reason="invalid_value", field="prompt")
    if type(prompt[0]) is not list:
        if set(map(type, prompt)) == {str}:
            return
        _require_ids(prompt)
        return
    if len(prompt) > MAX_PROMPTS:
        raise _too_many("prompt", MAX_PROMPTS)
    for ids in prompt:
        _require_ids(ids)


def _require_ids(ids: Any) -> None:
    if type(ids) is not list or not ids:
        raise RequestError(
            "prompt: neither texts nor lists of token ids", reason="invalid_value", field="prompt"
        )
    if set(map(type, ids)) != {int}:
        raise RequestError(
            "prompt: token ids and something else", reason="invalid_type", field="prompt"
        )
    if min(ids) < 0 or max(ids) >= MAX_TOKEN:
        raise RequestError(
            "prompt: a number that is no token id", reason="invalid_value", field="prompt"
        )


def _too_many(field: str, most: int) -> RequestError:
    return RequestError(f"{field}: more than {most}", reason="invalid_value", field=field)


def ignored_parameters(request: _Request) -> list[str]:
    """Names of parameters that nothing here knows, at the top or in ``baton``; at most 32,
    shortened to 64.
    """
    known = {*REFUSED, *_ALLOWED}
    unknown = [name[:64] for name in request.model_extra or {} if name not in known]
    ours = request.baton.model_extra if request.baton else None
    return [*unknown, *(f"baton.{name[:58]}" for name in ours or {})][:32]


def _fields(model: type[BaseModel], found: set[str]) -> set[str]:
    found.update(model.model_fields)
    for below in model.__subclasses__():
        _fields(below, found)
    return found


_FIELD_NAMES = _fields(_Model, set())


def _explained(error: ValidationError) -> RequestError:
    """OpenAI's way to say it: the first fault, its parameter as ``messages[0].role``."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    same = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    # Of a parameter that may have several types, the type whose value is wrong says most.
    fault = next((one for one in same if not _is_type(one["type"])), same[0])
    param, kind = _param(fault["loc"]), fault["type"]
    if not param:
        return RequestError("the body is not a JSON object", reason="invalid_value")
    if kind == "missing":
        return RequestError(
            f"missing required parameter: {param}", reason="missing_parameter", field=param
        )
    reason = "invalid_type" if _is_type(kind) else "invalid_value"
    return RequestError(f"{param}: {fault['msg']}", reason=reason, field=param)


def _is_type(kind: str) -> bool:
    return kind.endswith(("_type", "_parsing"))


def _param(location: tuple[int | str, ...]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``, up to the first name not ours."""
    param = ""
    for step in location:
        if isinstance(step, int):
            param += f"[{step}]"
        elif step in _FIELD_NAMES:
            param += f".{step}" if param else step
        else:
            break
    return param
