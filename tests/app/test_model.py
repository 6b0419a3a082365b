"""`baton model`: imports a small checkpoint, quantises it, and compares both frameworks on it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from app.commands import app
from app.probe import Agreement, layer_errors, require_agreement
from mac_decoder.engine.model import load
from protocol.checkpoint import read_checkpoint
from protocol.errors import ConfigError
from protocol.layout import FullLayer, Layout
from tests.ordinary import usual
from tests.tiny_models import NAMES, REFUSED


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_checkpoint_is_copied_and_probed(checkpoint, tmp_path: Path) -> None:
    made = tmp_path / "made"
    printed = json.loads(
        invoke("model", "import", str(checkpoint("llama")), "--to", str(made), "--json")
    )
    assert printed["probe"]["kv_error"] < 5e-5
    assert printed["probe"]["argmax_agreement"] == 1.0
    assert printed["model"]["refused"] is None
    assert read_checkpoint(made).identity == read_checkpoint(checkpoint("llama")).identity
    assert list(tmp_path.iterdir()) == [made]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_checkpoint_reads_the_same_on_both_sides(
    checkpoint, tmp_path: Path, bits: int
) -> None:
    made = tmp_path / "made"
    source = str(checkpoint("llama"))
    printed = json.loads(
        invoke("model", "import", source, "--to", str(made), "--quantize", str(bits), "--json")
    )
    assert printed["model"]["quantisation"] == bits
    assert printed["probe"]["kv_error"] < 5e-5
    assert printed["probe"]["argmax_agreement"] == 1.0
    config = json.loads((made / "config.json").read_text())
    original = json.loads((Path(source) / "config.json").read_text())
    assert {name: config[name] for name in original} == original


QUICK = ("gpt_oss", "muse_glimmer", "falcon_h1")
"""One with experts to split, one with tensors to leave out, one whose file could not be read."""


MIXTURES = ("qwen3_moe", "afmoe", "deepseek_v3", "deepseek_v3_yarn", "glm4_moe", "qwen3_next")

CARRIED = [name for name in NAMES if name not in (*REFUSED, "falcon_h1_multipliers")]


@pytest.mark.parametrize("name", usual(CARRIED, QUICK))
def test_what_the_decoder_can_load_can_be_quantised(checkpoint, tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    # mlx's CPU backend multiplies the experts of a mixture in float32 only.
    source = str(checkpoint(name, "float32" if name in MIXTURES else "bfloat16"))
    arguments = ["--to", str(made), "--quantize", "8", "--no-probe", "--json"]
    assert json.loads(invoke("model", "import", source, *arguments))["model"]["quantisation"] == 8
    found = read_checkpoint(made)
    assert found.layout == read_checkpoint(Path(source)).layout
    assert load(found).layout == found.layout


def test_what_could_not_be_read_back_is_not_written(checkpoint, tmp_path: Path) -> None:
    source, made = str(checkpoint("falcon_h1_multipliers")), tmp_path / "made"
    arguments = ["model", "import", source, "--to", str(made), "--quantize", "8", "--no-probe"]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert refused.value.reason == "architecture_unsupported"
    assert not made.exists()


def test_weights_that_do_not_fit_are_refused_by_name(checkpoint, tmp_path: Path) -> None:
    source = Path(shutil.copytree(checkpoint("llama"), tmp_path / "source"))
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_size": 96}))
    arguments = ["model", "import", str(source), "--to", str(tmp_path / "made"), "--quantize", "8"]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert refused.value.reason == "model_unloadable"


def test_a_cast_changes_the_caches_dtype(checkpoint, tmp_path: Path) -> None:
    made = tmp_path / "made"
    arguments = ["--to", str(made), "--dtype", "bfloat16", "--no-probe"]
    invoke("model", "import", str(checkpoint("llama")), *arguments)
    assert read_checkpoint(made).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--quantize", "3"], "quantisation_unsupported"),
        (["--dtype", "int8"], "dtype_unsupported"),
    ],
)
def test_options_that_cannot_work_are_refused(
    checkpoint, tmp_path: Path, options: list[str], reason: str
) -> None:
    arguments = ["model", "import", str(checkpoint("llama")), "--to", str(tmp_path / "made")]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, [*arguments, *options], catch_exceptions=False)
    assert refused.value.reason == reason


def test_a_checkpoint_that_is_there_is_not_overwritten(checkpoint, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "config.json").write_text("{}")
    arguments = ["model", "import", str(checkpoint("llama")), "--to", str(tmp_path / "made")]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert refused.value.reason == "destination_exists"
    assert (tmp_path / "made" / "config.json").read_text() == "{}"


def test_an_architecture_that_does_not_carry_over_leaves_nothing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"model_type": "jamba"}))
    arguments = ["model", "import", str(source), "--to", str(tmp_path / "made")]
    with pytest.raises(ConfigError) as refused:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert refused.value.reason == "architecture_unsupported"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_the_list_says_what_carries_over(checkpoint, tmp_path: Path) -> None:
    (tmp_path / "jamba").mkdir()
    (tmp_path / "jamba" / "config.json").write_text(json.dumps({"model_type": "jamba"}))
    (tmp_path / ".importing-x").mkdir()
    (tmp_path / ".importing-x" / "config.json").write_text("{}")
    found = json.loads(invoke("model", "list", str(tmp_path), str(checkpoint("llama")), "--json"))
    assert [(one["model_type"], one["refused"]) for one in found] == [
        ("jamba", "architecture_unsupported"),
        ("llama", None),
    ]


def test_a_path_can_be_copied_and_a_config_says_nothing_to_a_terminal(tmp_path: Path) -> None:
    odd = [tmp_path / name for name in (":dog:", "Qwen:free:8b", "[red]", "trailing\\")]
    for path in odd:
        path.mkdir()
        kind = "a\x1b]0;title\x07\x1b[31mred\nforged line"
        (path / "config.json").write_text(json.dumps({"model_type": kind}))
    said = invoke("model", "list", *map(str, odd)).splitlines()
    assert said[::2] == [str(path) for path in odd]
    assert len(said) == 2 * len(odd)
    assert all(line.isprintable() for line in said)
    (tmp_path / "a\x1b[31m\nb").mkdir()
    (tmp_path / "a\x1b[31m\nb" / "config.json").write_text("{}")
    assert invoke("model", "list", str(tmp_path)).startswith(f"{tmp_path}/:dog:\n")
    assert "a\ufffd[31m\ufffdb\n" in invoke("model", "list", str(tmp_path))


def test_weights_that_are_not_there_are_not_counted(tmp_path: Path) -> None:
    """A link into a cache of downloads that was emptied, and one that leads to itself."""
    for name in ("linked", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "jamba"}')
        (tmp_path / name / "model-1.safetensors").write_bytes(bytes(10))
    (tmp_path / "linked" / "model-2.safetensors").symlink_to(tmp_path / "gone")
    (tmp_path / "linked" / "model-3.safetensors").symlink_to("model-3.safetensors")
    found = json.loads(invoke("model", "list", str(tmp_path), "--json"))
    assert [(Path(one["path"]).name, one["bytes"]) for one in found] == [
        ("linked", 10),
        ("other", 10),
    ]


@pytest.mark.parametrize("name", ["[/x]", "[red]x", "x\\", ":dog:", "long" * 50])
def test_where_nothing_was_found_is_told_letter_by_letter(tmp_path: Path, name: str) -> None:
    nowhere = str(tmp_path / name)
    result = CliRunner().invoke(app, ["model", "list", nowhere, "[b]"], catch_exceptions=False)
    assert result.exit_code == 0
    assert result.stderr == f"no checkpoints in {nowhere}, [b]\n"


def test_a_name_that_is_no_utf_8_is_shown_replaced_and_told_escaped(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/bad\xff"
    try:
        os.mkdir(odd)
    except OSError:
        pytest.skip("this file system takes no such name")
    Path(os.fsdecode(odd), "config.json").write_text(json.dumps({"model_type": "\ud800 ü"}))
    # As at a terminal in a UTF-8 locale: what cannot be encoded raises.
    strict = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    command = [sys.executable, "-m", "app.cli", "model", "list"]

    def said(*arguments: str | bytes) -> list[bytes]:
        done = subprocess.run([*command, *arguments], capture_output=True, env=strict, timeout=60)
        assert done.returncode == 0, done.stderr
        return [done.stdout, done.stderr]

    shown, _ = said(tmp_path.as_posix())
    assert shown.decode().splitlines()[0] == f"{tmp_path}/bad\ufffd"
    told, _ = said(tmp_path.as_posix(), "--json")
    assert b"bad\\udcff" in told
    assert "ü" in told.decode(), "what can be written is"
    (found,) = json.loads(told)
    assert os.fsencode(found["path"]) == odd
    assert found["model_type"] == "\ud800 ü"
    _, complained = said(odd + b"/none")
    assert complained.decode() == f"no checkpoints in {tmp_path}/bad\ufffd/none\n"


@pytest.mark.parametrize("layers", [10**30, 20_000_000, 4_999, -5])
def test_a_config_of_layers_without_end_is_listed_at_once_as_refused(
    checkpoint, tmp_path: Path, layers: int
) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    (found,) = json.loads(invoke("model", "list", str(tmp_path), "--json"))
    assert found["refused"] == "config_unreadable"


@pytest.mark.parametrize("bits", ["four", {"a": [1]}, 10**40, 7])
def test_bits_that_no_model_has_are_refused_in_the_list(
    checkpoint, tmp_path: Path, bits: object
) -> None:
    config = json.loads((checkpoint("llama") / "config.json").read_text())
    quantised = {**config, "quantization": {"bits": bits, "group_size": 64}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    (found,) = json.loads(invoke("model", "list", str(tmp_path), "--json"))
    assert found["refused"] in ("quantisation_unsupported", "config_unreadable")


MALFORMED = {
    "empty": "",
    "cut": '{"model_type": "llama", "num_hid',
    "a list": "[1, 2]",
    "no text": "\udcff",
    "quantization is text": '{"model_type": "llama", "quantization": "int4"}',
    "quantization lacks bits": '{"model_type": "llama", "quantization": {"group_size": 64}}',
    "text_config is text": '{"model_type": "mistral3", "text_config": "small"}',
    "layers are text": '{"model_type": "llama", "num_hidden_layers": "[many]"}',
}


@pytest.mark.parametrize("content", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_config_is_listed_with_the_reason(
    checkpoint, tmp_path: Path, content: str
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    good = str(checkpoint("llama"))
    found = json.loads(invoke("model", "list", str(tmp_path), good, "--json"))
    assert [one["refused"] is None for one in found] == [False, True]
    assert found[0]["path"] == str(tmp_path / "broken")
    assert found[0]["detail"]
    said = invoke("model", "list", str(tmp_path), good).splitlines()
    # A path stands alone on its line, however long it is.
    assert said[::2] == [str(tmp_path / "broken"), good]
    assert "does not carry over: " in said[1]
    assert said[3].endswith("carries over")


def test_a_config_that_may_not_be_read_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")

    def forbidden(model: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("app.model.read_config", forbidden)
    (found,) = json.loads(invoke("model", "list", str(tmp_path), "--json"))
    assert found["refused"] == "config_unreadable"
    assert "Permission denied" in found["detail"]


def test_nothing_but_our_own_steps_is_shown(checkpoint, tmp_path: Path) -> None:
    """In a process of its own, as the libraries decide at their import whether to show bars."""
    command = [sys.executable, "-m", "app.cli", "model", "import", str(checkpoint("llama"))]
    command += ["--to", str(tmp_path / "made"), "--quantize", "4", "--dtype", "bfloat16", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["quantisation"] == 4
    assert all(line[:2] in ("… ", "✓ ") for line in done.stderr.splitlines()), done.stderr


@pytest.mark.parametrize(
    ("error", "agreement", "good"),
    [(1e-6, 1.0, True), (0.2, 1.0, False), (1e-6, 0.5, False), (float("nan"), 1.0, False)],
)
def test_a_probe_beyond_its_bounds_refuses_the_model(
    error: float, agreement: float, good: bool
) -> None:
    found = Agreement("m", "float32", False, 96, (1e-7, error), agreement, 32)
    if good:
        require_agreement(found)
        return
    with pytest.raises(ConfigError) as refused:
        require_agreement(found)
    assert refused.value.reason == "frameworks_differ"


def test_errors_are_relative_to_each_array() -> None:
    layout = Layout((FullLayer(0, 1, 4, 4, "bfloat16"), FullLayer(1, 1, 4, 4, "float32")))
    large = np.array([256.0, 1.0, 1.0, 1.0], np.float32)
    near = large + np.array([2.0, 0.0, 0.0, 0.0], np.float32)

    def short(values: np.ndarray) -> np.ndarray:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)

    expected = {(0, 0): short(large), (1, 0): large.view(np.uint8)}
    found = {(0, 0): short(near), (1, 0): large.view(np.uint8)}
    assert layer_errors(layout, found, expected) == (2 / 256, 0.0)
