"""The `baton` command: which subcommands exist, and what its exit status means.

Each subcommand lives in the file of its name, and is imported when it is asked for. Nothing
here imports torch or MLX, so that each machine needs only its own half; a missing half is
reported as one sentence.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from functools import partial
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command, get_group

from app import settings
from app.terminal import complain, err
from protocol.errors import (
    EXIT_CONFIG,
    EXIT_ENGINE_FAULT,
    BatonError,
    ConfigError,
    EngineFault,
    RequestError,
)

_MODULES: Final = {
    "demo": "demo",
    "serve": "serve",
    "produce": "produce",
    "app": "app_command",
    "plan": "plan",
    "status": "status",
    "dashboard": "dashboard_command",
    "doctor": "doctor",
    "cache": "cache",
    "key": "key",
    "model": "model",
    "node": "node",
    "bench": "bench",
}
"""Where each subcommand is: a function of its name there, or else a ``typer.Typer`` called app."""

_NODES: Final = ("serve", "produce")
"""The two nodes read their own arguments, so that their option lists cannot drift apart."""


class _Subcommands(TyperGroup):
    """Imports a subcommand when it is asked for: all of them take half a second."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*_MODULES]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        # Of what there is not, the most similar one is suggested.
        for name in [cmd_name] if cmd_name in _MODULES else _MODULES:
            if name not in self.commands:
                self.add_command(_imported(name), name)
        return self.commands.get(cmd_name)


def _imported(name: str) -> Any:
    module = importlib.import_module(f"app.{_MODULES[name]}")
    found = getattr(module, name, None)
    if found is None:
        group = get_group(module.app)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    if name in _NODES:
        forward = {"allow_extra_args": True, "ignore_unknown_options": True}
        alone.command(name, context_settings=forward, add_help_option=False)(found)
    else:
        alone.command(name)(found)
    return get_command(alone)


app = typer.Typer(
    name="baton",
    cls=_Subcommands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_ABOUT_THE_DECODER: Final = ("cache", "dashboard", "key", "node", "status")

_OF_THE_DECODER: Final = {"state_dir": "state-dir", "cache_dir": "cache-dir", "secrets": "secrets"}
"""Parameters of those commands that are settings of the decoder's, by the names of these."""


def _print_version(asked: bool) -> None:
    if asked:
        print(f"baton {importlib.metadata.version('baton-llm')}")
        raise typer.Exit


def _as_the_decoder(context: typer.Context) -> None:
    """Let a command that looks after the decoder find it where the settings say that it is.

    Each is asked for if the command has such a parameter and it was not typed: what is wrong in
    the file stops nobody who does without. Its address: ``app.status.decoders_address``.
    """
    group: Any = context.command
    name = context.invoked_subcommand
    assert name is not None
    inner = getattr(group.get_command(context, name), "commands", None)
    known = {parameter: partial(_setting, option) for parameter, option in _OF_THE_DECODER.items()}
    context.default_map = {name: known if inner is None else dict.fromkeys(inner, known)}


def _setting(option: str) -> str | None:
    # An empty one is as none, for the decoder, too; as a path it would be this directory.
    return settings.named("serve", option) or None


@app.callback()
def baton(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Prefill on an NVIDIA machine, decode on a Mac, through one OpenAI endpoint."""
    asks_for_help = {"-h", "--help"} & {*sys.argv[1:]}
    if context.invoked_subcommand in _ABOUT_THE_DECODER and not asks_for_help:
        _as_the_decoder(context)


def run() -> None:
    """Run the command line.

    Exit status: 0 done, 1 failed, 2 wrong usage, 75 the accelerator failed, 78 the configuration
    or model must change, 130 interrupted.
    """
    try:
        sys.exit(app(prog_name="baton", standalone_mode=False))
    except TyperException as error:
        # Without a message it has printed the help that was asked for by giving no command.
        if message := error.format_message():
            context = getattr(error, "ctx", None)
            program = context.command_path if context is not None else "baton"
            usage = RequestError(message, reason="usage", hint=f"{program} --help")
            complain(usage, program)
        sys.exit(error.exit_code)
    except typer.Abort:
        err.print("aborted")
        sys.exit(1)
    except BatonError as error:
        complain(error)
        if isinstance(error, EngineFault):
            sys.exit(EXIT_ENGINE_FAULT)
        sys.exit(EXIT_CONFIG if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
