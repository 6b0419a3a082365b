"""A checkpoint as a stream: one encoding of its list, limits in everything, and where what lies."""

from __future__ import annotations

import hashlib
import json
import string
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.control.models import (
    MAX_FILES,
    MAX_MANIFEST,
    MAX_OTHER,
    MAX_WEIGHTS,
    Manifest,
    ModelFile,
    manifest_of,
    read_manifest,
)
from protocol.errors import PeerProtocolError
from tests.ordinary import examples

NONE = hashlib.sha256(b"").hexdigest()
LETTERS = string.ascii_letters + string.digits
SUFFIXES = ("safetensors", "json", "jinja", "txt", "model", "tiktoken")


def names() -> st.SearchStrategy[str]:
    return st.builds(
        lambda first, rest, suffix: f"{first}{rest}.{suffix}",
        st.sampled_from(LETTERS + "_"),
        st.text(LETTERS + "._-", max_size=20),
        st.sampled_from(SUFFIXES),
    )


def manifests(most: int = 300) -> st.SearchStrategy[Manifest]:
    file = st.builds(ModelFile, names(), st.integers(0, most), st.just("ab" * 32) | st.just(NONE))
    unique = st.lists(file, min_size=1, max_size=8, unique_by=lambda file: file.name.lower())
    return unique.map(manifest_of)


@given(manifests(MAX_OTHER))
def test_what_is_listed_is_read_again(manifest: Manifest) -> None:
    assert read_manifest(manifest.raw) == manifest
    assert json.loads(manifest.raw) == [
        {"name": file.name, "nbytes": file.nbytes, "sha256": file.sha256} for file in manifest.files
    ]
    assert manifest.nbytes == len(manifest.raw) + sum(file.nbytes for file in manifest.files)
    assert manifest.digest == hashlib.sha256(manifest.raw).digest()


@given(manifests(), st.data())
def test_the_rest_of_a_stream_is_what_its_offset_leaves(
    manifest: Manifest, data: st.DataObject
) -> None:
    """Compared with the stream written out, of which each file has its own byte values."""
    contents = {file.name: bytes([n]) * file.nbytes for n, file in enumerate(manifest.files)}
    stream = manifest.raw + b"".join(contents[file.name] for file in manifest.files)
    offset = data.draw(st.integers(0, manifest.nbytes))
    rest = manifest.raw[offset:]
    rest += b"".join(contents[span.file.name][span.start :] for span in manifest.rest(offset))
    assert rest == stream[offset:]
    left = [span.file.name for span in manifest.rest(offset)]
    assert left == sorted(left)
    assert all(0 <= span.start < span.file.nbytes for span in manifest.rest(offset))


@examples(200)
@given(manifests(), st.data())
def test_no_other_spelling_is_read(manifest: Manifest, data: st.DataObject) -> None:
    raw = manifest.raw
    place = data.draw(st.integers(0, len(raw) - 1))
    changed = bytearray(raw)
    changed[place] ^= data.draw(st.integers(1, 255))
    for spelled in (raw + b"\n", b" " + raw, raw.replace(b":", b": ", 1), raw[:-1], bytes(changed)):
        with suppress(PeerProtocolError):
            found = read_manifest(spelled)
            assert found.raw == spelled
            assert found != manifest


@examples(200)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError):
        read_manifest(raw)


def listed(*files: dict[str, Any]) -> bytes:
    return json.dumps([*files], separators=(",", ":")).encode()


def one(name: str = "config.json", nbytes: Any = 1, sha256: str = NONE, **more: Any):
    return {"name": name, "nbytes": nbytes, "sha256": sha256, **more}


HOSTILE = [
    *(
        "../config.json",
        "..",
        "/etc/config.json",
        "a/config.json",
        "a\\config.json",
        ".config.json",
    ),
    *("config.json\0", "con\0fig.json", "config.json/", "config.json ", "config.json\n", ""),
    *(
        "config",
        "config.py",
        "config.json.py",
        "model.bin",
        "model.safetensors.",
        ".json",
        "-a.json",
    ),
    *("c\u00f6nfig.json", "config.JSON", "c" * 124 + ".json", "CON:.json", "~config.json"),
]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_leads_elsewhere_or_is_of_another_kind(name: str) -> None:
    raw = json.dumps([one(name)], separators=(",", ":"), ensure_ascii=False).encode()
    with pytest.raises(PeerProtocolError) as caught:
        read_manifest(raw)
    assert caught.value.reason == "model_manifest_invalid"
    assert not name or name not in repr(caught.value.details())


@pytest.mark.parametrize(
    "raw",
    [
        b"[]",
        b"{}",
        b"null",
        b"[" * 5000,
        listed(one(nbytes=-1)),
        listed(one(nbytes=1.5)),
        listed(one(nbytes="1")),
        listed(one(nbytes=MAX_OTHER + 1)),
        listed(one("model.safetensors", nbytes=MAX_WEIGHTS + 1)),
        listed(one(sha256="AB" * 32)),
        listed(one(sha256="ab" * 31)),
        listed(one(mode=0o777)),
        listed(one("b.json"), one("a.json")),
        listed(one("a.json"), one("a.json")),
        listed(one("A.json"), one("a.json")),
        listed(*(one(f"{n:04}.json") for n in range(MAX_FILES + 1))),
        listed(*(one(f"{n}.safetensors", nbytes=MAX_WEIGHTS) for n in range(5))),
        b" " * (MAX_MANIFEST + 1),
    ],
)
def test_lists_beyond_the_limits_are_refused(raw: bytes) -> None:
    with pytest.raises(PeerProtocolError) as caught:
        read_manifest(raw)
    assert caught.value.reason == "model_manifest_invalid"


def test_lists_at_the_limits_are_read() -> None:
    raw = listed(*(one(f"{n:04}.json") for n in range(MAX_FILES)))
    assert len(read_manifest(raw).files) == MAX_FILES
    large = listed(one("a.json", nbytes=MAX_OTHER), one("b.safetensors", nbytes=MAX_WEIGHTS))
    assert len(read_manifest(large).files) == 2
    assert read_manifest(listed(one("c" * 123 + ".json"))).files


def test_what_cannot_be_listed_is_not() -> None:
    with pytest.raises(PeerProtocolError):
        manifest_of([ModelFile("../a.json", 1, NONE)])
    with pytest.raises(PeerProtocolError):
        manifest_of([])
