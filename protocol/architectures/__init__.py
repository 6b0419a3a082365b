"""Which architectures carry over between torch and mlx-lm, and what each needs for it.

One table (:mod:`~protocol.architectures.table`) with one entry per architecture. Both machines
resolve the same ``config.json`` to the same entry, and refuse the same ones by name before a
token is computed. No mlx, no torch: an entry names what each side has to do.
"""

from protocol.architectures.definition import Architecture, text_config
from protocol.architectures.table import ARCHITECTURES, REFUSED, resolve

__all__ = ["ARCHITECTURES", "REFUSED", "Architecture", "resolve", "text_config"]
