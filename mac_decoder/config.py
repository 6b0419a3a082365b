"""The decoder's configuration: one frozen record, made from a command line, checked once.

It crosses from the supervisor to its child through a pipe, so that a secret is never in
an argument or in the environment; its ``repr`` shows none.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
from decimal import Decimal
from pathlib import Path
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec
from platformdirs import user_cache_dir, user_state_dir

from mac_decoder.api.keys import KeyFiles
from mac_decoder.blas import AUTO, BUNDLED
from protocol.addresses import can_be_a_host, is_loopback
from protocol.errors import ConfigError
from protocol.pairing import KEY_BYTES
from trust import plain_file
from trust.peers import Peers
from trust.secrets import Choice, default_choice, secrets_of

_MAX_KEYS_FILE_BYTES: Final = 1 << 16
_SECRET: Final = frozenset({"key", "api_keys"})
_SIZE: Final = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) ?([kmgt]?)(i?)b?", re.ASCII | re.IGNORECASE)


class DecoderConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, repr_omit_defaults=True
):
    """Everything that a decoder process is told.

    ``model`` is a checkpoint's directory; ``served_name`` what clients call it (its
    directory's name if ``None``). ``producers`` are ``wss://`` URLs, each with its file of
    ``pairings`` in the same order, or one ``ws://`` URL of this machine with ``key`` (32 bytes);
    the paired ones come on top.
    ``qualify_every_h`` is how many hours a paired producer's qualification is good for.
    ``remote_threshold`` is in prompt tokens (``None``: from measured rates); ``cache_bytes``
    bounds the caches of requests (0: measured, see ``engine/memory.py``); ``prefill_step`` is
    the tile of local prefill in tokens (0: by device); ``blas`` is what multiplies on a processor
    (see ``blas.py``).

    ``ram_max`` bytes bound the resident tier (``None``: measured, 0: none of it). ``disk`` says
    whether caches are kept on disk, in ``cache_dir`` (empty: the platform's), and ``cache_max``
    how many bytes of them (``None``: by the volume, see ``store/limits.py``). ``hosts`` and
    ``origins`` are allowed beside this machine's own. ``api_keys`` are valid beside those that
    ``baton key`` made, and with any of them every client has to give one; ``share_caches`` lets
    keys reuse each other's caches. ``tls_cert`` and ``tls_key`` are PEM files; off loopback
    without them a certificate of this machine's own is shown. ``secrets`` says how those of the
    paired producers are kept (see ``trust/secrets.py``). ``dashboard`` says whether whoever has
    pages to show may show them.
    """

    model: str
    served_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    producers: tuple[str, ...] = ()
    key: bytes | None = None
    pairings: tuple[str, ...] = ()
    qualify_every_h: float = 24.0
    lane: Literal["auto", "local", "remote"] = "auto"
    remote_threshold: int | None = None
    max_concurrent: int = 16
    max_waiting: int = 64
    prefill_step: int = 0
    blas: str = AUTO
    cache_bytes: int = 0
    ram_max: int | None = None
    disk: bool = True
    cache_dir: str = ""
    cache_max: int | None = None
    share_caches: bool = False
    default_max_tokens: int | None = None
    default_temperature: float = 1.0
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    state_dir: str = ""
    secrets: Choice = msgspec.field(default_factory=default_choice)
    dashboard: bool = True
    log_level: Literal["debug", "info", "warning"] = "info"

    def __repr__(self) -> str:
        shown = (
            f"{name}={'<hidden>' if name in _SECRET and value else value!r}"
            for name in self.__struct_fields__
            for value in (getattr(self, name),)
        )
        return f"DecoderConfig({', '.join(shown)})"

    @property
    def uses_tls(self) -> bool:
        """Whether clients are answered over TLS alone: always where others can reach it."""
        return bool(self.tls_cert) or not is_loopback(self.host)

    @property
    def keys_demanded(self) -> bool:
        """Whether every client has to give an API key."""
        return bool(self.api_keys) or not is_loopback(self.host)

    @property
    def own_names(self) -> tuple[str, ...]:
        """The names, beside loopback's, that clients may call this machine by."""
        return self.hosts if is_loopback(self.host) else (*self.hosts, self.host)

    @property
    def state_path(self) -> Path:
        """Where generations, digests, API keys, paired producers and the store key are kept."""
        return Path(self.state_dir or user_state_dir("baton")) / "decoder"

    def peers(self) -> Peers:
        """The producers that this machine is paired with; nothing is read yet."""
        return Peers(self.state_path, "decoder", secrets_of(self.secrets))

    @property
    def cache_path(self) -> Path:
        """Where caches are kept on disk."""
        return Path(self.cache_dir or user_cache_dir("baton")) / "kv"

    @property
    def store_key_path(self) -> Path:
        """The file of the store key; not beside what it authenticates."""
        return self.state_path / "store.key"


def check(config: DecoderConfig) -> DecoderConfig:
    """Return the configuration if it can be served at all.

    Raises ``ConfigError`` naming the field: ``bind_needs_keys``, ``tls_incomplete``,
    ``producer_url_invalid``, ``producer_needs_key``, ``producer_needs_tls``,
    ``producer_repeated``, ``option_out_of_range``, and what ``KeyFiles.all`` raises where API
    keys are needed.
    """
    for name, low in (
        ("port", 0),
        ("max_concurrent", 1),
        ("max_waiting", 0),
        ("prefill_step", 0),
        ("cache_bytes", 0),
        ("ram_max", 0),
        ("remote_threshold", 1),
        ("qualify_every_h", 0),
        ("default_max_tokens", 1),
    ):
        value = getattr(config, name)
        if value is not None and (value < low or (name == "port" and value > 65535)):
            raise ConfigError(
                f"{name} is out of range", reason="option_out_of_range", field=name, found=value
            )
    _check_door(config)
    for number, url in enumerate(config.producers):
        _check_producer(config, url)
        if _place(url) in map(_place, config.producers[:number]):
            raise ConfigError(
                "a producer was given twice",
                reason="producer_repeated",
                field="producer",
                found=url,
                hint="give each --producer once",
            )
    if config.pairings and not config.producers:
        raise ConfigError(
            "a pairing was given, and no producer",
            reason="producer_url_invalid",
            field="producer",
            hint="give --producer wss://HOST:PORT with it",
        )
    if config.pairings and len(config.pairings) != len(config.producers):
        raise ConfigError(
            "every producer has a pairing of its own",
            reason="producer_needs_key",
            field="pairing",
            found=len(config.pairings),
            expected=len(config.producers),
            hint="give --producer URL --pairing FILE once for each, in the same order",
        )
    return config


def _check_door(config: DecoderConfig) -> None:
    if bool(config.tls_cert) != bool(config.tls_key):
        raise ConfigError(
            "a certificate and its private key are given together",
            reason="tls_incomplete",
            field="tls-key" if config.tls_cert else "tls-cert",
            hint="give --tls-cert FILE --tls-key FILE, or neither",
        )
    if is_loopback(config.host) or config.api_keys or KeyFiles(config.state_path).all():
        return
    place = f" --state-dir {config.state_dir}" if config.state_dir else ""
    raise ConfigError(
        f"{config.host or 'every address'} can be reached from other machines, "
        "which needs API keys",
        reason="bind_needs_keys",
        field="host",
        found=config.host,
        hint=f"make a key with `baton key create NAME{place}`, or give --host 127.0.0.1",
    )


def _check_producer(config: DecoderConfig, url: str) -> None:
    scheme, host = _scheme_and_host(url)
    if scheme not in ("ws", "wss") or not can_be_a_host(host):
        raise ConfigError(
            "the producer's address is no ws:// or wss:// URL",
            reason="producer_url_invalid",
            field="producer",
            expected="wss://HOST:PORT, or ws://127.0.0.1:PORT",
        )
    if scheme == "ws" and (not is_loopback(host) or config.pairings):
        raise ConfigError(
            "a paired producer, or one on another machine, is reached by TLS alone",
            reason="producer_needs_tls",
            field="producer",
            hint="give a wss:// address and the file that pairing made",
        )
    if not (config.pairings if scheme == "wss" else config.key):
        raise ConfigError(
            "the producer's pairing is missing",
            reason="producer_needs_key",
            field="pairing",
            hint="give --pairing FILE, as the producer's --make-pairing wrote it",
        )


def _place(url: str) -> tuple[str, int | None]:
    """Host and port of a checked URL."""
    parts = urlsplit(url)
    return (parts.hostname or "", parts.port)


def _scheme_and_host(url: str) -> tuple[str, str]:
    """The two, the host without brackets; empty where the URL is none or its port is no port."""
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.port != 0 else None
    except ValueError:
        return "", ""
    # urlsplit drops line feeds and tabs, which nobody meant.
    return (parts.scheme, host) if host is not None and url.isprintable() else ("", "")


def parser() -> argparse.ArgumentParser:
    """The command line of ``python -m mac_decoder`` and ``baton serve``."""
    made = argparse.ArgumentParser(
        prog="baton serve", description="Serve a model on this machine, prefilled by a producer."
    )
    add = made.add_argument
    add("--model", required=True, metavar="DIR", help="the checkpoint's directory")
    add("--served-name", metavar="NAME", help="what clients call the model")
    add("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, help="port to listen on, 0 for any (%(default)s)")
    once = "once for each producer"
    add(
        *("--producer",),
        action="append",
        default=[],
        metavar="URL",
        help=f"the producer, wss://HOST:PORT; {once}",
    )
    add(
        *("--pairing",),
        action="append",
        default=[],
        metavar="FILE",
        help=f"the decoder's half of its pairing; {once}, in the same order",
    )
    add("--key-fd", type=int, metavar="N", help="read a 32-byte pairing key from this pipe")
    add(
        *("--qualify-every",),
        type=float,
        default=24.0,
        metavar="HOURS",
        help="qualify a paired producer again after so many hours, 0 for never (%(default)s)",
    )
    add("--lane", choices=("auto", "local", "remote"), default="auto", help="who may prefill")
    add("--remote-threshold", type=int, metavar="N", help="ask the producer from N tokens on")
    add("--max-concurrent", type=int, default=16, metavar="N", help="requests worked on at once")
    add("--max-waiting", type=int, default=64, metavar="N", help="requests that may wait")
    add("--prefill-step", type=int, default=0, metavar="N", help="tile of local prefill")
    add(
        *("--blas",),
        default=AUTO,
        metavar="LIBRARY",
        help=f"Linux, without a GPU: the BLAS that multiplies; {AUTO}: OpenBLAS if this machine "
        f"has it; {BUNDLED}: MLX's own (%(default)s)",
    )
    add("--memory-max", type=size, default=0, metavar="SIZE", help="memory for requests' caches")
    add("--ram-max", type=size, metavar="SIZE", help="memory for caches that are kept, 0 for none")
    add("--cache-dir", default="", metavar="DIR", help="where caches are kept on disk")
    add("--cache-max", type=size, metavar="SIZE", help="disk space for them, such as 50GB")
    add("--no-disk", action="store_true", help="keep no caches on disk")
    add("--share-caches", action="store_true", help="let API keys reuse each other's caches")
    add("--kv-bits", type=int, metavar="N", help="refused: caches are kept as the model makes them")
    add("--default-max-tokens", type=int, metavar="N", help="where a request gives no limit")
    add("--default-temperature", type=float, default=1.0, metavar="T", help="(%(default)s)")
    add("--allow-host", action="append", default=[], metavar="NAME", help="another Host name")
    add("--allow-origin", action="append", default=[], metavar="URL", help="a web page's origin")
    add("--api-keys-file", metavar="FILE", help="keys beside those of baton key, one a line")
    add("--tls-cert", default="", metavar="FILE", help="the certificate that clients are shown")
    add("--tls-key", default="", metavar="FILE", help="its private key; without: one made here")
    add("--state-dir", default="", metavar="DIR", help="where keys and such are kept")
    add(
        *("--secrets",),
        choices=("keyring", "file"),
        default=default_choice(),
        help="where the secrets of paired producers are kept (%(default)s)",
    )
    add("--no-dashboard", action="store_true", help="show no pages to browsers")
    add("--log-level", choices=("debug", "info", "warning"), default="info")
    return made


def size(text: str) -> int:
    """Bytes in a size as people write it: ``500MB``, ``1.5 GiB``, ``800000``.

    Raises ``argparse.ArgumentTypeError`` (the type of an option's argument).
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give bytes, or 500MB, 20GB, 8GiB")
    number, unit, binary = found.groups()
    base = 1024 if binary else 1000
    return int(Decimal(number) * base ** " kmgt".index(unit.lower() or " "))


def config_from(args: list[str]) -> DecoderConfig:
    """The checked configuration of a command line; reads the key and the key file.

    Raises ``ConfigError`` (see :func:`check`; ``kv_format_unsupported``, ``key_invalid``,
    ``api_keys_invalid``, ``api_keys_exposed``: others may read the file) and, as argparse does,
    ``SystemExit`` for options it does not know.
    """
    given = parser().parse_args(args)
    if given.kv_bits is not None:
        raise ConfigError(
            "quantised KV caches are not supported: their rows are other rows",
            reason="kv_format_unsupported",
            field="kv-bits",
            found=given.kv_bits,
            hint="leave it out; a model that is quantised itself is fine",
        )
    key = None if given.key_fd is None else read_key(given.key_fd)
    return check(
        DecoderConfig(
            model=given.model,
            served_name=given.served_name,
            host=given.host,
            port=given.port,
            producers=tuple(given.producer),
            key=key,
            pairings=tuple(given.pairing),
            qualify_every_h=given.qualify_every,
            lane=given.lane,
            remote_threshold=given.remote_threshold,
            max_concurrent=given.max_concurrent,
            max_waiting=given.max_waiting,
            prefill_step=given.prefill_step,
            blas=given.blas,
            cache_bytes=given.memory_max,
            ram_max=given.ram_max,
            disk=not given.no_disk,
            cache_dir=given.cache_dir,
            cache_max=given.cache_max,
            share_caches=given.share_caches,
            default_max_tokens=given.default_max_tokens,
            default_temperature=given.default_temperature,
            hosts=tuple(given.allow_host),
            origins=tuple(given.allow_origin),
            api_keys=() if given.api_keys_file is None else _read_api_keys(given.api_keys_file),
            tls_cert=given.tls_cert,
            tls_key=given.tls_key,
            state_dir=given.state_dir,
            secrets=given.secrets,
            dashboard=not given.no_dashboard,
            log_level=given.log_level,
        )
    )


def read_key(descriptor: int) -> bytes:
    """The pairing key from an inherited pipe: exactly 32 bytes, then its end. Closes it.

    Raises ``ConfigError`` (``key_invalid``).
    """
    key = b""
    try:
        with os.fdopen(descriptor, "rb") as pipe:
            key = pipe.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"the key's descriptor cannot be read: {error.strerror}",
            reason="key_invalid",
            field="key-fd",
            found=descriptor,
        ) from error
    if len(key) != KEY_BYTES:
        raise ConfigError(
            "the pairing key has another length",
            reason="key_invalid",
            field="key-fd",
            found=f"{len(key)} bytes",
            expected=f"{KEY_BYTES} bytes, then the end of the pipe",
        )
    return key


def _read_api_keys(name: str) -> tuple[str, ...]:
    try:
        found = plain_file.read(Path(name), _MAX_KEYS_FILE_BYTES)
        text = found.content.decode("utf-8")
    except OSError as error:
        raise _no_api_keys(name, error.strerror or type(error).__name__) from error
    except UnicodeDecodeError as error:
        raise _no_api_keys(name, "it is not UTF-8") from error
    except ValueError as error:
        raise _no_api_keys(name, str(error)) from error
    if found.mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            "the file of API keys is a secret, and other users may read it",
            reason="api_keys_exposed",
            field="api-keys-file",
            found=f"mode {stat.S_IMODE(found.mode):04o}",
            expected="mode 0600",
            hint=f"chmod 600 {name}",
        )
    keys = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not keys or any(len(key) < 16 or not key.isascii() for key in keys):
        raise _no_api_keys(name, "it needs one key a line, each of 16 or more ASCII characters")
    return keys


def _no_api_keys(name: str, why: str) -> ConfigError:
    return ConfigError(
        f"the file of API keys cannot be used: {why}",
        reason="api_keys_invalid",
        field="api-keys-file",
        found=name,
    )
