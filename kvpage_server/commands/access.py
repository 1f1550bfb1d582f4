"""One user: whether it may come in, and which commands, keys and channels it may use. The rules are Redis 7's.

A key pattern gives the right to read, to write, or both. A command that concerns every key, as INFO's numbers or
FLUSHALL do, is for users who have that right on every key: whoever may use only some keys learns nothing of the others.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from kvpage_server.commands.absent import ABSENT
from kvpage_server.commands.keys import READ, WRITE, Prefix
from kvpage_server.commands.registry import CATEGORIES, TABLE, Spec
from kvpage_server.core import Argument
from kvpage_server.glob import Matches, PatternTooLong, glob

_UNKNOWN = "Unknown command or category name in ACL"
_SYNTAX = "Syntax error"
_AFTER_ALL_KEYS = (
    "Adding a pattern after the * pattern (or the 'allkeys' flag) is not valid and does not have any effect. "
    "Try 'resetkeys' to start with an empty list of patterns"
)
_AFTER_ALL_CHANNELS = (
    "Adding a pattern after the * pattern (or the 'allchannels' flag) is not valid and does not have any effect. "
    "Try 'resetchannels' to start with an empty list of channels"
)
_BAD_HASH = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"
_NO_SUCH_PASSWORD = "The password you are trying to remove from the user does not exist"
_NO_SELECTORS = "Selectors are not supported: give each set of rights a user of its own"

_HASH = re.compile(r"[0-9a-f]{64}\Z")
_KEY_RULE = re.compile(rb"(?:~|%(R|W|RW|WR)~)(.*)\Z", re.DOTALL | re.IGNORECASE)
_ACCESS = {None: READ | WRITE, b"R": READ, b"W": WRITE, b"RW": READ | WRITE, b"WR": READ | WRITE}
_SPELT = {READ: b"%R~", WRITE: b"%W~", READ | WRITE: b"~"}


class RuleError(ValueError):
    """A rule that cannot be understood, or changes nothing where it stands."""


class Denial(NamedTuple):
    """What a user lacks: the right to a command, a key or a channel."""

    kind: str  # command, key or channel
    what: bytes
    command: str
    user: bytes
    lacks: bytes = b""  # the key rule without which the command is of no use to it

    @property
    def message(self) -> str:
        """As Redis words it to the client: without saying which key."""
        if self.kind == "command":
            return f"NOPERM {self.verbose}"
        return f"NOPERM No permissions to access a {self.kind}"

    @property
    def verbose(self) -> str:
        """As ACL DRYRUN words it."""
        user = self.user.decode("utf-8", "surrogateescape")
        if self.lacks:
            lacks = f"without access to every key ({self.lacks.decode()})"
            return f"User {user} has no permissions to run the '{self.command}' command {lacks}"
        if self.kind == "command":
            return f"User {user} has no permissions to run the '{self.command}' command"
        return f"User {user} has no permissions to access the '{self.what.decode('utf-8', 'replace')}' {self.kind}"


class KeyPattern(NamedTuple):
    """Keys by a glob pattern, and what may be done to them."""

    pattern: bytes
    access: int
    matches: Matches
    open_ended: bool  # whatever begins like a match is one too

    def covers(self, key: bytes, access: int) -> bool:
        """Whether it gives `access` to the key; to all keys that begin so, for a Prefix."""
        if self.access & access != access or not self.matches(key):
            return False
        return type(key) is not Prefix or self.open_ended


def _key_pattern(pattern: bytes, access: int) -> KeyPattern:
    plain_end = b"\\" not in pattern and pattern.rfind(b"]") >= pattern.rfind(b"[")
    return KeyPattern(pattern, access, glob(pattern), plain_end and pattern.endswith(b"*"))


def digest(password: bytes) -> str:
    """A password as it is kept: SHA-256, in hexadecimal."""
    return hashlib.sha256(password).hexdigest()


@dataclass(slots=True)
class User:
    """A user and its rights. `commands` are those it may run, `rules` how they were given."""

    name: bytes
    enabled: bool = False
    no_password: bool = False  # any password will do
    passwords: list[str] = field(default_factory=list)  # hashed
    every_command: bool = False
    commands: set[str] = field(default_factory=set)
    rules: list[str] = field(default_factory=list)  # after -@all, or after +@all
    keys: list[KeyPattern] = field(default_factory=list)
    channels: list[bytes] = field(default_factory=list)

    # -- asking ----------------------------------------------------------------------------------------------------

    @property
    def unrestricted(self) -> bool:
        """Whether nothing needs to be asked: every command, key and channel."""
        return self.every_command and not self.rules and self.may_use_all(READ | WRITE) and self.every_channel

    @property
    def every_channel(self) -> bool:
        """Whether it may use all channels."""
        return b"*" in self.channels

    def may_use_all(self, access: int) -> bool:
        """Whether it may do that to every key."""
        return any(key.pattern == b"*" and key.access & access == access for key in self.keys)

    def may_use(self, key: bytes, access: int) -> bool:
        """Whether it may do that to a key, or to every key that begins so when it is a Prefix."""
        return any(pattern.covers(key, access) for pattern in self.keys)

    def readable(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of some keys that it may read."""
        patterns = [pattern.matches for pattern in self.keys if pattern.access & READ]
        if len(patterns) == 1:
            return list(filter(patterns[0], keys))
        return [key for key in keys if any(matches(key) for matches in patterns)]

    def may_listen(self, channel: bytes, *, as_pattern: bool = False) -> bool:
        """Whether it may use a channel. A pattern must be one of its own, letter for letter."""
        if as_pattern:
            return self.every_channel or channel in self.channels
        return any(glob(allowed)(channel) for allowed in self.channels)

    def accepts(self, password: bytes) -> bool:
        """Whether it may come in with that password."""
        given = digest(password)
        known = [hmac.compare_digest(given, kept) for kept in self.passwords]  # all of them: the time tells nothing
        return self.enabled and (self.no_password or any(known))

    def denial(self, spec: Spec, args: Sequence[Argument]) -> Denial | None:
        """What forbids a command with these arguments; None when it is allowed."""
        if spec.name not in self.commands:
            return Denial("command", spec.name.encode(), spec.name, self.name)
        if spec.all_keys and not self.may_use_all(spec.access):
            return Denial("command", spec.name.encode(), spec.name, self.name, _SPELT[spec.access] + b"*")
        if not self.may_use_all(READ | WRITE):
            for key, access in spec.uses_of(args):
                if not self.may_use(key, access):
                    return Denial("key", bytes(key), spec.name, self.name)
        if spec.channels and not self.every_channel:
            for channel in spec.channels_of(args):
                if not self.may_listen(channel, as_pattern=spec.channels == "patterns"):
                    return Denial("channel", channel, spec.name, self.name)
        return None

    # -- changing --------------------------------------------------------------------------------------------------

    def changed(self, rules: Iterable[bytes]) -> User:
        """A user like this one after some rules. Raises RuleError naming the rule; this one stays as it is."""
        user = copy(self)
        user.passwords, user.rules = list(self.passwords), list(self.rules)
        user.commands, user.keys, user.channels = set(self.commands), list(self.keys), list(self.channels)
        for rule in rules:
            try:
                user._apply(rule)
            except (RuleError, PatternTooLong) as error:
                shown = rule.decode("utf-8", "backslashreplace")
                raise RuleError(f"Error in ACL SETUSER modifier '{shown}': {error}") from None
        return user

    def become(self, other: User) -> None:
        """Take the rights of another, name and identity being one's own."""
        for attribute in fields(self):
            if attribute.name != "name":
                setattr(self, attribute.name, getattr(other, attribute.name))

    def _apply(self, rule: bytes) -> None:
        word = rule.lower()
        if word in _WORDS:
            _WORDS[word](self)
        elif found := _KEY_RULE.match(rule):
            self._add_keys(found[2], _ACCESS[found[1] and found[1].upper()])
        elif rule[:1] == b"&":
            self._add_channel(rule[1:])
        elif rule[:1] in (b"+", b"-"):
            self._allow(word[1:].decode("ascii", "backslashreplace"), allowed=rule[:1] == b"+")
        elif rule[:1] in (b">", b"#"):
            self._add_password(digest(rule[1:]) if rule[:1] == b">" else _checked_hash(rule[1:]))
        elif rule[:1] in (b"<", b"!"):
            self._remove_password(digest(rule[1:]) if rule[:1] == b"<" else _checked_hash(rule[1:]))
        else:
            raise RuleError(_NO_SELECTORS if rule[:1] == b"(" else _SYNTAX)

    def enable(self, enabled: bool) -> None:
        """Let it in, or not; connections that it has stay."""
        self.enabled = enabled

    def _add_password(self, hashed: str) -> None:
        self.no_password = False
        if hashed not in self.passwords:
            self.passwords.append(hashed)

    def _remove_password(self, hashed: str) -> None:
        if hashed not in self.passwords:
            raise RuleError(_NO_SUCH_PASSWORD)
        self.passwords.remove(hashed)

    def forget_passwords(self, *, then_any: bool) -> None:
        """Have no password: nobody comes in, or `then_any` will do."""
        self.passwords.clear()
        self.no_password = then_any

    def _add_keys(self, pattern: bytes, access: int) -> None:
        if self.may_use_all(READ | WRITE):
            raise RuleError(_AFTER_ALL_KEYS)
        if (pattern, access) not in [key[:2] for key in self.keys]:
            self.keys.append(_key_pattern(pattern, access))

    def _add_channel(self, pattern: bytes) -> None:
        if self.every_channel:
            raise RuleError(_AFTER_ALL_CHANNELS)
        glob(pattern)
        if pattern not in self.channels:
            self.channels.append(pattern)

    def _all_keys(self) -> None:
        self.keys = [_key_pattern(b"*", READ | WRITE)]

    def _all_channels(self) -> None:
        self.channels = [b"*"]

    def _allow(self, name: str, *, allowed: bool) -> None:
        """+name and -name: a command, a subcommand (`container|sub`), or a @category."""
        if name == "@all":
            self.every_command, self.rules = allowed, []
            self.commands = {*TABLE, *ABSENT} if allowed else set()
            return
        chosen = _commands_named(name)
        if (allowed and chosen <= self.commands) or (not allowed and not chosen & self.commands):
            return  # as it is already
        self.commands = self.commands | chosen if allowed else self.commands - chosen
        self.rules = [rule for rule in self.rules if rule[1:] != name and not rule[1:].startswith(f"{name}|")]
        self.rules.append(("+" if allowed else "-") + name)

    def _reset(self) -> None:
        self.enabled = False
        self.forget_passwords(then_any=False)
        self.keys, self.channels = [], []
        self._allow("@all", allowed=False)

    # -- telling ---------------------------------------------------------------------------------------------------

    @property
    def command_rules(self) -> str:
        """Its commands as rules: `-@all +get`."""
        return " ".join(["+@all" if self.every_command else "-@all", *self.rules])

    @property
    def key_rules(self) -> bytes:
        """Its keys as rules: `~a* %R~b*`."""
        return b" ".join(_SPELT[key.access] + key.pattern for key in self.keys)

    @property
    def channel_rules(self) -> bytes:
        """Its channels as rules: `&news.*`."""
        return b" ".join(b"&" + channel for channel in self.channels)

    def __bytes__(self) -> bytes:
        """The line of a configuration or ACL file that makes this user."""
        words = [b"user", self.name, b"on" if self.enabled else b"off"]
        words += [b"nopass"] if self.no_password else []
        words += [b"#" + hashed.encode() for hashed in self.passwords]
        words += [self.key_rules] if self.keys else []
        words += [] if self.every_channel else [b"resetchannels"]
        words += [self.channel_rules] if self.channels else []
        return b" ".join([*words, self.command_rules.encode()])


