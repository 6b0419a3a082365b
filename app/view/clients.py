"""What programs that speak OpenAI's protocol are told to use this decoder: text to be copied.

Each in the form that the program's own documentation has. No API key is ever in it: what a
person must put in its place is ``YOUR_KEY``.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

YOUR_KEY: Final = "YOUR-BATON-KEY"
"""Stands where the decoder demands a key; `baton key create NAME` makes one."""

NO_KEY: Final = "none"
"""What is given where no key is needed: most programs insist on one."""

_MOST_OUTPUT: Final = 32_000
_HINT: Final = f"{YOUR_KEY}: baton key create NAME prints one"


@dataclass(frozen=True)
class Endpoint:
    """A decoder as its clients see it. ``url`` is its base URL without ``/v1``; ``certificate``
    the file of the one that clients have to trust, empty if they need not.
    """

    url: str
    model: str
    context_tokens: int | None = None
    keys_demanded: bool = False
    certificate: str = ""

    @property
    def base_url(self) -> str:
        """What clients call the base URL."""
        return f"{self.url}/v1"

    @property
    def key(self) -> str:
        """What to give for an API key."""
        return YOUR_KEY if self.keys_demanded else NO_KEY


@dataclass(frozen=True)
class Client:
    """A program. ``place`` says where :attr:`configuration` goes."""

    id: str
    name: str
    place: str
    configuration: Callable[[Endpoint], str]


def openai_sdk(endpoint: Endpoint) -> str:
    """A beginning in Python."""
    remarks: list[str] = []
    if endpoint.certificate:
        trusted = shlex.quote(endpoint.certificate)
        remarks.append(f"# run with SSL_CERT_FILE={trusted}")
    if endpoint.keys_demanded:
        remarks.append(f"# {_HINT}")
    return "\n".join(
        (
            *remarks,
            "from openai import OpenAI",
            "",
            f"client = OpenAI(base_url={_quoted(endpoint.base_url)}, "
            f"api_key={_quoted(endpoint.key)})",
            "answer = client.chat.completions.create(",
            f"    model={_quoted(endpoint.model)},",
            '    messages=[{"role": "user", "content": "Hello"}],',
            ")",
            "print(answer.choices[0].message.content)",
            "",
        )
    )


def continue_dev(endpoint: Endpoint) -> str:
    """A whole ``config.yaml``."""
    lines = [
        "name: Baton",
        "version: 1.0.0",
        "schema: v1",
        "models:",
        f"  - name: {_quoted(endpoint.model)}",
        "    provider: openai",
        f"    model: {_quoted(endpoint.model)}",
        f"    apiBase: {_quoted(endpoint.base_url)}",
        f"    apiKey: {_quoted(endpoint.key)}",
        "    roles:",
        *(f"      - {role}" for role in ("chat", "edit", "apply")),
    ]
    if endpoint.context_tokens is not None:
        lines += [
            "    defaultCompletionOptions:",
            f"      contextLength: {endpoint.context_tokens}",
        ]
    if endpoint.certificate:
        lines += [
            "    requestOptions:",
            f"      caBundlePath: {_quoted(endpoint.certificate)}",
        ]
    return _with_hint(lines, endpoint)


def opencode(endpoint: Endpoint) -> str:
    """A whole ``opencode.json``, which holds no remarks."""
    model: dict[str, Any] = {"name": endpoint.model}
    if endpoint.context_tokens is not None:
        # The rest is what a prompt may fill before it is shortened.
        output = min(_MOST_OUTPUT, max(1, endpoint.context_tokens // 4))
        model["limit"] = {"context": endpoint.context_tokens, "output": output}
    return _json(
        {
            "$schema": "https://opencode.ai/config.json",
            "model": f"baton/{endpoint.model}",
            "provider": {
                "baton": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Baton",
                    "options": {"baseURL": endpoint.base_url, "apiKey": endpoint.key},
                    "models": {endpoint.model: model},
                }
            },
        }
    )


def open_webui(endpoint: Endpoint) -> str:
    """Commands that start it."""
    lines = [
        "# Once it has been started, what its Admin Panel has under Connections counts instead.",
        f"export OPENAI_API_BASE_URL={shlex.quote(endpoint.base_url)}",
        f"export OPENAI_API_KEY={shlex.quote(endpoint.key)}",
    ]
    if endpoint.certificate:
        lines.append(f"export SSL_CERT_FILE={shlex.quote(endpoint.certificate)}")
    return _with_hint([*lines, "open-webui serve"], endpoint)


def aider(endpoint: Endpoint) -> str:
    """A whole ``.aider.conf.yml``."""
    lines = [
        f"openai-api-base: {_quoted(endpoint.base_url)}",
        f"openai-api-key: {_quoted(endpoint.key)}",
        f"model: {_quoted('openai/' + endpoint.model)}",
    ]
    if endpoint.certificate:
        lines.insert(0, f"# run with SSL_CERT_FILE={shlex.quote(endpoint.certificate)}")
    return _with_hint(lines, endpoint)


CLIENTS: Final = (
    Client("openai", "OpenAI SDK (Python)", "a Python program", openai_sdk),
    Client("continue", "Continue", "~/.continue/config.yaml", continue_dev),
    Client("opencode", "OpenCode", "~/.config/opencode/opencode.json", opencode),
    Client("open_webui", "Open WebUI", "a terminal", open_webui),
    Client("aider", "Aider", "~/.aider.conf.yml", aider),
)


def configuration(client: str, endpoint: Endpoint) -> str:
    """What to copy for the client of this id. Raises ``LookupError``."""
    found = {one.id: one for one in CLIENTS}[client]
    return found.configuration(endpoint)


def _with_hint(lines: list[str], endpoint: Endpoint) -> str:
    hint = [f"# {_HINT}"] if endpoint.keys_demanded else []
    return "\n".join((*hint, *lines, ""))


def _quoted(text: str) -> str:
    """A text in double quotes, as Python, JSON and YAML read it."""
    return json.dumps(text, ensure_ascii=False)


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
