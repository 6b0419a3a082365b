"""What the endpoints share: the engine, the model's text, and the record of each request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request

from mac_decoder.api.door import MOST_CONNECTIONS, Door
from mac_decoder.api.errors import status_of
from mac_decoder.api.keys import KeyFiles, Keys
from mac_decoder.api.metrics import Metrics
from mac_decoder.api.settings import ApiSettings
from mac_decoder.custody import Custody
from mac_decoder.engine.events import Report
from mac_decoder.engine.facade import Engine, Stream
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.text import TokenText
from mac_decoder.status import sections
from mac_decoder.status.board import Board
from mac_decoder.status.journal import Begun, Ending, Journal
from mac_decoder.status.told import merged, source
from protocol import releases
from protocol.errors import BatonError, Cancelled, EngineFault, RequestError
from protocol.status.snapshot import Cache, Decoder, Nodes, Outcome
from protocol.status.snapshot import Door as DoorSection
from protocol.status.snapshot import Engine as EngineSection

log = logging.getLogger("mac_decoder.api")

_STEADY_BYTES: Final = 4096
"""A body that brings fewer in ``body_stall_s`` does not come on: bytes that trickle in one by
one would hold a place as well as none."""


class Past(NamedTuple):
    """What the supervisor has seen: how many processes before this one, how the last ended."""

    restarts: int = 0
    last_fault: str = ""


FIRST: Final = Past()


class Service:
    """One per app. ``text`` and ``loaded`` are there once the engine is ready."""

    def __init__(
        self,
        engine: Engine,
        served_name: str,
        settings: ApiSettings,
        past: Past = FIRST,
        custody: Custody | None = None,
        stored: KeyFiles | None = None,
        certificate: str | None = None,
        most_connections: int = MOST_CONNECTIONS,
        address: str | None = None,
    ) -> None:
        """``stored`` keys are valid beside the settings'; ``certificate`` is the fingerprint of
        the one that is shown to clients, where there is TLS; ``address`` is this endpoint's, as
        this machine reaches it.
        """
        self.past = past
        self.custody = custody
        self.certificate = certificate
        self.keys = Keys(settings.api_keys, stored)
        self.door = Door(most_connections)
        self.engine = engine
        self.served_name = served_name
        self.settings = settings
        self._text: TokenText | None = None
        self._making_text = asyncio.Lock()
        self.metrics = Metrics(engine.counters, self.door, self._sections)
        self.created = int(time.time())
        self.address = address
        self.journal = Journal()
        self.board = Board(engine, self.journal, self._decoder, self._door)
        self.streams = 0
        """Clients that follow the status; pages of the dashboard do not count among them."""
        self._process = secrets.token_hex(8)
        self._started_at = round(time.time(), 3)
        self.metrics.started.set(self._started_at)
        self._versions = versions()
        self._began = time.monotonic()

    @property
    def loaded(self) -> LoadedModel:
        """The model; raises :attr:`absence` where there is none that could answer."""
        if not self.engine.ready():
            raise self.absence
        return self.engine.loaded

    @property
    def absence(self) -> EngineFault:
        """Why no model can answer now (``engine_not_ready``)."""
        if self.engine.status().get("fault"):
            message = "the engine has failed, and the decoder starts again"
        elif self._text is not None:
            message = "the decoder is stopping"
        else:
            seconds = time.monotonic() - self._began
            message = f"the model is being loaded, for {seconds:.0f} s so far"
        return EngineFault(
            message, reason="engine_not_ready", hint="try again when /ready answers with 200"
        )

    def _sections(self) -> tuple[EngineSection, Nodes, Cache]:
        """What changes by itself. Any thread."""
        told = self.engine.status()
        found = sections.engine(told, loaded=self._text is not None)
        return found, sections.nodes(told), sections.cache(self.engine.cache_status())

    def _decoder(self) -> Decoder:
        """Who this is. A model that was loaded is told of also once it cannot answer any more."""
        try:
            checkpoint = self.engine.loaded.checkpoint
        except EngineFault:
            checkpoint = None
        identity = None if checkpoint is None else checkpoint.identity
        return Decoder(
            process=self._process,
            model=self.served_name,
            started_at=self._started_at,
            address=self.address,
            versions=self._versions,
            identity=identity,
            identity_digest=None if identity is None else identity.digest().hex(),
            context_tokens=None if checkpoint is None else checkpoint.max_context,
            restarts=self.past.restarts,
            last_fault=self.past.last_fault,
            connections_missed=0 if self.custody is None else self.custody.missed,
        )

    def _door(self) -> DoorSection:
        refusals = self.door.refusals.counts
        return DoorSection(
            certificate_sha256=self.certificate,
            keys=len(self.keys),
            keys_demanded=self.settings.keys_demanded,
            connections=len(self.door.crowd),
            connections_limit=self.door.crowd.most,
            streams=self.streams,
            streams_limit=self.settings.max_streams,
            refused={reason: count for reason, count in refusals.items() if count},
        )

    @property
    def fingerprint(self) -> str:
        """OpenAI's ``system_fingerprint``: the beginning of the identity's digest."""
        return f"baton_{self.loaded.checkpoint.identity.digest().hex()[:16]}"

    async def text(self) -> TokenText:
        """The texts of the model's tokens; reading them takes a while, once."""
        if self._text is None:
            async with self._making_text:
                if self._text is None:
                    self._text = await asyncio.to_thread(TokenText, self.loaded.tokenizer)
        return self._text

    async def warm(self) -> None:
        """Read the texts of the tokens before the first request needs them.

        To be called once the engine has started, by whoever started it.
        """
        began = time.perf_counter()
        await self.text()
        log.info("read the texts of all tokens in %.1f s", time.perf_counter() - began)

    def require_model(self, name: str) -> None:
        """Raise ``RequestError`` (``model_not_found``, a 404) for any name but the served one."""
        if name != self.served_name:
            raise RequestError(
                "this server does not serve that model",
                reason="model_not_found",
                field="model",
                hint=f"it serves {self.served_name}",
            )

    def room_for(self, prompt: int, field_name: str) -> int:
        """How many tokens may follow a prompt of ``prompt`` tokens; at least 1.

        Raises ``RequestError`` (``context_length_exceeded``): nothing is ever cut off.
        """
        limit = self.loaded.checkpoint.max_context
        if prompt >= limit:
            raise RequestError(
                f"this model's context is {limit} tokens; the prompt alone has {prompt}",
                reason="context_length_exceeded",
                field=field_name,
            )
        return limit - prompt

    async def body(self, request: Request) -> bytes:
        """The whole body, within ``body_timeout_s``, and steadily (``body_stall_s``)."""
        settings, clock = self.settings, asyncio.get_running_loop().time
        body, counted = bytearray(), 0
        try:
            async with (
                asyncio.timeout(settings.body_timeout_s),
                asyncio.timeout(settings.body_stall_s) as stall,
            ):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) - counted >= _STEADY_BYTES:
                        counted = len(body)
                        stall.reschedule(clock() + settings.body_stall_s)
            return bytes(body)
        except TimeoutError:
            raise RequestError("the body came too slowly", reason="request_timeout") from None
        except ClientDisconnect:
            raise Cancelled("the client left", reason="client_left") from None


