"""Choosing a model, at first and later: what is offered, what it leads to, and what is shown.

Pure but for three functions: :func:`offer` and :func:`check` look at directories, :func:`choose`
writes the settings. A window only lays out :func:`shown`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from app import demo_fetch, demo_model, settings_edit
from app.demo_fetch import Progress
from app.model import describe
from app.view.words import human_bytes
from protocol import halves
from protocol.checkpoint import read_layout, require_tokenizer
from protocol.errors import BatonError, Cancelled, ConfigError

TITLE: Final = "Which model shall Baton serve?"
ABOUT: Final = (
    "It answers with a model that lies on this machine. Which one is written into config.toml, "
    "and can be changed, there or in the menu."
)
DEMO: Final = "Try the demo model"
OWN: Final = "Use a model of mine"
OWN_ABOUT: Final = (
    "A directory with config.json, a tokenizer and safetensors, as mlx-lm reads them. Baton's "
    "producers need the same one: baton node send NAME."
)
EMPTY: Final = "No directory is chosen yet."

Choice = Literal["demo", "own"]
Doing = Literal["nothing", "checking", "demo", "stopping", "done"]


@dataclass(frozen=True)
class Offer:
    """The demo model as it is offered. ``bytes_here`` were fetched earlier; ``lacking`` says why
    it cannot be made on this machine, empty where it can.
    """

    made: bool = False
    bytes_here: int = 0
    lacking: str = ""

    @property
    def about(self) -> str:
        """What is told before anything is fetched."""
        if self.lacking:
            return f"{demo_model.NAME}. {self.lacking}"
        small = "It is small: good for seeing what Baton does, not for work."
        if self.made:
            return f"{demo_model.NAME}: on this machine already. {small}"
        fetch = f"{human_bytes(demo_fetch.FETCHED_BYTES)} to fetch"
        if self.bytes_here:
            fetch += f" ({human_bytes(self.bytes_here)} of it are here)"
        disk = f"{human_bytes(demo_fetch.DISK_BYTES)} on disk"
        return f"{demo_model.NAME}: {fetch}, {disk}. {small}"


@dataclass(frozen=True)
class Checked:
    """A directory that can be served: what it is, for people."""

    path: Path
    about: str


@dataclass(frozen=True)
class State:
    """What has happened in the window so far; every event returns the next one.

    ``path`` is what is typed for a model of one's own; ``model`` what it will be served from, once
    that is settled, ``before`` what the settings named before. ``began`` and ``began_bytes``:
    when fetching began, and with how much.
    """

    offer: Offer
    choice: Choice = "demo"
    path: str = ""
    doing: Doing = "nothing"
    checked: Checked | None = None
    error: BatonError | None = None
    progress: Progress | None = None
    began: float = 0.0
    began_bytes: int = 0
    now: float = 0.0
    model: Path | None = None
    before: str = ""

    def chose(self, choice: Choice) -> State:
        """Another of the two was chosen; what went wrong with the first is no longer told."""
        return self if self.busy else replace(self, choice=choice, error=None)

    def typed(self, path: str) -> State:
        """Another directory was named; it is checked next."""
        if self.busy:
            return self
        doing: Doing = "checking" if path.strip() else "nothing"
        return replace(self, choice="own", path=path, doing=doing, checked=None, error=None)

    def found(self, path: str, result: Checked | BatonError) -> State:
        """A check ended; one of a directory that is not named any more is passed over."""
        if self.doing != "checking" or path != self.path:
            return self
        if isinstance(result, BatonError):
            return replace(self, doing="nothing", error=result)
        return replace(self, doing="nothing", checked=result)

    def started(self, now: float) -> State:
        """The demo model is being fetched."""
        return replace(self, doing="demo", error=None, progress=None, began=now, now=now)

    def progressed(self, progress: Progress, now: float) -> State:
        """Some of it is done."""
        if self.doing not in ("demo", "stopping"):
            return self
        first = self.progress is None or self.progress.phase != progress.phase
        if first:
            return replace(self, progress=progress, began=now, began_bytes=progress.done, now=now)
        return replace(self, progress=progress, now=now)

    def stopped(self) -> State:
        """Somebody wants it to stop; it ends in a moment."""
        return replace(self, doing="stopping") if self.doing == "demo" else self

    def failed(self, error: BatonError, offer: Offer) -> State:
        """It ended without a model. A cancel is nothing that went wrong."""
        told = None if isinstance(error, Cancelled) else error
        return replace(self, doing="nothing", error=told, progress=None, offer=offer)

    def settled(self, model: Path) -> State:
        """The settings name the model."""
        return replace(self, doing="done", error=None, model=model)

    @property
    def busy(self) -> bool:
        """Whether the choice stands for now."""
        return self.doing in ("demo", "stopping", "done")


@dataclass(frozen=True)
class Shown:
    """What a window shows of a state. ``bar`` is 0 to 1, ``None`` for a bar of unknown length;
    ``says`` is told beside it or, without one, about the chosen directory.
    """

    says: str
    error: str
    hint: str
    bar_visible: bool
    bar: float | None
    begin: str
    may_begin: bool
    leave: str
    may_choose: bool
    may_demo: bool


def shown(state: State) -> Shown:
    """The window of a state."""
    fetching = state.doing in ("demo", "stopping")
    ready = state.doing == "nothing"
    demo = state.choice == "demo"
    begin = "Serve it"
    if demo and not state.offer.made:
        begin = "Go on" if state.offer.bytes_here else "Fetch and serve"
    error = state.error
    return Shown(
        says=_says(state),
        error="" if error is None else _sentence(error),
        hint="" if error is None else error.hint or "",
        bar_visible=fetching,
        bar=_bar(state.progress) if fetching else None,
        begin=begin,
        may_begin=ready and (not state.offer.lacking if demo else state.checked is not None),
        leave="Stop" if fetching else "Cancel" if state.before else "Not now",
        may_choose=not state.busy,
        may_demo=not state.busy and not state.offer.lacking,
    )


def begun(offer: Offer, now: str = "") -> State:
    """The window as it opens; ``now`` is the model that the settings name, if they do."""
    return State(offer, "own" if offer.lacking or now else "demo", path=now, before=now)


def offer(cache_dir: Path | None = None) -> Offer:
    """What the demo model takes on this machine."""
    if demo_model.existing(cache_dir) is not None:
        return Offer(made=True)
    if lacking := halves.missing("both"):
        return Offer(
            lacking="Making it here needs both halves; "
            f"{', '.join(lacking)} {'is' if len(lacking) == 1 else 'are'} not installed. "
            f"They come with: {halves.install_command('both')}"
        )
    return Offer(bytes_here=demo_fetch.bytes_here(cache_dir))


def check(directory: str) -> Checked:
    """What lies in a directory, if `baton serve` would take it. Nothing large is read.

    Raises ``ConfigError``: ``model_missing``, and what ``read_layout`` and ``require_tokenizer``
    raise.
    """
    path = Path(os.path.expanduser(directory.strip()))
    if not path.is_absolute() or not path.is_dir():
        raise ConfigError(
            f"there is no directory {path}",
            reason="model_missing",
            field="model",
            hint="baton model import makes one from a GGUF file" if path.is_file() else None,
        )
    try:
        read_layout(path)
        require_tokenizer(path)
        found = describe(path)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror or type(error).__name__}",
            reason="model_unreadable",
            field="model",
        ) from error
    bits = found["quantisation"]
    about = (found["model_type"], f"{bits} bit" if bits else "not quantised")
    return Checked(path, ", ".join((*about, human_bytes(found["bytes"]))))


def choose(model: Path) -> Path:
    """Have the settings name the model; where they are. Raises ``ConfigError``, as
    ``settings_edit.put``.
    """
    return settings_edit.put("serve", "model", str(model))


def _sentence(error: BatonError) -> str:
    message = error.message.rstrip(".")
    return f"{message[:1].upper()}{message[1:]} ({error.reason})."


def _says(state: State) -> str:
    if state.doing in ("demo", "stopping"):
        return "Stopping …" if state.doing == "stopping" else _progress(state)
    if state.doing == "done":
        return "The decoder starts."
    if state.choice == "demo" or state.error is not None:
        return ""
    if state.doing == "checking":
        return "Looking at it …"
    return EMPTY if state.checked is None else f"Can be served: {state.checked.about}."


def _progress(state: State) -> str:
    progress = state.progress
    if progress is None:
        return "Looking for it …"
    if progress.phase == "check":
        return "Checking its digest …"
    if progress.phase == "make":
        return "Making the checkpoint: about half a minute …"
    text = f"Fetched {human_bytes(progress.done)}"
    if progress.total:
        text += f" of {human_bytes(progress.total)}"
    passed = state.now - state.began
    if passed >= 1:
        text += f", {human_bytes((progress.done - state.began_bytes) / passed)}/s"
    return text


def _bar(progress: Progress | None) -> float | None:
    if progress is None or not progress.total:
        return None
    return min(1.0, progress.done / progress.total)
