"""Nodes: the producers, how they qualified, and pairing with them."""

from __future__ import annotations

import asyncio
import logging
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from app import node_pairing
from app.dashboard.pages import nodes_parts, parts
from app.dashboard.pages.dialogs import confirmation, refusal
from app.dashboard.pages.manage import require_manager
from app.dashboard.pages.markup import NOTHING, Html, joined, tag
from app.dashboard.pages.nodes_parts import LONGEST_HOST, LONGEST_NAME, Adding, Known
from app.dashboard.pages.screen import Browser, Change, Drawn, Memo, Rows, Seen, part, piece, rows
from app.discovery import browse
from app.node_registry import Registry, link_name
from app.view.nodes import NO_PRODUCER, Producer, producers
from app.view.qualifications import history
from protocol.control.messages import Description
from protocol.errors import BatonError, RequestError, TransferError
from protocol.identity import Identity, identity_differences
from protocol.pairing.code import MAX_TYPED, read_code
from protocol.status.snapshot import Nodes
from trust.control import Control
from trust.own import machine_name
from trust.peers import Peer
from trust.secrets import Choice

log = logging.getLogger(__name__)

_AGE_S: Final = 5.0
_UNREACHED: Final = ("down", "refused")

Action = Callable[[], Awaitable[str]]
"""Does what was confirmed; what to say of it."""


@dataclass(frozen=True)
class _Serving:
    """What a producer says that it serves, and what comes of it; ``lacks``: not this machine's
    model, which has to be sent.
    """

    text: str
    lacks: bool = False


