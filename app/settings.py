"""One file of settings for this machine, in the same words as the command line.

``config.toml`` in the platform's directory has a table for each side, ``[serve]`` and
``[produce]``, whose keys are the long options without their dashes. What is given on the command
line goes before. No secret belongs into it: options that take one take a file's name.
"""

from __future__ import annotations

import argparse
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from platformdirs import user_config_path

from protocol.addresses import is_loopback
from protocol.errors import ConfigError
from trust import plain_file

Table = Literal["serve", "produce"]

DEFAULT_PORT: Final = 8000
MAX_BYTES: Final = 64 * 1024
_HOST: Final = re.compile(r"[A-Za-z0-9:._-]*")
_OF_THE_URL: Final = ("host", "port", "tls-cert")
_LONGEST_WHY: Final = 200
_LONGEST_KEY: Final = 64

FOR_ONE_RUN: Final = frozenset(
    {
        *("help", "key-fd", "lifeline-fd", "no-supervisor", "kv-bits"),
        *("pair", "peers", "forget", "make-pairing"),
    }
)
"""Options that say what to do once, or that a file cannot hold."""


def default_path() -> Path:
    """The file that is read where none is named; it need not exist."""
    return user_config_path("baton", appauthor=False) / "config.toml"


def arguments(table: Table, parser: argparse.ArgumentParser, given: Sequence[str]) -> list[str]:
    """``given`` behind what the file says, without ``--config FILE``, which names another.

    ``parser`` is the side's own: its options are the keys that there are. Raises ``ConfigError``:
    ``settings_missing``, ``settings_exposed`` (others may write to it), ``settings_unreadable``,
    ``settings_invalid``.
    """
    named, rest = _named(given)
    if {"-h", "--help"} & {*rest}:
        return rest
    path = default_path() if named is None else named
    raw = _read(path, required=named is not None)
    if raw is None:
        return rest
    return [*_from_file(path, _table(path, raw, table), parser, rest), *rest]


def named(table: Table, key: str) -> str | None:
    """What the file that is read where none is named says of one option of a side, as it would be
    typed; ``None`` where it says nothing, or where nothing is typed behind the option.

    Raises ``ConfigError`` as :func:`arguments`: for a key of the table that is no setting, which
    may be this one misspelt, and for a value that the side's parser would not take. What is wrong
    with other settings is no matter of this one.
    """
    found = _usual(table)
    if key not in found:
        return None
    _taken(table, found, key)
    value = found[key]
    return None if isinstance(value, bool | list) else str(value)


def decoders_url() -> str | None:
    """Where this machine's decoder listens, as the file says it; ``None`` if it says nothing.

    Raises ``ConfigError`` as :func:`named`; ``settings_invalid`` also where no decoder could be
    found by what it says, instead of looking for it in another place; ``address_not_known`` for
    ``port = 0``, which is any free one.
    """
    found, path = _usual("serve"), default_path()
    if found.keys().isdisjoint(_OF_THE_URL):
        return None
    given = _taken("serve", found, *_OF_THE_URL)
    if not _HOST.fullmatch(given.host):
        raise _invalid(f"host in {path} is no name or address", "host")
    if not 0 <= given.port < 1 << 16:
        raise _invalid(f"port in {path} is no number from 0 to 65535", "port")
    if given.port == 0:
        raise ConfigError(
            f"port in {path} is 0, any free one: nobody knows where the decoder listens",
            reason="address_not_known",
            field="port",
            hint="give the address that `baton serve` has printed, or name a port there",
        )
    return url_of(given.host, str(given.port), tls=bool(given.tls_cert))


def url_of(host: str, port: str, *, tls: bool) -> str:
    """Where this machine reaches a decoder with these options; ``tls``: on loopback, too."""
    # What listens on every address does on this machine's own.
    reached = "127.0.0.1" if host in ("", "0.0.0.0", "::") else host
    scheme = "http" if is_loopback(host) and not tls else "https"
    shown = f"[{reached}]" if ":" in reached else reached
    return f"{scheme}://{shown}:{port}"


def content(path: Path) -> bytes | None:
    """What a file of settings holds; ``None`` if there is none.

    Raises ``ConfigError``: ``settings_exposed``, ``settings_unreadable``, ``settings_invalid``.
    """
    raw = _read(path, required=False)
    if raw is not None:
        _table(path, raw, "serve")
    return raw


def _usual(table: Table) -> dict[str, Any]:
    """The table of a side in the file that is read where none is named, every key of it a setting;
    its values are not looked at (:func:`_taken`).
    """
    path = default_path()
    raw = _read(path, required=False)
    found = {} if raw is None else _table(path, raw, table)
    if found:
        _require_settings(path, found, _options(_parser(table)))
    return found


