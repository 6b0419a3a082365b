"""Generations: open once, admitted once, never again."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from protocol.errors import LocalProtocolError, PeerProtocolError
from protocol.outstanding import REMEMBERED, Outstanding

NONCE, OTHER = b"n" * 32, b"o" * 32


def reason_of(outstanding: Outstanding, generation: int, nonce: bytes = NONCE) -> str:
    with pytest.raises(PeerProtocolError) as caught:
        outstanding.admit(generation, nonce)
    return caught.value.reason


def test_each_generation_is_admitted_once() -> None:
    outstanding = Outstanding(nullcontext())
    outstanding.open(5, NONCE)
    outstanding.check(5, NONCE)
    outstanding.admit(5, NONCE)
    assert reason_of(outstanding, 5) == "generation_used"
    with pytest.raises(LocalProtocolError):
        outstanding.open(5, NONCE)


def test_unknown_and_foreign_are_told_apart() -> None:
    outstanding = Outstanding(nullcontext())
    outstanding.open(5, NONCE)
    assert reason_of(outstanding, 6) == "generation_unknown"
    assert reason_of(outstanding, 4) == "generation_unknown"
    assert reason_of(outstanding, 5, OTHER) == "nonce_differs"
    # A wrong nonce uses nothing up.
    outstanding.admit(5, NONCE)


def test_a_withdrawn_generation_is_used() -> None:
    outstanding = Outstanding(nullcontext())
    outstanding.open(5, NONCE)
    outstanding.withdraw(5)
    outstanding.withdraw(5)
    outstanding.withdraw(77)
    assert len(outstanding) == 0
    assert reason_of(outstanding, 5) == "generation_used"
    with pytest.raises(LocalProtocolError):
        outstanding.open(5, NONCE)


def test_any_order_is_fine() -> None:
    outstanding = Outstanding(nullcontext())
    for generation in (9, 3, 7):
        outstanding.open(generation, NONCE)
    for generation in (7, 9, 3):
        outstanding.admit(generation, NONCE)


def test_memory_is_bounded_and_forgetting_is_strict() -> None:
    outstanding = Outstanding(nullcontext())
    outstanding.open(2, NONCE)
    for generation in range(10, 10 + REMEMBERED + 50):
        outstanding.open(generation, NONCE)
        outstanding.admit(generation, NONCE)
    assert len(outstanding._used) == REMEMBERED
    assert reason_of(outstanding, 10) == "generation_used"
    with pytest.raises(LocalProtocolError):
        outstanding.open(5, NONCE)
    # One that has been open all the time is still good for its one use.
    outstanding.admit(2, NONCE)
    assert reason_of(outstanding, 2) == "generation_used"


def test_threads_share_one_object_under_their_lock() -> None:
    outstanding = Outstanding(threading.Lock())
    for generation in range(1, 101):
        outstanding.open(generation, NONCE)
    admitted: list[int] = []

    def admit_all() -> None:
        for generation in range(1, 101):
            try:
                outstanding.admit(generation, NONCE)
            except PeerProtocolError:
                continue
            admitted.append(generation)

    threads = [threading.Thread(target=admit_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(admitted) == list(range(1, 101))


def test_the_lock_guards_every_method() -> None:
    class Counting:
        entered = 0

        def __enter__(self) -> None:
            self.entered += 1

        def __exit__(self, *exc: object) -> None:
            return None

    lock = Counting()
    outstanding = Outstanding(lock)
    outstanding.open(1, NONCE)
    outstanding.check(1, NONCE)
    outstanding.admit(1, NONCE)
    outstanding.withdraw(1)
    assert len(outstanding) == 0
    assert lock.entered == 5
    with pytest.raises(TypeError):
        Outstanding()  # type: ignore[call-arg]


class Book(RuleBasedStateMachine):
    """Compared with a plain list of everything that ever happened."""

    def __init__(self) -> None:
        super().__init__()
        self.outstanding = Outstanding(nullcontext())
        self.open: dict[int, bytes] = {}
        self.used: set[int] = set()

    @rule(generation=st.integers(1, 20), nonce=st.sampled_from((NONCE, OTHER)))
    def start(self, generation: int, nonce: bytes) -> None:
        if generation in self.open or generation in self.used:
            with pytest.raises(LocalProtocolError):
                self.outstanding.open(generation, nonce)
        else:
            self.outstanding.open(generation, nonce)
            self.open[generation] = nonce

    @rule(generation=st.integers(1, 20), nonce=st.sampled_from((NONCE, OTHER)))
    def admit(self, generation: int, nonce: bytes) -> None:
        if self.open.get(generation) == nonce:
            self.outstanding.admit(generation, nonce)
            del self.open[generation]
            self.used.add(generation)
            return
        expected = "generation_used" if generation in self.used else "generation_unknown"
        if generation in self.open:
            expected = "nonce_differs"
        assert reason_of(self.outstanding, generation, nonce) == expected

    @rule(generation=st.integers(1, 20))
    def withdraw(self, generation: int) -> None:
        self.outstanding.withdraw(generation)
        if self.open.pop(generation, None) is not None:
            self.used.add(generation)

    @invariant()
    def sizes_agree(self) -> None:
        assert len(self.outstanding) == len(self.open)


TestBook = Book.TestCase
