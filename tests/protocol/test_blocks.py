"""Names of blocks and cuts: what changes them, and that nothing else finds them."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.blocks import BLOCK, as_tokens, chain, cut_digest, namespace
from protocol.pairing import length_prefixed

KEY = bytes(range(32))
IDENTITY = hashlib.sha256(b"identity").digest()
SPACE = namespace(KEY, IDENTITY)


def some_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def test_the_namespace_is_recomputed_with_hmac_alone() -> None:
    message = length_prefixed(b"baton namespace 1", IDENTITY, b"salt")
    assert namespace(KEY, IDENTITY, b"salt") == hmac.digest(KEY, message, "sha256")


def test_the_chain_is_recomputed_with_hashlib_alone() -> None:
    tokens = some_tokens(2 * BLOCK + 7)
    raw = tokens.astype("<u4").tobytes()
    first = hashlib.sha256(b"baton block 1" + SPACE + bytes(32) + raw[:1024]).digest()
    second = hashlib.sha256(b"baton block 1" + SPACE + first + raw[1024:2048]).digest()
    assert chain(SPACE, tokens) == [first, second]


def test_a_cut_is_recomputed_with_hashlib_alone() -> None:
    tokens = some_tokens(BLOCK + 3)
    (parent,) = chain(SPACE, tokens)
    position = (BLOCK + 3).to_bytes(8, "big")
    parts = (b"baton cut 1", SPACE, parent, position, tokens[BLOCK:].astype("<u4").tobytes())
    expected = hashlib.sha256(length_prefixed(*parts)).digest()
    assert cut_digest(SPACE, parent, tokens[BLOCK:], BLOCK + 3) == expected


def test_every_part_of_a_namespace_changes_it() -> None:
    made = {
        SPACE,
        namespace(bytes(32), IDENTITY),
        namespace(KEY, bytes(32)),
        namespace(KEY, IDENTITY, b"a"),
        namespace(KEY, IDENTITY, b"b"),
    }
    assert len(made) == 5


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4 * BLOCK), st.data())
def test_one_changed_token_renames_its_block_and_all_after_it(
    count: int, data: st.DataObject
) -> None:
    tokens = some_tokens(count)
    changed = tokens.copy()
    at = data.draw(st.integers(0, count - 1))
    changed[at] ^= np.uint32(1 << data.draw(st.integers(0, 31)))
    before, after = chain(SPACE, tokens), chain(SPACE, changed)
    same = at // BLOCK
    assert before[:same] == after[:same]
    assert not set(before[same:]) & set(after[same:])


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 3 * BLOCK), st.integers(0, 3 * BLOCK))
def test_a_longer_prompt_keeps_the_names_of_a_shorter_one(a: int, b: int) -> None:
    short, long = sorted((a, b))
    tokens = some_tokens(long)
    assert chain(SPACE, tokens)[: short // BLOCK] == chain(SPACE, tokens[:short])


def test_equal_tokens_at_another_place_have_another_name() -> None:
    names = chain(SPACE, np.zeros(4 * BLOCK, np.uint32))
    assert len(set(names)) == 4


def test_another_namespace_shares_no_name() -> None:
    tokens = some_tokens(BLOCK + 1)
    other = namespace(KEY, IDENTITY, b"other")
    assert chain(SPACE, tokens) != chain(other, tokens)
    parent = chain(SPACE, tokens)[0]
    ours, theirs = (cut_digest(s, parent, tokens[BLOCK:], BLOCK + 1) for s in (SPACE, other))
    assert ours != theirs


def test_cuts_of_every_position_and_tail_have_their_own_name() -> None:
    tokens = some_tokens(2 * BLOCK)
    names = chain(SPACE, tokens)
    made = set()
    for position in range(1, 2 * BLOCK + 1):
        whole = position // BLOCK
        parent = names[whole - 1] if whole else b""
        made.add(cut_digest(SPACE, parent, tokens[whole * BLOCK : position], position))
    assert len(made) == 2 * BLOCK


@pytest.mark.parametrize(
    ("parent", "tail", "position"),
    [
        (b"", [1, 2], 3),
        (b"", [1] * BLOCK, BLOCK),
        (bytes(32), [], 0),
        (bytes(32), [1], 1),
        (bytes(31), [], BLOCK),
        (b"", [], BLOCK),
        (b"", [], -1),
    ],
)
def test_a_cut_whose_parts_do_not_add_up_has_no_name(
    parent: bytes, tail: list[int], position: int
) -> None:
    with pytest.raises(ValueError):
        cut_digest(SPACE, parent, tail, position)


def test_token_ids_are_never_narrowed() -> None:
    """Trap 4: two ids that agree in their low bits are two ids."""
    low, high = np.full(BLOCK, 1), np.full(BLOCK, 1 + (1 << 31))
    assert chain(SPACE, low) != chain(SPACE, high)
    for wrong in ([1 << 32], [-1], [1.5], [[1]], np.array([1 << 63], np.uint64)):
        with pytest.raises(ValueError):
            as_tokens(wrong)


def test_tokens_in_their_form_are_not_copied() -> None:
    tokens = some_tokens(5)
    assert as_tokens(tokens) is tokens
    assert as_tokens([]).dtype == np.dtype("<u4")
    for given_as in (list(map(int, tokens)), tokens.astype(np.int64), tokens.astype(">u4")):
        assert as_tokens(given_as).tolist() == tokens.tolist()
    assert chain(SPACE, np.repeat(tokens, 2 * BLOCK)[::2]) == chain(SPACE, np.repeat(tokens, BLOCK))


def test_keys_and_digests_have_one_length() -> None:
    for arguments in ((bytes(31), IDENTITY), (KEY, bytes(33))):
        with pytest.raises(ValueError):
            namespace(*arguments)
    with pytest.raises(ValueError):
        chain(b"", some_tokens(1))
    with pytest.raises(ValueError):
        cut_digest(b"", b"", [1], 1)
