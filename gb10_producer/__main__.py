"""``python -m gb10_producer``: the producer from the command line."""

from __future__ import annotations

import sys
import time

from gb10_producer import logs
from gb10_producer.config import ProducerConfig, parse
from protocol.errors import EXIT_CONFIG, ConfigError
from protocol.halves import require


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status (0, 75 device failed, 78 change something)."""
    try:
        command = parse(sys.argv[1:] if arguments is None else arguments)
        if command.make_pairing is not None:
            from gb10_producer.trust import make_pairing

            producer, decoder = make_pairing(command.make_pairing, epoch=int(time.time()))
            print(f"{producer}\n{decoder}")
            print(f"Copy {decoder.name} to the Mac; keep both files secret.", file=sys.stderr)
            return 0
        if command.peers or command.forget is not None:
            from gb10_producer import registry

            if command.forget is not None:
                registry.forget(command.config, command.forget)
            if command.peers:
                registry.list_peers(command.config)
            return 0
        return _serve(command.config, supervised=command.supervised)
    except ConfigError as error:
        logs.complain(error)
        return EXIT_CONFIG


def _serve(config: ProducerConfig, *, supervised: bool) -> int:
    from gb10_producer import beginnings, presence

    if (running := beginnings.for_one_that_runs(config)) is not None:
        from gb10_producer import node

        return node.run(running, only_pair=True)
    beginnings.require_something(config)
    if config.synthetic is None:
        require("producer")
    if config.lifeline_fd is not None:
        return _run(config, supervised=supervised)  # whoever started it shows that it runs
    with presence.shown(config):
        return _run(config, supervised=supervised)


def _run(config: ProducerConfig, *, supervised: bool) -> int:
    if supervised:
        from gb10_producer import supervisor

        return supervisor.run(config)
    from gb10_producer import node

    return node.run(config)


if __name__ == "__main__":
    sys.exit(main())
