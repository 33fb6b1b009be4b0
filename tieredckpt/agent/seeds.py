"""Where the configuration says that other hosts are, and which of these places have not answered.

A place that has not answered since the job began may be a host that holds what nobody else does, so
a recovery that finds nothing names it instead of beginning anew.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

NOT_YET = "was not asked yet"


class Seeds:
    """Of one namespace. Thread-safe.

    Args:
        addresses: ``host:port`` of a static list.
        dns: ``name:port`` that resolves to all hosts; "": none.

    Attributes:
        addresses, dns: As given.
    """

    def __init__(self, addresses: tuple[str, ...] = (), dns: str = "") -> None:
        self.addresses, self.dns = addresses, dns
        self._lock = threading.Lock()
        self._unmet = dict.fromkeys((*addresses, *([dns] if dns else ())), NOT_YET)
        self._met: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self.addresses or self.dns)

    def unmet(self) -> dict[str, str]:
        """What has not answered, and why."""
        with self._lock:
            own = {*self.addresses, self.dns}
            return {
                place if place in own else f"{place} ({self.dns})": why
                for place, why in self._unmet.items()
            }

    def resolved(self, addresses: Iterable[str]) -> None:
        """The name stands for these at present; what it stood for before is forgotten."""
        with self._lock:
            wanted = dict.fromkeys(addresses)
            self._unmet.pop(self.dns, None)
            before = self._unmet
            self._unmet = {a: w for a, w in before.items() if a in self.addresses}
            self._unmet |= {a: before.get(a, NOT_YET) for a in wanted if a not in self._met}

    def met(self, address: str) -> None:
        """A host has said there who it is."""
        with self._lock:
            self._met.add(address)
            self._unmet.pop(address, None)

    def failed(self, place: str, why: str) -> bool:
        """An address, or the name, did not answer, unless it has before; whether that is news."""
        with self._lock:
            before = self._unmet.get(place, why)
            if place in self._unmet:
                self._unmet[place] = why
            return before != why
