"""A model that comes in: whole and verified or not there, whatever ends it, and nowhere else."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from app.model_stream import Outgoing, outgoing
from gb10_producer import received
from gb10_producer.received import STALE_S, Disk, Incoming, ReceivedModels
from protocol import checkpoint as checkpoints
from protocol.checkpoint import read_checkpoint
from protocol.control.messages import NO_MAC, SendModel
from protocol.control.models import Manifest, ModelFile, manifest_of
from protocol.errors import BatonError, Cancelled, ConfigError
from protocol.identity import Identity

STEP = 1 << 17
REUSED = settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def ours(checkpoint_once: Path) -> Outgoing:
    return outgoing(checkpoint_once, None)


@pytest.fixture(scope="module")
def checkpoint_once(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """With a file that is empty, as vocabularies can be."""
    path = tmp_path_factory.mktemp("sent") / "tiny llama"
    shutil.copytree(checkpoint("llama"), path)
    (path / "merges.txt").touch()
    return path


@pytest.fixture
def models(tmp_path: Path) -> ReceivedModels:
    return fresh(tmp_path / "cache")


def fresh(cache: Path, disk: Disk | None = None) -> ReceivedModels:
    return ReceivedModels(cache / "models", cache / "digests.json", disk)


def fed(incoming: Incoming, stream: Iterator[bytes], until: int | None = None) -> int:
    """Write so much of the stream, in small pieces; how much that was."""
    done = 0
    for piece in stream:
        for start in range(0, len(piece), STEP):
            part = piece[start : start + STEP]
            if until is not None:
                part = part[: until - done]
            incoming.write(part)
            done += len(part)
            if done == until:
                return done
    return done


def taken(models: ReceivedModels, ours: Outgoing) -> Path:
    with models.open(ours.offer) as incoming:
        fed(incoming, ours.pieces(incoming.prepare()))
        return incoming.finish().path


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(BatonError) as caught:
        call()
    return caught.value.reason


def parts(models: ReceivedModels) -> list[Path]:
    return list(models._root.glob(".receiving-*"))


def is_whole(path: Path, ours: Outgoing) -> None:
    for file in ours.manifest.files:
        assert (path / file.name).read_bytes() == (ours.path / file.name).read_bytes()
    names = {file.name for file in ours.manifest.files} | {received.MANIFEST}
    assert {one.name for one in path.iterdir()} == names


# From the first byte to the last


def test_a_model_is_kept_under_its_name_and_known_to_whoever_loads_it(
    models: ReceivedModels, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert models.last() is None
    path = taken(models, ours)
    assert path.name == "tiny-llama"
    assert path.parent.name == "models"
    assert path.stat().st_mode & 0o777 == 0o700
    is_whole(path, ours)
    assert [one.name for one in path.parent.iterdir() if one != path] == [".receiving.lock"]
    assert models.last() == path
    monkeypatch.setattr(checkpoints, "_sha256", None)  # what was hashed once
    assert read_checkpoint(path, models._digest_cache).identity == ours.identity


@REUSED
@given(st.data())
def test_it_goes_on_wherever_it_was_cut(
    ours: Outgoing, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Cut anywhere, several times; most cuts lie where something changes."""
    models = fresh(tmp_path_factory.mktemp("cut"))
    total = ours.manifest.nbytes
    edges = [0, 1, len(ours.manifest.raw), len(ours.manifest.raw) - 1, total - 1]
    begin = len(ours.manifest.raw)
    for file in ours.manifest.files:
        begin += file.nbytes
        edges += [begin - 1, begin]
    place = st.sampled_from(sorted({edge for edge in edges if 0 <= edge < total}))
    cuts = sorted(data.draw(st.lists(place | st.integers(0, total - 1), min_size=1, max_size=4)))
    had = 0
    for cut in cuts:
        with models.open(ours.offer) as incoming:
            had = incoming.prepare()
            if had < cut:
                fed(incoming, ours.pieces(had), cut - had)
    with models.open(ours.offer) as incoming:
        have = incoming.prepare()
        listed = cuts[-1] >= len(ours.manifest.raw)
        assert have == (cuts[-1] if listed else 0)
        fed(incoming, ours.pieces(have))
        is_whole(incoming.finish().path, ours)


def test_what_was_whole_when_it_was_cut_is_only_looked_at(
    models: ReceivedModels, ours: Outgoing
) -> None:
    with models.open(ours.offer) as incoming:
        fed(incoming, ours.pieces(incoming.prepare()))
    with models.open(ours.offer) as incoming:
        assert incoming.prepare() == ours.manifest.nbytes
        is_whole(incoming.finish().path, ours)


