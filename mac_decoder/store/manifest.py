"""The head of a cut's file: what the cut is, and the HMAC that makes its word count.

The head is header, tokens, digests of the block files, digests of the rest, and the MAC over
all of these; the rest follows. Byte tables and the attacker are in FORMAT.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from mac_decoder.reuse.cut import (
    CutBody,
    Place,
    block_sizes,
    check_history,
    rest_regions,
)
from mac_decoder.store import container
from mac_decoder.store.container import Header, Tensor, element_code, malformed
from mac_decoder.store.key import key_number, manifest_key
from protocol.blocks import BLOCK, NAME_BYTES, chain, cut_digest
from protocol.errors import IntegrityError
from protocol.identity import Identity
from protocol.layout import KEY, STATE, FullLayer, Layout, Region
from protocol.messages import MAX_TOKENS, History

CUT_FORMAT: Final = "baton cut 1"
BLOCK_FORMAT: Final = "baton block 1"

Role = Literal["turn", "shared", "step"]
"""Why a cut was taken: the end of a turn, a shared prefix, or a step inside a prefill. Only
steps are superseded."""

MAC_BYTES: Final = 32
_TABLES: Final = ("tokens", "blocks", "rest", "mac")


@dataclass(frozen=True)
class Manifest:
    """What a cut's file says about the cut, authenticated.

    ``files`` are the digests of its blocks' files (empty for a layout without full layers),
    ``rest`` the digest of each place of the rest in the order of ``rest_regions``.
    """

    name: bytes
    space: bytes
    identity: Identity
    layout: Layout
    tokens: NDArray[np.uint32]
    files: tuple[bytes, ...]
    rest: tuple[bytes, ...]
    history: tuple[History, ...]
    role: Role
    head_nbytes: int
    nbytes: int

    @property
    def position(self) -> int:
        """Tokens in the cache."""
        return len(self.tokens)

    @cached_property
    def blocks(self) -> tuple[bytes, ...]:
        """The names of the whole blocks."""
        return tuple(chain(self.space, self.tokens))

    def check_name(self) -> None:
        """Raise ``IntegrityError`` (``file_malformed``) unless the name is that of the tokens."""
        tail = self.tokens[len(self.blocks) * BLOCK :]
        parent = self.blocks[-1] if self.blocks else b""
        if cut_digest(self.space, parent, tail, self.position) != self.name:
            raise malformed("name")

    def __repr__(self) -> str:
        # Tokens are a prompt: they do not belong into logs.
        return f"Manifest({self.name.hex()[:12]}, position={self.position})"


class StoreKeys:
    """What is derived from one store key: the manifests' MAC and the key's public number."""

    def __init__(self, store_key: bytes) -> None:
        self._manifest = manifest_key(store_key)
        self.number = key_number(store_key)

    def mac(self, head: memoryview | bytes) -> bytes:
        """HMAC-SHA256 over a cut file's bytes before its MAC, 32 bytes."""
        return hmac.digest(self._manifest, head, "sha256")

    def __repr__(self) -> str:
        return f"StoreKeys({self.number})"


def place_name(place: Place) -> str:
    """The tensor's name of an entry of the layout: ``3.key``, ``3.value``, ``7.state0``."""
    index, role = place
    return f"{index}.{('key', 'value')[role] if role < STATE else f'state{role - STATE}'}"


def block_tensors(layout: Layout) -> dict[Place, Tensor]:
    """The tensors of a block's file, in order; none for a layout without full layers."""
    found: dict[Place, Tensor] = {}
    for place in sorted(block_sizes(layout)):
        layer = layout.layers[place[0]]
        assert isinstance(layer, FullLayer)
        width = layer.key_dim if place[1] == KEY else layer.value_dim
        shape = (BLOCK, layer.heads, width)
        found[place] = Tensor(place_name(place), element_code(layer.dtype), shape)
    return found


def block_header(layout: Layout, space: bytes, block: bytes, number: str) -> bytes:
    """Length field and header of the file of ``block``, made under the key ``number``."""
    metadata = {
        "format": BLOCK_FORMAT,
        "key": number,
        "namespace": space.hex(),
        "block": block.hex(),
    }
    return container.encode(metadata, list(block_tensors(layout).values()))