def _parser(table: Table) -> argparse.ArgumentParser:
    # A command that needs no settings does without either.
    if table == "serve":
        from mac_decoder.config import parser

        return parser()
    from gb10_producer.config import parser

    return parser()


def _taken(table: Table, values: Mapping[str, Any], *keys: str) -> argparse.Namespace:
    """What the side's own parser makes of these keys, as far as the file has them."""
    path, parser = default_path(), _parser(table)
    parser.exit_on_error = False
    for action in parser._actions:
        action.required = False  # it is asked about these alone
    options, words = _options(parser), list[str]()
    for key in keys:
        if key not in values:
            continue
        words += _words(path, key, values[key], options[key])
        try:
            parser.parse_args(words)
        except argparse.ArgumentError as error:
            why = error.message if len(error.message) <= _LONGEST_WHY else None
            raise _invalid(f"{key} in {path} is nothing that baton {table} takes", key, why) from (
                error
            )
    return parser.parse_args(words)


def _named(given: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that ``--config`` names last, and the other arguments."""
    named: Path | None = None
    rest: list[str] = []
    words = iter(given)
    for word in words:
        if word == "--config":
            value = next(words, None)
            if value is None:
                raise _invalid("--config needs the name of a file", "config")
            named = Path(value)
        elif word.startswith("--config="):
            named = Path(word.partition("=")[2])
        else:
            rest.append(word)
    return named, rest


def _read(path: Path, *, required: bool) -> bytes | None:
    try:
        raw, mode = plain_file.read(path, MAX_BYTES)
    except FileNotFoundError as error:
        if not required:
            return None
        raise ConfigError(
            f"there is no file {path}", reason="settings_missing", field="config"
        ) from error
    except OSError as error:
        raise _unreadable(path, error.strerror or type(error).__name__) from error
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"others may write to {path}, and so say what runs here",
            reason="settings_exposed",
            field="config",
            hint=f"chmod go-w {path}",
        )
    return raw


def _table(path: Path, raw: bytes, table: Table) -> dict[str, Any]:
    try:
        found = tomllib.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _unreadable(path, "it is not UTF-8") from error
    except (ValueError, RecursionError) as error:  # numbers and nesting without end, too
        raise _unreadable(path, "it is not TOML") from error
    for name, value in found.items():
        if name not in ("serve", "produce"):
            raise _invalid(f"{path} has a table or key that nobody reads: {_shown(name)}", name)
        if not isinstance(value, dict):
            raise _invalid(f"[{name}] in {path} is a table", name)
    return found.get(table, {})


def _from_file(
    path: Path, values: dict[str, Any], parser: argparse.ArgumentParser, rest: Sequence[str]
) -> Iterator[str]:
    options = _options(parser)
    _require_settings(path, values, options)
    on_the_line = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    for key, value in values.items():
        if key not in on_the_line:
            yield from _words(path, key, value, options[key])


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """What can be set of a side."""
    return {
        option[2:]: action
        for action in parser._actions
        for option in action.option_strings
        if option.startswith("--") and option[2:] not in FOR_ONE_RUN
    }


def _require_settings(
    path: Path, values: Mapping[str, Any], options: Mapping[str, argparse.Action]
) -> None:
    for key in values:
        if key not in options:
            known = ", ".join(sorted(options))
            raise _invalid(
                f"{path} has a key that is no setting: {_shown(key)}",
                key,
                f"the settings are: {known}",
            )


def _words(path: Path, key: str, value: object, action: argparse.Action) -> Iterator[str]:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _invalid(f"{key} in {path} is true or false", key)
        if value:
            yield f"--{key}"
        return
    several = isinstance(action.default, list)
    values = value if isinstance(value, list) and several else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float):
            form = "a text or a number, or a list of such" if several else "a text or a number"
            raise _invalid(f"{key} in {path} is {form}", key)
        yield f"--{key}={one}"


def _shown(key: str) -> str:
    """All of a key that may be a setting misspelt, and the beginning of whatever else it is."""
    return f"{key!a}" if len(key) <= _LONGEST_KEY else f"{key[:_LONGEST_KEY]!a}..."


def _invalid(message: str, field: str, hint: str | None = None) -> ConfigError:
    return ConfigError(message, reason="settings_invalid", field=field[:_LONGEST_KEY], hint=hint)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{path} cannot be read: {why}", reason="settings_unreadable", field="config"
    )
