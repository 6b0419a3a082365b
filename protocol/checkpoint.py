"""Reading a checkpoint's directory: configuration, safetensors headers, digests, identity.

The one module of this package that reads files: both machines must describe the same directory
in the same way, so they share the reader. Tensors are never loaded here, only hashed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from protocol.architectures import Architecture, resolve, text_config
from protocol.errors import ConfigError
from protocol.identity import Identity, identity_from_parts
from protocol.layout import Dtype, Layout

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the bytes hashed so far and their total."""

_CHUNK: Final = 4 << 20
MAX_JSON: Final = 16 << 20
"""Most bytes of a file of JSON that is read as a whole: those of real models have some KB, and
a chat template some hundred.
"""
MAX_DEPTH: Final = 64
"""Objects and lists in each other in such a file; those of real models have five."""
MAX_LAYERS: Final = 4096
"""Most layers that a configuration may have; the largest models have some hundred."""
_MAX_HEADER: Final = 100 << 20
"""The safetensors format's own limit on its JSON header."""
_MARK_LENGTH: Final = 5
"""Numbers that :func:`_mark` returns; a memory with others is of another release."""

_FLOATS: Final[dict[str, Dtype]] = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_CARRIED: Final = frozenset({*_FLOATS, "U32", "U8", "I64", "I32", "BOOL"})
_TOKENIZER_FILES: Final = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
_BESIDES: Final = (
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
)
"""What else a checkpoint consists of; mlx-lm reads from the fourth where an answer ends."""
_VOCABULARIES: Final = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)
"""Files that hold a tokenizer's tokens, any of these groups; the others only describe it."""

_TAGGED_FLOATS: Final = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


@dataclass(frozen=True)
class Checkpoint:
    """What both machines know about a model before they load it.

    ``dtype`` is that of keys and values; ``quantisation`` is mlx's description or ``None``;
    ``nbytes`` the size of all weight files.
    """

    path: Path
    config: dict[str, Any]
    architecture: Architecture
    layout: Layout
    dtype: Dtype
    quantisation: dict[str, Any] | None
    max_context: int
    identity: Identity
    weight_files: tuple[Path, ...]
    nbytes: int

    @property
    def name(self) -> str:
        """The directory's name, for people; two models may share it."""
        return self.path.resolve().name


def read_checkpoint(
    model_dir: Path, digest_cache: Path | None = None, progress: Progress | None = None
) -> Checkpoint:
    """Describe the checkpoint in ``model_dir``.

    Digests are remembered in the file ``digest_cache`` by path, size, inode, device and the
    times of the last modification and change; the second one no program can set. A cache that
    cannot be read or written costs time alone.

    Raises ``ConfigError``: ``model_missing``, ``config_unreadable``, ``config_incomplete``,
    ``architecture_unsupported``, ``quantisation_unsupported``, ``weights_truncated``,
    ``weights_dtype_unsupported``, ``tokenizer_missing``, ``tokenizer_unloadable``.
    """
    found = _inspect(model_dir)
    require_tokenizer(model_dir)
    with well_formed():
        layout = found.architecture.layout(found.config, found.dtype)
        max_context = _max_context(found.config)
    tokenizer_files = _tokenizer_files(model_dir)
    template = read_chat_template(model_dir)
    digests = file_digests([*found.weight_files, *tokenizer_files], digest_cache, progress)
    weight_files = [(p.name, p.stat().st_size, digests[p]) for p in found.weight_files]
    with well_formed():
        identity = identity_from_parts(
            found.raw,
            weight_files=weight_files,
            tokenizer_files=[(p.name, digests[p]) for p in tokenizer_files],
            chat_template=template,
            layout=layout,
            dtype=found.dtype,
            max_context=max_context,
        )
    return Checkpoint(
        path=model_dir,
        config=found.config,
        architecture=found.architecture,
        layout=layout,
        dtype=found.dtype,
        quantisation=found.quantisation,
        max_context=max_context,
        identity=identity,
        weight_files=found.weight_files,
        nbytes=sum(path.stat().st_size for path in found.weight_files),
    )


def checkpoint_files(model_dir: Path) -> list[Path]:
    """Every file that the checkpoint consists of, and no other. Raises like :func:`read_layout`."""
    besides = [path for name in _BESIDES if (path := model_dir / name).is_file()]
    return [*_inspect(model_dir).weight_files, *_tokenizer_files(model_dir), *besides]