def encode_head(
    keys: StoreKeys,
    space: bytes,
    identity: Identity,
    cut: CutBody,
    files: tuple[bytes, ...],
    role: Role,
) -> bytes:
    """A cut file's bytes up to and with the MAC; the rest follows in the order of its regions."""
    places = rest_regions(cut.layout, cut.position)
    rest = [hashlib.sha256(cut.rest[region.index, region.role].data).digest() for region in places]
    metadata = {
        "format": CUT_FORMAT,
        "key": keys.number,
        "namespace": space.hex(),
        "cut": cut.digest(space).hex(),
        "position": str(cut.position),
        "role": role,
        "identity": msgspec.json.encode(identity).decode("ascii"),
        "layout": msgspec.json.encode(cut.layout).decode("ascii"),
        "history": msgspec.json.encode(cut.history).decode("ascii"),
    }
    tensors = _tensors(cut.position, len(files), places)
    bound = b"".join((container.encode(metadata, tensors), cut.tokens.tobytes(), *files, *rest))
    return bound + keys.mac(bound)


def head_length(header: Header) -> int:
    """Bytes up to and with the MAC. Raises ``IntegrityError`` (``file_malformed``)."""
    if tuple(tensor.name for tensor in header.tensors[: len(_TABLES)]) != _TABLES:
        raise malformed("tables")
    return header.nbytes + sum(tensor.nbytes for tensor in header.tensors[: len(_TABLES)])


def decode_head(keys: StoreKeys, header: Header, head: memoryview) -> Manifest:
    """The manifest in ``head``, which is a cut file's bytes up to and with the MAC.

    The header's format and key were looked at before (see ``recovery``): here whatever
    differs is damage. Raises ``IntegrityError``: ``mac_differs``, or ``file_malformed``.
    """
    bound = head[:-MAC_BYTES]
    if not hmac.compare_digest(keys.mac(bound), head[-MAC_BYTES:]):
        raise IntegrityError("a cut's manifest is not authentic", reason="mac_differs")
    try:
        return _decode(header, bound)
    except (msgspec.DecodeError, ValueError, KeyError) as error:
        raise malformed("manifest") from error


def _decode(header: Header, bound: memoryview) -> Manifest:
    said = header.metadata
    space, name = bytes.fromhex(said["namespace"]), bytes.fromhex(said["cut"])
    layout = msgspec.json.decode(said["layout"], type=Layout)
    history = msgspec.json.decode(said["history"], type=tuple[History, ...])
    position = int(said["position"])
    if said["role"] not in get_args(Role) or not 0 < position <= MAX_TOKENS:
        raise malformed("position")
    role: Role = said["role"]  # type: ignore[assignment]
    places = rest_regions(layout, position)
    count = position // BLOCK if block_sizes(layout) else 0
    if header.tensors != tuple(_tensors(position, count, places)):
        raise malformed("tensors")
    at = header.nbytes
    tokens = np.frombuffer(bound[at : at + 4 * position], dtype="<u4")
    tokens.setflags(write=False)
    at += 4 * position
    files = _digests(bound, at, count)
    rest = _digests(bound, at + NAME_BYTES * count, len(places))
    check_history(history, position)
    return Manifest(
        name=name,
        space=space,
        identity=msgspec.json.decode(said["identity"], type=Identity),
        layout=layout,
        tokens=tokens,
        files=files,
        rest=rest,
        history=history,
        role=role,
        head_nbytes=len(bound) + MAC_BYTES,
        nbytes=header.file_nbytes,
    )


def _tensors(position: int, blocks: int, places: tuple[Region, ...]) -> list[Tensor]:
    tables = [
        Tensor("tokens", "U32", (position,)),
        Tensor("blocks", "U8", (blocks, NAME_BYTES)),
        Tensor("rest", "U8", (len(places), NAME_BYTES)),
        Tensor("mac", "U8", (MAC_BYTES,)),
    ]
    rest = [Tensor(place_name((r.index, r.role)), element_code(r.dtype), r.shape) for r in places]
    return tables + rest


def _digests(bound: memoryview, at: int, count: int) -> tuple[bytes, ...]:
    ends = range(at, at + NAME_BYTES * count, NAME_BYTES)
    return tuple(bytes(bound[end : end + NAME_BYTES]) for end in ends)


def rest_offsets(manifest: Manifest) -> Mapping[Place, tuple[int, int]]:
    """For each place of the rest its offset in the cut's file and its size, in file order."""
    found: dict[Place, tuple[int, int]] = {}
    at = manifest.head_nbytes
    for region in rest_regions(manifest.layout, manifest.position):
        found[region.index, region.role] = (at, region.nbytes)
        at += region.nbytes
    return found
