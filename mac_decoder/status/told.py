"""What is told of where prompts came from: an answer's ``baton`` object, for all who show it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mac_decoder.engine.events import Report


def merged(reports: Sequence[Report], notes: Sequence[str] = ()) -> dict[str, Any]:
    """The ``baton`` object of an answer: its prompts' reports as one.

    Counts are summed; times are those of the slowest prompt; ``source`` is ``mixed`` where
    prompts differ. ``notes`` are appended to the reasons.
    """
    slowest = max(reports, key=lambda report: report.ttft_ms)
    reasons = dict.fromkeys(reason for report in reports for reason in report.reasons)
    return {
        "source": source(reports),
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


def source(reports: Sequence[Report]) -> str:
    """Where the caches of all came from; ``mixed`` where they differ. At least one report."""
    sources = {report.source for report in reports}
    return sources.pop() if len(sources) == 1 else "mixed"
