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
    "live": "The conversation's own sequence, still in the engine: nothing has to be restored.",
    "resident": "Kept in this machine's memory.",
    "durable": "Kept on this machine's disk, also after a restart.",
    "remote": "Prefilled by a producer.",
    "local": "Prefilled here, and nothing was reused.",
    "mixed": "Several prompts in one request, whose caches came from different places.",
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
    "phases": (
        "The parts of a bar, each with all the time that it took. Two machines measure them, and "
        "some go on side by side: together they can come to more than the time to the first token."
    ),
}
"""In the order in which a page lists them: what others are explained by comes first."""

PHASES: Final[Mapping[str, tuple[str, str]]] = {
    "queue": ("waiting", "The prompt waits for its turn, here or at the producer."),
    "failed_restore": ("failed restore", "A cache could not be restored: so long it was tried."),
    "failed_handoff": ("failed handoff", "A handoff came to no end: so long it was tried."),
    "lookup": (
        "looking up",
        "What is kept of this prompt is looked up. It lasts until the engine has time for what was "
        "found.",
    ),
    "read": ("reading", "The cache is read from disk."),
    "compute": ("computing", "The rest of the prompt is computed."),
    "wire": (
        "transfer",
        "Rows travel while the next are computed: this is what the transfer took longer.",
    ),
    "verify": ("checking", "Every byte is checked against the digests of when it was made."),
    "place": ("placing", "The cache is placed in memory."),
    "compose": (
        "joining",
        "Rows that are held are placed while the others are received: this is what it took longer.",
    ),
    "swap": ("swapping in", "What was placed becomes the model's cache, all layers at once."),
    "install": ("installing", "The cache joins those that the engine decodes with."),
    "boundary_decode": (
        "last prompt token",
        "It is always computed here, and gives the first token of the answer.",
    ),
    "decode": ("decoding", "The rest of the answer is generated."),
}
"""Phases by the code that answers have them by, in the order in which they happen: what they are
called, and what goes on in them, in sentences.
"""

WORDS: Final[Mapping[Page, tuple[str, ...]]] = {
    "now": (
        *("token", "prefill", "decode", "producer", "cache", "reuse"),
        *("live", "resident", "durable", "remote", "local", "mixed"),
        *("hit", "first token", "moving average", "handoff", "qualify", "phases"),
    ),
    "requests": (
        *("token", "prefill", "decode", "producer", "cache", "reuse"),
        *("live", "resident", "durable", "remote", "local", "mixed"),
        *("first token", "parts at", "cut", "block", "staging", "phases"),
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
        *("live", "resident", "durable", "remote", "local", "first token", "phases"),
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
    return said + (tuple(PHASES.values()) if page in _WITH_PHASES else ())
