"""Which scripts of a page may run: those that the template has, and none that came as content."""

from __future__ import annotations

import re

import httpx
import pytest
from jinja2 import DictLoader, Environment
from nicegui.client import templates
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

from app.dashboard.sealed import Marked, Sealed

pytestmark = pytest.mark.anyio

CONTENT = "<script>stolen()</script><SCRIPT src='x'></SCRIPT>"
TEMPLATE = "<script defer src='own.js'></script><script>own()</script>{{ content | safe }}"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answered() -> httpx.Response:
    environment = Environment(loader=Marked(DictLoader({"page": TEMPLATE})), autoescape=True)

    async def page(request: Request) -> HTMLResponse:
        shown = environment.get_template("page")
        return HTMLResponse(shown.render(request=request, content=CONTENT))

    app = Sealed(Starlette(routes=[Route("/", page)]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        return await client.get("http://here/")


async def test_a_script_that_came_as_content_bears_no_number() -> None:
    first, second = await answered(), await answered()
    numbers = []
    for answer in (first, second):
        found = re.search(r"'nonce-([\w-]{20,})'", answer.headers["content-security-policy"])
        assert found is not None
        mark = f'nonce="{found[1]}"'
        assert answer.text == (
            f"<script {mark} defer src='own.js'></script><script {mark}>own()</script>{CONTENT}"
        )
        numbers.append(found[1])
    assert numbers[0] != numbers[1]


def test_what_is_marked_in_niceguis_template_is_its_own() -> None:
    loader = templates.env.loader
    assert loader is not None
    own = loader if isinstance(loader, Marked) else Marked(loader)
    source = own.get_source(templates.env, "index.html")[0]
    scripts = re.findall(r"<script[^>]*>", source)
    assert len(scripts) > 5
    assert all("nonce=\"{{ request.scope['baton.nonce'] }}\"" in script for script in scripts)
