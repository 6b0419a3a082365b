"""Producers that say by zeroconf (mDNS) where they are.

Whoever answers is believed nothing but an address: that it is the producer that showed the code
is what pairing proves. The service is ``_baton._tcp.local.``, with these TXT fields:

=========  ===========================================================
field      meaning
=========  ===========================================================
``v``      1
``name``   what the producer is called
``port``   where it serves handoffs
``pair``   where a code can be tried; 0 while none is open
``model``  what it serves, its directory's name; may be empty
=========  ===========================================================
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from protocol.errors import ConfigError, TransferError
from protocol.pairing.messages import require_name

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

SERVICE: Final = "_baton._tcp.local."
SECONDS: Final = 3.0
"""How long answers are waited for, unless something else is asked for."""

_LOOK_S: Final = 0.1
_ANSWER_S: Final = 0.3
_MOST: Final = 64
_LONGEST_MODEL: Final = 255


@dataclass(frozen=True)
class Seen:
    """A producer that answered. ``pair`` is 0 while no code is open there."""

    name: str
    host: str
    port: int
    pair: int
    model: str


def browse(
    seconds: float = SECONDS, interfaces: Sequence[str] = (), until: str | None = None
) -> list[Seen]:
    """Who answers within so many ``seconds``, by name; sooner once one called ``until`` did.

    ``interfaces``: addresses of this machine's to ask from, all if empty. Raises
    ``TransferError`` (``discovery_unavailable``).
    """
    # Only here: no other command needs it.
    from zeroconf import InterfaceChoice, ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

    instances: set[str] = set()

    class Listener(ServiceListener):
        def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            instances.add(name)

        def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            instances.add(name)

        def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
            instances.discard(name)

    deadline = time.monotonic() + seconds
    seen: dict[str, Seen] = {}
    try:
        with Zeroconf(list(interfaces) or InterfaceChoice.All) as asked:
            browser = ServiceBrowser(asked, SERVICE, listener=Listener())
            while time.monotonic() < deadline and until not in [one.name for one in seen.values()]:
                time.sleep(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
                for instance in [*instances][:_MOST]:
                    info = ServiceInfo(SERVICE, instance)
                    # What answered so far is cached; most answers are whole.
                    known = info.load_from_cache(asked) or info.request(asked, _ANSWER_S * 1e3)
                    if known and (one := seen_in(info)) is not None:
                        seen[instance] = one
                    if time.monotonic() > deadline:
                        break
            browser.cancel()
    except OSError as error:
        raise TransferError(
            f"the local network cannot be asked for producers: {error.strerror}",
            reason="discovery_unavailable",
            hint="give the producer's address instead: baton node add HOST; on macOS, check "
            "whether this program may use the local network (System Settings, Privacy & Security)",
        ) from error
    left = {one for instance, one in seen.items() if instance in instances}
    return sorted(left, key=lambda one: (one.name, one.host))


def seen_in(info: ServiceInfo) -> Seen | None:
    """What an answer says, if it is one that can be understood."""
    from zeroconf import IPVersion

    addresses = info.parsed_scoped_addresses(IPVersion.V4Only) or info.parsed_scoped_addresses()
    told = info.decoded_properties
    name, port, pair = told.get("name") or "", _port(told, "port"), _port(told, "pair")
    if told.get("v") != "1" or not addresses or not port or pair is None:
        return None
    try:
        require_name(name)
    except ConfigError:
        return None
    return Seen(name, addresses[0], port, pair, (told.get("model") or "")[:_LONGEST_MODEL])


def _port(told: Mapping[str, str | None], field: str) -> int | None:
    text = told.get(field) or ""
    number = int(text) if text.isascii() and text.isdecimal() and len(text) <= 5 else -1
    return number if 0 <= number <= 65535 else None
