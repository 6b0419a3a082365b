"""The producer process: the only place where its concrete objects meet.

Exit status: 0 after a clean shutdown, 75 when the device failed, 78 when configuration, model
or machine must change before another start can help.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gb10_producer import logs
from gb10_producer.advertise import Advertisement, addresses_of
from gb10_producer.backlog import Pool, item_bytes
from gb10_producer.config import ProducerConfig, check
from gb10_producer.control import Desk, Profile
from gb10_producer.device import Device
from gb10_producer.memory import (
    Ledger,
    available_bytes,
    prefill_bytes,
    require_room,
)
from gb10_producer.prefill import SYNTHETIC, Prefiller, Rows, State
from gb10_producer.registry import Registry, open_registry
from gb10_producer.server import Server, bind, url_of
from gb10_producer.serving import Offer
from gb10_producer.throttle import Throttle
from gb10_producer.trust import (
    RegistryTrust,
    Trust,
    require_trust_for,
    trust_from_file,
    trust_from_key_pipe,
)
from gb10_producer.welcome import Welcome
from protocol import releases
from protocol.errors import (
    EXIT_CONFIG,
    EXIT_ENGINE_FAULT,
    CapacityError,
    ConfigError,
    EngineFault,
)
from protocol.identity import Identity
from protocol.layout import ITEMSIZE, Dtype, LayerLayout, RecurrentLayer, payload_bytes
from protocol.layouts_named import named, stand_in_identity
from protocol.messages import MAX_CREDIT, MAX_EXTRA_CUTS, MAX_TOKENS, Limits
from trust.peers import Peer

log = logging.getLogger(__name__)

_EXPONENTS: Mapping[Dtype, tuple[type[np.unsignedinteger], int]] = {
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
"""How a number is stored, and the exponent that NaN and the infinities have."""

_PROBE_TOKENS = 33
_STOP_S = 8.0


@dataclass(frozen=True)
class Source:
    """What computes, and what it is a source of; ``vocabulary`` bounds token ids.

    ``weights`` is the bytes that are loaded, ``free`` says how many more its device has.
    """

    prefiller: Prefiller
    identity: Identity
    max_tokens: int
    vocabulary: int
    weights: int = 0
    free: Callable[[], int] = available_bytes


def say_ready(url: str) -> None:
    """The one line on stdout, but for those of :func:`say_paired`."""
    print(f"ready {url}", flush=True)


def say_paired(name: str) -> None:
    """On stdout, for whoever started this process; people are told on stderr."""
    print(f"paired {name}", flush=True)


def run(config: ProducerConfig, ready: Callable[[str], None] = say_ready) -> int:
    """Serve until a signal, the lifeline's end or a device fault; return the exit status."""
    logs.configure(config.log_level)
    stop, serving = threading.Event(), threading.Event()

    def now_ready(url: str) -> None:
        serving.set()
        ready(url)

    try:
        _listen_to_signals(stop, serving)
        if config.lifeline_fd is not None:
            _watch_lifeline(config.lifeline_fd, stop, serving)
        if config.only_pairs:
            serving.set()  # nothing is loaded: a stop is looked at
            return pair(config, stop)
        return serve(config, stop, now_ready)
    except (ConfigError, CapacityError) as error:
        logs.complain(error)
        return EXIT_CONFIG
    except EngineFault as fault:
        logs.complain(fault)
        return EXIT_ENGINE_FAULT


def serve(
    config: ProducerConfig,
    stop: threading.Event | None = None,
    ready: Callable[[str], None] = say_ready,
) -> int:
    """Serve until ``stop`` is set; return the exit status.

    Raises ``ConfigError`` and ``CapacityError`` before anybody can connect, and ``EngineFault``
    from the probe.
    """
    stop = stop or threading.Event()
    check(config)
    registry = open_registry(config) if config.registered else None
    trust = _trust(config) if registry is None else RegistryTrust(registry.peers, registry.own)
    require_trust_for(config.address, trust, pairing=config.pair)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.address, config.port))
        server = _server(config, listener, trust, registry)
        if registry is not None:
            # Who pairs, or asks what this is, need not wait for the model.
            server.start()
            stack.callback(server.stop)
            port = listener.getsockname()[1]
            advertisement = _advertise(config, registry, port, stack)
            if config.pair:
                welcome = _welcome(config, registry, port, advertisement, trust.refresh)
                stack.callback(welcome.stop)
                welcome.start()
        source = _source(config)
        device = _device(config, source, stop)
        device.start()
        server.offer(_offer(config, source), device)
        if registry is None:
            server.start()
        url = url_of(listener, "wss" if trust.context else "ws")
        known = {"url": url, "device": source.prefiller.device, "tile": source.prefiller.tile}
        log.info("ready", extra=known)
        ready(url)
        stop.wait()
        log.info("stopping")
        tidy = server.stop(_STOP_S / 2)
        tidy = device.stop(_STOP_S / 2) and tidy
    status = 0 if device.fault is None else EXIT_ENGINE_FAULT
    if not tidy:
        # A thread in the middle of a kernel or a driver call would outlive the interpreter.
        log.warning("threads were still busy at exit")
        logging.shutdown()
        os._exit(status)
    return status


