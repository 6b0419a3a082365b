"""Pairing from the page: only by who may, and every error with what to do about it."""

from __future__ import annotations

import asyncio
import re
import shlex
from contextlib import nullcontext
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from app import node_pairing
from app.dashboard.pages import nodes
from app.dashboard.pages.nodes import NodesPage
from app.dashboard.pages.screen import Rows
from app.discovery import Seen
from app.node_pairing import Kept
from app.status import DEFAULT_URL
from mac_decoder.config import DecoderConfig
from protocol.control.messages import Description, ProducerState
from protocol.errors import TransferError
from protocol.identity import Identity
from protocol.pairing.words import WORDS
from protocol.status.snapshot import LinkName
from tests.app.dashboard.pages.drawing import Looking, seen
from tests.app.view.snapshots import IDLE, with_node
from trust.peers import Address
from trust.secrets import default_choice

pytestmark = pytest.mark.anyio


@pytest.fixture
def page(tmp_path: Path) -> NodesPage:
    made = NodesPage(tmp_path, "file")
    made.draw(seen(IDLE))
    return made


@pytest.mark.parametrize(
    "does", ["add", "discover", "pair", "qualify", "rotate", "remove", "confirmed"]
)
async def test_who_may_not_manage_gets_nothing_done(
    page: NodesPage, monkeypatch: pytest.MonkeyPatch, does: str
) -> None:
    for name in ("pair", "end", "renew", "target_of"):
        monkeypatch.setattr(node_pairing, name, None)
    looking = Looking()
    await page.act({"do": does, "host": "10.0.0.1", "words": "", "nodeLink": "gb10"}, looking)
    assert "may_not_manage" in looking.last("open")[0]


async def test_a_slip_costs_nothing_and_is_told(
    page: NodesPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_pairing, "target_of", None)
    looking = Looking(manages=True)
    await page.act({"do": "add"}, looking)
    await page.act({"do": "pair", "host": "10.0.0.1", "words": "one two three"}, looking)
    assert "code_malformed" in looking.last("open")[0]