class NodesPage:
    """``/nodes``"""

    title = "Nodes"

    def __init__(self, state: Path, secrets: Choice) -> None:
        """``state`` is what ``--state-dir`` says; ``secrets`` is how the decoder keeps them."""
        self._state = state
        self._secrets: Choice = secrets
        self._open_registry = partial(Registry, state, secrets)
        self._memo = Memo()
        self._nodes: Nodes | None = None
        self._identity: Identity | None = None
        self._address: str | None = None
        self._known: Mapping[str, Known] = {}
        self._reading: asyncio.Task[None] | None = None
        self._read_for: object = None
        self._asked: Action | None = None
        self._questions = 0
        self._adding: Adding | None = None

    def draw(self, seen: Seen) -> Drawn:
        """Every part."""
        nodes, memo, tick = seen.snapshot.nodes, self._memo, int(seen.now / _AGE_S)
        self._nodes = nodes
        self._identity = seen.snapshot.decoder.identity
        self._address = seen.snapshot.decoder.address
        if self._read_for is not None and _told(nodes) != self._read_for:
            self._read()
        inputs = (nodes, tick, self._known, seen.may_manage)
        return {
            "nodes": memo.of(
                "nodes", inputs, lambda: self._rows(producers(seen.snapshot, seen.now), seen)
            ),
            "adding": memo.of(
                "adding", (seen.may_manage,), lambda: nodes_parts.adding(seen.may_manage)
            ),
        }

    def body(self, drawn: Drawn) -> Html:
        """Everything below the heading."""
        shown = tag(
            "section",
            piece(drawn, "adding"),
            part("nodes-told", "p", role="status", class_="told"),
            rows("nodes", "div", drawn["nodes"], class_="cards"),
            aria_label="Producers",
        )
        return joined(shown, parts.glossary("nodes"))

    def looked_at(self, browser: Browser) -> None:
        """Read what is on record."""
        if self._reading is None:
            self._read()

    def unseen(self) -> None:
        """Read no more."""
        self.close()

    def close(self) -> None:
        """What was begun goes on."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None

    async def act(self, said: dict[str, Any], browser: Browser) -> None:
        """Ask for a confirmation, or do what was confirmed."""
        try:
            await self._act(said, browser)
        except BatonError as error:
            browser.tell([("open", refusal(error))])

    async def _act(self, said: dict[str, Any], browser: Browser) -> None:
        does = said.get("do")
        if does == "closed":
            self._asked = self._adding = None
            return
        require_manager(browser)
        match does:
            case "add":
                self._show_adding(Adding(), browser)
            case "discover":
                await self._discover(browser)
            case "pair":
                await self._pair(said, browser)
            case "qualify":
                await self._done(partial(self._qualify, self._peer(said)), browser)
            case "rotate":
                peer = self._peer(said)
                self._asked = partial(self._rotate, peer)
                self._questions += 1
                text = (
                    "Both machines agree on it now; what goes on between them goes on with it.",
                )
                asking = confirmation(
                    f"A new key with {peer.name}?", text, "New key", self._questions
                )
                browser.tell([("open", asking)])
            case "remove":
                peer = self._peer(said)
                self._asked = partial(self._remove, peer)
                self._questions += 1
                text = ("Both machines forget each other. What is cached of its prompts stays.",)
                asking = confirmation(
                    f"Remove {peer.name}?", text, "Remove", self._questions, danger=True
                )
                browser.tell([("open", asking)])
            case "confirmed" if self._asked and said.get("number") == str(self._questions):
                action, self._asked = self._asked, None
                browser.tell([("close",)])
                await self._done(action, browser)
            case _:
                pass

    # -- what is done

    async def _done(self, action: Action, browser: Browser) -> None:
        told = await action()
        browser.tell([_say(told)])
        self._read()

    async def _qualify(self, peer: Peer) -> str:
        nodes = self._nodes.producers if self._nodes is not None else ()
        node = next((one for one in nodes if one.name == link_name(peer)), None)
        if node is not None and node.state in _UNREACHED:
            # A producer that cannot be asked keeps the verdict that it has.
            raise TransferError(
                f"the producer {peer.name} cannot be asked now",
                reason=node.reason,
                found=node.detail,
            )
        await asyncio.to_thread(lambda: self._open_registry().forget_verdict(peer))
        return f"{peer.name} is being qualified anew."

    async def _rotate(self, peer: Peer) -> str:
        kept = await asyncio.to_thread(lambda: node_pairing.renew(self._open_registry(), peer))
        if kept is None:
            return f"{peer.name} was removed meanwhile."
        return f"{peer.name} has a new key: epoch {kept.record.epoch}."

    async def _remove(self, peer: Peer) -> str:
        unheard = await asyncio.to_thread(lambda: node_pairing.end(self._open_registry(), peer))
        if unheard is None:
            return f"{peer.name} is removed."
        return (
            f"{peer.name} is removed here. It could not be told ({unheard.reason}): remove this "
            f"machine there with baton produce --forget '{machine_name('mac')}'."
        )

    async def _discover(self, browser: Browser) -> None:
        adding = self._adding or Adding()
        self._show_adding(replace(adding, says="Asking the local network…", busy=True), browser)
        try:
            seen = tuple(await asyncio.to_thread(browse))
            found = (
                "" if seen else "Nobody answers. A producer shows a code with baton produce --pair."
            )
            told = replace(adding, seen=seen, says=found, wrong=None)
        except TransferError as error:
            told = replace(adding, wrong=error, says="")
        if self._adding is not None:
            self._show_adding(told, browser)

    async def _pair(self, said: Mapping[str, Any], browser: Browser) -> None:
        if self._adding is None or self._adding.busy:
            return
        adding = self._adding
        host = str(said.get("host") or "")[:LONGEST_HOST].strip()
        called = str(said.get("called") or "")[:LONGEST_NAME].strip() or None
        pairing = replace(adding, says=f"Pairing with {host}…", wrong=None, busy=True)
        self._show_adding(pairing, browser)
        words = str(said.get("words") or "")[:MAX_TYPED].strip()
        try:
            kept = await asyncio.to_thread(self._paired, host, words, called)
        except BatonError as error:
            if self._adding is not None:
                self._show_adding(replace(adding, wrong=error, says=""), browser)
            return
        gone = "".join(f" {name}, which had this address, is forgotten." for name in kept.replaced)
        found = await asyncio.to_thread(_described, kept.peer)
        serving = _serves(found, self._identity)
        told = [f"Paired with {kept.peer.name}.{gone} {serving.text}"]
        if serving.lacks:
            told += [" To send it this machine's, in a terminal here: ", self._sends(kept.peer)]
        # It can be left meanwhile, and another begun.
        if self._adding is pairing:
            self._adding = None
            browser.tell([("close",)])
        browser.tell([_say(*told)])
        self._read()

    def _sends(self, peer: Peer) -> Html:
        """The command that sends a producer this machine's model."""
        # All is said: whoever types it has settings that need not be those of this decoder.
        words = ["baton", "node", "send", peer.name]
        words += ["--state-dir", str(self._state.absolute()), "--secrets", self._secrets]
        if self._address is not None:
            words += ["--url", self._address]
        return tag("code", shlex.join(words), class_="command")

    def _paired(self, host: str, words: str, called: str | None) -> node_pairing.Kept:
        code = read_code(words)  # before anything is asked: a slip costs nothing
        registry = self._open_registry()
        registry.peers.require_usable()
        target = node_pairing.target_of(host)
        return node_pairing.pair(registry, target, code, machine_name("mac"), called)

    def _show_adding(self, adding: Adding, browser: Browser) -> None:
        self._adding = adding
        browser.tell([("open", nodes_parts.form(adding))])

    def _peer(self, said: Mapping[str, Any]) -> Peer:
        known = self._known.get(str(said.get("nodeLink")))
        if known is None:
            raise RequestError(
                "this producer is not paired, or not any more", reason="node_not_found"
            )
        return known.peer

    # -- what is on record

    def _read(self) -> None:
        if self._nodes is not None:
            self._read_for = _told(self._nodes)
        self._reading = asyncio.create_task(self._read_registry())

    async def _read_registry(self) -> None:
        try:
            self._known = await asyncio.to_thread(_on_record, self._open_registry)
        except BatonError as error:
            log.info("the registry of producers was not read (%s)", error.reason)

    def _rows(self, found: tuple[Producer, ...], seen: Seen) -> Rows:
        if not found:
            text = f"{NO_PRODUCER}."
            return Rows({"none": tag("p", text, class_="none", data_key="none")})
        return Rows({one.name: self._node(one, seen.may_manage) for one in found})

    def _node(self, one: Producer, may_manage: bool) -> Html:
        known = self._known.get(one.name)
        lacks = NOTHING
        if known is not None and one.lacks:
            lacks = nodes_parts.lacks(one.lacks, self._sends(known.peer))
        return nodes_parts.node(one, known, may_manage, lacks)


