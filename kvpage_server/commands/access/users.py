"""All users, the log of refusals, and the limit of failed logins.

Users come from `user` lines of the configuration, or from an aclfile with the same lines. A new client has the user
`default`.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from kvpage_server.bounded import read_regular
from kvpage_server.commands.access.user import ABSENT, Change, RuleError, User, digest, has_spaces
from kvpage_server.page import unix_ms
from kvpage_server.system.durable import remove_unfinished, replacing
from kvpage_server.system.text import cut

_LONGEST = 128  # bytes of a name in the log
_MOST_BYTES = 64 * 1024**2  # of an aclfile
_SAME_WITHIN = 60.0  # seconds within which equal refusals are one entry of the log
DEFAULT = b"default"

log = logging.getLogger("kvpage")


class UserFileError(ValueError):
    """Error: a line of an aclfile, or a `user` line of the configuration, is invalid. The message has the place of the
    line and the reason.
    """

    def __init__(self, message: str) -> None:
        super().__init__(cut(message))


def _open_default() -> User:
    """Return a user `default` that may do everything and needs no password."""
    return User(DEFAULT).changed([b"on", b"nopass", b"allkeys", b"allchannels", b"allcommands"])


class Users:
    """Users by name. The user `default` always exists."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, User] = {DEFAULT: _open_default()}
        self._absent: set[str] = set()  # commands in rules that do not exist here
        self._warned_of: set[str] = set()

    @property
    def default(self) -> User:
        """The user of a new client."""
        return self.by_name[DEFAULT]

    def authenticate(self, name: bytes, password: bytes) -> User | None:
        """Return the user named `name` if it accepts the password; None if there is none, or it does not accept it."""
        user = self.by_name.get(name)
        return user if user is not None and user.accepts(password) else None

    def set(self, name: bytes, changes: Iterable[tuple[bytes, Change]]) -> User:
        """Create or change a user, and return it. Either all changes are applied or none.

        A change is a rule and the result of `change_of` for it. The object of an existing user stays the same, so the
        changes apply to its connections immediately. Raises RuleError for an invalid name or rule.
        """
        if not name:
            raise RuleError("Usernames can't be empty")
        if has_spaces(name):
            raise RuleError("Usernames can't contain spaces or null characters")
        user = self.by_name.get(name)
        changed = (user or User(name)).after(changes)
        if user is None:
            user = self.by_name[name] = changed
        else:
            user.become(changed)
        self._absent |= user.rules.keys() & ABSENT.keys()
        self.warn_of_absent()
        return user

    def require_password(self, password: str) -> None:
        """Set the only password of the default user. If `password` is empty, the default user accepts any password."""
        raw = password.encode("utf-8", "surrogateescape")
        self.default.forget_passwords(then_any=not raw)
        if raw:
            self.default.passwords[digest(raw)] = None

    def load(self, lines: Iterable[tuple[str, list[bytes]]]) -> None:
        """Replace all users in one step. See `loading` for `lines`. Raises UserFileError, and changes no user then."""
        for _ in self.loading(lines):
            pass

    def loading(self, lines: Iterable[tuple[str, list[bytes]]], password: str | None = None) -> Iterator[None]:
        """Replace all users. Yields after each line; the users are replaced after the last one.

        Each item of `lines` is the place of a line, for error messages, and its words after `user`. The default user
        stays if it has no line; with `password`, it is as at a start with this `requirepass`. Raises UserFileError for
        an invalid line, and changes no user then.
        """
        loaded, absent = dict[bytes, User](), set[str]()
        for where, words in lines:
            name, *rules = words or [b""]
            if not name:
                raise UserFileError(f"{where}: a user needs a name")
            if has_spaces(name):
                raise UserFileError(f"{where}: a user's name has no spaces: its rules are words of their own")
            if name in loaded:
                raise UserFileError(f"{where}: user '{name.decode('utf-8', 'replace')}' is defined twice")
            try:
                loaded[name] = User(name).changed(rules)
            except RuleError as error:
                raise UserFileError(f"{where}: {error}") from None
            absent |= loaded[name].rules.keys() & ABSENT.keys()
            yield
        if password is not None and DEFAULT not in loaded:
            self.by_name[DEFAULT] = _open_default()
            self.require_password(password)
        self.by_name = {DEFAULT: self.default} | loaded
        self._absent |= absent

    def warn_of_absent(self) -> None:
        """Log one warning with the commands of Redis that rules name and that do not exist here. Each command is logged
        once.
        """
        named = self._absent - self._warned_of
        if named:
            self._warned_of |= named
            log.warning("rules of users name commands of Redis that do not exist here: %s", ", ".join(sorted(named)))

    def load_file(self, path: Path) -> None:
        """Replace all users by those of an aclfile, in one step. Raises UserFileError for an invalid line, and
        OSError.
        """
        self.load(lines_of(path))

    def lines(self) -> list[bytes]:
        """Return the line of each user for a file, without a line break, sorted by name."""
        return [bytes(self.by_name[name]) for name in sorted(self.by_name)]


