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
from mac_decoder.engine.facade import Engine
from mac_decoder.engine.model import LoadedModel
from mac_decoder.engine.text import TokenText
from protocol.errors import BatonError, Cancelled, EngineFault, RequestError

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
    ) -> None:
        """``stored`` keys are valid beside the settings'; ``certificate`` is the fingerprint of
        the one that is shown to clients, where there is TLS.
        """
        self.past = past
        self.custody = custody
        self.certificate = certificate
        self.keys = Keys(settings.api_keys, stored)
        self.door = Door(most_connections)
        self.engine = engine
        self.served_name = served_name
        self.settings = settings
        self.metrics = Metrics(engine.counters, self.door)
        self.created = int(time.time())
        self._began = time.monotonic()
        self._text: TokenText | None = None
        self._making_text = asyncio.Lock()

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

    def completed(self) -> None:
        """The whole answer was sent."""
        self._end("completed", None)

    def broken(self, error: BatonError) -> None:
        """The request ended with ``error``, before or in its answer."""
        status = status_of(error)
        if isinstance(error, Cancelled):
            outcome = "cancelled"
        else:
            outcome = "refused" if status < 500 else "failed"
        self._end(outcome, error)

    def abandoned(self) -> None:
        """A bug ended the request; nothing more is known here."""
        self._end("failed", BatonError("a bug"))

    def _end(self, outcome: str, error: BatonError | None) -> None:
        if self.ended:
            return
        self.ended = True
        source = merged(self.reports)["source"] if self.reports else "none"
        metrics = self.service.metrics
        metrics.in_hand.dec()
        metrics.requests.labels(self.route, outcome, source).inc()
        metrics.tokens.labels("prompt").inc(self.prompt_tokens)
        metrics.tokens.labels("generated").inc(self.completion_tokens)
        for report in self.reports:
            metrics.count_report(report)
        if error is not None:
            metrics.refusals.labels(error.reason).inc()
        log.info("%s", msgspec.json.encode(self._line(outcome, error)).decode())

    def _line(self, outcome: str, error: BatonError | None) -> dict[str, Any]:
        line: dict[str, Any] = {
            "event": "request",
            "id": self.id,
            "route": self.route,
            "outcome": outcome,
            "code": None if error is None else error.reason,
            "stream": self.streamed,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "finish_reasons": self.finish_reasons,
            "total_ms": round((time.perf_counter() - self.began) * 1e3, 3),
        }
        return line | (merged(self.reports, self.notes) if self.reports else {})


def merged(reports: Sequence[Report], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The ``baton`` object of an answer: its prompts' reports as one.

    Counts are summed; times are those of the slowest prompt; ``source`` is ``mixed`` where
    prompts differ. ``notes`` are appended to the reasons.
    """
    slowest = max(reports, key=lambda report: report.ttft_ms)
    sources = {report.source for report in reports}
    reasons = dict.fromkeys(reason for report in reports for reason in report.reasons)
    return {
        "source": sources.pop() if len(sources) == 1 else "mixed",
        "reused_tokens": sum(report.reused_tokens for report in reports),
        "prefilled_tokens": sum(report.prefilled_tokens for report in reports),
        "computed_tokens": sum(report.computed_tokens for report in reports),
        "transferred_bytes": sum(report.transferred_bytes for report in reports),
        "shared_tokens": sum(report.shared_tokens for report in reports),
        "parts_at": slowest.parts_at,
        "restore_ms": slowest.restore_ms,
        "restore_bytes": sum(report.restore_bytes for report in reports),
        "staging_bytes": max(report.staging_bytes for report in reports),
        "evicted_bytes": sum(report.evicted_bytes for report in reports),
        "ttft_ms": round(slowest.ttft_ms, 3),
        "phases": dict(slowest.phases),
        "fallback": any(report.fallback for report in reports),
        "reasons": [*reasons, *(note for note in dict.fromkeys(notes) if note not in reasons)],
    }
