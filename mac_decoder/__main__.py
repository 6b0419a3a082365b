"""``python -m mac_decoder``: the supervisor, or with ``--child N`` the node that it started."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mac_decoder.config import DecoderConfig, config_from
from mac_decoder.handoff.trust import trust_of_file
from mac_decoder.reporting import complain, start_logging
from protocol import releases
from protocol.checkpoint import read_layout, require_tokenizer
from protocol.errors import EXIT_CONFIG, ConfigError
from protocol.halves import require

if TYPE_CHECKING:
    from mac_decoder.api.face import MakeFace

log = logging.getLogger(__name__)

MODULE: Final = "mac_decoder"


def main(
    argv: list[str] | None = None,
    module: str = MODULE,
    face: Callable[[], MakeFace] | None = None,
) -> int:
    """Run what the arguments ask for; the exit status (see ``supervisor.run``, ``node.run``).

    ``module`` is what runs the node in a process of its own, as ``python -m``; where that has
    pages for browsers, ``face`` gets what makes them.
    """
    args = sys.argv[1:] if argv is None else argv
    try:
        if len(args) == 2 and args[0] == "--child" and args[1].isdecimal():
            return _child(int(args[1]), face)
        config = config_from(args)
        start_logging(config.log_level)
        require("decoder")
        look_ahead(config)
        # Only here: without its half installed this command is to say so.
        from mac_decoder import supervisor

        return supervisor.run(config, supervisor.command(module))
    except ConfigError as error:
        complain(error)
        return EXIT_CONFIG


def look_ahead(config: DecoderConfig) -> None:
    """Find what a child would stumble over, before the seconds that it takes to start one.

    Raises ``ConfigError``: what ``require_measured``, ``read_layout``, ``require_tokenizer``
    and ``trust_of_file`` raise.
    """
    for remark in releases.require_measured(releases.installed(releases.DECODER)):
        log.warning("%s", remark)
    read_layout(Path(config.model))
    require_tokenizer(Path(config.model))
    for pairing in config.pairings:
        trust_of_file(Path(pairing))


def _child(descriptor: int, face: Callable[[], MakeFace] | None) -> int:
    from mac_decoder import blas, supervisor

    start, listening, channel = supervisor.take_over(descriptor)
    # Before MLX. Where both halves are installed, its tokenizers would load torch: two seconds.
    used = blas.use(start.config.blas)
    sys.modules.setdefault("torch", None)  # pyright: ignore[reportArgumentType]
    # Only here: the supervisor itself never loads MLX.
    from mac_decoder import node
    from mac_decoder.api.service import Past

    start_logging(start.config.log_level)
    if used:
        log.info("what MLX multiplies on the processor, %s does", used)
    past = Past(start.restarts, start.last_fault)
    custody = supervisor.custody(start)
    shown = face() if face is not None and start.config.dashboard else None
    return node.run(start.config, listening, channel, past, custody, used, shown)


if __name__ == "__main__":
    sys.exit(main())
