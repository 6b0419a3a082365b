"""Component digests: what changes them, what does not, and how differences are named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from protocol.errors import IdentityMismatch
from protocol.identity import (
    Identity,
    identity_differences,
    identity_from_parts,
    require_same,
)
from protocol.layout import FullLayer, Layout
from protocol.reasons import COMPONENTS

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "time_step_limit": [0.0, float("inf")],
}
PARTS: dict[str, Any] = {
    "config": CONFIG,
    "weight_files": [("b.safetensors", 10, "b" * 64), ("a.safetensors", 20, "a" * 64)],
    "tokenizer_files": [("tokenizer.json", "c" * 64), ("vocab.json", "d" * 64)],
    "chat_template": "{{ messages }}",
    "layout": Layout((FullLayer(0, 1, 2, 2, "float32"),)),
    "dtype": "float32",
    "max_context": 4096,
}


def made(**changes: Any) -> Identity:
    return identity_from_parts(**{**PARTS, **changes})


def test_components_are_those_of_the_struct() -> None:
    assert Identity.__struct_fields__ == COMPONENTS


@pytest.mark.parametrize(
    ("changes", "components"),
    [
        ({"weight_files": [("a.safetensors", 20, "a" * 64)]}, ("weights",)),
        (
            {"weight_files": [("b.safetensors", 11, "b" * 64), ("a.safetensors", 20, "a" * 64)]},
            ("weights",),
        ),
        ({"config": {**CONFIG, "hidden_act": "silu"}}, ("revision",)),
        ({"config": {**CONFIG, "rope_theta": 500000.0}}, ("revision", "context")),
        (
            {"config": {**CONFIG, "quantization": {"bits": 4, "group_size": 64}}},
            ("revision", "quantisation"),
        ),
        ({"adapter_files": [("adapter.safetensors", "e" * 64)]}, ("adapter",)),
        ({"tokenizer_files": [("tokenizer.json", "c" * 64)]}, ("tokenizer",)),
        ({"chat_template": None}, ("template",)),
        ({"chat_template": ""}, ("template",)),
        ({"max_context": 8192}, ("context",)),
        ({"dtype": "bfloat16"}, ("engine",)),
        ({"layout": Layout((FullLayer(0, 1, 4, 2, "float32"),))}, ("engine",)),
    ],
)
def test_each_part_shows_in_its_component(
    changes: dict[str, Any], components: tuple[str, ...]
) -> None:
    assert identity_differences(made(), made(**changes)) == components
    assert made().digest() != made(**changes).digest()


def test_order_of_files_and_keys_does_not_matter() -> None:
    shuffled = dict(reversed(CONFIG.items()))
    assert made() == made(
        config=shuffled,
        weight_files=list(reversed(PARTS["weight_files"])),
        tokenizer_files=list(reversed(PARTS["tokenizer_files"])),
    )


def test_what_a_model_lacks_is_none() -> None:
    identity = made(chat_template=None, tokenizer_files=[])
    assert (identity.template, identity.tokenizer) == ("none", "none")
    assert (identity.adapter, identity.quantisation) == ("none", "none")


def test_names_and_digests_cannot_run_into_each_other() -> None:
    one = made(tokenizer_files=[("ab", "c" * 64)])
    two = made(tokenizer_files=[("a", "b" + "c" * 64)])
    assert one.tokenizer != two.tokenizer


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_difference_is_named(component: str) -> None:
    ours = made()
    theirs = msgspec.structs.replace(ours, **{component: "f" * 64})
    with pytest.raises(IdentityMismatch) as caught:
        require_same(ours, theirs)
    assert caught.value.components == (component,)
    assert caught.value.field == component
    assert caught.value.found == "f" * 64
    assert caught.value.expected == getattr(ours, component)
    expected = "weights_differ" if component == "weights" else f"{component}_differs"
    assert caught.value.reason == expected


def test_equal_identities_agree() -> None:
    require_same(made(), made())


@pytest.mark.parametrize("wrong", ["", "abc", "F" * 64, "f" * 63, "f" * 64 + "\n", "None"])
def test_only_digests_and_none_are_components(wrong: str) -> None:
    raw = msgspec.json.encode(msgspec.structs.replace(made(), adapter=wrong))
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(raw, type=Identity)