async def test_why_pairing_failed_is_told_with_a_hint(
    page: NodesPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Any:
        raise TransferError("another code", reason="code_differs", hint="type the next one")

    monkeypatch.setattr(nodes, "read_code", lambda typed: typed)
    monkeypatch.setattr(node_pairing, "pair", refused)
    looking = Looking(manages=True)
    await page.act({"do": "add"}, looking)
    await page.act({"do": "pair", "host": "10.0.0.1", "words": WORDS[0]}, looking)
    (shown,) = looking.last("open")
    assert "code_differs" in shown
    assert "Type the next one." in shown
    assert "Pairing with 10.0.0.1" in str(looking.told[-2])


SAME, OTHER = Identity(*["a" * 64] * 8), Identity(*["b" * 64] * 8)


def described(state: ProducerState, model: str, identity: Identity | None) -> Description:
    return Description("attic", "0.1.0", state, model, identity, None)


@pytest.mark.parametrize(
    ("found", "ours", "says", "qualified"),
    [
        (described("ready", "m", SAME), SAME, "It serves m, and is being qualified", True),
        (described("waiting", "", None), SAME, "It has no model", False),
        (described("waiting", "broken", None), SAME, "It has no model", False),
        (described("ready", "m", OTHER), SAME, "It serves another model (m)", False),
        (described("loading", "m", None), SAME, "once it has", False),
        (described("ready", "m", SAME), None, "once this machine has loaded", False),
        (TransferError("no", reason="producer_down"), SAME, "(producer_down)", False),
    ],
)
async def test_what_a_new_producer_serves_is_asked_and_told(
    page: NodesPage,
    monkeypatch: pytest.MonkeyPatch,
    found: Description | TransferError,
    ours: Identity | None,
    says: str,
    qualified: bool,
) -> None:
    class Controlled:
        def describe(self) -> Description:
            if isinstance(found, TransferError):
                raise found
            return found

    monkeypatch.setattr(nodes, "read_code", lambda typed: typed)
    peer = SimpleNamespace(name="attic", address=Address("10.0.0.1", 7431), record=None)
    monkeypatch.setattr(node_pairing, "pair", lambda *_: Kept(cast(Any, peer), ["older"]))
    monkeypatch.setattr(nodes.Control, "open", lambda *_: nullcontext(Controlled()))
    decoder = msgspec.structs.replace(IDLE.decoder, identity=ours)
    page.draw(seen(msgspec.structs.replace(IDLE, decoder=decoder)))
    looking = Looking(manages=True)
    await page.act({"do": "add"}, looking)
    await page.act({"do": "pair", "host": "10.0.0.1", "words": WORDS[0]}, looking)
    told = unescape(looking.last("set")[1])
    assert told.startswith('<p data-part="nodes-told"')
    assert "Paired with attic. " in told
    assert says in told
    assert ("and is being qualified." in told) == qualified
    sends = "waiting" in str(found) or "another" in says
    assert ("baton node send attic --state-dir" in told) == sends
    assert "older, which had this address, is forgotten." in told
    assert ("close",) in looking.told
    page.close()


@pytest.mark.parametrize(
    ("state", "reason", "says"),
    [
        ("down", "producer_without_model", "It has no model"),
        ("refused", "identity_differs", "It serves another model"),
        ("down", "connection_lost", ""),
        ("ready", "", ""),
    ],
)
async def test_a_producer_that_lacks_the_model_says_what_to_do(
    page: NodesPage, monkeypatch: pytest.MonkeyPatch, state: LinkName, reason: str, says: str
) -> None:
    peer = SimpleNamespace(name="the attic", address=Address("10.0.0.1", 7431), record=None)
    snapshot = with_node(IDLE, state=state, reason=reason)
    name = snapshot.nodes.producers[0].name
    monkeypatch.setattr(nodes, "_on_record", lambda _: {name: nodes.Known(cast(Any, peer), None)})
    decoder = msgspec.structs.replace(IDLE.decoder, address="http://127.0.0.1:8123")
    told = msgspec.structs.replace(snapshot, decoder=decoder)
    page.draw(seen(told))
    page.looked_at(Looking())
    async with asyncio.timeout(10):
        while page._reading is not None and not page._reading.done():
            await asyncio.sleep(0.01)
    drawn = page.draw(seen(told))["nodes"]
    assert isinstance(drawn, Rows)
    shown = unescape(drawn.html[name])
    assert ("baton node send 'the attic' --state-dir" in shown) == bool(says)
    assert ("--url http://127.0.0.1:8123" in shown) == bool(says)
    assert says in shown
    page.close()


@pytest.mark.parametrize("given", ["", "kept here"])
async def test_the_shown_command_leaves_nothing_to_the_settings_of_who_types_it(given: str) -> None:
    """What is usual here may be set otherwise there: the file may name another decoder."""
    usual = DecoderConfig(model="").state_path.parent
    page = NodesPage(Path(given) if given else usual, default_choice())
    decoder = msgspec.structs.replace(IDLE.decoder, address=DEFAULT_URL)
    page.draw(seen(msgspec.structs.replace(IDLE, decoder=decoder)))
    shown = unescape(page._sends(cast(Any, SimpleNamespace(name="attic"))))
    typed = shlex.split(re.sub("<[^>]*>", "", shown))
    assert typed[:4] == ["baton", "node", "send", "attic"]
    assert dict(zip(typed[4::2], typed[5::2], strict=True)) == {
        "--state-dir": str(Path.cwd() / given if given else usual),
        "--secrets": default_choice(),
        "--url": DEFAULT_URL,
    }


async def test_who_answers_can_be_chosen(page: NodesPage, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [Seen("attic", "10.0.0.7", 7431, 7432, "a-model"), Seen("v6", "fe80::1", 1, 0, "")]
    monkeypatch.setattr(nodes, "browse", lambda: answers)
    looking = Looking(manages=True)
    await page.act({"do": "add"}, looking)
    await page.act({"do": "discover"}, looking)
    (shown,) = looking.last("open")
    assert 'data-with="10.0.0.7:7432"' in shown
    assert shown.count("No code is open there") == 1


async def test_a_producer_that_is_not_paired_cannot_be_removed(page: NodesPage) -> None:
    looking = Looking(manages=True)
    await page.act({"do": "remove", "nodeLink": "gb10"}, looking)
    assert "node_not_found" in looking.last("open")[0]
    html = page.body(page.draw(seen(IDLE, may_manage=True)))
    assert "Not paired" in html
    assert 'data-node="gb10"' in html