def test_a_model_that_is_kept_is_not_taken_again_and_is_the_last(
    models: ReceivedModels, ours: Outgoing, checkpoint: Callable[..., Path]
) -> None:
    first = taken(models, ours)
    second = taken(models, outgoing(checkpoint("llama", seed=1), None))
    assert models.last() == second
    with models.open(ours.offer) as incoming:
        assert incoming.prepare() == ours.manifest.nbytes
        assert incoming.finish().path == first
    assert models.last() == first
    assert parts(models) == []


def test_the_last_is_the_one_that_was_whole_last(
    models: ReceivedModels, ours: Outgoing, checkpoint: Callable[..., Path]
) -> None:
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        fed(incoming, ours.pieces(0), 10_000)
    between = taken(models, outgoing(checkpoint("llama", seed=1), None))
    assert models.last() == between
    whole = taken(models, ours)
    assert models.last() == whole != between


def test_the_last_is_the_last_whatever_the_clock_says(
    models: ReceivedModels,
    ours: Outgoing,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = taken(models, ours)
    monkeypatch.setattr(received.time, "time_ns", lambda: 1_000_000_000)
    second = taken(models, outgoing(checkpoint("llama", seed=1), None))
    assert models.last() == second
    assert taken(models, ours) == first
    assert models.last() == first


def test_a_kept_model_that_was_changed_is_taken_anew_beside_it(
    models: ReceivedModels, ours: Outgoing
) -> None:
    first = taken(models, ours)
    (first / "tokenizer_config.json").write_text("{}")
    second = taken(models, ours)
    assert second.name == f"tiny-llama-{ours.offer.digest.hex()[:8]}"
    is_whole(second, ours)
    assert (first / "tokenizer_config.json").read_text() == "{}"


# Damage


@REUSED
@given(st.data())
def test_no_byte_of_a_stream_can_be_changed(
    ours: Outgoing, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    models = fresh(tmp_path_factory.mktemp("flip"))
    place = data.draw(st.integers(0, ours.manifest.nbytes - 1) | st.integers(0, 900))
    mask = data.draw(st.integers(1, 255))
    stream = bytearray(b"".join(ours.pieces(0)))
    stream[place] ^= mask
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        assert refused(lambda: fed(incoming, iter([bytes(stream)]))) == "model_digest_differs"
    with models.open(ours.offer) as incoming:
        have = incoming.prepare()
        assert have <= place, "what was before is kept, the changed file is not"
        fed(incoming, ours.pieces(have))
        is_whole(incoming.finish().path, ours)


@REUSED
@given(st.data())
def test_what_was_changed_on_disk_is_not_gone_on_from(
    ours: Outgoing, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    models = fresh(tmp_path_factory.mktemp("rot"))
    until = data.draw(st.integers(len(ours.manifest.raw) + 10, ours.manifest.nbytes - 1))
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        fed(incoming, ours.pieces(0), until)
    (part,) = parts(models)
    files = sorted(one for one in part.iterdir() if one.stat().st_size)
    file = data.draw(st.sampled_from(files))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    whole = {one.name: one.nbytes for one in ours.manifest.files}.get(file.name) == len(content)
    if not whole and file.name != received.MANIFEST:
        # It shows at the end of the file alone.
        with models.open(ours.offer) as incoming:
            have = incoming.prepare()
            reason = refused(lambda: fed(incoming, ours.pieces(have)))
            assert reason == "model_digest_differs"
    is_whole(taken(models, ours), ours)


def test_a_file_that_has_grown_or_is_left_over_is_removed(
    models: ReceivedModels, ours: Outgoing
) -> None:
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        fed(incoming, ours.pieces(0), len(ours.manifest.raw) + 500)
    (part,) = parts(models)
    first = ours.manifest.files[0]
    with (part / first.name).open("ab") as file:
        file.write(bytes(first.nbytes))
    (part / "left.json").write_text("{}")
    (part / "folder").mkdir()
    (part / "folder" / "file").touch()
    with models.open(ours.offer) as incoming:
        assert incoming.prepare() == len(ours.manifest.raw)
        assert [one.name for one in part.iterdir()] == [received.MANIFEST]
        fed(incoming, ours.pieces(len(ours.manifest.raw)))
        is_whole(incoming.finish().path, ours)


# Models that are none, or others


def replaced(ours: Outgoing, contents: dict[str, bytes | None]) -> tuple[SendModel, bytes]:
    """The offer and the stream of ``ours`` with other files."""
    known = {file.name: (ours.path / file.name).read_bytes() for file in ours.manifest.files}
    known |= {name: content for name, content in contents.items() if content is not None}
    for name, content in contents.items():
        if content is None:
            del known[name]
    manifest = manifest_of(
        ModelFile(name, len(content), hashlib.sha256(content).hexdigest())
        for name, content in known.items()
    )
    stream = manifest.raw + b"".join(known[file.name] for file in manifest.files)
    return offered(ours, manifest), stream


def offered(ours: Outgoing, manifest: Manifest) -> SendModel:
    return structs.replace(
        ours.offer,
        nbytes=manifest.nbytes,
        manifest_bytes=len(manifest.raw),
        digest=manifest.digest,
    )


def ending(models: ReceivedModels, offer: SendModel, stream: bytes) -> tuple[str, int]:
    """Why a stream is refused, and how many of its bytes were taken in pieces before."""
    done = 0

    def take() -> None:
        nonlocal done
        with models.open(offer) as incoming:
            done = incoming.prepare()
            while done < len(stream):
                incoming.write(stream[done : done + STEP])
                done += STEP
            incoming.finish()

    return refused(take), done


def verdict(models: ReceivedModels, offer: SendModel, stream: bytes) -> str:
    """Why a whole stream is refused; nothing of it is there any more."""
    reason, _ = ending(models, offer, stream)
    assert parts(models) == []
    assert models.last() is None
    return reason


def test_another_model_than_announced_is_not_kept(models: ReceivedModels, ours: Outgoing) -> None:
    stream = b"".join(ours.pieces(0))
    for component in Identity.__struct_fields__:
        other = structs.replace(ours.identity, **{component: "f" * 64})
        offer = structs.replace(ours.offer, identity=other)
        assert verdict(models, offer, stream) == "model_identity_differs"


@pytest.mark.parametrize(
    "contents",
    [
        {"config.json": None},
        {"config.json": b"no json"},
        {"config.json": b"\xff\xfe"},
        {"config.json": b'{"a":' * 100_000 + b"1" + b"}" * 100_000},
        {"config.json": b'{"model_type": "llama"}'},
        {"config.json": b'{"model_type": "llama", "num_hidden_layers": "many"}'},
        {"tokenizer.json": None},
        {"tokenizer.json": b"{"},
        {"model.safetensors": None},
        {"model.safetensors": b""},
        {"model.safetensors": b"\xff" * 4096},
        {"model.safetensors": (50_000).to_bytes(8, "little") + b'{"a":' * 10_000},
        {"chat_template.jinja": b"\xff"},
    ],
    ids=lambda contents: next(iter(contents)),
)
def test_what_is_no_checkpoint_is_not_kept(
    models: ReceivedModels, ours: Outgoing, contents: dict[str, bytes | None]
) -> None:
    assert verdict(models, *replaced(ours, contents)) == "model_unusable"


JAMBA = b'{"model_type": "jamba"}'
EIGHT_BITS = b'{"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}'


@pytest.mark.parametrize("config", [JAMBA, EIGHT_BITS])
def test_what_this_release_cannot_read_is_refused_before_its_weights_come(
    models: ReceivedModels, ours: Outgoing, config: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer, stream = replaced(ours, {"config.json": config})
    reason, taken_bytes = ending(models, offer, stream)
    assert reason == "model_unsupported"
    weights = (ours.path / "model.safetensors").stat().st_size
    assert taken_bytes < offer.nbytes - weights
    # What came is there for a release that can; this one refuses it before anything more comes.
    (part,) = parts(models)
    assert (part / "config.json").read_bytes() == config
    with models.open(offer) as incoming:
        assert refused(incoming.prepare) == "model_unsupported"
    monkeypatch.setattr(received, "require_known", lambda path: None)
    with models.open(offer) as incoming:
        assert incoming.prepare() > len(config)


def test_weights_that_another_release_may_read_are_not_removed(
    models: ReceivedModels, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(path: Path, *_: object) -> None:
        raise ConfigError("x", reason="weights_dtype_unsupported")

    monkeypatch.setattr(received, "read_checkpoint", other)
    stream = b"".join(ours.pieces(0))
    assert ending(models, ours.offer, stream)[0] == "model_unsupported"
    monkeypatch.undo()
    with models.open(ours.offer) as incoming:
        assert incoming.prepare() == ours.manifest.nbytes
        is_whole(incoming.finish().path, ours)


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EIO])
def test_a_whole_model_that_cannot_be_looked_at_now_is_kept(
    models: ReceivedModels, ours: Outgoing, error: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, *_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(received, "read_checkpoint", broken)
    stream = b"".join(ours.pieces(0))
    assert ending(models, ours.offer, stream)[0] == "model_not_kept"
    monkeypatch.undo()
    with models.open(ours.offer) as incoming:
        assert incoming.prepare() == ours.manifest.nbytes
        path = incoming.finish().path
    is_whole(path, ours)
    # Nor is one that is kept already taken for another, and sent once more.
    monkeypatch.setattr(received, "read_checkpoint", broken)
    with models.open(ours.offer) as incoming:
        assert refused(incoming.prepare) == "model_not_kept"
    is_whole(path, ours)


def test_a_bug_of_ours_is_not_called_a_bad_model(
    models: ReceivedModels, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(path: Path, *_: object) -> None:
        raise TypeError("a bug")

    monkeypatch.setattr(received, "read_checkpoint", broken)
    with pytest.raises(TypeError):
        taken(models, ours)
    assert len(parts(models)) == 1


def test_who_is_gone_has_no_kept_model_hashed(models: ReceivedModels, ours: Outgoing) -> None:
    """Its digests are remembered; where they are lost, it is as if it came anew."""
    taken(models, ours)
    models._digest_cache.unlink()
    with models.open(ours.offer) as incoming, pytest.raises(Cancelled):
        incoming.prepare(lambda: True)
    assert not models._digest_cache.exists(), "not all of it was hashed"


def test_a_list_that_lies_about_its_stream_is_refused_before_anything_is_written(
    models: ReceivedModels, ours: Outgoing
) -> None:
    """One that names files elsewhere, or too many, is refused by ``read_manifest``."""
    hostile = json.dumps(
        [{"name": "../../config.json", "nbytes": 1, "sha256": "ab" * 32}], separators=(",", ":")
    ).encode()
    lists = [
        (ours.manifest.raw, ours.manifest.nbytes + 1),
        (ours.manifest.raw, len(ours.manifest.raw)),
        (hostile, len(hostile) + 1),
        (b"[]", 2),
    ]
    for raw, nbytes in lists:
        offer = structs.replace(
            ours.offer,
            nbytes=nbytes,
            manifest_bytes=len(raw),
            digest=hashlib.sha256(raw).digest(),
        )
        with models.open(offer) as incoming:
            assert incoming.prepare() == 0
            assert refused(lambda raw=raw, i=incoming: i.write(raw)) == "model_manifest_invalid"
        assert parts(models) == []
        assert [one.name for one in models._root.iterdir()] == [".receiving.lock"]


# Links and directories that somebody has put there


def test_links_lead_nowhere(models: ReceivedModels, ours: Outgoing, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        names = [file.name for file in ours.manifest.files]
        (incoming.part / names[1]).symlink_to(elsewhere)
        # While it comes, somebody else's link is an obstacle; afterwards it is removed.
        assert refused(lambda: fed(incoming, ours.pieces(0))) == "model_not_kept"
    (part,) = parts(models)
    assert (part / names[1]).is_symlink()
    os.link(elsewhere, part / names[2])
    (part / names[3]).symlink_to(tmp_path, target_is_directory=True)
    path = taken(models, ours)
    is_whole(path, ours)
    assert elsewhere.read_text() == "mine"
    assert not any(one.is_symlink() for one in path.iterdir())


@pytest.mark.parametrize("kind", ["link", "file", "open to others"])
def test_a_place_that_is_not_its_own_is_not_used(
    models: ReceivedModels, ours: Outgoing, tmp_path: Path, kind: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    models._root.mkdir(parents=True)
    part = models._root / f".receiving-{ours.offer.digest.hex()}"
    if kind == "link":
        part.symlink_to(elsewhere, target_is_directory=True)
    elif kind == "file":
        part.touch()
    else:
        part.mkdir()
        part.chmod(0o777)
    with models.open(ours.offer) as incoming:
        assert refused(incoming.prepare) == "model_not_kept"
    assert list(elsewhere.iterdir()) == []


def test_another_models_directory_is_never_touched(
    models: ReceivedModels, ours: Outgoing, tmp_path: Path
) -> None:
    digest = ours.offer.digest.hex()
    models._root.mkdir(parents=True)
    (models._root / "tiny-llama").symlink_to(tmp_path / "nowhere")
    mine = models._root / f"tiny-llama-{digest[:8]}"
    mine.mkdir()
    (mine / "config.json").write_text("mine")
    path = taken(models, ours)
    assert path.name == f"tiny-llama-{digest}"
    is_whole(path, ours)
    assert (mine / "config.json").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()


# Disks


class Full(Disk):
    """Has room for so many bytes more, and writes them in small pieces."""

    def __init__(self, room: int, error: int = errno.ENOSPC) -> None:
        self.left = room
        self.error = error
        self.volume = (1 << 40, 1 << 41)

    def room(self, directory: Path) -> tuple[int, int]:
        return self.volume

    def write(self, descriptor: int, data: memoryview) -> int:
        data = data[: min(self.left, 1000)]
        if not data:
            raise OSError(self.error, os.strerror(self.error))
        count = os.write(descriptor, data)
        self.left -= count
        return count


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
        (errno.EFBIG, "disk_full"),
        (errno.EIO, "model_not_kept"),
    ],
)
@pytest.mark.parametrize("room", [0, 100, 3_000, 700_000])
def test_a_disk_that_fails_loses_nothing(
    tmp_path: Path, ours: Outgoing, room: int, error: int, reason: str
) -> None:
    disk = Full(room, error)
    models = fresh(tmp_path, disk)
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        assert refused(lambda: fed(incoming, ours.pieces(0))) == reason
    disk.left = 1 << 30
    with models.open(ours.offer) as incoming:
        have = incoming.prepare()
        assert have == (room if room >= len(ours.manifest.raw) else 0)
        fed(incoming, ours.pieces(have))
        is_whole(incoming.finish().path, ours)


def test_a_sync_that_fails_is_told(
    tmp_path: Path, ours: Outgoing, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Full(1 << 30)

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk, "sync", broken)
    models = fresh(tmp_path, disk)
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        assert refused(lambda: fed(incoming, ours.pieces(0))) == "model_not_kept"
    assert models.last() is None


def test_a_volume_keeps_its_floor(tmp_path: Path, ours: Outgoing) -> None:
    disk = Full(1 << 30)
    models = fresh(tmp_path, disk)
    nbytes, floor = ours.manifest.nbytes, received.FLOOR_BYTES
    for volume, lacks in (
        ((floor + nbytes, 1 << 50), 0),
        ((floor + nbytes - 1, 1 << 50), 1),
        ((50_000 + nbytes, 1_000_000), 0),
        ((50_000 + nbytes - 1, 1_000_000), 1),
    ):
        disk.volume = volume
        with models.open(ours.offer) as incoming:
            if lacks:
                assert refused(incoming.prepare) == "disk_full"
            else:
                assert incoming.prepare() == 0
    # What is there already needs no more room.
    disk.volume = (1 << 40, 1 << 41)
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        fed(incoming, ours.pieces(0), 1_000_000)
    disk.volume = (floor + nbytes - 1_000_000, 1 << 50)
    with models.open(ours.offer) as incoming:
        assert incoming.prepare() == 1_000_000


# One at a time, and what is left of others


def test_one_model_at_a_time(models: ReceivedModels, ours: Outgoing) -> None:
    with models.open(ours.offer):
        for other in (models, ReceivedModels(models._root, models._digest_cache)):
            with pytest.raises(BatonError) as caught, other.open(ours.offer):
                pass
            assert caught.value.reason == "model_transfer_busy"
    taken(models, ours)


def test_what_was_given_up_is_removed_after_seven_days(
    models: ReceivedModels, ours: Outgoing
) -> None:
    with models.open(ours.offer) as incoming:
        incoming.prepare()
        fed(incoming, ours.pieces(0), 10_000)
        models.sweep(time.time() + STALE_S + 60.0)
        assert len(parts(models)) == 1, "somebody is at it"
    models.sweep(time.time() + STALE_S - 60.0)
    assert len(parts(models)) == 1
    models.sweep(time.time() + STALE_S + 60.0)
    assert parts(models) == []
    path = taken(models, ours)
    models.sweep(time.time() + 100 * STALE_S)
    is_whole(path, ours)


def test_nothing_is_made_before_it_is_needed(tmp_path: Path) -> None:
    models = fresh(tmp_path / "cache")
    models.sweep(time.time())
    assert models.last() is None
    assert not (tmp_path / "cache").exists()


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, ours: Outgoing) -> None:
    (tmp_path / "cache").touch()
    models = fresh(tmp_path / "cache")
    models.sweep(time.time())
    with pytest.raises(BatonError) as caught, models.open(ours.offer):
        pass
    assert caught.value.reason == "model_not_kept"


def test_offers_have_no_mac_of_their_own(ours: Outgoing) -> None:
    assert ours.offer.mac == NO_MAC