def pair(config: ProducerConfig, stop: threading.Event | None = None) -> int:
    """Show codes until somebody has paired, or ``stop`` is set; return the exit status.

    For a producer that runs elsewhere on this machine, and notices by itself. Raises
    ``ConfigError``.
    """
    stop = stop or threading.Event()
    check(config)
    registry = open_registry(config)
    with ExitStack() as stack:
        # The one that runs may answer already, without a port for codes.
        instance = f"{registry.name} pairing"
        advertisement = _advertise(config, registry, config.port, stack, instance)
        welcome = _welcome(config, registry, config.port, advertisement)
        stack.callback(welcome.stop)
        welcome.start()
        while not welcome.wait(0.2) and not stop.is_set():
            pass
    return 0


def _server(
    config: ProducerConfig, listener: socket.socket, trust: Trust, registry: Registry | None
) -> Server:
    desk = None
    if registry is not None:
        assert isinstance(trust, RegistryTrust)
        desk = Desk(trust, Profile(registry.name, _version(), _model_name(config)))
    return Server(listener, trust, connections=config.connections, desk=desk)


def _advertise(
    config: ProducerConfig,
    registry: Registry,
    port: int,
    stack: ExitStack,
    instance: str | None = None,
) -> Advertisement | None:
    if not config.advertised:
        return None
    advertisement = Advertisement(
        name=registry.name,
        addresses=addresses_of(config.address),
        port=port,
        model=_model_name(config),
        instance=instance,
    )
    stack.callback(advertisement.stop)
    advertisement.start()
    return advertisement


def _model_name(config: ProducerConfig) -> str:
    """What is served, by its directory's name; empty if nothing is."""
    return (config.synthetic or "") if config.model is None else config.model.resolve().name


def _version() -> str:
    """Of Baton, as a message can carry it."""
    (found,) = releases.installed(["baton-llm"]).values()
    return re.sub(r"[^A-Za-z0-9_.:-]", "-", found)[:64] or "unknown"


def _welcome(
    config: ProducerConfig,
    registry: Registry,
    port: int,
    advertisement: Advertisement | None,
    changed: Callable[[], None] = lambda: None,
) -> Welcome:
    listener = bind(config.address, config.pair_port, "--pair-port")
    pair_port = listener.getsockname()[1]
    called = _called(config.address, pair_port)
    if advertisement is not None:
        called = [registry.name, *called]

    def paired(peer: Peer) -> None:
        changed()
        say_paired(peer.name)

    def opened(open: bool) -> None:
        if advertisement is not None:
            advertisement.pair(pair_port if open else 0)

    return Welcome(
        listener,
        registry.peers,
        registry.own,
        name=registry.name,
        port=port,
        called=called,
        paired=paired,
        opened=opened,
    )


def _called(host: str, port: int) -> list[str]:
    """What may be typed at the decoder for what is bound there, without zeroconf."""
    hosts = addresses_of(host) or [socket.gethostname()]
    if port == ProducerConfig.pair_port:
        return hosts
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]


def _device(config: ProducerConfig, source: Source, stop: threading.Event) -> Device:
    ledger = Ledger(_cache_budget(config, source), source.free)
    probe(source.prefiller, ledger)
    kept = ledger.limit // 2 if config.prefix_cache is None else config.prefix_cache
    source.prefiller.keep_prefixes(ledger, kept)
    return Device(
        source.prefiller,
        pool=Pool(config.backlog_bytes),
        ledger=ledger,
        waiting_limit=config.waiting,
        on_fault=stop.set,
    )


def _offer(config: ProducerConfig, source: Source) -> Offer:
    return Offer(
        identity=source.identity,
        layout=source.prefiller.layout,
        recipe=source.prefiller.recipe,
        limits=Limits(source.max_tokens, MAX_CREDIT, MAX_EXTRA_CUTS),
        vocabulary=source.vocabulary,
        throttle=Throttle(config.link_mbps),
    )


def _trust(config: ProducerConfig) -> Trust:
    if config.pairing is not None:
        return trust_from_file(config.pairing)
    assert config.key_fd is not None
    return trust_from_key_pipe(config.key_fd)


def _source(config: ProducerConfig) -> Source:
    if config.synthetic is not None:
        from gb10_producer.synthetic import TILE, Synthetic

        layout = named(config.synthetic)
        prefiller = Synthetic(layout, config.tile or TILE)
        return Source(prefiller, stand_in_identity(layout), MAX_TOKENS, 1 << 32)
    assert config.model is not None
    return _model_source(config, config.model)


