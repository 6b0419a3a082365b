"""What a producer process is told: one frozen record, and the command line that makes it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from protocol.addresses import is_loopback
from protocol.errors import ConfigError
from protocol.pairing.messages import require_name
from trust.secrets import Choice, default_choice

BACKLOG_BYTES: Final = 48 << 20
"""Default for rows between tap and sockets, those kept for a lost connection among them; one
item and a socket's queue come on top."""


@dataclass(frozen=True)
class ProducerConfig:
    """One producer process.

    At most one of ``model`` and ``synthetic`` is set. With neither the model that a decoder sent
    last is served, or the first that one sends. Whom it serves is in the registry under
    ``state_dir``, unless ``key_fd``, an inherited pipe with the 32-byte key, or ``pairing``, a
    pairing file, says it. With ``pair`` it opens codes on ``pair_port``. ``memory_limit`` in
    bytes caps weights and caches together, ``prefix_cache`` what is kept of earlier prompts
    (``None``: half of the memory for caches); ``link_mbps`` throttles bulk frames, for benchmarks;
    ``lifeline_fd`` is a pipe whose end ends this process: it has a supervisor.
    """

    model: Path | None = None
    synthetic: str | None = None
    host: str | None = None
    port: int = 7431
    pair: bool = False
    pair_port: int = 7432
    no_advertise: bool = False
    name: str | None = None
    state_dir: Path | None = None
    secrets: Choice | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    tile: int | None = None
    threads: int | None = None
    key_fd: int | None = None
    pairing: Path | None = None
    waiting: int = 8
    connections: int = 16
    memory_limit: int | None = None
    prefix_cache: int | None = None
    backlog_bytes: int = BACKLOG_BYTES
    link_mbps: float | None = None
    cache_dir: Path | None = None
    log_level: str = "INFO"
    lifeline_fd: int | None = None

    @property
    def registered(self) -> bool:
        """Whether the registry says whom it serves."""
        return self.key_fd is None and self.pairing is None

    @property
    def address(self) -> str:
        """The host to bind: other machines can reach a producer that has a registry."""
        return self.host or ("0.0.0.0" if self.registered else "127.0.0.1")

    @property
    def advertised(self) -> bool:
        """Whether it says on the local network where it is: where others can reach it."""
        return self.registered and not self.no_advertise and not is_loopback(self.address)

    @property
    def unnamed(self) -> bool:
        """Whether it serves what decoders send."""
        return self.model is None and self.synthetic is None

    @property
    def cache_path(self) -> Path:
        """The directory of what could be had again: models, digests of files."""
        import platformdirs

        return self.cache_dir or Path(platformdirs.user_cache_dir("baton"))

    @property
    def state_path(self) -> Path:
        """The directory of what this producer keeps of itself and of those it is paired with."""
        import platformdirs

        root = self.state_dir or platformdirs.user_state_path("baton", appauthor=False)
        return root / "producer"

    def arguments(self) -> list[str]:
        """The command line that :func:`parse` turns into this record."""
        found: list[str] = []
        for option, name in _OPTIONS.items():
            value = getattr(self, name)
            if value is True:
                found.append(option)
            elif value is not None and value != getattr(_DEFAULTS, name):
                found += [option, str(value)]
        return found


_OPTIONS: Final = {
    "--model": "model",
    "--synthetic": "synthetic",
    "--host": "host",
    "--port": "port",
    "--pair": "pair",
    "--pair-port": "pair_port",
    "--no-advertise": "no_advertise",
    "--name": "name",
    "--state-dir": "state_dir",
    "--secrets": "secrets",
    "--device": "device",
    "--tile": "tile",
    "--threads": "threads",
    "--key-fd": "key_fd",
    "--pairing": "pairing",
    "--waiting": "waiting",
    "--connections": "connections",
    "--memory-limit": "memory_limit",
    "--prefix-cache": "prefix_cache",
    "--backlog": "backlog_bytes",
    "--link-mbps": "link_mbps",
    "--cache-dir": "cache_dir",
    "--log-level": "log_level",
    "--lifeline-fd": "lifeline_fd",
}
_DEFAULTS: Final = ProducerConfig()


_LOWEST: Final = {"waiting": 0, "connections": 1, "port": 0, "pair_port": 0, "backlog_bytes": 1}


@dataclass(frozen=True)
class Command:
    """What the command line asks for: serve (supervised or not), or one of the others.

    ``peers``: list them; ``forget``: the name or fingerprint of one that is to be removed.
    """

    config: ProducerConfig
    supervised: bool = True
    make_pairing: Path | None = None
    peers: bool = False
    forget: str | None = None


def parse(arguments: list[str]) -> Command:
    """The command in ``arguments``. Exits like argparse; raises ``ConfigError``
    (``config_invalid``) for options that do not go together.
    """
    found = parser().parse_args(arguments)
    values = {name: getattr(found, name) for name in _OPTIONS.values()}
    config = replace(_DEFAULTS, **{k: v for k, v in values.items() if v is not None})
    command = Command(
        config, not found.no_supervisor, found.make_pairing, found.peers, found.forget
    )
    if command.make_pairing is None and command.forget is None and not command.peers:
        check(config)
    return command


