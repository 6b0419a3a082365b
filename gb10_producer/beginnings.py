"""What a start without ``--model`` can mean: decided before anything runs."""

from __future__ import annotations

from dataclasses import replace

from gb10_producer.config import ProducerConfig, nothing_to_serve
from gb10_producer.presence import port_of_another
from gb10_producer.received import ReceivedModels
from trust.places import Place


def received_models(config: ProducerConfig) -> ReceivedModels:
    """Where models that decoders send are kept: beside those that were imported here."""
    return ReceivedModels(config.cache_path / "models", config.cache_path / "digests.json")


def for_one_that_runs(config: ProducerConfig) -> ProducerConfig | None:
    """What to pair with, if a code is wanted for a producer that runs already.

    It notices by itself who has paired. ``None``: this start is the producer's own.
    """
    if not (config.pair and config.unnamed and config.registered):
        return None
    if config.lifeline_fd is not None:
        return None
    port = port_of_another(config)
    return None if port is None else replace(config, port=port or config.port)


def require_something(config: ProducerConfig) -> None:
    """Raise ``ConfigError`` (``config_invalid``) where there is nothing to serve, nor will be.

    There will be if a model was received, if somebody is paired who can send one, or pairs.
    Raises also as ``Place.names`` does.
    """
    if not config.unnamed or config.pair or received_models(config).last() is not None:
        return
    if not Place(config.state_path / "peers").names():
        raise nothing_to_serve(
            "or start with --pair, and have the Mac send its model: baton node add",
        )