def _commands_named(name: str) -> set[str]:
    """The commands that a rule names, those of Redis that do not exist here too. Raises RuleError."""
    if name[:1] == "@":
        if name[1:] not in CATEGORIES:
            raise RuleError(_UNKNOWN)
        here = {spec.name for spec in TABLE.values() if name[1:] in spec.categories}
        return here | {absent for absent, categories in ABSENT.items() if name[1:] in categories}
    if name not in TABLE and name not in ABSENT:
        raise RuleError(_UNKNOWN)
    return {name} | {sub for sub in (*TABLE, *ABSENT) if sub.startswith(f"{name}|")}


def _checked_hash(hashed: bytes) -> str:
    found = hashed.decode("ascii", "replace")
    if not _HASH.match(found):
        raise RuleError(_BAD_HASH)
    return found


def _nothing(user: User) -> None:
    """Rules that Redis writes into its files and that have no meaning here."""


_WORDS: dict[bytes, Callable[[User], None]] = {
    b"on": lambda user: user.enable(True),
    b"off": lambda user: user.enable(False),
    b"nopass": lambda user: user.forget_passwords(then_any=True),
    b"resetpass": lambda user: user.forget_passwords(then_any=False),
    b"allkeys": User._all_keys,
    b"~*": User._all_keys,
    b"resetkeys": lambda user: user.keys.clear(),
    b"allchannels": User._all_channels,
    b"&*": User._all_channels,
    b"resetchannels": lambda user: user.channels.clear(),
    b"allcommands": lambda user: user._allow("@all", allowed=True),
    b"nocommands": lambda user: user._allow("@all", allowed=False),
    b"reset": User._reset,
    b"sanitize-payload": _nothing,
    b"skip-sanitize-payload": _nothing,
    b"clearselectors": _nothing,
}
