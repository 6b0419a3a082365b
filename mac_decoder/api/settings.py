"""Settings of the HTTP endpoint; the defaults serve a user on one desk."""

from __future__ import annotations

from dataclasses import dataclass, field

from mac_decoder.engine.events import Lane


@dataclass(frozen=True)
class ApiSettings:
    """What the endpoint allows, and what it assumes where a request does not say.

    ``hosts`` are names that the endpoint may be called by beside this machine's loopback
    names; ``origins`` are foreign web origins (``https://chat.example``) that browsers may
    call from. ``api_keys`` are valid beside those that are stored; ``keys_demanded`` asks
    everybody for one. At most ``max_requests`` are in hand at once,
    each with a body of at most ``max_body_bytes`` that is read within ``body_timeout_s``, and
    never goes on for ``body_stall_s`` with hardly a byte: so much memory can requests take, for
    so long can they keep others out. A client that takes no byte for ``stall_timeout_s`` has
    left. At most ``max_streams`` clients follow the status at once; one that takes nothing for
    ``stream_stall_s`` is left. ``heartbeat_s`` is the longest silence on an answer's stream.
    ``default_max_tokens`` ``None`` lets a chat answer grow to the end of the model's context.
    ``share_caches`` lets one API key reuse what was computed for another, who can then tell by
    the time whether a prompt was there before. ``model_path`` is the model's directory, empty
    where it is nobody's business.
    """

    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    keys_demanded: bool = False
    share_caches: bool = False
    max_requests: int = 96
    max_body_bytes: int = 16 << 20
    body_timeout_s: float = 60.0
    body_stall_s: float = 10.0
    stall_timeout_s: float = 300.0
    max_streams: int = 16
    stream_stall_s: float = 10.0
    heartbeat_s: float = 1.0
    max_choices: int = 8
    default_max_tokens: int | None = None
    default_temperature: float = 1.0
    lane: Lane = "auto"
    model_path: str = ""