def check(config: ProducerConfig) -> None:
    """Raise ``ConfigError`` (``config_invalid``) where options contradict each other."""
    both = config.model is not None and config.synthetic is not None
    if both or (config.unnamed and not config.registered):
        raise nothing_to_serve()
    if config.key_fd is not None and config.pairing is not None:
        raise _invalid("Give either --pairing FILE or --key-fd N.", "pairing")
    if config.pair and not config.registered:
        raise _invalid("--pair goes with neither --pairing nor --key-fd.", "pair")
    if config.name is not None:
        require_name(config.name)
    for name, lowest in _LOWEST.items():
        if getattr(config, name) < lowest:
            raise _invalid(f"{name} must be at least {lowest}.", name)
    if config.prefix_cache is not None and config.prefix_cache < 0:
        raise _invalid("--prefix-cache must be at least 0.", "prefix_cache")
    for name in ("port", "pair_port"):
        if getattr(config, name) > 65535:
            raise _invalid(f"{name} must be at most 65535.", name)
    if config.link_mbps is not None and not config.link_mbps > 0:
        raise _invalid("--link-mbps must be above 0.", "link_mbps")


def nothing_to_serve(hint: str | None = None) -> ConfigError:
    """The refusal (``config_invalid``) of a start that names no model, or two."""
    return _invalid("Give either --model DIR or --synthetic LAYOUT.", "model", hint)


def parser() -> argparse.ArgumentParser:
    """The command line of ``python -m gb10_producer`` and ``baton produce``."""
    made = argparse.ArgumentParser(
        prog="baton produce",
        description="Baton's producer: prefills prompts and hands their KV cache to a decoder.",
        argument_default=None,
    )
    add = made.add_argument
    source = made.add_argument_group("what to run")
    source.add_argument(
        "--model", type=Path, metavar="DIR", help="the decoder's checkpoint; else what it sent"
    )
    source.add_argument("--synthetic", metavar="LAYOUT", help="random rows, no model: muse-glimmer")
    source.add_argument("--device", choices=["auto", "cuda", "cpu"], help="default: auto")
    source.add_argument("--tile", type=int, help="tokens per tile (default: the device's)")
    source.add_argument("--threads", type=int, help="torch's CPU threads")
    reach = made.add_argument_group("who may talk to it")
    reach.add_argument("--pair", action="store_true", help="show a code, for `baton node add`")
    reach.add_argument("--name", help="what this machine is called (default: its host's name)")
    reach.add_argument("--host", help="address to bind (default: every one of this machine)")
    reach.add_argument("--port", type=int, help=f"0: any free one (default {_DEFAULTS.port})")
    reach.add_argument(
        "--pair-port", type=int, help=f"where codes are tried (default {_DEFAULTS.pair_port})"
    )
    reach.add_argument(
        "--no-advertise", action="store_true", help="do not say by zeroconf where this is"
    )
    reach.add_argument("--peers", action="store_true", help="list who is paired, exit")
    reach.add_argument("--forget", metavar="NAME", help="forget who is paired, exit")
    reach.add_argument("--state-dir", type=Path, metavar="DIR", help="where pairings are kept")
    reach.add_argument(
        "--secrets", choices=["keyring", "file"], help=f"default here: {default_choice()}"
    )
    reach.add_argument("--pairing", type=Path, metavar="FILE", help="producer.pairing")
    reach.add_argument("--key-fd", type=int, metavar="N", help="inherited pipe with a 32-byte key")
    reach.add_argument("--make-pairing", type=Path, metavar="DIR", help="write a new pairing, exit")
    add("--waiting", type=int, help=f"prompts that may wait (default {_DEFAULTS.waiting})")
    add("--connections", type=int, help=f"decoders (default {_DEFAULTS.connections})")
    add("--memory-limit", type=_bytes, metavar="SIZE", help="cap on weights and caches, as 80G")
    add(
        "--prefix-cache",
        type=_bytes,
        metavar="SIZE",
        help="memory for what earlier prompts left (default: half of that for caches; 0: none)",
    )
    add("--backlog", dest="backlog_bytes", type=_bytes, metavar="SIZE", help=argparse.SUPPRESS)
    add("--link-mbps", type=float, help="throttle the link, for benchmarks")
    add("--cache-dir", type=Path, help="where models that are sent, and digests, are kept")
    add("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="default: INFO")
    add("--no-supervisor", action="store_true", help="run without the process that restarts it")
    add("--lifeline-fd", type=int, help=argparse.SUPPRESS)
    return made


def _bytes(text: str) -> int:
    """A size: bytes, or with a suffix K, M, G (powers of 1024)."""
    units = {"K": 10, "M": 20, "G": 30}
    shift = units.get(text[-1:].upper(), 0)
    number = text[:-1] if shift else text
    try:
        return int(float(number) * (1 << shift))
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give 800M, 80G, ...") from error


def _invalid(message: str, field: str, hint: str | None = None) -> ConfigError:
    return ConfigError(message, reason="config_invalid", field=field, hint=hint)