def require_known(model_dir: Path) -> None:
    """Raise unless ``config.json`` alone is of a model that this release can read.

    Raises ``ConfigError``: ``model_missing``, ``config_unreadable``,
    ``architecture_unsupported``, ``quantisation_unsupported``; and ``OSError``.
    """
    _kind(_decode_floats(read_config(model_dir)))


def read_layout(model_dir: Path) -> Layout:
    """The layout alone, from the configuration and the weights' headers: nothing is hashed.

    Raises ``ConfigError`` as :func:`read_checkpoint` does, but for a missing tokenizer.
    """
    found = _inspect(model_dir)
    with well_formed():
        return found.architecture.layout(found.config, found.dtype)


@contextlib.contextmanager
def well_formed() -> Iterator[None]:
    """Turn what a field of the wrong type raises into ``ConfigError`` (``config_unreadable``).

    The table takes fields as what they should be; somebody may have edited them.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"config.json lacks a field, or has one of a wrong type ({error!r})",
            reason="config_unreadable",
            field="config.json",
        ) from error


class _Inspected(NamedTuple):
    """What configuration and headers say; ``raw`` is the file, ``config`` with real floats."""

    raw: dict[str, Any]
    config: dict[str, Any]
    architecture: Architecture
    quantisation: dict[str, Any] | None
    weight_files: tuple[Path, ...]
    dtype: Dtype


def _inspect(model_dir: Path) -> _Inspected:
    raw = read_config(model_dir)
    config = _decode_floats(raw)
    architecture, quantisation = _kind(config)
    weight_files = _weight_files(model_dir)
    tensors = _all_headers(weight_files)
    dtype = _kv_dtype(tensors)
    with well_formed():
        architecture.refuse_tensors(config, {name: e.shape for name, e in tensors.items()})
    _refuse_broken_tokenizer(model_dir)
    return _Inspected(raw, config, architecture, quantisation, weight_files, dtype)


def _kind(config: dict[str, Any]) -> tuple[Architecture, dict[str, Any] | None]:
    """The architecture of a configuration, and its quantisation if it has one."""
    with well_formed():
        found = resolve(config), _quantisation(config)
        # Before anything is made for each of them.
        layers = text_config(config).get("num_hidden_layers", 0)
        if not 0 <= layers <= MAX_LAYERS:
            raise ConfigError(
                f"config.json speaks of {layers} layers",
                reason="config_unreadable",
                field="num_hidden_layers",
                expected=f"at most {MAX_LAYERS}",
            )
        return found


def require_tokenizer(model_dir: Path) -> None:
    """Raise ``ConfigError`` (``tokenizer_missing``) where no file holds the model's tokens.

    Also on a machine that handles token numbers alone: without these files its identity is
    another one than that of the machine that has them.
    """
    whole = any(all((model_dir / name).is_file() for name in group) for group in _VOCABULARIES)
    if whole or any(model_dir.glob("*.tiktoken")):
        return
    raise ConfigError(
        f"there is no tokenizer in {model_dir}: tokenizer.json is missing",
        reason="tokenizer_missing",
        field="tokenizer.json",
        hint="copy the whole directory of the checkpoint, the same on both machines",
    )


def _tokenizer_files(model_dir: Path) -> list[Path]:
    named = [model_dir / name for name in _TOKENIZER_FILES]
    named += sorted(model_dir.glob("*.tiktoken"))
    return [path for path in named if path.is_file()]


def _refuse_broken_tokenizer(model_dir: Path) -> None:
    """Refuse a ``tokenizer.json`` that was cut short; its meaning is its library's to judge."""
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        return
    try:
        # The values are walked through, not built: some of these files have tens of megabytes.
        msgspec.json.decode(path.read_text(encoding="utf-8"), type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path.name} is not a whole JSON object",
            reason="tokenizer_unloadable",
            field=path.name,
            hint="fetch or import the model again",
        ) from error


def _max_context(config: dict[str, Any]) -> int:
    name = "max_position_embeddings"
    found = text_config(config).get(name)
    if not isinstance(found, int) or found < 1:
        raise ConfigError(
            f"config.json names no {name}", reason="config_incomplete", field=name, found=found
        )
    return found


def read_config(model_dir: Path) -> dict[str, Any]:
    """The parsed ``config.json``.

    Raises ``ConfigError``: ``model_missing``, ``config_unreadable``.
    """
    path = model_dir / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"there is no model in {model_dir}: config.json is missing",
            reason="model_missing",
            hint="give the directory of a checkpoint, or make one with baton model import",
        )
    return _read_json(path)


