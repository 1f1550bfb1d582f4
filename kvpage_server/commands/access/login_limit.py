"""Counts wrong passwords by address, and slows down addresses that send many of them.

An address may fail ten times; one failure is forgiven every six seconds. After that, its AUTHs are handled one a
second, in order of arrival, for all its connections together. This includes those with the right password: otherwise a
guesser could take a slow answer for a no and not wait for it. Other addresses are not affected.

Memory is bounded: beyond a number of addresses, the one whose last failure is oldest is forgotten.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

log = logging.getLogger("kvpage")

FREE_FAILURES = 10
_FORGIVEN_SECONDS = 6.0  # until one failure is forgotten
_PAUSE_SECONDS = 1.0  # between two tries
_LONGEST_SECONDS = 10.0  # a try that would have to wait longer is refused
_MOST_ADDRESSES = 10_000


class TooMany(Exception):
    """This address has sent too many wrong passwords: its next try is refused."""

    def __init__(self) -> None:
        super().__init__(
            f"too many wrong passwords came from your address: try again in {_LONGEST_SECONDS:.0f} seconds"
        )


@dataclass(slots=True)
class _Failures:
    count: float
    counted: float  # when, in monotonic seconds
    next_try: float = 0.0

    def left(self, now: float) -> float:
        """Return the failures that are not forgiven yet; a fraction for the one that is being forgiven."""
        return max(0.0, self.count - (now - self.counted) / _FORGIVEN_SECONDS)

    def are_many(self, now: float) -> bool:
        return self.left(now) > FREE_FAILURES - 1


class LoginLimiter:
    """Failed AUTHs by address."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, _Failures] = OrderedDict()  # the last to fail is the last

    def __len__(self) -> int:
        return len(self._failures)

    def take_turn(self, address: str) -> float:
        """Return the seconds that a try from an address ("host:port") has to wait, usually 0. Raises TooMany."""
        found = self._failures.get(_network(address))
        now = time.monotonic()
        if found is None or not found.are_many(now):
            return 0.0
        turn = max(found.next_try, now)
        if turn - now > _LONGEST_SECONDS:
            raise TooMany
        found.next_try = turn + _PAUSE_SECONDS
        return turn - now

    def note(self, address: str) -> None:
        """Count a failed try from an address."""
        network, now = _network(address), time.monotonic()
        found = self._failures.setdefault(network, _Failures(0.0, now))
        self._failures.move_to_end(network)
        found.count, found.counted = found.left(now) + 1, now
        if found.are_many(now) and not found.next_try:
            found.next_try = now + _PAUSE_SECONDS
            log.warning("%s sent a wrong password %d times: its AUTHs are slowed down", network, FREE_FAILURES)
        while len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)


def _network(address: str) -> str:
    """Return the unit that failures are counted for: the host, for IPv6 its /64 network, or a unix socket's path."""
    host = address.rpartition(":")[0]
    if not host.startswith("["):
        return host
    return str(ipaddress.ip_network(f"{host[1:-1].partition('%')[0]}/64", strict=False))
