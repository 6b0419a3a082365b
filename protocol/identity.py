"""What a cache is a function of besides tokens, as component digests.

Each component is a SHA-256 in hexadecimal, or ``"none"`` where a model has no such thing.
Digests travel by component, so that a refusal names what differs. All digests are over
length-prefixed canonical bytes: no component's encoding can be read as another's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec

from protocol.layout import Dtype, Layout
from protocol.pairing import length_prefixed
from protocol.reasons import COMPONENTS, component_reason, refusal

FORMAT_VERSION: Final = 1
"""Version of the meaning of rows and states; part of the component ``engine``."""

NONE: Final = "none"
OVERFLOW_POLICY: Final = "refuse"
"""What happens to a prompt above the maximum length: it is refused, nothing is dropped."""

ComponentDigest = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64}|none)\Z")]

# What config.json says about positions; names of both spellings that checkpoints use.
_CONTEXT_FIELDS: Final = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "max_position_embeddings",
    "sliding_window",
)


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Eight component digests, each 64 lower-case hexadecimal digits or ``"none"``."""

    weights: ComponentDigest
    revision: ComponentDigest
    quantisation: ComponentDigest
    adapter: ComponentDigest
    tokenizer: ComponentDigest
    template: ComponentDigest
    context: ComponentDigest
    engine: ComponentDigest

    def digest(self) -> bytes:
        """SHA-256 over a domain tag and the components in declared order, 32 bytes."""
        values = (getattr(self, name).encode("ascii") for name in COMPONENTS)
        return hashlib.sha256(length_prefixed(b"baton identity 1", *values)).digest()


def identity_from_parts(
    config: Mapping[str, Any],
    weight_files: Iterable[tuple[str, int, str]],
    tokenizer_files: Iterable[tuple[str, str]],
    chat_template: str | None,
    layout: Layout,
    dtype: Dtype,
    max_context: int,
    adapter_files: Iterable[tuple[str, str]] = (),
) -> Identity:
    """The identity of a checkpoint whose files were already read and hashed.

    ``weight_files`` are (name, bytes, SHA-256 hex), the other files (name, SHA-256 hex);
    the order in which they are given does not matter. ``max_context`` is in tokens.
    """
    quantisation = config.get("quantization") or config.get("quantization_config")
    context = {name: config[name] for name in _CONTEXT_FIELDS if config.get(name) is not None}
    engine = (layout.digest(), dtype.encode(), str(FORMAT_VERSION).encode())
    weights = [(name, str(size), sha) for name, size, sha in weight_files]
    return Identity(
        weights=_of_files("weights", weights),
        revision=_of(b"revision", _canonical_json(config)),
        quantisation=_of(b"quantisation", _canonical_json(quantisation)) if quantisation else NONE,
        adapter=_of_files("adapter", adapter_files),
        tokenizer=_of_files("tokenizer", tokenizer_files),
        template=NONE if chat_template is None else _of(b"template", chat_template.encode()),
        context=_of(
            b"context",
            _canonical_json(context),
            str(max_context).encode(),
            OVERFLOW_POLICY.encode(),
        ),
        engine=_of(b"engine", *engine),
    )


def identity_differences(ours: Identity, theirs: Identity) -> tuple[str, ...]:
    """Names of the components that differ, in declared order; empty when all agree."""
    return tuple(name for name in COMPONENTS if getattr(ours, name) != getattr(theirs, name))


def require_same(ours: Identity, theirs: Identity) -> None:
    """Return only if both identities agree in every component.

    Raises IdentityMismatch with the reason of the first component that differs
    (``weights_differ``, ``tokenizer_differs``, ...) and all of them in ``components``.
    """
    components = identity_differences(ours, theirs)
    if not components:
        return
    first = components[0]
    error = refusal(
        component_reason(first),
        f"the other side's model differs in: {', '.join(components)}",
        field=first,
        found=getattr(theirs, first),
        expected=getattr(ours, first),
        hint="load the same checkpoint, as the decoder has it, on both machines",
    )
    error.components = components  # type: ignore[attr-defined]
    raise error


def _of(domain: bytes, *parts: bytes) -> str:
    return hashlib.sha256(length_prefixed(b"baton " + domain + b" 1", *parts)).hexdigest()


def _of_files(domain: str, files: Iterable[tuple[str, ...]]) -> str:
    listed = sorted(files)
    if not listed:
        return NONE
    parts = (length_prefixed(*(column.encode() for column in entry)) for entry in listed)
    return _of(domain.encode(), *parts)


def _canonical_json(value: object) -> bytes:
    # Sorted keys and no blanks; Infinity is a legal value in Mamba configurations.
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return text.encode("ascii")
