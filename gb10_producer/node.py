"""The producer process: where what computes, what serves and what shows itself are joined.

Exit status: 0 after a clean shutdown, 75 when the device failed, 78 when configuration, model
or machine must change before another start can help, 79 when another model is to be served.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from gb10_producer import logs
from gb10_producer.backlog import Pool, item_bytes
from gb10_producer.config import ProducerConfig, check
from gb10_producer.device import Device
from gb10_producer.front import Asked, Front, advertise, welcome
from gb10_producer.memory import (
    Ledger,
    available_bytes,
    prefill_bytes,
    require_room,
)
from gb10_producer.prefill import SYNTHETIC, Prefiller, Rows, State
from gb10_producer.registry import open_registry
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
    """On stdout, for whoever started this process; people are told on stderr."""
    print(f"ready {url}", flush=True)


def say_waiting(url: str) -> None:
    """On stdout: it answers, and has no model yet."""
    print(f"waiting {url}", flush=True)


def run(
    config: ProducerConfig,
    ready: Callable[[str], None] = say_ready,
    *,
    only_pair: bool = False,
) -> int:
    """Serve until a signal, the lifeline's end or a device fault; return the exit status.

    ``only_pair``: show codes instead, for a producer that runs elsewhere.
    """
    logs.configure(config.log_level)
    asked = Asked()
    try:
        _listen_to_signals(asked)
        if config.lifeline_fd is not None:
            _watch_lifeline(config.lifeline_fd, asked)
        if only_pair:
            asked.serving.set()  # nothing is loaded: a stop is looked at
            return pair(config, asked.stop)
        return serve(config, asked, lambda url: _settled(url, ready))
    except (ConfigError, CapacityError) as error:
        logs.complain(error)
        return EXIT_CONFIG
    except EngineFault as fault:
        logs.complain(fault)
        return EXIT_ENGINE_FAULT


def _settled(url: str, ready: Callable[[str], None]) -> None:
    """Say that it is ready, once no search for garbage goes through what was imported and loaded.

    That stays. With torch's objects each search would stop the wire and the device's thread for
    160 ms.
    """
    gc.collect()
    gc.freeze()
    ready(url)


def serve(
    config: ProducerConfig,
    asked: Asked | None = None,
    ready: Callable[[str], None] = say_ready,
) -> int:
    """Serve until a stop is asked for; return the exit status.

    Raises ``ConfigError`` and ``CapacityError`` before anybody can connect, and ``EngineFault``
    from the probe; of a model that was received, the first two only begin the wait for another.
    """
    asked = asked or Asked()
    check(config)
    if config.model is not None:
        _require_checkpoint(config.model)  # before anybody is invited to pair with it
    registry = open_registry(config) if config.registered else None
    trust = _trust(config) if registry is None else RegistryTrust(registry.peers, registry.own)
    require_trust_for(config.address, trust, pairing=config.pair)
    with ExitStack() as stack:
        listener = stack.enter_context(bind(config.address, config.port))
        url = url_of(listener, "wss" if trust.context else "ws")
        front = Front(config, registry, asked)
        server = Server(listener, trust, connections=config.connections, desk=front.desk(trust))
        if registry is not None:
            # Who pairs, asks what this is, or sends a model need not wait for one.
            server.start()
            stack.callback(server.stop)
            front.open(listener.getsockname()[1], trust, stack)
        loaded = front.load(
            lambda model, begun: _computing(config, model, asked, begun),
            lambda: say_waiting(url),
            _drop,
        )
        if loaded is None:
            return front.status()
        source, device = loaded
        device.start()
        server.offer(_offer(config, source), device)
        if registry is None:
            server.start()
        known = {"url": url, "device": source.prefiller.device, "tile": source.prefiller.tile}
        log.info("ready", extra=known)
        asked.serving.set()
        ready(url)
        asked.stop.wait()
        log.info("stopping")
        tidy = server.stop(_STOP_S / 2)
        tidy = device.stop(_STOP_S / 2) and tidy
    status = front.status() if device.fault is None else EXIT_ENGINE_FAULT
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
        advertisement = advertise(config, registry, config.port, stack, "", instance)
        shown = welcome(config, registry, config.port, advertisement)
        stack.callback(shown.stop)
        shown.start()
        while not shown.wait(0.2) and not stop.is_set():
            pass
    return 0


def _computing(
    config: ProducerConfig, received: Path | None, asked: Asked, begun: Callable[[], None]
) -> tuple[Source, Device]:
    """The model that was received, or else the one of ``config``, and what it runs on.

    ``begun`` is called before it takes memory.
    """
    source = _source(config if received is None else replace(config, model=received), begun)
    return source, _device(config, source, asked.stop)


def _drop() -> None:
    """A model that was loaded for nothing leaves this process's memory."""
    from gb10_producer import model as models

    models.give_memory_back()


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


def _source(config: ProducerConfig, begun: Callable[[], None]) -> Source:
    if config.synthetic is not None:
        from gb10_producer.synthetic import TILE, Synthetic

        layout = named(config.synthetic)
        prefiller = Synthetic(layout, config.tile or TILE)
        return Source(prefiller, stand_in_identity(layout), MAX_TOKENS, 1 << 32)
    assert config.model is not None
    return _model_source(config, config.model, begun)


def _require_checkpoint(model: Path) -> None:
    """Raise ``ConfigError`` as ``read_layout`` and ``require_tokenizer`` do; nothing is hashed."""
    from protocol.checkpoint import read_layout, require_tokenizer

    read_layout(model)
    require_tokenizer(model)


def _model_source(config: ProducerConfig, model: Path, begun: Callable[[], None]) -> Source:
    for remark in releases.require_measured(releases.installed(releases.PRODUCER)):
        log.warning("another release", extra={"remark": remark})
    from protocol.architectures import text_config
    from protocol.checkpoint import read_checkpoint, well_formed

    with logs.progress_bar(f"reading {model.name}") as report:
        checkpoint = read_checkpoint(model, config.cache_path / "digests.json", report)
    with well_formed():
        vocabulary = int(text_config(checkpoint.config)["vocab_size"])
    from gb10_producer import model as models
    from gb10_producer.prefill import TorchPrefiller

    device = models.choose_device(config.device)
    discrete = models.discrete_free_bytes(device) is not None

    def free() -> int:
        return (models.discrete_free_bytes(device) or 0) if discrete else available_bytes()

    weights = loaded_bytes(checkpoint.nbytes, checkpoint.quantisation, checkpoint.dtype)
    require_room(weights, free(), config.memory_limit, checkpoint.name)
    begun()
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
        vocabulary=vocabulary,
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


def _listen_to_signals(asked: Asked) -> None:
    if threading.current_thread() is not threading.main_thread():
        return

    def heard(number: int, _frame: object) -> None:
        if asked.stop.is_set():
            os._exit(128 + number)  # asked twice: whoever asks does not want to wait
        _ask_to_stop(asked)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, heard)


def _watch_lifeline(descriptor: int, asked: Asked) -> None:
    """Stop when the other end of the pipe is closed: whoever started this process is gone."""

    def watch() -> None:
        with os.fdopen(descriptor, "rb", buffering=0) as pipe:
            while pipe.read(64):
                pass
        _ask_to_stop(asked)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def _ask_to_stop(asked: Asked) -> None:
    """Have ``serve`` return; while it still loads, which takes long, nobody loses anything."""
    if not asked.serving.is_set():
        asked.withdraw()
        os._exit(0)
    asked.stop.set()
