"""Any values of the status's structs, by their types: no field is forgotten."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
from hypothesis import settings

from protocol.status.figures import UNAVAILABLE, Figure
from protocol.status.snapshot import Finished, Recent, Snapshot

numbers = st.floats(-1e9, 1e9)
figures = st.one_of(
    st.just(UNAVAILABLE),
    st.builds(Figure, numbers, st.sampled_from(["measured", "estimated"])),
)
few = settings(max_examples=15, deadline=None)
"""A snapshot has two hundred fields to be drawn."""

words = st.text("abc_", max_size=4)


def values(kind: msgspec.inspect.Type) -> st.SearchStrategy[Any]:
    """Any value of a type; collections are short."""
    match kind:
        case msgspec.inspect.StructType(cls=cls, fields=fields):
            if cls is Figure:
                return figures
            return st.builds(cls, **{field.name: values(field.type) for field in fields})
        case msgspec.inspect.IntType(ge=low):
            return st.integers(low or 0, 1 << 40)
        case msgspec.inspect.FloatType():
            return numbers
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.StrType(pattern=pattern):
            return words if pattern is None else st.just("none")
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=literals):
            return st.sampled_from(literals)
        case msgspec.inspect.UnionType(types=types):
            return st.one_of([values(one) for one in types])
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            return st.dictionaries(values(key), values(value), max_size=2)
        case msgspec.inspect.VarTupleType(item_type=item):
            return st.lists(values(item), max_size=2).map(tuple)
    raise NotImplementedError(kind)


def of(kind: type) -> st.SearchStrategy[Any]:
    """Any value of a struct."""
    return values(msgspec.inspect.type_info(kind))


finished = of(Finished)
snapshots: st.SearchStrategy[Snapshot] = of(Snapshot)


@st.composite
def next_ones(draw: st.DrawFn, before: Snapshot) -> Snapshot:
    """What may follow: any sections may be others, and requests may have ended."""
    other = draw(snapshots)
    changed = {
        name: getattr(other, name)
        for name in draw(st.sets(st.sampled_from(Snapshot.__struct_fields__[2:])))
    }
    if draw(st.booleans()):
        more = tuple(draw(st.lists(finished, min_size=1, max_size=3)))
        changed["recent"] = Recent(more + before.recent.finished)
    return msgspec.structs.replace(before, revision=before.revision + 1, **changed)
