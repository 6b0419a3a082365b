"""The engine's settings; every one has a default that fits most machines."""

from __future__ import annotations

from dataclasses import dataclass, field

from mac_decoder.engine.admission import PaddingRule


@dataclass(frozen=True)
class EngineSettings:
    """How the engine shares the machine.

    ``prefill_step`` is the tile of local prefill in tokens (0: 512 on a GPU, 64 on a CPU);
    it is part of the recipe of local rows. ``max_active`` requests are worked on at once,
    ``max_waiting`` more may wait. ``cache_bytes`` bounds all caches together (0: what
    ``memory.cache_budget`` finds once the weights are loaded), ``ram_bytes`` the resident tier
    (``None``: by ``memory.resident_budget``). ``growth_rows`` are reserved
    ahead of a sequence that decodes. ``remote_threshold`` is the prompt length from which the
    producer is asked (``None``: from measured rates). While others decode, at least
    ``decode_share`` of the time goes to them.
    """

    prefill_step: int = 0
    max_active: int = 16
    max_waiting: int = 64
    cache_bytes: int = 0
    ram_bytes: int | None = None
    growth_rows: int = 1024
    padding: PaddingRule = field(default_factory=PaddingRule)
    remote_threshold: int | None = None
    decode_share: float = 0.25
