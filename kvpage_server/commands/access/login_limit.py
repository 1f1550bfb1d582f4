"""The limit of failed logins: it counts wrong passwords by address, and slows down addresses that send many of them.

An address may fail ten times; one failure is forgiven every six seconds. After that, its AUTHs are handled one a
second, in order of arrival, for all its connections together. AUTHs with the right password wait, too: otherwise an
attacker could take a slow reply for a refusal and not wait for it. Other addresses are not affected.

Memory is bounded: above a number of addresses, the address with the oldest last failure is removed.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict
from dataclasses import dataclass

log = logging.getLogger("kvpage")

FREE_FAILURES = 10
_FORGIVEN_SECONDS = 6.0  # time after which one failure is forgiven
_PAUSE_SECONDS = 1.0  # time between two attempts
_LONGEST_SECONDS = 10.0  # an attempt that would have to wait longer is refused
_MOST_ADDRESSES = 10_000


class TooMany(Exception):
    """Error: an attempt to log in is refused, because its address has sent too many wrong passwords."""

    def __init__(self) -> None:
        super().__init__(
            f"too many wrong passwords came from your address: try again in {_LONGEST_SECONDS:.0f} seconds"
        )


@dataclass(slots=True)
class _Failures:
    """The failed logins of one address, a number that decreases with time."""

    count: float
    counted: float  # time of the last failure, in seconds of the monotonic clock
    next_try: float = 0.0  # time of the next attempt, likewise

    def left(self, now: float) -> float:
        """Return the number of failures that are not forgiven yet at `now`. It is fractional, because time forgives
        continuously.
        """
        return max(0.0, self.count - (now - self.counted) / _FORGIVEN_SECONDS)

    def are_many(self, now: float) -> bool:
        """Return whether the next attempt has to wait: more than nine failures are not forgiven at `now`."""
        return self.left(now) > FREE_FAILURES - 1


class LoginLimiter:
    """Failed logins by address, and the delays that follow from them."""

    def __init__(self) -> None:
        self._failures: OrderedDict[str, _Failures] = OrderedDict()  # in order of the last failure

    def __len__(self) -> int:
        """Return the number of addresses with failures."""
        return len(self._failures)

    def take_turn(self, address: str) -> float:
        """Return the seconds that an attempt to log in from an address ("host:port") has to wait, usually 0, and
        reserve its turn.

        It must be called before each attempt. Raises TooMany if the wait would be longer than _LONGEST_SECONDS.
        """
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
        """Count a failed login from an address ("host:port"). The first that makes the address wait is logged."""
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
    """Return the name under which the failures of an address are counted: the host, for IPv6 its /64 network, or the
    path of a unix socket.
    """
    host = address.rpartition(":")[0]
    if not host.startswith("["):
        return host
    return str(ipaddress.ip_network(f"{host[1:-1].partition('%')[0]}/64", strict=False))