def _described(peer: Peer) -> Description | BatonError:
    """What a producer is, or why it did not say: that is no failure of pairing."""
    try:
        with Control.open(node_pairing.address_of(peer), peer.record) as control:
            return control.describe()
    except BatonError as error:
        return error


def _serves(found: Description | BatonError, ours: Identity | None) -> _Serving:
    """What a producer serves, and what comes of it: it is qualified where the model is the same."""
    if isinstance(found, BatonError):
        return _Serving(f"It does not say what it serves ({found.reason}).")
    if found.state == "waiting":
        return _Serving("It has no model, and is not used until it has this machine's.", lacks=True)
    model = found.model or "a model"
    if found.identity is None:
        return _Serving(f"It loads {model}, and will be qualified once it has.")
    if ours is None:
        text = f"It serves {model}, and will be qualified once this machine has loaded its own."
        return _Serving(text)
    if identity_differences(ours, found.identity):
        text = f"It serves another model ({model}), and is not used until it has this machine's."
        return _Serving(text, lacks=True)
    return _Serving(f"It serves {model}, and is being qualified.")


def _on_record(opened: Callable[[], Registry]) -> Mapping[str, Known]:
    registry, now = opened(), time.time()
    return {
        link_name(peer): Known(peer, history(registry.verdict(peer), now))
        for peer in registry.peers.all().peers
    }


def _told(nodes: Nodes) -> object:
    """What changes when something else may be on record."""
    return tuple(
        (one.name, one.qualified.at if one.qualified is not None else None)
        for one in nodes.producers
    )


def _say(*pieces: str) -> Change:
    return ("set", "nodes-told", part("nodes-told", "p", *pieces, role="status", class_="told"))