def read_chat_template(model_dir: Path) -> str | None:
    """The chat template's text, from its own file or from ``tokenizer_config.json``.

    Raises ``ConfigError`` (``config_unreadable``).
    """
    own = model_dir / "chat_template.jinja"
    if own.is_file():
        with well_formed():
            return own.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        path = model_dir / name
        found = _read_json(path).get("chat_template") if path.is_file() else None
        if found is not None:
            return found if isinstance(found, str) else json.dumps(found, sort_keys=True)
    return None


class Tensor(msgspec.Struct, frozen=True):
    """A tensor's entry in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def tensor_headers(path: Path) -> dict[str, Tensor]:
    """Name -> entry of a safetensors file's tensors.

    Raises ``ConfigError`` (``weights_truncated``) where header and file length disagree.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise _truncated(path, size, length + 8)
        try:
            entries = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
            entries.pop("__metadata__", None)
            header = {
                name: msgspec.json.decode(entry, type=Tensor) for name, entry in entries.items()
            }
        except (msgspec.DecodeError, RecursionError) as error:
            raise _truncated(path, size, length + 8) from error
    end = 8 + length + max((entry.data_offsets[1] for entry in header.values()), default=0)
    if end != size:
        raise _truncated(path, size, end)
    return header


def _weight_files(model_dir: Path) -> tuple[Path, ...]:
    """The files that mlx-lm reads weights from, in order; at least one."""
    found = tuple(sorted(model_dir.glob("model*.safetensors")))
    if not found:
        raise ConfigError(
            f"there are no weights (model*.safetensors) in {model_dir}",
            reason="model_missing",
            hint="baton model import makes a checkpoint",
        )
    return found


def _all_headers(weight_files: Iterable[Path]) -> dict[str, Tensor]:
    """Name -> header entry of every tensor in every file."""
    return {name: entry for path in weight_files for name, entry in tensor_headers(path).items()}


def _truncated(path: Path, found: int, expected: int) -> ConfigError:
    return ConfigError(
        f"{path.name} is not a whole safetensors file",
        reason="weights_truncated",
        field="length",
        found=found,
        expected=expected,
        hint="fetch or import the model again",
    )


def _kv_dtype(tensors: dict[str, Tensor]) -> Dtype:
    """The element type of the token embedding, or of its scales where it is quantised.

    Activations, and with them keys and values, have this type in mlx-lm whatever
    ``config.json`` says.
    """
    found: Dtype | None = None
    for name, entry in tensors.items():
        if entry.dtype not in _CARRIED:
            raise ConfigError(
                f"weights of type {entry.dtype} cannot be read the same way on both sides",
                reason="weights_dtype_unsupported",
                field=name,
                found=entry.dtype,
                hint="convert the model with baton model import",
            )
        if name.endswith(("embed_tokens.weight", "embed_tokens.scales")):
            dtype = _FLOATS.get(entry.dtype)
            found = dtype or found
    if found is None:
        raise ConfigError(
            "the weights hold no token embedding of a known type",
            reason="weights_dtype_unsupported",
            field="embed_tokens",
        )
    return found


def _quantisation(config: dict[str, Any]) -> dict[str, Any] | None:
    """mlx's affine quantisation, or ``None``; any other scheme is refused by name."""
    found = config.get("quantization")
    if found is None:
        other = config.get("quantization_config")
        if other:
            method = other.get("quant_method", "unknown")
            raise _unsupported_quantisation(method)
        return None
    modes = [found, *(value for value in found.values() if isinstance(value, dict))]
    for entry in modes:
        mode = entry.get("mode", "affine")
        if mode != "affine":
            raise _unsupported_quantisation(mode)
        # Entries of single tensors may leave out what holds for all.
        bits = entry.get("bits", found.get("bits"))
        group = entry.get("group_size", found.get("group_size"))
        if bits not in (2, 3, 4, 5, 6, 8) or group not in (16, 32, 64, 128):
            raise _unsupported_quantisation(f"{bits} bits in groups of {group}")
    return found


def _unsupported_quantisation(name: str) -> ConfigError:
    return ConfigError(
        f"weights quantised with {name} cannot be read the same way on both sides",
        reason="quantisation_unsupported",
        field="quantization",
        found=name,
        expected="mlx affine quantisation, or none",
    )


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        raw = file.read(MAX_JSON + 1)
    if len(raw) > MAX_JSON:
        raise ConfigError(
            f"{path.name} is too large to be what it is called",
            reason="config_unreadable",
            field=path.name,
            expected=f"at most {MAX_JSON} bytes",
        )
    try:
        found = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.name} is not JSON", reason="config_unreadable", field=path.name
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path.name} holds no JSON object", reason="config_unreadable", field=path.name
        )
    if _is_deeper(found, MAX_DEPTH):
        raise ConfigError(
            f"{path.name} is nested too deep to be what it is called",
            reason="config_unreadable",
            field=path.name,
            expected=f"at most {MAX_DEPTH} levels",
        )
    return found


