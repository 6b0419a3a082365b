"""The `baton` command: which subcommands exist, and what its exit status means.

Each subcommand lives in the file of its name. Nothing here imports torch or MLX, so that
each machine needs only its own half; a missing half is reported as one sentence.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Annotated, Any, Final

import typer
from typer.exceptions import TyperException

from app import (
    app_command,
    bench,
    cache,
    dashboard_command,
    demo,
    doctor,
    key,
    model,
    node,
    plan,
    produce,
    serve,
    settings,
    status,
)
from app.terminal import complain, err
from protocol.errors import (
    EXIT_CONFIG,
    EXIT_ENGINE_FAULT,
    BatonError,
    ConfigError,
    EngineFault,
    RequestError,
)

app = typer.Typer(
    name="baton",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


_ABOUT_THE_DECODER: Final = ("cache", "dashboard", "key", "node", "status")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"baton {importlib.metadata.version('baton-llm')}")
        raise typer.Exit


def _as_the_decoder(context: typer.Context) -> None:
    """Let commands that look after the decoder find it where the settings say that it is."""
    known = settings.of_the_decoder()
    group: Any = context.command
    context.default_map = {}
    for name in _ABOUT_THE_DECODER:
        inner = getattr(group.commands[name], "commands", None)
        context.default_map[name] = known if inner is None else dict.fromkeys(inner, known)


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


app.command("demo")(demo.demo)
FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True}
"""The two nodes read their own arguments, so that their option lists cannot drift apart."""

app.command("serve", context_settings=FORWARD, add_help_option=False)(serve.serve)
app.command("produce", context_settings=FORWARD, add_help_option=False)(produce.produce)
app.command("app")(app_command.app)
app.command("plan")(plan.plan)
app.command("status")(status.status)
app.command("dashboard")(dashboard_command.dashboard)
app.command("doctor")(doctor.doctor)
app.add_typer(cache.app, name="cache")
app.add_typer(key.app, name="key")
app.add_typer(model.app, name="model")
app.add_typer(node.app, name="node")
app.add_typer(bench.app, name="bench")


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
