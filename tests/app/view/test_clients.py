"""What is copied for other programs is read by a reader of its format, and says the same there."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest
import yaml

from app.view.clients import CLIENTS, YOUR_KEY, Endpoint, configuration

NAMES = ("SmolLM2-135M", "a \"name\": with #, 'quotes' $HOME and \\n", "ein Modell ✓")
PLAIN = Endpoint("http://127.0.0.1:8000", "SmolLM2", context_tokens=8192)
GUARDED = Endpoint(
    "https://127.0.0.1:8443",
    "m",
    keys_demanded=True,
    certificate="/srv/u s/certificate.pem",
)


def _called(text: str, name: str) -> dict[str, Any]:
    """The keyword arguments of the first call of ``name``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            return {word.arg or "": ast.literal_eval(word.value) for word in node.keywords}
    raise AssertionError(f"{name} is not called")


def _exported(text: str) -> dict[str, str]:
    words = [shlex.split(line, comments=True) for line in text.splitlines()]
    pairs = [line[1].partition("=") for line in words if line and line[0] == "export"]
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("name", NAMES)
def test_every_client_is_told_the_same_address_and_the_model_by_its_exact_name(name: str) -> None:
    endpoint = Endpoint("http://127.0.0.1:8000", name)
    url = "http://127.0.0.1:8000/v1"
    python = configuration("openai", endpoint)
    assert _called(python, "OpenAI") == {"base_url": url, "api_key": "none"}
    assert _called(python, "client.chat.completions.create")["model"] == name
    model = yaml.safe_load(configuration("continue", endpoint))["models"][0]
    assert (model["provider"], model["model"], model["apiBase"]) == ("openai", name, url)
    code = json.loads(configuration("opencode", endpoint))
    provider = code["provider"]["baton"]
    assert provider["options"]["baseURL"] == url
    assert provider["models"] == {name: {"name": name}}
    assert code["model"] == f"baton/{name}"
    assert _exported(configuration("open_webui", endpoint))["OPENAI_API_BASE_URL"] == url
    aider = yaml.safe_load(configuration("aider", endpoint))
    assert (aider["model"], aider["openai-api-base"]) == (f"openai/{name}", url)


def test_a_context_that_is_known_is_told_with_room_for_a_prompt() -> None:
    model = yaml.safe_load(configuration("continue", PLAIN))["models"][0]
    assert model["defaultCompletionOptions"] == {"contextLength": 8192}
    limit = json.loads(configuration("opencode", PLAIN))["provider"]["baton"]["models"]["SmolLM2"]
    assert limit["limit"] == {"context": 8192, "output": 2048}


@pytest.mark.parametrize("client", [one.id for one in CLIENTS])
def test_a_key_is_asked_for_where_the_decoder_demands_one_and_nowhere_else(client: str) -> None:
    assert YOUR_KEY in configuration(client, GUARDED)
    assert YOUR_KEY not in configuration(client, PLAIN)


def test_a_certificate_that_nobody_vouches_for_is_named_to_whoever_can_be_told() -> None:
    where = GUARDED.certificate
    model = yaml.safe_load(configuration("continue", GUARDED))["models"][0]
    assert model["requestOptions"] == {"caBundlePath": where}
    assert _exported(configuration("open_webui", GUARDED))["SSL_CERT_FILE"] == where
    for client in ("openai", "aider"):
        told = configuration(client, GUARDED)
        assert f"SSL_CERT_FILE='{where}'" in told
        assert "SSL_CERT_FILE" not in configuration(client, PLAIN)


def test_a_client_that_nobody_knows_is_none() -> None:
    with pytest.raises(LookupError):
        configuration("emacs", PLAIN)