def _is_deeper(value: dict[str, Any] | list[Any], most: int) -> bool:
    """Whether something lies in more than ``most`` objects and lists."""
    level: list[dict[str, Any] | list[Any]] = [value]
    for _ in range(most):
        inner = (one.values() if isinstance(one, dict) else one for one in level)
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return bool(level)


def _decode_floats(value: Any) -> Any:
    """Undo transformers' tags for numbers that JSON lacks (``{"__float__": "Infinity"}``)."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and isinstance(tag := value["__float__"], str):
            return _TAGGED_FLOATS.get(tag, value)
        return {name: _decode_floats(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_decode_floats(item) for item in value]
    return value


def file_digests(
    paths: list[Path], cache_file: Path | None, progress: Progress | None = None
) -> dict[Path, str]:
    """SHA-256 of every file, as hex, from the cache where the file is unchanged.

    What a cache is: see :func:`read_checkpoint`. Raises ``OSError``.
    """
    cache = _read_cache(cache_file)
    total, done = sum(path.stat().st_size for path in paths), 0
    found: dict[Path, str] = {}
    for path in paths:
        status = path.stat()
        mark = _mark(status)
        key = str(path.resolve())
        remembered = cache.get(key)
        if remembered is not None and remembered[:-1] == mark:
            found[path] = remembered[-1]
        else:
            base = done

            def report(read: int, base: int = base) -> None:
                if progress is not None:
                    progress(base + read, total)

            found[path] = _sha256(path, report)
            cache[key] = [*mark, found[path]]
        done += status.st_size
        if progress is not None:
            progress(done, total)
    _write_cache(cache_file, cache)
    return found


def remember_digests(cache_file: Path, digests: Mapping[Path, str]) -> None:
    """Have :func:`file_digests` find these, of files that somebody has hashed as they are.

    Raises ``OSError`` where one of them cannot be looked at.
    """
    cache = _read_cache(cache_file)
    for path, digest in digests.items():
        cache[str(path.resolve())] = [*_mark(path.stat()), digest]
    _write_cache(cache_file, cache)


def _mark(status: os.stat_result) -> list[int]:
    """What a file's content cannot change without changing."""
    return [
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
        status.st_ino,
        status.st_dev,
    ]


def _sha256(path: Path, report: Callable[[int], None]) -> str:
    digest, buffer, read = hashlib.sha256(), bytearray(_CHUNK), 0
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            read += count
            report(read)
    return digest.hexdigest()


def _read_cache(path: Path | None) -> dict[str, list[Any]]:
    """The remembered digests; a file that is missing or not ours is an empty memory."""
    if path is None:
        return {}
    try:
        found = json.loads(_read_memory(path).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: entry for key, entry in found.items() if _is_remembered(entry)}


def _read_memory(path: Path) -> bytes:
    """A plain file of at most ``MAX_JSON`` bytes; raises ``OSError``, ``ValueError``."""
    # Without waiting: it may be a pipe that nobody writes to.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        # Before Python makes a file of it, which leaves a directory's descriptor open.
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ValueError("it is no file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(MAX_JSON + 1)
    finally:
        os.close(handle)
    if len(content) > MAX_JSON:
        raise ValueError(f"it has more than {MAX_JSON} bytes")
    return content


def _is_remembered(entry: object) -> bool:
    """Whether it is a mark and a digest. What is kept is written again: nothing deep is."""
    return (
        isinstance(entry, list)
        and len(entry) == _MARK_LENGTH + 1
        and all(isinstance(number, int) for number in entry[:-1])
        and isinstance(entry[-1], str)
    )


def _write_cache(path: Path | None, cache: dict[str, list[Any]]) -> None:
    if path is None:
        return
    # Another process may write at the same time: each renames a file of its own into place.
    own = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(json.dumps(cache), encoding="utf-8")
        os.replace(own, path)
    except OSError as error:
        _log.warning("the digests cannot be remembered in %s: %s", path, error.strerror)
        with contextlib.suppress(OSError):
            own.unlink()
