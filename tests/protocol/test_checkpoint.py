"""Reading a checkpoint: the same description on both machines, or a refusal by name."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protocol import checkpoint as module
from protocol.checkpoint import read_chat_template, read_checkpoint, read_layout, tensor_headers
from protocol.errors import ConfigError
from protocol.identity import identity_differences

Fixture = Callable[..., Path]


@pytest.fixture
def copied(checkpoint: Fixture, tmp_path: Path) -> Path:
    """A copy of the tiny llama that a test may change."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


def _edit(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def _reason(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_checkpoint(path)
    return caught.value.reason


def _save(path: Path, tensors: dict[str, tuple[str, int]]) -> None:
    """A safetensors file of zeros: name -> type and number of bytes."""
    header, end = {}, 0
    for name, (dtype, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": [nbytes], "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_a_checkpoint_is_described(checkpoint: Fixture) -> None:
    path = checkpoint("muse_glimmer", "bfloat16")
    found = read_checkpoint(path)
    assert found.architecture.name == "muse_glimmer"
    assert (found.dtype, found.quantisation, found.max_context) == ("bfloat16", None, 4096)
    assert found.weight_files == (path / "model.safetensors",)
    assert found.nbytes == (path / "model.safetensors").stat().st_size
    assert found.name == path.name
    assert found.layout == read_layout(path)


def test_the_same_bytes_elsewhere_are_the_same_model(checkpoint: Fixture, copied: Path) -> None:
    assert read_checkpoint(copied).identity == read_checkpoint(checkpoint("llama")).identity


def _other_weights(path: Path, checkpoint: Fixture) -> None:
    shutil.copy(checkpoint("llama", seed=1) / "model.safetensors", path)


def _other_template(path: Path, _checkpoint: Fixture) -> None:
    (path / "chat_template.jinja").write_text("{{ messages }}")


def _other_rope(path: Path, _checkpoint: Fixture) -> None:
    _edit(path, rope_parameters={"rope_type": "default", "rope_theta": 9.0})


def _other_tokenizer(path: Path, _checkpoint: Fixture) -> None:
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text + "\n")


@pytest.mark.parametrize(
    ("change", "component"),
    [
        (_other_weights, "weights"),
        (_other_template, "template"),
        (_other_rope, "context"),
        (_other_tokenizer, "tokenizer"),
    ],
)
def test_every_part_is_in_the_identity(
    change: Callable[[Path, Fixture], None], component: str, checkpoint: Fixture, copied: Path
) -> None:
    before = read_checkpoint(copied).identity
    change(copied, checkpoint)
    assert component in identity_differences(before, read_checkpoint(copied).identity)


def test_digests_are_remembered_while_files_stay(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache" / "digests.json"
    seen: list[tuple[int, int]] = []
    first = read_checkpoint(copied, cache, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] >= first.nbytes
    assert seen == sorted(seen)

    def unreachable(*_: object) -> str:
        raise AssertionError("hashed again")

    with monkeypatch.context() as patched:
        patched.setattr(module, "_sha256", unreachable)
        assert read_checkpoint(copied, cache).identity == first.identity
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    assert read_checkpoint(copied, cache).identity.weights != first.identity.weights
    assert [path.name for path in cache.parent.iterdir()] == ["digests.json"]


DEEP = "[" * 100_000
NOT_OURS = {
    "empty": "",
    "no json": "no json",
    "a list": "[1]",
    "short": '{"a": [1, 2]}',
    "a number": '{"a": 3}',
    "no text": "\udcff",
    "deep": DEEP,
    "deep entries": '{"a": ' + DEEP,
    "a mark of lists": json.dumps({"a": [[[]], 2, 3, 4, 5, "d"]}),
    "long": json.dumps({"a": [1, 2, 3, 4, 5, "d"]}) + " " * module.MAX_JSON,
}


@pytest.mark.parametrize("text", NOT_OURS.values(), ids=NOT_OURS)
def test_a_damaged_cache_is_an_empty_one(text: str, copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    cache.write_text(text, errors="surrogateescape")
    assert read_checkpoint(copied, cache).identity == read_checkpoint(copied).identity
    remembered = json.loads(cache.read_text())
    assert len(remembered) >= 3
    assert "a" not in remembered
    assert cache.stat().st_size < 1 << 16


@pytest.mark.timeout(30)
def test_a_pipe_for_a_cache_is_not_waited_for_and_makes_way(copied: Path, tmp_path: Path) -> None:
    cache = tmp_path / "digests.json"
    os.mkfifo(cache)
    assert read_checkpoint(copied, cache).identity == read_checkpoint(copied).identity
    assert cache.is_file()
    os.unlink(cache)
    os.mkfifo(cache)
    files = module.checkpoint_files(copied)
    module.remember_digests(cache, module.file_digests(files, None))
    assert len(json.loads(cache.read_text())) == len(files)


def test_another_file_with_the_same_size_and_times_is_hashed_again(
    checkpoint: Fixture, copied: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "digests.json"
    weights = copied / "model.safetensors"
    first = read_checkpoint(copied, cache)
    was = weights.stat()
    # As ``cp -p`` does: the inode stays, and the modification time is the source's.
    weights.write_bytes((checkpoint("llama", seed=1) / "model.safetensors").read_bytes())
    os.utime(weights, ns=(was.st_atime_ns, was.st_mtime_ns))
    now = weights.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (
        was.st_size,
        was.st_mtime_ns,
        was.st_ino,
    )
    assert read_checkpoint(copied, cache).identity.weights != first.identity.weights
    assert read_checkpoint(copied, cache).identity == read_checkpoint(copied).identity


def test_a_cache_of_digests_that_cannot_be_written_is_no_obstacle(
    copied: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "digests.json", tmp_path):
        caplog.clear()
        assert read_checkpoint(copied, place).identity == read_checkpoint(copied).identity
        assert "digests" in caplog.text


def test_a_cache_of_digests_that_cannot_be_read_is_no_obstacle(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "digests.json"
    read_checkpoint(copied, cache)
    opened, refusals = os.open, []

    def refused(path: Any, *more: Any, **options: Any) -> int:
        if path == cache:
            refusals.append(path)
            raise PermissionError(13, "Permission denied")
        return opened(path, *more, **options)

    monkeypatch.setattr(os, "open", refused)
    assert read_checkpoint(copied, cache).identity == read_checkpoint(copied).identity
    assert refusals == [cache]


def test_digests_are_sha256(copied: Path) -> None:
    found = module.file_digests([copied / "config.json"], None)
    expected = hashlib.sha256((copied / "config.json").read_bytes()).hexdigest()
    assert found == {copied / "config.json": expected}


def test_digests_that_somebody_else_has_computed_are_found(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "digests.json"
    files = module.checkpoint_files(copied)
    whole = read_checkpoint(copied)
    module.remember_digests(cache, module.file_digests(files, None))
    with monkeypatch.context() as patched:
        patched.setattr(module, "_sha256", None)
        assert read_checkpoint(copied, cache).identity == whole.identity
    (copied / "tokenizer.json").write_text('{"another": 1}')
    assert identity_differences(read_checkpoint(copied, cache).identity, whole.identity)


def test_the_files_of_a_checkpoint_are_all_it_needs_and_nothing_else(
    copied: Path, tmp_path: Path
) -> None:
    for name in ("README.md", "code.py", ".secret.json", "notes.json", "optimizer.safetensors"):
        (copied / name).write_text("{}")
    (copied / "model.safetensors.index.json").write_text("{}")
    (copied / "words.tiktoken").write_text("")
    files = module.checkpoint_files(copied)
    expected = {"model.safetensors", "model.safetensors.index.json", "config.json"}
    expected |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert {path.name for path in files} == {*expected, "generation_config.json", "words.tiktoken"}
    assert len({*files}) == len(files)
    alone = tmp_path / "alone"
    alone.mkdir()
    for path in files:
        shutil.copy(path, alone)
    assert read_checkpoint(alone).identity == read_checkpoint(copied).identity


def test_nothing_there(tmp_path: Path, copied: Path) -> None:
    assert _reason(tmp_path) == "model_missing"
    (copied / "model.safetensors").unlink()
    assert _reason(copied) == "model_missing"


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "3", "[" * 100_000, " " * (module.MAX_JSON + 1)),
        # Deep enough for what looks into it, and not for what reads it.
        *('{"a":' * depth + "1" + "}" * depth for depth in (module.MAX_DEPTH + 1, 600, 900)),
        '{"a":' + "[" * module.MAX_DEPTH + "]" * module.MAX_DEPTH + "}",
    ],
)
def test_a_configuration_that_cannot_be_read(text: str, copied: Path) -> None:
    (copied / "config.json").write_text(text)
    assert _reason(copied) == "config_unreadable"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", "two"),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -5),
        ("quantization", {}),
        ("quantization", {"bits": 4}),
        ("num_attention_heads", 0),
        ("hidden_size", None),
        ("model_type", 7),
        ("num_attention_heads", {"__float__": []}),
        ("num_attention_heads", {"__float__": "two"}),
    ],
)
def test_a_field_of_another_type_is_a_refusal(
    checkpoint: Callable[..., Path], tmp_path: Path, field: str, value: object
) -> None:
    copied = Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))
    config = json.loads((copied / "config.json").read_text())
    config[field] = value
    config.pop("head_dim", None)
    (copied / "config.json").write_text(json.dumps(config))
    for read in (read_checkpoint, read_layout):
        with pytest.raises(ConfigError) as caught:
            read(copied)
        assert caught.value.reason in (
            *("config_unreadable", "architecture_unsupported", "quantisation_unsupported"),
        )