@dataclass
class Record:
    """What is logged and counted of one request, once, when it ends. Codes and counts only.

    ``salt`` keeps the caches of its API key apart from those of others; it is not logged.
    """

    service: Service
    route: str
    prefix: str
    salt: bytes = field(default=b"", repr=False)
    began: float = field(default_factory=time.perf_counter)
    streamed: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    reports: tuple[Report, ...] = ()
    notes: tuple[str, ...] = ()
    ended: bool = False

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.service.metrics.in_hand.inc()

    def submitted(self, streams: Sequence[Stream]) -> None:
        """The engine has the request, with a stream for each choice."""
        began_at = time.time() - (time.perf_counter() - self.began)
        self.service.journal.began(
            Begun(self.id, self.route, self.streamed, began_at, self.prompt_tokens, streams)
        )
        self.service.board.touch()

    def completed(self) -> None:
        """The whole answer was sent."""
        self._end("completed", None)

    def broken(self, error: BatonError) -> None:
        """The request ended with ``error``, before or in its answer."""
        status = status_of(error)
        outcome: Outcome
        if isinstance(error, Cancelled):
            outcome = "cancelled"
        else:
            outcome = "refused" if status < 500 else "failed"
        self._end(outcome, error)

    def abandoned(self) -> None:
        """A bug ended the request; nothing more is known here."""
        self._end("failed", BatonError("a bug"))

    def _end(self, outcome: Outcome, error: BatonError | None) -> None:
        if self.ended:
            return
        self.ended = True
        total_ms = round((time.perf_counter() - self.began) * 1e3, 3)
        code = None if error is None else error.reason
        told = merged(self.reports, self.notes) if self.reports else None
        ending = Ending(
            outcome,
            code,
            time.time(),
            total_ms,
            self.prompt_tokens,
            self.completion_tokens,
            self.finish_reasons,
            told,
        )
        self._count(ending)
        finished = self.service.journal.ended(self.id, self.route, self.streamed, ending)
        if finished is not None and finished.tokens_per_s.value is not None:
            self.service.metrics.decode.observe(finished.tokens_per_s.value)
        self.service.board.touch()
        log.info("%s", msgspec.json.encode(self._line(ending)).decode())

    def _count(self, ending: Ending) -> None:
        metrics = self.service.metrics
        came_from = source(self.reports) if self.reports else "none"
        metrics.in_hand.dec()
        metrics.requests.labels(self.route, ending.outcome, came_from).inc()
        metrics.tokens.labels("prompt").inc(ending.prompt_tokens)
        metrics.tokens.labels("generated").inc(ending.generated_tokens)
        for report in self.reports:
            metrics.count_report(report)
        if ending.code is not None:
            metrics.refusals.labels(ending.code).inc()

    def _line(self, ending: Ending) -> dict[str, Any]:
        line: dict[str, Any] = {
            "event": "request",
            "id": self.id,
            "route": self.route,
            "outcome": ending.outcome,
            "code": ending.code,
            "stream": self.streamed,
            "prompt_tokens": ending.prompt_tokens,
            "completion_tokens": ending.generated_tokens,
            "finish_reasons": ending.finish_reasons,
            "total_ms": ending.total_ms,
        }
        return line | dict(ending.told or {})


def versions() -> dict[str, str]:
    """Releases of Baton and of what computes here; what is not installed is left out."""
    found = releases.installed(("baton-llm", *releases.DECODER))
    return {name: version for name, version in found.items() if version}
