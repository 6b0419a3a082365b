"""Baton's own words, each explained in a sentence where it is shown. Pure.

A page lists those that stand on it; a fact names the one that its label is about. Words that
everybody knows are in no list, and what can be said in plain words is not called otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

Page = Literal["now", "requests", "cache", "nodes", "try", "about"]

MEANINGS: Final[Mapping[str, str]] = {
    "token": "What models read and write: a piece of text, about three quarters of a word.",
    "prefill": "To compute the cache of a prompt, before the first token of its answer.",
    "decode": "To generate an answer, token by token. This machine always does.",
    "producer": "Another machine that prefills prompts for this one.",
    "handoff": "A producer's cache of a prompt, on its way to this machine.",
    "cache": "What a model remembers of the tokens before: with it they need not be computed.",
    "reuse": "To go on from a cache that is kept, instead of computing it again.",
    "live": "The conversation's own sequence, still in the engine: going on in it takes no time.",
    "resident": "Kept in this machine's memory.",
    "durable": "Kept on this machine's disk, also after a restart.",
    "remote": "Prefilled by a producer.",
    "local": "Prefilled here, and nothing was reused.",
    "cut": "A position in a conversation at which its cache can be taken up again.",
    "block": "The cache of 256 tokens in a row. Conversations that begin alike share it.",
    "sequence": "One answer's cache in the engine.",
    "hit": "A prompt that went on from memory or from disk.",
    "cap accounting": "What the books say is on disk. The cap is about this figure.",
    "disk footprint": "What a walk through the directory counts, once a minute while you look.",
    "referenced": "What all would take if nothing were shared: each counted whole.",
    "withheld": "On disk, but not used: a block that it needs was found damaged.",
    "published": "On disk, and certain to survive a crash.",
    "recipe": "Who computed the rows of a cache, on what device and in what precision.",
    "row": "What a cache holds of one token, in one layer of the model.",
    "tile": "How many tokens a producer computes at a time.",
    "qualify": (
        "To compare what a producer computes with this machine's own: the same tokens on both, "
        "and the rows that come out. Before it is used, and once a day."
    ),
    "qualifying": "Connected, and being qualified: nothing is asked of it before.",
    "unfit": "Connected, but its rows differ from this machine's: nothing is asked of it.",
    "down": "It cannot be reached, which is tried again and again.",
    "refused": "Reached, but of another release, model or key.",
    "largest difference": "Between a row of the producer and the same row computed here.",
    "moving average": "What was measured last counts most. By it is chosen who prefills.",
    "identity": (
        "Everything that a cache depends on besides its tokens, as digests. A producer must "
        "have the same."
    ),
    "followers": "Programs that are told what changes as it does: these pages, the menu's icon.",
    "first token": "From a request's arrival to the first token of its answer.",
    "parts at": "The position at which this prompt and what is kept have different tokens.",
    "staging": "Memory that was needed for a moment, while a cache was restored.",
}
"""In the order in which a page lists them: what others are explained by comes first."""

PHASES: Final[Mapping[str, tuple[str, str]]] = {
    "queue": ("waiting", "for its turn"),
    "failed_restore": ("failed restore", "a cache that could not be restored"),
    "failed_handoff": ("failed handoff", "a handoff that did not come to its end"),
    "lookup": ("looking up", "what is kept of this prompt"),
    "read": ("reading", "the cache, from disk"),
    "compute": ("computing", "the rest of the prompt"),
    "wire": ("transfer", "what of the transfer took longer than computing"),
    "verify": ("checking", "every byte"),
    "place": ("placing", "the cache in memory"),
    "compose": ("joining", "held rows with those that were received"),
    "swap": ("swapping in", "all layers at once"),
    "install": ("installing", "the cache in the engine"),
    "boundary_decode": (
        "last prompt token",
        "which is always computed here, and gives the first token of the answer",
    ),
    "decode": ("decoding", "the rest of the answer"),
}
"""Phases by the code that answers have them by, in the order in which they happen: what they are
called, and what is done."""

WORDS: Final[Mapping[Page, tuple[str, ...]]] = {
    "now": (
        *("token", "prefill", "decode", "producer", "cache", "reuse"),
        *("live", "resident", "durable", "remote", "local"),
        *("hit", "first token", "moving average", "handoff", "qualify"),
    ),
    "requests": (
        *("token", "prefill", "decode", "producer", "cache", "reuse"),
        *("live", "resident", "durable", "remote", "local"),
        *("first token", "parts at", "cut", "block", "staging"),
    ),
    "cache": (
        *("token", "prefill", "producer", "cache", "live", "sequence", "cut", "block", "hit"),
        *("cap accounting", "disk footprint", "referenced", "published", "withheld"),
        *("recipe", "row", "handoff"),
    ),
    "nodes": (
        *("producer", "prefill", "handoff", "moving average", "tile"),
        *("qualify", "qualifying", "unfit", "down", "refused", "row", "largest difference"),
    ),
    "try": (
        *("token", "prefill", "producer", "cache", "reuse"),
        *("live", "resident", "durable", "remote", "local", "first token"),
    ),
    "about": ("identity", "followers"),
}
"""What each page explains."""

_WITH_PHASES: Final[frozenset[Page]] = frozenset({"now", "requests", "try"})


def listed(page: Page) -> tuple[tuple[str, str], ...]:
    """The words of a page, with what they mean; phases after the others."""
    here = WORDS[page]
    assert not {*here} - {*MEANINGS}
    said = tuple((word, meaning) for word, meaning in MEANINGS.items() if word in here)
    return said + (_phases() if page in _WITH_PHASES else ())


def _phases() -> tuple[tuple[str, str], ...]:
    """What the parts of a stacked bar are, by what they are called."""
    return tuple((called, f"{means[0].upper()}{means[1:]}.") for called, means in PHASES.values())
