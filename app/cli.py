"""The `baton` command: which subcommands exist, and where their code is.

Each subcommand lives in the file of its name. Nothing here imports torch or MLX, so that
each machine needs only its own half; a missing half is reported as a sentence.
"""

from __future__ import annotations

import typer

app = typer.Typer(
    name="baton",
    help="Prefill on one machine, decode on another.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; errors of Baton become one sentence and exit status 2 or 1."""
    app()


if __name__ == "__main__":
    main()
