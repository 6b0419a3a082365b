"""What a start without ``--model`` can mean: decided before anything runs."""

from __future__ import annotations

from gb10_producer.config import ProducerConfig, nothing_to_serve
from gb10_producer.received import ReceivedModels
from gb10_producer.server import taken
from trust.places import Place


def received_models(config: ProducerConfig) -> ReceivedModels:
    """Where models that decoders send are kept: beside those that were imported here."""
    return ReceivedModels(config.cache_path / "models", config.cache_path / "digests.json")


def runs_elsewhere(config: ProducerConfig) -> bool:
    """Whether a code is wanted for a producer that runs already, which notices by itself."""
    if not (config.pair and config.unnamed) or config.lifeline_fd is not None:
        return False
    return taken(config.address, config.port)


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