def test_fields_that_are_missing(copied: Path) -> None:
    for name in ("num_hidden_layers", "max_position_embeddings"):
        config = json.loads((copied / "config.json").read_text())
        spoilt = {key: value for key, value in config.items() if key != name}
        (copied / "config.json").write_text(json.dumps(spoilt))
        with pytest.raises(ConfigError) as caught:
            read_checkpoint(copied)
        assert (caught.value.reason, caught.value.field) == ("config_incomplete", name)
        (copied / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("kept", [0, 4, 8, 60, -1])
def test_truncated_weights(kept: int, copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:kept])
    assert _reason(copied) == "weights_truncated"


def test_a_header_that_claims_too_much(copied: Path) -> None:
    weights = copied / "model.safetensors"
    weights.write_bytes((2**63).to_bytes(8, "little") + weights.read_bytes()[8:])
    assert _reason(copied) == "weights_truncated"
    weights.write_bytes(weights.read_bytes() + b"more")
    assert _reason(copied) == "weights_truncated"


@pytest.mark.parametrize("header", ["x" * 20, "[]", '{"a": 3}', '{"a": {"dtype": "F32"}}'])
def test_a_header_that_is_none(header: str, copied: Path) -> None:
    text = header.encode()
    (copied / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert _reason(copied) == "weights_truncated"


def test_the_embedding_decides_the_type(copied: Path) -> None:
    _edit(copied, dtype="float16")
    assert read_checkpoint(copied).dtype == "float32"
    weights = copied / "model.safetensors"
    _save(
        weights, {"model.embed_tokens.weight": ("U32", 8), "model.embed_tokens.scales": ("F16", 4)}
    )
    assert read_checkpoint(copied).dtype == "float16"
    assert set(tensor_headers(weights)) == {
        "model.embed_tokens.weight",
        "model.embed_tokens.scales",
    }
    _save(weights, {"model.norm.weight": ("F32", 4)})
    assert _reason(copied) == "weights_dtype_unsupported"
    _save(weights, {"model.embed_tokens.weight": ("F32", 4), "x.weight": ("F8_E4M3", 4)})
    assert _reason(copied) == "weights_dtype_unsupported"


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"quantization": {"group_size": 32, "bits": 4, "mode": "mxfp4"}},
        {"quantization": {"group_size": 64, "bits": 4, "lm_head": {"mode": "nvfp4", "bits": 4}}},
    ],
)
def test_other_quantisations_are_refused(changes: dict[str, Any], copied: Path) -> None:
    _edit(copied, **changes)
    assert _reason(copied) == "quantisation_unsupported"


