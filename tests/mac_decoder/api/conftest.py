"""One server with the reciting model for all tests of the endpoint."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import load
from mac_decoder.engine.settings import EngineSettings
from protocol.checkpoint import read_checkpoint
from tests.mac_decoder.api.recital import Recital, make_recital
from tests.mac_decoder.api.serving import Server, serving


@pytest.fixture(scope="session")
def recital(tmp_path_factory: pytest.TempPathFactory) -> Recital:
    return make_recital(tmp_path_factory.mktemp("recital"))


@pytest.fixture(scope="session")
def server(recital: Recital) -> Iterator[Server]:
    checkpoint = read_checkpoint(recital.path)
    settings = EngineSettings(prefill_step=64)
    with serving(lambda: Engine(lambda: load(checkpoint), settings)) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as made:
        yield made
