"""The options of a side, checked as the side itself does, in the form that a service is given.

A service starts in another directory, and nobody is there to hand it a pipe or to read what
it prints. So paths become absolute, and what needs a person or a parent is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from protocol import releases
from protocol.checkpoint import read_layout
from protocol.errors import ConfigError
from protocol.halves import require
from trust.pairing_file import load_record

DECODER_PATHS: Final = (
    "model",
    "pairing",
    "cache_dir",
    "api_keys_file",
    "tls_cert",
    "tls_key",
    "state_dir",
)
"""The decoder's options that name files or directories."""

_FOR_PEOPLE: Final = ("pair",)
"""The producer's options that print what nobody would read, or what no log should hold."""


def decoder_arguments(given: Sequence[str]) -> tuple[str, ...]:
    """The decoder's command line for a service.

    Raises ``ConfigError``: ``option_not_for_service``, ``half_not_installed``, and what
    ``mac_decoder`` itself refuses at its start. Exits as argparse does.
    """
    from mac_decoder.__main__ import look_ahead
    from mac_decoder.config import config_from, parser

    read = parser()
    found = vars(read.parse_args(list(given)))
    if found["key_fd"] is not None:
        raise _refused("--key-fd", "a service inherits no pipe, and a key is kept in no file of it")
    arguments: list[str] = []
    for name, value in found.items():
        if value == read.get_default(name):
            continue
        option = f"--{name.replace('_', '-')}"
        values: list[Any] = value if isinstance(value, list) else [value]
        for one in values:
            if one is True:
                arguments.append(option)
                continue
            text = str(Path(one).absolute()) if name in DECODER_PATHS else str(one)
            arguments.append(f"{option}={text}")
    require("decoder")
    look_ahead(config_from(arguments))
    return tuple(arguments)


def producer_arguments(given: Sequence[str]) -> tuple[str, ...]:
    """The producer's command line for a service. Raises like :func:`decoder_arguments`."""
    from gb10_producer.beginnings import require_something
    from gb10_producer.config import Command, parse

    command = parse(list(given))
    config = command.config
    served = Command(config)
    for one in fields(command):
        if getattr(command, one.name) != getattr(served, one.name):
            option = "no-supervisor" if one.name == "supervised" else one.name.replace("_", "-")
            raise _refused(f"--{option}", "it is for a person at a terminal")
    paths: dict[str, Path] = {}
    for one in fields(config):
        value = getattr(config, one.name)
        if one.name in _FOR_PEOPLE and value:
            raise _refused(f"--{one.name}", "it is for a person at a terminal")
        if one.name.endswith("_fd") and value is not None:
            option = f"--{one.name.replace('_', '-')}"
            raise _refused(option, "a service inherits no pipe, and a key is kept in no file of it")
        if isinstance(value, Path):
            paths[one.name] = value.absolute()
    config = replace(config, **paths)
    require_something(config)
    if config.synthetic is None:
        require("producer")
        releases.require_measured(releases.installed(releases.PRODUCER))
    if config.model is not None:
        read_layout(config.model)
    if config.pairing is not None:
        load_record(config.pairing, "producer")
    return tuple(config.arguments())


def value_of(option: str, arguments: Sequence[str]) -> str:
    """What an installed service was given for an option; empty if nothing."""
    for number, word in enumerate(arguments):
        name, given, value = word.partition("=")
        if name == option and given:
            return value
        if word == option and number + 1 < len(arguments):
            return arguments[number + 1]
    return ""


def _refused(option: str, why: str) -> ConfigError:
    return ConfigError(
        f"{option} does not go with --install: {why}",
        reason="option_not_for_service",
        field=option.lstrip("-"),
        hint="pair first, then install without it",
    )