def test_a_chat_template_wherever_it_is(copied: Path) -> None:
    own = copied / "chat_template.jinja"
    expected = own.read_text()
    assert read_chat_template(copied) == expected
    own.unlink()
    assert read_chat_template(copied) is None
    settings = copied / "tokenizer_config.json"
    given = json.loads(settings.read_text())
    settings.write_text(json.dumps(given | {"chat_template": "from settings"}))
    assert read_chat_template(copied) == "from settings"
    named = [{"name": "default", "template": "a"}]
    settings.write_text(json.dumps(given | {"chat_template": named}))
    assert json.loads(read_chat_template(copied) or "") == named
    (copied / "chat_template.json").write_text(json.dumps({"chat_template": "from its file"}))
    assert read_chat_template(copied) == "from its file"


def test_numbers_that_json_lacks(checkpoint: Fixture) -> None:
    found = read_checkpoint(checkpoint("granitemoehybrid"))
    assert found.config["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_tokenizer_that_was_cut_short(kept: int, copied: Path) -> None:
    path = copied / "tokenizer.json"
    path.write_bytes(path.read_bytes().rstrip()[:kept])
    assert _reason(copied) == "tokenizer_unloadable"


@pytest.mark.parametrize(
    ("files", "enough"),
    [
        ([], False),
        (["vocab.json"], False),
        (["vocab.json", "merges.txt"], True),
        (["tokenizer.model"], True),
        (["model.tiktoken"], True),
    ],
)
def test_a_checkpoint_needs_a_file_with_its_tokens(
    copied: Path, files: list[str], enough: bool
) -> None:
    (copied / "tokenizer.json").unlink()
    for name in files:
        (copied / name).write_text("{}")
    if enough:
        assert read_checkpoint(copied).identity.tokenizer != "none"
    else:
        assert _reason(copied) == "tokenizer_missing"
    assert read_layout(copied).layers, "bytes can be counted without"


def test_a_tokenizer_that_is_not_text_or_no_object(copied: Path) -> None:
    for content in (b"\xff\xfe", b"[]", b'{"a": "\xff"}'):
        (copied / "tokenizer.json").write_bytes(content)
        assert _reason(copied) == "tokenizer_unloadable"