def lines_of(path: Path) -> list[tuple[str, list[bytes]]]:
    """Return the lines of an aclfile: the place of each, for error messages, and its words after `user`. Empty lines
    and comments are left out.

    Raises UserFileError for a line that does not start with `user`, and OSError.
    """
    lines = []
    for number, line in enumerate(read_regular(path, _MOST_BYTES).splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith(b"#"):
            continue
        where = f"{path}, line {number}"
        if words[0] != b"user":
            raise UserFileError(f"{where}: a line must start with 'user', got '{words[0].decode('utf-8', 'replace')}'")
        lines.append((where, words[1:]))
    return lines


def save_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write lines to an aclfile, which is replaced as a whole. Raises OSError; the old file is unchanged then."""
    remove_unfinished(path.parent, path.stem)  # it has hashes of passwords
    with replacing(path, keep_group=True) as file:
        file.writelines(line + b"\n" for line in lines)


@dataclass(slots=True)
class Refusal:
    """An entry of ACL LOG: a refused command or login, and the number of its repetitions."""

    reason: str  # auth, command, key or channel
    context: str  # toplevel or multi
    what: bytes  # the command, key or channel
    user: bytes
    client: str  # in the format of CLIENT INFO
    id: int
    created_ms: int = field(default_factory=unix_ms, init=False)
    updated_ms: int = field(default_factory=unix_ms, init=False)
    updated: float = field(default_factory=time.monotonic, init=False)
    count: int = field(default=1, init=False)


class Refusals:
    """The last refusals, for ACL LOG, newest first. `limit` returns the number of entries to keep."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self.entries: deque[Refusal] = deque()
        self.forget_totals()
        self._limit = limit
        self._ids = count()

    def forget_totals(self) -> None:
        """Set the counts of refusals in INFO to 0. The entries of ACL LOG stay."""
        self.total = dict.fromkeys(("auth", "cmd", "key", "channel"), 0)  # for INFO

    def note(self, reason: str, context: str, what: bytes, user: bytes, client: str) -> None:
        """Count a refusal, and add it to ACL LOG.

        `reason` is auth, command, key or channel, `context` toplevel or multi, `client` a line of CLIENT LIST. If an
        equal refusal was added within the last _SAME_WITHIN seconds, its entry counts one more and becomes the newest.
        """
        self.total["cmd" if reason == "command" else reason] += 1
        what, user, now = what[:_LONGEST], user[:_LONGEST], time.monotonic()
        for entry in self.entries:
            same = (entry.reason, entry.context, entry.what, entry.user) == (reason, context, what, user)
            if same and now - entry.updated < _SAME_WITHIN:
                entry.count += 1
                entry.client, entry.updated, entry.updated_ms = client, now, unix_ms()
                self.entries.remove(entry)
                self.entries.appendleft(entry)
                return
        self.entries.appendleft(Refusal(reason, context, what, user, client, next(self._ids)))
        while len(self.entries) > self._limit():
            self.entries.pop()


# -- The limit of failed logins ----------------------------------------------------------------------------------------
#
# Wrong passwords are counted by address. An address may fail ten times; one failure is forgiven every six seconds.
# After that, its AUTHs are handled one a second, in order of arrival, for all its connections together. AUTHs with the
# right password wait, too: otherwise an attacker could take a slow reply for a refusal and not wait for it. Other
# addresses are not affected. Memory is bounded: above a number of addresses, the one with the oldest last failure is
# removed.


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
    """Failed logins by address, and the delays that follow from them. Those over HTTP have counts of their own: behind
    a proxy, all viewers have its address, which may be that of engines.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[str, _Failures] = OrderedDict()  # in order of the last failure

    def __len__(self) -> int:
        """Return the number of addresses with failures."""
        return len(self._failures)

    def take_turn(self, address: str, *, over_http: bool = False) -> float:
        """Return the seconds that an attempt to log in from an address ("host:port") has to wait, usually 0, and
        reserve its turn.

        It must be called before each attempt. Raises TooMany if the wait would be longer than _LONGEST_SECONDS.
        """
        found = self._failures.get(_network(address, over_http=over_http))
        now = time.monotonic()
        if found is None or not found.are_many(now):
            return 0.0
        turn = max(found.next_try, now)
        if turn - now > _LONGEST_SECONDS:
            raise TooMany
        found.next_try = turn + _PAUSE_SECONDS
        return turn - now

    def note(self, address: str, *, over_http: bool = False) -> None:
        """Count a failed login from an address ("host:port"). The first that makes the address wait is logged."""
        network, now = _network(address, over_http=over_http), time.monotonic()
        found = self._failures.setdefault(network, _Failures(0.0, now))
        self._failures.move_to_end(network)
        found.count, found.counted = found.left(now) + 1, now
        if found.are_many(now) and not found.next_try:
            found.next_try = now + _PAUSE_SECONDS
            log.warning("%s sent a wrong password %d times: its AUTHs are slowed down", network, FREE_FAILURES)
        while len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)


def _network(address: str, *, over_http: bool) -> str:
    """Return the name under which the failures of an address are counted: the host, for IPv6 its /64 network, or the
    path of a unix socket.
    """
    host = address.rpartition(":")[0]
    if host.startswith("["):
        host = str(ipaddress.ip_network(f"{host[1:-1].partition('%')[0]}/64", strict=False))
    return f"{host} (HTTP)" if over_http else host
