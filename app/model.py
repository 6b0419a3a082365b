"""`baton model`: make checkpoints that both machines read the same way, and list them."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from app.demo_model import cache_root
from app.terminal import err, out, print_json, step
from app.view.standing import one_line
from app.view.words import human_bytes
from protocol.architectures import resolve
from protocol.checkpoint import read_config, require_known, well_formed
from protocol.errors import ConfigError
from protocol.halves import require

app = typer.Typer(no_args_is_help=True, help="Import and list checkpoints.")

BITS = (4, 8)


@app.command("import")
def import_model(
    source: Annotated[Path, typer.Argument(help="A GGUF file, or a transformers checkpoint.")],
    to: Annotated[Path, typer.Option(help="The checkpoint to make; must not exist.")],
    quantize: Annotated[
        int | None, typer.Option(help="Quantise the weights with MLX: 4 or 8 bits.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16. GGUF: bfloat16 unless said."),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Compare torch with MLX on a probe.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Make a checkpoint for both machines from a GGUF file or a transformers checkpoint."""
    require("both")
    # The libraries' own bars would come between ours; tqdm asks when it is first imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    _check_arguments(source, to, quantize, dtype)
    to.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".importing-", dir=to.parent) as scratch:
        made = _make(source, Path(scratch), quantize, dtype)
        report = None
        if probe:
            from app.probe import compare, require_agreement

            with step("compare torch with MLX on a probe"):
                report = compare(made)
            require_agreement(report)
        if to.is_dir():
            to.rmdir()
        os.rename(made, to)
    described = describe(to)
    if as_json:
        print_json({"model": described, "probe": report.as_json() if report else None})
        return
    _show([described])
    if report is not None:
        out.print(report.table())


@app.command("list")
def list_models(
    directory: Annotated[
        list[Path] | None,
        typer.Argument(help="Where to look; the cache of `baton demo` if not given."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """List the checkpoints in the given directories, and whether they can be carried over."""
    roots = directory or [cache_root(None) / "models"]
    found = [describe(file.parent) for root in roots for file in sorted(_configs(root))]
    if as_json:
        print_json(found)
    elif found:
        _show(found)
    else:
        said = f"no checkpoints in {', '.join(_shown(str(root)) for root in roots)}"
        err.print(Text(said), soft_wrap=True)


def describe(model: Path) -> dict[str, Any]:
    """What a checkpoint is, from its config and file sizes: no weights are read.

    Keys ``path``, ``model_type``, ``quantisation`` (bits or ``None``), ``bytes``, ``refused``
    (the reason code when it cannot be carried over, else ``None``) and ``detail``. A
    configuration that cannot be read is one that is refused, never an error.
    """
    described: dict[str, Any] = {
        "path": str(model),
        "model_type": None,
        "quantisation": None,
        "bytes": sum(map(_size, model.glob("*.safetensors"))),
        "refused": None,
        "detail": None,
    }
    try:
        config = read_config(model)
        described["model_type"] = config.get("model_type")
        require_known(model)  # before anything is made for each of its layers
        with well_formed():
            quantisation = config.get("quantization")
            described["quantisation"] = quantisation and quantisation["bits"]
            resolve(config).layout(config, "bfloat16")
    except ConfigError as error:
        described |= {"refused": error.reason, "detail": error.message}
    except OSError as error:
        detail = f"config.json cannot be opened: {error.strerror}"
        described |= {"refused": "config_unreadable", "detail": detail}
    return described


def _size(file: Path) -> int:
    """Its bytes; none where nothing can be found, as behind a link into an emptied cache."""
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _check_arguments(source: Path, to: Path, quantize: int | None, dtype: str | None) -> None:
    """Refuse what cannot work before anything large is read."""
    if quantize is not None and quantize not in BITS:
        raise ConfigError(
            "weights are quantised to 4 or 8 bits",
            reason="quantisation_unsupported",
            field="quantize",
            found=quantize,
        )
    if dtype is not None and dtype not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            "weights are float32, bfloat16 or float16",
            reason="dtype_unsupported",
            field="dtype",
            found=dtype,
        )
    if not ((source.suffix == ".gguf" and source.is_file()) or (source / "config.json").is_file()):
        raise ConfigError(
            f"there is no model in {source}",
            reason="model_missing",
            field="source",
            found=str(source),
            expected="a GGUF file, or a directory with config.json",
        )
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(
            f"{to} exists already", reason="destination_exists", field="to", found=str(to)
        )


def _make(source: Path, scratch: Path, quantize: int | None, dtype: Any) -> Path:
    """The finished checkpoint inside ``scratch``; what was in between is gone."""
    from app import convert

    plain = scratch / "plain"
    plain.mkdir()
    if source.is_file():
        with step(f"dequantise {source.name}"):
            convert.from_gguf(source, plain, dtype or "bfloat16")
    else:
        with step(f"copy {source.name or source}"):
            convert.from_directory(source, plain, dtype)
    if quantize is None:
        return plain
    quantised = scratch / "quantised"
    quantised.mkdir()
    with step(f"quantise to {quantize} bits"):
        convert.quantise(plain, quantised, quantize)
    shutil.rmtree(plain)
    return quantised


def _configs(root: Path) -> list[Path]:
    """The config files of checkpoints at ``root`` or right below it, half-made ones left out."""
    candidates = [root / "config.json", *root.glob("*/config.json")]
    return [file for file in candidates if file.is_file() and not file.parent.name.startswith(".")]


def _show(models: list[dict[str, Any]]) -> None:
    """Each on two lines, the first of which is its path and nothing else, to be copied."""
    for found in models:
        bits, detail = found["quantisation"], found["detail"]
        facts = (
            str(found["model_type"] or "unknown architecture"),
            f"{bits} bit" if bits else "not quantised",
            human_bytes(found["bytes"]),
            "carries over" if found["refused"] is None else f"does not carry over: {detail}",
        )
        # As texts: nothing in them is markup, or the name of an emoji.
        out.print(Text(_shown(found["path"])), soft_wrap=True)
        out.print(Text("  " + ", ".join(one_line(fact) for fact in facts)), soft_wrap=True)


def _shown(path: str) -> str:
    """A path as it can be printed: what is no UTF-8, or speaks to a terminal, is replaced."""
    text = os.fsencode(path).decode(errors="replace")
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)
