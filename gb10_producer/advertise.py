"""Says by zeroconf (mDNS) where this producer is, so that nobody has to type an address.

A convenience: whatever fails here is logged and never ends anything. The answer is public and
proves nothing; it holds no secret. Its TXT fields are those that ``app/discovery.py`` reads.
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import psutil

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

log = logging.getLogger(__name__)

SERVICE: Final = "_baton._tcp.local."

_LONGEST_LABEL: Final = 63
_LONGEST_MODEL: Final = 200
_STOP_S: Final = 3.0


def addresses_of(host: str) -> list[str]:
    """The numbers at which other machines reach what is bound to ``host``, IPv4 first.

    A cable between two machines has link-local ones at first, which come last; those of IPv6
    mean nothing without the name of an interface, which is another one there.
    """
    if host not in ("0.0.0.0", "::", ""):
        return [host]
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = []
    for interface in psutil.net_if_addrs().values():
        for one in interface:
            if one.family == socket.AF_INET or (host == "::" and one.family == socket.AF_INET6):
                number = ipaddress.ip_address(one.address.partition("%")[0])
                scoped = number.version == 6 and number.is_link_local
                if not number.is_loopback and not scoped:
                    found.append(number)
    found.sort(key=lambda number: (number.version, number.is_link_local))
    return [str(number) for number in found]


class _Said(NamedTuple):
    """What changes in an answer: where codes are tried, 0 if nowhere, and what is served."""

    pair: int
    model: str


class Advertisement:
    """One answer on the local network, changed and withdrawn from any thread.

    :meth:`start` once, :meth:`stop` once. Everything happens in a thread of its own, since
    others' answers have to be waited for.
    """

    def __init__(
        self,
        *,
        name: str,
        addresses: Sequence[str],
        port: int,
        model: str,
        instance: str | None = None,
        interfaces: Sequence[str] = (),
    ) -> None:
        """``port`` is for handoffs at these ``addresses``; ``model``: the served one's name.

        ``instance``: what tells it apart from other answers of this machine (``name`` if
        ``None``). ``interfaces``: addresses of this machine's to answer on, all if empty.
        """
        self._name = name
        self._addresses = list(addresses)
        self._port = port
        self._said = _Said(0, _ascii(model))
        self._instance = (instance or name)[:_LONGEST_LABEL]
        self._interfaces = list(interfaces)
        self._wanted: queue.Queue[_Said | None] = queue.Queue()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="advertise", daemon=True)

    def start(self) -> None:
        """Answer from now on, or soon."""
        self._thread.start()

    def pair(self, port: int) -> None:
        """Codes can be tried at ``port`` from now on; 0: at none."""
        self._say(pair=port)

    def serve(self, model: str) -> None:
        """The model of this name is served from now on; empty: none is."""
        self._say(model=_ascii(model))

    def _say(self, **changes: int | str) -> None:
        with self._lock:
            self._said = self._said._replace(**changes)
            self._wanted.put(self._said)

    def stop(self) -> None:
        """Withdraw the answer."""
        self._wanted.put(None)
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        # Only here: who does not advertise needs none of it.
        from zeroconf import Error, InterfaceChoice, Zeroconf

        try:
            with Zeroconf(self._interfaces or InterfaceChoice.All) as responder:
                self._answer(responder)
        except (OSError, Error) as error:
            why = str(error) or type(error).__name__
            log.warning("not advertised on the local network", extra={"error": why})

    def _answer(self, responder: Zeroconf) -> None:
        answered: ServiceInfo | None = None
        wanted: _Said | None = self._said
        while wanted is not None:
            info = self._info(wanted, answered)
            if answered is None:
                responder.register_service(info, allow_name_change=True)
                log.info("advertised", extra={"called": info.name})
            else:
                responder.update_service(info)
            answered, wanted = info, self._wanted.get()
            while wanted is not None and not self._wanted.empty():
                wanted = self._wanted.get()  # the last one counts
        if answered is not None:
            responder.unregister_service(answered)

    def _info(self, said: _Said, answered: ServiceInfo | None) -> ServiceInfo:
        from zeroconf import ServiceInfo

        txt = {
            "v": "1",
            "name": self._name,
            "port": str(self._port),
            "pair": str(said.pair),
            "model": said.model,
        }
        return ServiceInfo(
            SERVICE,
            f"{self._instance}.{SERVICE}" if answered is None else answered.name,
            port=self._port,
            properties=txt,
            parsed_addresses=self._addresses,
            server=f"{socket.gethostname().removesuffix('.local')}.local.",
        )


def _ascii(model: str) -> str:
    return model.encode("ascii", "replace").decode()[:_LONGEST_MODEL]