def _model_source(config: ProducerConfig, model: Path) -> Source:
    for remark in releases.require_measured(releases.installed(releases.PRODUCER)):
        log.warning("another release", extra={"remark": remark})
    from protocol.architectures import text_config
    from protocol.checkpoint import read_checkpoint

    with logs.progress_bar(f"reading {model.name}") as report:
        checkpoint = read_checkpoint(model, _digest_cache(config), report)
    from gb10_producer import model as models
    from gb10_producer.prefill import TorchPrefiller

    device = models.choose_device(config.device)
    discrete = models.discrete_free_bytes(device) is not None

    def free() -> int:
        return (models.discrete_free_bytes(device) or 0) if discrete else available_bytes()

    weights = loaded_bytes(checkpoint.nbytes, checkpoint.quantisation, checkpoint.dtype)
    require_room(weights, free(), config.memory_limit, checkpoint.name)
    loaded = models.load(
        checkpoint,
        config.device,
        threads=config.threads,
        progress=sys.stderr.isatty(),
    )
    return Source(
        TorchPrefiller(loaded, config.tile),
        checkpoint.identity,
        max_tokens=min(checkpoint.max_context, MAX_TOKENS),
        vocabulary=int(text_config(checkpoint.config)["vocab_size"]),
        weights=weights,
        free=free,
    )


def loaded_bytes(nbytes: int, quantisation: dict | None, dtype: str) -> int:
    """Bytes of the weights in memory; quantised ones are dequantised to ``dtype``."""
    if quantisation is None:
        return nbytes
    itemsize = ITEMSIZE[dtype]
    per_weight = quantisation["bits"] / 8 + 2 * itemsize / quantisation["group_size"]
    return int(nbytes * itemsize / per_weight)


def _digest_cache(config: ProducerConfig) -> Path:
    import platformdirs

    root = config.cache_dir or Path(platformdirs.user_cache_dir("baton"))
    return root / "digests.json"


def _cache_budget(config: ProducerConfig, source: Source) -> int:
    """Bytes for caches once the weights are in. Raises ``ConfigError`` when none is of use."""
    cap = None if config.memory_limit is None else config.memory_limit - source.weights
    needed = prefill_bytes(source.prefiller.layout, _PROBE_TOKENS, source.prefiller.tile)
    return require_room(needed, source.free(), cap, "the smallest cache beside the weights")


def probe(prefiller: Prefiller, ledger: Ledger) -> None:
    """Run a small prefill and look at what it emits, before anybody is told that it can run.

    Raises ``EngineFault`` (``probe_failed``) when rows are missing or too many, ``ConfigError``
    (``model_not_finite``) when they are not all numbers, and what the prefill raises.
    """
    emitted = 0
    layers = prefiller.layout.layers
    broken: set[int] = set()

    def count(item: Rows | State) -> None:
        nonlocal emitted
        emitted += item_bytes(item)
        if not all_finite(item, layers[item.index]):
            broken.add(item.index)

    with ledger.reserve(prefill_bytes(prefiller.layout, _PROBE_TOKENS, prefiller.tile)):
        prefiller.prefill(
            [0] * _PROBE_TOKENS, 0, _PROBE_TOKENS, count, lambda: False, lambda _: None
        )
    expected = payload_bytes(prefiller.layout, 0, _PROBE_TOKENS)
    if emitted != expected:
        raise EngineFault(
            "The probe's prefill emitted another number of bytes than the layout has.",
            reason="probe_failed",
            field="bytes",
            found=emitted,
            expected=expected,
        )
    if broken and prefiller.recipe.device != SYNTHETIC:  # random bytes are no numbers
        raise ConfigError(
            "the model's keys, values or states are not finite",
            reason="model_not_finite",
            field="layers",
            found=", ".join(map(str, sorted(broken)[:8])),
            hint="fetch or import the model again",
        )


def all_finite(item: Rows | State, layer: LayerLayout) -> bool:
    """Whether no number of ``item``, a part of ``layer``, is NaN or infinite."""
    if isinstance(item, State):
        assert isinstance(layer, RecurrentLayer)
        return _finite(item.data, layer.states[item.number].dtype)
    assert not isinstance(layer, RecurrentLayer)
    return _finite(item.key, layer.dtype) and _finite(item.value, layer.dtype)


def _finite(data: memoryview, dtype: Dtype) -> bool:
    """By the exponent's bits alone: numpy has no bfloat16."""
    if not data.nbytes:
        return True
    unsigned, exponent = _EXPONENTS[dtype]
    numbers = np.frombuffer(data, unsigned)
    return not np.any((numbers & exponent) == exponent)


def _listen_to_signals(stop: threading.Event, serving: threading.Event) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def asked(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)  # asked twice: whoever asks does not want to wait
        _ask_to_stop(stop, serving)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, asked)


def _watch_lifeline(descriptor: int, stop: threading.Event, serving: threading.Event) -> None:
    """Stop when the other end of the pipe is closed: whoever started this process is gone."""

    def watch() -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while pipe.read(64):
                pass
        _ask_to_stop(stop, serving)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _ask_to_stop(stop: threading.Event, serving: threading.Event) -> None:
    """Have ``serve`` return; while it still loads, which takes long, nobody loses anything."""
    if not serving.is_set():
        os._exit(0)
    stop.set()
