"""Files that any safetensors reader can open, and of which there is one spelling."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from mac_decoder.store import container
from mac_decoder.store.container import Tensor
from protocol.errors import IntegrityError
from tests.mac_decoder.reuse.made import LAYOUTS
from tests.mac_decoder.store.made import conversation, opened, publish, rows_of
from tests.mac_decoder.store.simulated import SimulatedDisk

texts = st.text(st.characters(codec="ascii"), max_size=8)
tensors = st.lists(
    st.builds(
        Tensor,
        texts.filter(lambda name: name != "__metadata__"),
        st.sampled_from(("U8", "F16", "BF16", "F32", "U32")),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=5,
    unique_by=lambda tensor: tensor.name,
)


@given(st.dictionaries(texts, texts, max_size=4), tensors)
def test_what_is_encoded_is_parsed(metadata: dict[str, str], tensors: list[Tensor]) -> None:
    raw = container.encode(metadata, tensors)
    header = container.parse(raw)
    assert (header.metadata, list(header.tensors)) == (metadata, tensors)
    assert header.nbytes == len(raw) == container.header_length(raw[:8])
    assert len(raw) % 8 == 0
    assert container.peek(raw) == metadata


@given(st.dictionaries(texts, texts, max_size=2), tensors, st.data())
def test_no_other_bytes_are_parsed_as_the_same(
    metadata: dict[str, str], tensors: list[Tensor], data: st.DataObject
) -> None:
    raw = bytearray(container.encode(metadata, tensors))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    try:
        header = container.parse(bytes(raw))
    except IntegrityError:
        return
    assert (header.metadata, list(header.tensors)) != (metadata, tensors)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"__metadata__":null}',
        '{"__metadata__":{"a":1}}',
        '{"__metadata__":{},"x":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}}',
        '{"__metadata__":{},"x":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}',
        '{"__metadata__":{},"x":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
        '{"__metadata__":{},"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        '{"__metadata__":{},"x":{"dtype":"U8","shape":[1e3],"data_offsets":[0,1000]}}',
        '{"__metadata__":{}, "x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        "[" * 10_000,
    ],
)
def test_other_headers_are_refused(text: str) -> None:
    raw = text.encode()
    raw += b" " * (-len(raw) % 8)
    with pytest.raises(IntegrityError):
        container.parse(container.LENGTH.pack(len(raw)) + raw)


def test_lengths_are_limited() -> None:
    with pytest.raises(IntegrityError):
        container.header_length(container.LENGTH.pack(container.MAX_HEADER + 1))
    with pytest.raises(IntegrityError):
        container.header_length(b"1234567")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_reader_without_our_code_gets_the_rows(layout: object, tmp_path: Path) -> None:
    """FORMAT.md's promise, kept with the safetensors library and nothing else."""
    disk = SimulatedDisk()
    tokens = conversation(600)
    with opened(tmp_path, disk) as store:
        publish(store, layout, tokens)  # type: ignore[arg-type]
    for path, data in disk.files().items():
        path.write_bytes(data)
    (cut_path,) = (tmp_path / "cuts").iterdir()
    found: dict[str, bytes] = {}
    with safe_open(cut_path, "np") as cut:
        said = cut.metadata()
        assert cut.get_tensor("tokens").tolist() == tokens
        kinds = [layer["kind"] for layer in json.loads(said["layout"])["layers"]]
        blocks = [bytes(row).hex() for row in cut.get_tensor("blocks")]
        rest_names = [name for name in cut.keys() if "." in name]  # noqa: SIM118
    for digest in [*blocks, None]:
        source = tmp_path / f"blocks/{digest}.safetensors" if digest else cut_path
        raw = source.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        for name in sorted(header.keys() - {"__metadata__"}):
            if digest or name in rest_names:
                start, end = header[name]["data_offsets"]
                data = raw[8 + length + start : 8 + length + end]
                full = kinds[int(name.split(".")[0])] == "full"
                found[name] = found.get(name, b"") + data if full else data
    for (index, role), array in rows_of(layout, tokens).items():  # type: ignore[arg-type]
        if array.nbytes:
            name = f"{index}." + (("key", "value")[role] if role < 2 else f"state{role - 2}")
            assert np.array_equal(np.frombuffer(found[name], np.uint8), array)
