"""Reason codes in words. The codes are stable, and are shown beside what they mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from mac_decoder.reuse.ladder import SHORTFALLS
from protocol.reasons import REASONS

MEANINGS: Final[dict[str, str]] = {
    "cut_at_end": "Everything but the last token was held.",
    "nothing_to_prefill": "One token: there is nothing to prefill.",
    "durable_out_of_space": "From memory; the disk had no room for it, or it was deleted there.",
    "handoff_resumed": "A lost connection was made again, and the handoff went on.",
    "cut_gone": "The cut was let go of in the meantime.",
    "restore_broke": "A fault of Baton's own; the log has the place.",
    "lookup_broke": "A fault of Baton's own; the log has the place.",
    "digest_differs": "A file was damaged and is set aside.",
    "file_missing": "A file is gone.",
    "mac_differs": "A file is not authentic and is set aside.",
    "not_a_file": "In a file's place lies something else.",
    "directory_not_empty": "In a file's place lies a directory that is not Baton's.",
    "not_permitted": "The system does not let go of it.",
    "in_use": "Something uses it.",
    "lane_local": "Asked to prefill here.",
    "lane_remote": "Asked to prefill there.",
    "no_producer": "No producer is set up.",
    "below_threshold": "Too short to be worth asking a producer.",
    "above_threshold": "Long enough to ask a producer.",
    "rates_favour_local": "By the measured rates this machine is faster.",
    "reuse_favoured": "By the measured rates going on from what is held is faster.",
    "producer_backlog": "Too much waits at the producer.",
    "producer_probe": "Asked so that the measured rates stay true.",
    "producer_down": "The producer cannot be reached.",
    "producer_qualifying": "The producer is being qualified: compared with this machine.",
    "producer_unfit": "The producer's rows differ from this machine's.",
    "reuse_off": "The request asked for no reuse.",
}


def why_not_more(reasons: Sequence[str]) -> tuple[str, ...]:
    """Those of a request's reasons that say why not more was reused."""
    return tuple(reason for reason in reasons if reason in SHORTFALLS)


def meaning(reason: str) -> str:
    """A reason in words; empty where the code is all there is."""
    known = SHORTFALLS.get(reason) or MEANINGS.get(reason)
    if known is None and reason in REASONS:
        # What ended a handoff, as the wire's own list has it.
        known = REASONS[reason].meaning
    return known or ""
