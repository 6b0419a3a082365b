"""The entry of the `baton` command. Its subcommands are in ``commands``.

What it imports takes a moment, in which nothing has begun that would have to be ended.
"""

from __future__ import annotations

from app.interrupts import at_once


def main() -> None:
    """Run the command line; ``commands.run`` has the exit statuses."""
    with at_once():
        from app.commands import run
    run()


if __name__ == "__main__":
    main()
