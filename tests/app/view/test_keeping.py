"""What is kept and what is done about it reads as it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.view import keeping, words
from mac_decoder.housekeeping.conversations import Conversation, Conversations, ShownCut, Span
from mac_decoder.housekeeping.house import Gone, Shared
from mac_decoder.housekeeping.operations import Operation
from mac_decoder.store.catalogue import Footprint, Foreign
from mac_decoder.store.events import PassedOver
from mac_decoder.store.ledger import Tally
from mac_decoder.store.verify import Bad, Verified
from protocol.errors import CapacityError
from tests.app.view.snapshots import NOW

pytestmark = pytest.mark.anyio

CUT = ShownCut(
    449, "turn", ("live", "durable"), "published", "", False, True, 465_800, NOW - 60, None
)
TALK = Conversation(
    id="c1",
    mark="3f9a1c",
    position=449,
    tiers=("live", "durable"),
    cuts=(CUT,),
    made_at=NOW - 60,
    used_at=NOW - 30,
    referenced_bytes=2_400_000,
    own_bytes=2_000_000,
    memory_bytes=0,
    memory_own_bytes=0,
    live_bytes=532_480,
    spans=(Span(0, 432, "producer", "cuda", "bfloat16", 512),),
    spans_not_shown=0,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def test_a_conversation() -> None:
    found = keeping.conversations(Conversations((TALK,), 2, Foreign(1, 3, 1_000)), NOW)
    (one,) = found.shown
    assert (one.title, one.used) == ("449 tokens", "30 s ago")
    assert [tier.text for tier in one.tiers] == ["live", "disk"]
    assert (one.mark, one.count) == ("3f9a1c", "1 cut")
    told = {fact.label: (fact.text, fact.note) for fact in one.facts}
    # What the row says is what its details add up to, and what forgetting it lets go of.
    assert one.size == "2.5 MB of its own"
    assert told["its own, all together"] == ("2.5 MB", "what goes when it is forgotten")
    assert told["its own on disk"][0] == "2.0 MB"
    assert told["its own in memory"][0] == "0 B"
    assert told["live in the engine"] == ("532.5 kB", "its own, too")
    assert told["shared on disk"] == ("400.0 kB", "others need it too")
    assert told["first seen"][0] == words.moment(NOW - 60)
    assert told["last used"] == (words.moment(NOW - 30), "30 s ago")
    (cut,) = one.cuts
    assert (cut.position, cut.why, cut.tiers, cut.state) == (
        "449",
        "end of a turn",
        ("live", "disk"),
        "on disk",
    )
    assert (cut.note, cut.used) == ("computed in more than one way, needed by others", "–")
    assert one.made_by == ("0 to 432 prefilled by a producer (cuda, bfloat16)",)
    assert found.rest == ("2 more conversations; 3 cuts of 1 other model, 1,000 bytes (1.0 kB)")


def test_a_conversation_of_before_the_start_has_no_time_of_use() -> None:
    unused = dataclasses.replace(TALK, made_at=None, used_at=None)
    (one,) = keeping.conversations(Conversations((unused,), 0, Foreign(0, 0, 0)), NOW).shown
    told = {fact.label: (fact.text, fact.note) for fact in one.facts}
    assert told["first seen"][0] == words.DASH
    assert told["last used"] == (words.DASH, "not since this decoder's start")
    assert one.used == ""


def test_a_walk_of_the_disk_is_another_number_than_the_books() -> None:
    kinds = {"blocks": Tally(2, 900), "index": Tally(0, 0)}
    found = keeping.footprint(Footprint(kinds, Tally(2, 900), 800, 700), 0.012)
    assert [(fact.label, fact.text, fact.note) for fact in found] == [
        ("all together", "900 B", "2 files, 900 bytes"),
        ("blocks", "900 B", "2 files, 900 bytes"),
        ("walked in", "12 ms", ""),
    ]


@pytest.mark.parametrize(
    ("gone", "text"),
    [
        (Gone(1, 5), "1 file, 5 bytes on disk"),
        (Gone(cuts=1, memory_bytes=9), "0 files, 0 bytes on disk; 1 cut, 9 bytes in memory"),
        (
            Gone(live=2, live_bytes=1),
            "0 files, 0 bytes on disk; 2 live sequences, 1 byte in the engine",
        ),
        (Gone(publications=1), "0 files, 0 bytes on disk; 1 cut on the way to the disk"),
    ],
)
def test_a_deletion_is_counted_to_the_byte(gone: Gone, text: str) -> None:
    assert keeping.deletion(gone) == text


GONE = Gone(2, 1_500, left=700, shared=Shared(400, 30))


async def test_a_question_and_its_answer_say_the_same() -> None:
    """What was estimated before is measured after, in the same words."""
    asked = keeping.question("forget", GONE)
    assert asked[:3] == (
        "Would delete ≈ 2 files, 1,500 bytes (1.5 kB) on disk.",
        "≈ 700 bytes stay on disk.",
        "What it shares with other conversations stays for them, such as a common system prompt: "
        "≈ 400 bytes on disk, 30 bytes in memory.",
    )
    done: Operation[Any] = Operation("forget")
    done.end(GONE)
    told = keeping.operation(done).text
    assert told == " ".join(asked[:3]).replace("Would delete", "Deleted").replace(words.ABOUT, "")


def test_what_shares_nothing_says_so() -> None:
    alone = dataclasses.replace(GONE, shared=Shared(0, 0))
    assert "Nothing of it is shared with other conversations." in keeping.question("forget", alone)
    assert "shared" not in " ".join(keeping.question("forget", Gone(1, 5)))


STAYS = keeping.stays(
    Foreign(2, 9, 37_000_000),
    {"foreign_key": Tally(3, 1_500), "unknown": Tally(1, 4), "blocks": Tally(40, 80_000)},
)


async def test_what_a_clearing_leaves_and_why() -> None:
    asked = keeping.question("clear", Gone(1, 5, left=37_084_989), STAYS)
    left = (
        "37,084,989 bytes (37.1 MB) stay on disk: 9 cuts of 2 other models, 37,000,000 bytes "
        "(37.0 MB); 3 files made under another store key, 1,500 bytes (1.5 kB); 1 file not "
        "made by Baton, 4 bytes; the index, lock and tag."
    )
    assert asked[1] == f"≈ {left}"
    assert "producers" in asked[2]
    done: Operation[Any] = Operation("clear")
    done.end(Gone(1, 5, left=37_084_989))
    assert keeping.operation(done, STAYS).text == f"Deleted 1 file, 5 bytes on disk. {left}"
    # Before it was looked whose it is, it is told in general.
    assert "other models" in keeping.operation(done).text


def test_a_clearing_without_a_disk_leaves_nothing_there() -> None:
    said = " ".join(keeping.question("clear", Gone(cuts=1, memory_bytes=9), STAYS))
    assert "stay on disk" not in said


def test_only_what_takes_memory_says_that_producers_keep_theirs() -> None:
    said = keeping.question("prune", Gone(1, 5, left=7), STAYS)
    assert said == (
        "Would delete ≈ 1 file, 5 bytes on disk.",
        "≈ 7 bytes stay on disk.",
        "Memory keeps what it has. No answer is lost, only time.",
    )


async def test_how_far_an_operation_is() -> None:
    running: Operation[Any] = Operation("prune")
    assert keeping.operation(running).share is None
    running.tell(25, 100)
    found = keeping.operation(running)
    assert (found.title, found.share, found.running) == ("Pruning", 0.25, True)
    running.end(Gone(1, 5))
    found = keeping.operation(running)
    assert (found.title, found.text, found.tone) == (
        "Pruned",
        "Deleted 1 file, 5 bytes on disk.",
        "good",
    )


async def test_a_verification_is_asked_of_the_files_that_it_then_counts() -> None:
    kinds = {
        "blocks": Tally(9, 2_000),
        "cuts": Tally(3, 400),
        "index": Tally(2, 50_000),
        "own": Tally(2, 43),
    }
    asked = keeping.verification(kinds)
    assert asked.startswith("Reads ≈ 12 files, 2,400 bytes (2.4 kB), and compares them with ")
    done: Operation[Any] = Operation("verify")
    done.end(Verified(12, 2_400))
    assert keeping.operation(done).text.startswith("Read 12 files, 2,400 bytes (2.4 kB): ")
    # Before the disk was walked no number is known.
    assert keeping.verification({}).startswith("Reads the files of all cuts and blocks, and ")


async def test_what_was_wrong_is_said_and_looks_like_it() -> None:
    done: Operation[Any] = Operation("verify")
    done.end(Verified(2, 10, 0, [Bad("blocks/x", "digest_differs")]))
    found = keeping.operation(done)
    assert (found.text, found.tone) == (
        "Read 2 files, 10 bytes: 1 file set aside (digest_differs)",
        "bad",
    )


async def test_what_could_not_be_removed_is_said() -> None:
    done: Operation[Any] = Operation("clear")
    done.passed_over = (
        PassedOver("blocks/aa/x", "directory_not_empty"),
        PassedOver("blocks/bb/y", "in_use"),
    )
    done.end(Gone(1, 5))
    found = keeping.operation(done)
    assert found.tone == "warn"
    assert found.text.endswith(
        "Could not be removed, and passed over: blocks/aa/x and 1 more (directory_not_empty). "
        "In a file's place lies a directory that is not Baton's."
    )


async def test_a_failure_and_a_stop() -> None:
    failed: Operation[Any] = Operation("clear")
    failed.end(error=CapacityError("no room", reason="cap_reached", hint="make some"))
    found = keeping.operation(failed)
    assert (found.title, found.text) == ("Clearing failed", "no room (cap_reached): make some")
    stopped: Operation[Any] = Operation("prune")
    stopped.cancel()
    stopped.end(Gone(1, 5))
    found = keeping.operation(stopped)
    assert (found.title, found.tone, found.running) == ("Pruning was cancelled", "warn", False)
    assert found.text == "Deleted 1 file, 5 bytes on disk."
