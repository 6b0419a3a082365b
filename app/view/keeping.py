"""What is kept, one conversation after the other, and what is done about it, in words. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from app.view import words
from app.view.exact import exactly
from app.view.facts import Badge, Fact, Tone
from app.view.reasons import meaning
from mac_decoder.housekeeping.conversations import (
    Conversation,
    Conversations,
    Held,
    ShownCut,
    State,
)
from mac_decoder.housekeeping.house import Gone
from mac_decoder.housekeeping.operations import Kind, Operation
from mac_decoder.store.catalogue import Footprint, Foreign
from mac_decoder.store.events import PassedOver
from mac_decoder.store.ledger import Tally
from mac_decoder.store.verify import Verified

_TIERS: Final[dict[Held, tuple[str, str]]] = {
    "live": ("live", "in the engine, and can be gone on in at once"),
    "resident": ("memory", "can be restored from memory"),
    "durable": ("disk", "can be restored from disk"),
}

_WHY: Final = {
    "turn": "end of a turn",
    "shared": "shared with others",
    "step": "on the way",
    "": "",
}

_STATES: Final[dict[State, str]] = {
    "published": "on disk",
    "pending": "on its way to the disk",
    "superseded": "a longer one took its place",
    "out_of_space": "only in memory",
    "refused": "refused by the disk",
    "invalid": "set aside",
    "withheld": "withheld",
    "": "",
}

_WHO: Final = {
    "decoder_prefill": "prefilled here",
    "decoder_decode": "decoded here",
    "producer": "prefilled by a producer",
}

_DOING: Final[dict[Kind, tuple[str, str]]] = {
    "verify": ("Verifying", "Verified"),
    "prune": ("Pruning", "Pruned"),
    "forget": ("Forgetting", "Forgotten"),
    "clear": ("Clearing", "Cleared"),
}


_KINDS: Final = {
    "own": "lock and tag",
    "index": "index",
    "blocks": "blocks",
    "cuts": "cuts",
    "unfinished": "being written",
    "quarantined": "set aside",
}
"""Kinds of files in plain words; others are called what they are."""


@dataclass(frozen=True)
class KeptCut:
    """A cut of a conversation, in one line."""

    position: str
    why: str
    tiers: tuple[str, ...]
    state: str
    note: str
    bytes: str
    used: str


@dataclass(frozen=True)
class Kept:
    """A conversation: what it is called, where it is, what it takes, and its cuts. ``mark`` is
    what people tell it from others by.
    """

    id: str
    mark: str
    title: str
    count: str
    tiers: tuple[Badge, ...]
    used: str
    size: str
    facts: tuple[Fact, ...]
    cuts: tuple[KeptCut, ...]
    made_by: tuple[str, ...]


@dataclass(frozen=True)
class Overview:
    """The conversations that are shown, and what is not."""

    shown: tuple[Kept, ...]
    rest: str


@dataclass(frozen=True)
class Stays:
    """What a clearing leaves on disk, and whose it is, one after the other; ``others``: also
    what is no part of this decoder's.
    """

    said: tuple[str, ...]
    others: bool


UNKNOWN: Final = Stays(("what other models, versions and store keys have, and the index",), True)
"""Where it was not looked what there is."""

_LEFT: Final = {
    "foreign_key": "made under another store key",
    "stale_format": "of another version",
    "unknown": "not made by Baton",
}
"""Kinds of files that a clearing leaves, as whose they are."""


@dataclass(frozen=True)
class Doing:
    """An operation: how far it is, or what came of it."""

    title: str
    text: str
    tone: Tone
    running: bool
    share: float | None


def conversations(found: Conversations, now: float) -> Overview:
    """What is kept, the latest used first."""
    rest: list[str] = []
    if found.not_shown:
        rest.append(f"{words.counted(found.not_shown, 'more conversation')}")
    if found.foreign.cuts:
        rest.append(_foreign(found.foreign))
    return Overview(tuple(_kept(one, now) for one in found.shown), "; ".join(rest))


def footprint(found: Footprint, took_s: float) -> tuple[Fact, ...]:
    """What a walk of the disk counted."""
    kinds = (
        _files(_KINDS.get(kind, kind.replace("_", " ")), files, nbytes)
        for kind, (files, nbytes) in found.kinds.items()
        if files
    )
    return (
        _files("all together", found.total.files, found.total.nbytes),
        *kinds,
        Fact("walked in", words.duration(took_s)),
    )


def not_walked(reason: str) -> tuple[Fact, ...]:
    """What is known of the disk where a walk of it did not come to its end: nothing."""
    return (
        Fact("all together", words.DASH, tone="warn", note=f"it could not be walked ({reason})"),
    )


def _files(label: str, files: int, nbytes: int) -> Fact:
    """Sizes that can be read, and to the last byte below."""
    note = f"{words.counted(files, 'file')}, {words.counted(nbytes, 'byte')}"
    return Fact(label, words.human_bytes(nbytes), note=note)


def question(kind: Kind, found: Gone, stays: Stays | None = None) -> tuple[str, ...]:
    """What a deletion would take and leave, in sentences, as it is estimated before it begins.
    :func:`operation` says the same of it in the same words, once it has been measured.
    ``stays`` is why a clearing leaves something, where that is known.
    """
    said = [*_told("Would delete", kind, found, stays, words.ABOUT)]
    if kind in ("clear", "forget"):
        said.append(
            "What producers have of it in memory is not touched: it goes when they end or need "
            "the room."
        )
    kept = "Memory keeps what it has. " if kind == "prune" else ""
    return (*said, f"{kept}No answer is lost, only time.")


def verification(kinds: Mapping[str, Tally]) -> str:
    """What a verification would read, in sentences, of what the latest walk of the disk counted;
    :func:`operation` counts the same files once they have been read.
    """
    read = [kinds.get(kind, Tally()) for kind in ("cuts", "blocks")]
    files, nbytes = sum(one.files for one in read), sum(one.nbytes for one in read)
    what = f"{words.ABOUT}{words.counted(files, 'file')}, {exactly(nbytes)}"
    return (
        f"Reads {what if kinds else 'the files of all cuts and blocks'}, and compares them with "
        "what was written. Files that are wrong are set aside; nothing else is changed."
    )


def stays(found: Foreign, kinds: Mapping[str, Tally]) -> Stays:
    """What a clearing leaves, of what others have and what the latest walk of the disk counted."""
    said: list[str] = []
    if found.cuts:
        said.append(_foreign(found))
    said += [
        f"{words.counted(tally.files, 'file')} {whose}, {exactly(tally.nbytes)}"
        for kind, whose in _LEFT.items()
        if (tally := kinds.get(kind, Tally())).files
    ]
    return Stays((*said, "the index, lock and tag"), others=bool(said))


def _foreign(found: Foreign) -> str:
    return (
        f"{words.counted(found.cuts, 'cut')} of "
        f"{words.counted(found.identities, 'other model')}, {exactly(found.nbytes)}"
    )


def _told(verb: str, kind: Kind, found: Gone, stays: Stays | None, about: str) -> Iterator[str]:
    yield f"{verb} {about}{deletion(found)}."
    if found.left is not None:
        left = f"{about}{exactly(found.left)} stay on disk"
        if kind == "clear":
            left += f": {'; '.join((stays or UNKNOWN).said)}"
        yield f"{left}."
    shared = found.shared
    if shared is None:
        return
    if not (shared.nbytes or shared.memory_bytes):
        yield "Nothing of it is shared with other conversations."
        return
    sizes = [f"{exactly(shared.nbytes)} on disk"] if found.left is not None else []
    sizes.append(f"{exactly(shared.memory_bytes)} in memory")
    yield (
        f"What it shares with other conversations stays for them, such as a common system "
        f"prompt: {about}{', '.join(sizes)}."
    )


def deletion(found: Gone) -> str:
    """What a deletion takes: exact counts, of what there is."""
    parts = [f"{words.counted(found.files, 'file')}, {exactly(found.nbytes)} on disk"]
    if found.cuts:
        parts.append(f"{words.counted(found.cuts, 'cut')}, {exactly(found.memory_bytes)} in memory")
    if found.live:
        sequences = words.counted(found.live, "live sequence")
        parts.append(f"{sequences}, {exactly(found.live_bytes)} in the engine")
    if found.publications:
        parts.append(f"{words.counted(found.publications, 'cut')} on the way to the disk")
    return "; ".join(parts)


def operation(found: Operation[Any], stays: Stays | None = None) -> Doing:
    """What goes on, or what came of it; ``stays`` as :func:`question` has it."""
    doing, done = _DOING[found.kind]
    if found.state == "running":
        progress = found.progress
        if progress.phase == "memory" or not progress.total:
            return Doing(doing, "", "busy", True, None)
        share = min(1.0, progress.done / progress.total)
        text = f"{words.human_bytes(progress.done)} of {words.human_bytes(progress.total)}"
        return Doing(doing, text, "busy", True, share)
    outcome = _outcome(found.kind, found.outcome, stays)
    if found.passed_over:
        outcome = f"{outcome} {_passed_over(found.passed_over)}".strip()
    if found.state == "cancelled":
        return Doing(f"{doing} was cancelled", outcome, "warn", False, None)
    if found.error is not None:
        error = found.error
        text = f"{error.message} ({error.reason})" + (f": {error.hint}" if error.hint else "")
        return Doing(f"{doing} failed", text, "bad", False, None)
    bad = isinstance(found.outcome, Verified) and bool(found.outcome.bad)
    tone: Tone = "bad" if bad else "warn" if found.passed_over else "good"
    return Doing(done, outcome, tone, False, None)


def _passed_over(found: Sequence[PassedOver]) -> str:
    """What could not be removed; the log and `baton cache` name all of it."""
    first = found[0]
    more = f" and {words.counted(len(found) - 1, 'more', 'more')}" if len(found) > 1 else ""
    told = f"Could not be removed, and passed over: {first.path}{more} ({first.reason})"
    return f"{told}. {meaning(first.reason)}".strip()


def _outcome(kind: Kind, outcome: object, stays: Stays | None) -> str:
    if isinstance(outcome, Gone):
        return " ".join(_told("Deleted", kind, outcome, stays, ""))
    if isinstance(outcome, Verified):
        read = f"Read {words.counted(outcome.files, 'file')}, {exactly(outcome.nbytes)}"
        if not outcome.bad:
            return f"{read}: all is well"
        reasons = ", ".join(sorted({bad.reason for bad in outcome.bad}))
        return f"{read}: {words.counted(len(outcome.bad), 'file')} set aside ({reasons})"
    return ""


def _kept(one: Conversation, now: float) -> Kept:
    # What goes when it is forgotten. On disk and in memory it can have the same rows: both go.
    own = words.human_bytes(one.own_bytes + one.memory_own_bytes + one.live_bytes)
    return Kept(
        one.id,
        one.mark,
        words.counted(one.position, "token"),
        words.counted(len(one.cuts), "cut"),
        tuple(Badge(_TIERS[tier][0], "plain", _TIERS[tier][1]) for tier in one.tiers),
        "" if one.used_at is None else words.ago(one.used_at, now),
        f"{own} of its own",
        (
            Fact("first seen", words.moment(one.made_at)),
            Fact("last used", words.moment(one.used_at), note=_since(one.used_at, now)),
            Fact("its own, all together", own, note="what goes when it is forgotten"),
            Fact("its own on disk", words.human_bytes(one.own_bytes)),
            Fact("its own in memory", words.human_bytes(one.memory_own_bytes)),
            Fact("live in the engine", words.human_bytes(one.live_bytes), note="its own, too"),
            Fact("shared on disk", words.human_bytes(one.shared_bytes), note="others need it too"),
            Fact(
                "shared in memory",
                words.human_bytes(max(0, one.memory_bytes - one.memory_own_bytes)),
                note="others need it too",
            ),
        ),
        tuple(_cut(cut, now) for cut in one.cuts),
        tuple(
            f"{span.first:,} to {span.last:,} {_WHO.get(span.who, span.who)} "
            f"({span.device}, {span.dtype})"
            for span in one.spans
        ),
    )


def _since(at: float | None, now: float) -> str:
    return "not since this decoder's start" if at is None else words.ago(at, now)


def _cut(cut: ShownCut, now: float) -> KeptCut:
    notes = [meaning(cut.withheld) or cut.withheld] if cut.withheld else []
    notes += ["computed in more than one way"] if cut.mixed else []
    notes += [] if cut.own else ["needed by others"]
    return KeptCut(
        words.count(cut.position),
        _WHY.get(cut.why, cut.why),
        tuple(_TIERS[tier][0] for tier in cut.tiers),
        _STATES[cut.state],
        ", ".join(notes),
        words.human_bytes(cut.file_bytes) if cut.file_bytes else words.DASH,
        words.DASH if cut.used_at is None else words.ago(cut.used_at, now),
    )
