"""Hypothesis strategies that several test files share. Append; do not change what others use."""

from __future__ import annotations

import hypothesis.strategies as st

from protocol.identity import Identity
from protocol.layout import (
    Dtype,
    FullLayer,
    Layout,
    RecurrentLayer,
    SlidingLayer,
    StateArray,
)
from protocol.messages import (
    MAX_CREDIT,
    MAX_EXTRA_CUTS,
    MAX_FRAMES,
    MAX_GENERATION,
    MAX_HISTORY,
    MAX_PAYLOAD,
    MAX_TILE,
    MAX_TOKENS,
    Abort,
    Aborted,
    Begin,
    Committed,
    Credit,
    Hello,
    HelloAck,
    History,
    Limits,
    Message,
    Prefill,
    Progress,
    Proof,
    Recipe,
    Seal,
)

dtypes: st.SearchStrategy[Dtype] = st.sampled_from(("float32", "bfloat16", "float16"))
small = st.integers(1, 4)


@st.composite
def layers(draw: st.DrawFn, index: int) -> FullLayer | SlidingLayer | RecurrentLayer:
    """One small layer of any kind; values may be missing from a latent's row."""
    kind = draw(st.sampled_from(("full", "sliding", "recurrent")))
    dtype = draw(dtypes)
    if kind == "recurrent":
        count = draw(st.integers(1, 3))
        states = tuple(
            StateArray(f"state{number}", draw(st.tuples(small, small)), draw(dtypes))
            for number in range(count)
        )
        return RecurrentLayer(index, states)
    heads, key, value = draw(small), draw(small), draw(st.integers(0, 4))
    if kind == "full":
        return FullLayer(index, heads, key, value, dtype)
    return SlidingLayer(index, heads, key, value, dtype, draw(st.integers(1, 24)))


@st.composite
def layouts(draw: st.DrawFn, max_layers: int = 4) -> Layout:
    """A layout of one to ``max_layers`` small layers."""
    count = draw(st.integers(1, max_layers))
    return Layout(tuple(draw(layers(index)) for index in range(count)))


@st.composite
def ranges(draw: st.DrawFn, max_end: int = 60) -> tuple[int, int]:
    """``(cut, end)`` of a handoff: ``0 <= cut < end <= max_end``."""
    end = draw(st.integers(1, max_end))
    return draw(st.integers(0, end - 1)), end


hexes = st.binary(min_size=32, max_size=32).map(bytes.hex)
components = st.one_of(st.just("none"), hexes)
identities = st.builds(Identity, *(components for _ in range(8)))
tokens = st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=60)
nonces = st.binary(min_size=32, max_size=32)
transfers = st.binary(min_size=16, max_size=16)
generations = st.integers(1, MAX_GENERATION)
epochs = st.integers(0, MAX_GENERATION)
positions = st.integers(0, MAX_TOKENS)
words = st.from_regex(r"\A[A-Za-z0-9_.:-]{1,64}\Z")
codes = st.from_regex(r"\A[a-z0-9_]{1,64}\Z")
notes = st.from_regex(r"\A[ !#-\[\]-~]{0,96}\Z")
tiles = st.integers(1, MAX_TILE)
recipes = st.builds(
    Recipe,
    who=st.sampled_from(("decoder_prefill", "decoder_decode", "producer")),
    device=words,
    dtype=dtypes,
    tile=tiles,
)
histories = st.builds(History, positions, positions, recipes)
limits = st.builds(
    Limits,
    st.integers(1, MAX_TOKENS),
    st.integers(1, MAX_CREDIT),
    st.integers(0, MAX_EXTRA_CUTS),
)
micros = st.integers(0, MAX_PAYLOAD)

messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(Hello, st.just(1), nonces, epochs, identities, nonces),
    st.builds(HelloAck, st.just(1), nonces, epochs, identities, nonces, recipes, limits),
    st.builds(Proof, nonces),
    st.builds(
        Prefill,
        request=words,
        generation=generations,
        nonce=nonces,
        identity=nonces,
        space=nonces,
        cut=positions,
        extra_cuts=st.lists(positions, max_size=4).map(tuple),
        deadline_ms=st.integers(1, 864_000_000),
        credit=st.integers(1, MAX_CREDIT),
        tokens=st.binary(min_size=4, max_size=64),
    ),
    st.builds(
        Begin,
        generation=generations,
        nonce=nonces,
        transfer=transfers,
        layout=nonces,
        tokens=nonces,
        spans=nonces,
        cut=positions,
        end=positions,
        tile=tiles,
        frames=st.integers(0, MAX_FRAMES),
        payload_bytes=st.integers(0, MAX_PAYLOAD),
        computed_tokens=positions,
        history=st.lists(histories, min_size=1, max_size=min(3, MAX_HISTORY)).map(tuple),
    ),
    st.builds(Progress, generations, positions),
    st.builds(Credit, generations, st.integers(1, MAX_CREDIT)),
    st.builds(
        Seal,
        transfers,
        st.integers(0, MAX_FRAMES),
        st.integers(0, MAX_PAYLOAD),
        micros,
        micros,
        nonces,
        nonces,
    ),
    st.builds(Committed, transfers, nonces),
    st.builds(
        Abort,
        generation=epochs,
        reason=codes,
        field=notes,
        found=notes,
        expected=notes,
        components=st.lists(codes, max_size=8).map(tuple),
        retry_after_ms=st.integers(0, 86_400_000),
    ),
    st.builds(Aborted, generations),
)
