"""One user: its passwords, and the commands, keys and channels that it may use. The rules are those of Redis 7.

A key pattern gives the right to read, to write, or both. A command that reads or changes data of every key, such as
FLUSHALL, needs that right for every key. So a user with access to some keys gets no information about the others.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cache, partial
from typing import NamedTuple

from kvpage_server.commands.arguments import escaped
from kvpage_server.commands.specs import CATEGORIES, READ, TABLE, WRITE, KeyPrefix, Spec, request_of
from kvpage_server.core import Argument
from kvpage_server.glob import Matches, Patterns, PatternTooLong, glob, is_open_ended

# -- absent ------------------------------------------------------------------------------------------------------------
#
# The commands of Redis 7 that do not exist here, and their ACL categories.
#
# Rules for users may name them, so that an aclfile written for Redis can be used. They are kept in the rules and have
# no effect. docs/compatibility.md lists them, too.

_BY_CATEGORIES = """
admin dangerous hyperloglog slow: pfselftest
admin dangerous hyperloglog slow write: pfdebug
admin dangerous slow: bgrewriteaof cluster|addslots cluster|addslotsrange cluster|bumpepoch
    cluster|count-failure-reports cluster|delslots cluster|delslotsrange cluster|failover cluster|flushslots
    cluster|forget cluster|meet cluster|replicas cluster|replicate cluster|reset cluster|saveconfig
    cluster|set-config-epoch cluster|setslot cluster|slaves debug failover latency|graph module|load module|loadex
    module|unload psync replconf replicaof slaveof sync
bitmap fast read: bitfield_ro getbit
bitmap read slow: bitcount bitpos
bitmap slow write: bitfield bitop setbit
blocking connection slow: waitaof
blocking fast sortedset write: bzpopmax bzpopmin
blocking list slow write: blmove blmpop blpop brpop brpoplpush
blocking read slow stream: xread
blocking slow sortedset write: bzmpop
blocking slow stream write: xreadgroup
connection fast: asking
dangerous fast keyspace write: swapdb
dangerous keyspace slow write: migrate restore restore-asking
dangerous list read set slow sortedset: sort_ro
dangerous list set slow sortedset write: sort
fast hash read: hexists hexpiretime hget hlen hmget hpexpiretime hpttl hstrlen httl
fast hash write: hdel hexpire hexpireat hincrby hincrbyfloat hmset hpersist hpexpire hpexpireat hset hsetnx
fast hyperloglog write: pfadd
fast keyspace write: move renamenx
fast list read: llen
fast list write: lpop lpush lpushx rpop rpush rpushx
fast pubsub: spublish
fast read: lolwut
fast read set: smismember
fast read sortedset: zcard zcount zlexcount zmscore zrank zrevrank zscore
fast read stream: xlen
fast set write: sadd smove spop srem
fast sortedset write: zadd zincrby zpopmax zpopmin zrem
fast stream write: xack xadd xautoclaim xclaim xdel xsetid
fast string write: append incrbyfloat
geo read slow: geodist geohash geopos georadius_ro georadiusbymember_ro geosearch
geo slow write: geoadd georadius georadiusbymember geosearchstore
hash read slow: hgetall hkeys hrandfield hscan hvals
hyperloglog read slow: pfcount
hyperloglog slow write: pfmerge
keyspace read slow: dump
keyspace slow write: copy rename
list read slow: lindex lpos lrange
list slow write: linsert lmove lmpop lrem lset ltrim rpoplpush
pubsub slow: pubsub|shardchannels pubsub|shardnumsub ssubscribe sunsubscribe
read set slow: sdiff sinter sintercard srandmember sunion
read slow sortedset: zdiff zinter zintercard zrandmember zrange zrangebylex zrangebyscore zrevrange zrevrangebylex
    zrevrangebyscore zscan zunion
read slow stream: xinfo|consumers xinfo|groups xinfo|stream xpending xrange xrevrange
read slow string: lcs
scripting slow: eval eval_ro evalsha evalsha_ro fcall fcall_ro function|dump function|help function|kill
    function|list function|stats script|debug script|exists script|flush script|help script|kill script|load
scripting slow write: function|delete function|flush function|load function|restore
set slow write: sdiffstore sinterstore sunionstore
slow: cluster|countkeysinslot cluster|getkeysinslot cluster|links cluster|myshardid function memory|malloc-stats
    memory|purge script xgroup xinfo
slow sortedset write: zdiffstore zinterstore zmpop zrangestore zremrangebylex zremrangebyrank zremrangebyscore
    zunionstore
slow stream: xgroup|help xinfo|help
slow stream write: xgroup|create xgroup|createconsumer xgroup|delconsumer xgroup|destroy xgroup|setid xtrim
slow string write: setrange
"""


def _read(table: str) -> dict[str, frozenset[str]]:
    """Return the categories of each command in a table like `_BY_CATEGORIES`, by the command's name."""
    rows = (row.split(":") for row in re.sub(r"\n +", " ", table).strip().splitlines())
    return {name: frozenset(categories.split()) for categories, names in rows for name in names.split()}


ABSENT = _read(_BY_CATEGORIES)  # categories by name; a subcommand is named `container|sub`


# -- Rights to keys: glob patterns, each with the right to read, to write, or both -------------------------------------

_SIGNS = {READ: b"%R~", WRITE: b"%W~", READ | WRITE: b"~"}
_ACCESSES = (READ, WRITE, READ | WRITE)


class _Rights(NamedTuple):
    """The rights that a user has for the keys that match one pattern. Each item of `accesses` was given by a rule of
    its own.
    """

    open_ended: bool  # whether every name that begins with a match is a match, too
    accesses: frozenset[int]

    def cover(self, key: bytes, access: int) -> bool:
        """Return whether one rule of the pattern gives `access` (READ, WRITE or both) to a key that matches the
        pattern. A KeyPrefix stands for all keys that begin with it, and needs an `open_ended` pattern.
        """
        if type(key) is KeyPrefix and not self.open_ended:
            return False
        return any(given & access == access for given in self.accesses)


def rule_of(access: int, pattern: bytes) -> bytes:
    """Return the ACL rule that gives `access` to the keys of a pattern, for example `%R~news:*`."""
    return _SIGNS[access] + pattern


class KeyRules:
    """A user's key patterns and the rights to their keys, in the order in which they were given."""

    def __init__(self) -> None:
        self._given: dict[tuple[bytes, int], None] = {}
        self._rights: Patterns[_Rights] = Patterns()

    def __bool__(self) -> bool:
        """Return whether there is any rule."""
        return bool(self._given)

    def __bytes__(self) -> bytes:
        """Return the rules as words of an ACL file, in the order in which they were given."""
        return b" ".join(rule_of(access, pattern) for pattern, access in self._given)

    def copy(self) -> KeyRules:
        """Return a copy, which can be changed independently."""
        new = KeyRules()
        new._given, new._rights = self._given.copy(), self._rights.copy()
        return new

    def add(self, pattern: bytes, access: int, matches: Matches) -> None:
        """Give `access` to the keys of a pattern. `matches` is the compiled pattern."""
        before = self._rights.get(pattern)
        accesses = {access} if before is None else before.accesses | {access}
        self._rights.add(pattern, _Rights(is_open_ended(pattern), frozenset(accesses)), matches)
        self._given[pattern, access] = None

    def all(self, access: int) -> bool:
        """Return whether one rule gives `access` (READ, WRITE or both) to every key: a rule for the pattern ``*``."""
        return any(given & access == access and (b"*", given) in self._given for given in _ACCESSES)

    def cover(self, key: bytes, access: int) -> bool:
        """Return whether one rule gives `access` (READ, WRITE or both) to a key, or to all keys with a KeyPrefix."""
        return any(rights.cover(key, access) for rights in self._rights.matching(key))

    def may_cover_some(self, prefix: bytes, access: int) -> bool:
        """Return False if the rules certainly give `access` to no key that begins with `prefix`. True does not mean
        that there is such a key.
        """
        return any(any(given & access == access for given in it.accesses) for it in self._rights.may_match_some(prefix))

    def readable(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return those of `keys` that may be read, in order."""
        return [key for key in keys if self.cover(key, READ)]

    @property
    def cost(self) -> int:
        """Number of patterns that one key is compared with, at most."""
        return self._rights.cost


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
_SPACES = b" \t\n\v\f\r\0"
_KEY_RULE = re.compile(rb"(?:~|%(R|W|RW|WR)~)(.*)\Z", re.DOTALL | re.IGNORECASE)
_ACCESS = {None: READ | WRITE, b"R": READ, b"W": WRITE, b"RW": READ | WRITE, b"WR": READ | WRITE}

Change = Callable[["User"], None]  # applies a rule; raises RuleError


def has_spaces(word: bytes) -> bool:
    """Return whether a name or pattern has white space or a NUL, which would separate words of an ACL file. Redis
    refuses the same characters.
    """
    return any(space in word for space in _SPACES)


class RuleError(ValueError):
    """Error: an ACL rule is invalid, or has no effect after the rules before it."""


class Denial(NamedTuple):
    """A right that a user lacks for a command: to the command itself, to a key, or to a channel."""

    kind: str  # command, key or channel
    what: bytes
    command: str
    user: bytes
    lacks: bytes = b""  # the key rule that the user would need

    @property
    def message(self) -> str:
        """The text of the error reply, which is that of Redis. It does not name the key."""
        if self.kind == "command":
            return f"NOPERM {self.verbose}"
        return f"NOPERM No permissions to access a {self.kind}"

    @property
    def verbose(self) -> str:
        """The reply of ACL DRYRUN, which is that of Redis."""
        user = self.user.decode("utf-8", "surrogateescape")
        if self.lacks:
            lacks = f"without access to every key ({self.lacks.decode()})"
            return f"User {user} has no permissions to run the '{self.command}' command {lacks}"
        if self.kind == "command":
            return f"User {user} has no permissions to run the '{self.command}' command"
        return f"User {user} has no permissions to access the '{self.what.decode('utf-8', 'replace')}' {self.kind}"


def digest(password: bytes) -> str:
    """Return the SHA-256 of a password in lower-case hexadecimal, as users store it."""
    return hashlib.sha256(password).hexdigest()


class User:
    """A user and its rights.

    `commands` has the names of the commands that the user may run, including subcommands and commands of Redis that do
    not exist here; `rules` the ACL rules that result in them.
    """

    enabled = False
    no_password = False  # any password is accepted
    every_command = False  # +@all, which `rules` then restricts
    unrestricted = False  # it may use every command, key and channel, so that no check is necessary

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.passwords: dict[str, None] = {}  # hashed
        self.commands: set[str] = set()
        self.rules: dict[str, bool] = {}  # +name (True) and -name (False) in order, after +@all or -@all
        self.keys = KeyRules()
        self.channels: Patterns[bytes] = Patterns()
        self.edition = object()  # another one after each change of the rights

    # -- checks ----------------------------------------------------------------------------------------------------

    @property
    def every_channel(self) -> bool:
        """Whether the user may use every channel."""
        return b"*" in self.channels

    @property
    def is_administrator(self) -> bool:
        """Whether the user may run every command on every key. Channels do not matter."""
        return self.every_command and not self.rules and self.keys.all(READ) and self.keys.all(WRITE)

    def may_listen(self, channel: bytes, *, as_pattern: bool = False) -> bool:
        """Return whether the user may use a channel: one of its patterns matches the name.

        With `as_pattern`, `channel` is a pattern of PSUBSCRIBE, and must be equal to one of the user's patterns.
        """
        if as_pattern:
            return self.every_channel or channel in self.channels
        return any(True for _ in self.channels.matching(channel))

    def accepts(self, password: bytes) -> bool:
        """Return whether the user is enabled, and a password is one of its passwords or it needs none."""
        given = digest(password)
        # compares all of them, so that the time does not depend on the passwords
        known = [hmac.compare_digest(given, kept) for kept in self.passwords]
        return self.enabled and (self.no_password or any(known))

    def denial(self, spec: Spec, args: Sequence[Argument]) -> Denial | None:
        """Return the first right that the user lacks for a command with these arguments; None if the command is
        allowed.
        """
        return next(filter(None, self.checks(spec, args)), None)

    def denial_of_index(self, name: str, key: bytes) -> Denial | None:
        """Return the denial of the command `name` on an index key, if the user may not read all keys of the request.
        The commands on sets, which show these keys, also need it.
        """
        req_id = request_of(key)
        if req_id is None or self.keys.cover(KeyPrefix(b"kv:%b:" % req_id), READ):
            return None
        return Denial("key", key, name, self.name)

    def checks(self, spec: Spec, args: Sequence[Argument]) -> Iterator[Denial | None]:
        """Check a command with these arguments: yield a Denial for each missing right, and None for each key or channel
        that is allowed.

        A denied command is yielded first, then its keys and channels in order. Each step compares one key or channel
        with up to `cost` patterns, so that the caller can stop between two.
        """
        if spec.name not in self.commands:
            yield Denial("command", spec.name.encode(), spec.name, self.name)
        if spec.all_keys and not self.keys.all(spec.access):
            yield Denial("command", spec.name.encode(), spec.name, self.name, rule_of(spec.access, b"*"))
        if not self.keys.all(READ | WRITE):
            for key, access in spec.uses_of(args):
                yield None if self.keys.cover(key, access) else Denial("key", bytes(key), spec.name, self.name)
        if spec.channels and not self.every_channel:
            for channel in spec.channels_of(args):
                may = self.may_listen(channel, as_pattern=spec.channels == "patterns")
                yield None if may else Denial("channel", channel, spec.name, self.name)

    @property
    def cost(self) -> int:
        """Number of patterns that one key or channel is compared with, at most."""
        return max(self.keys.cost, self.channels.cost)

    # -- changing --------------------------------------------------------------------------------------------------

    def changed(self, rules: Iterable[bytes]) -> User:
        """Return a copy of the user after ACL rules were applied in order. Raises RuleError, which names the first
        invalid rule.
        """
        return self.after((rule, change_of(rule)) for rule in rules)

    def after(self, changes: Iterable[tuple[bytes, Change]]) -> User:
        """Return a copy of the user after changes, each of which is a rule and the result of `change_of` for it.

        Raises RuleError, which names the first invalid rule. The user itself is not changed.
        """
        user = copy(self)
        user.edition = object()
        user.passwords, user.rules, user.commands = self.passwords.copy(), self.rules.copy(), self.commands.copy()
        user.keys, user.channels = self.keys.copy(), self.channels.copy()
        for rule, change in changes:
            try:
                change(user)
            except RuleError as error:
                raise RuleError(f"Error in ACL SETUSER modifier '{escaped(rule)}': {error}") from None
        every = user.every_command and not user.rules and user.every_channel
        user.unrestricted = every and user.keys.all(READ | WRITE)
        return user

    def become(self, other: User) -> None:
        """Take the rights and passwords of another user, which must not be changed any more. The name stays."""
        vars(self).update(vars(other) | {"name": self.name})

    def enable(self, enabled: bool) -> None:
        """Allow or forbid logins. Open connections of the user are not closed."""
        self.enabled = enabled

    def _add_password(self, hashed: str) -> None:
        """Add a password, given as `digest`. After that, a login needs a password."""
        self.no_password = False
        self.passwords[hashed] = None

    def _remove_password(self, hashed: str) -> None:
        """Remove a password, given as `digest`. Raises RuleError if the user does not have it."""
        if hashed not in self.passwords:
            raise RuleError(_NO_SUCH_PASSWORD)
        del self.passwords[hashed]

    def forget_passwords(self, *, then_any: bool) -> None:
        """Remove all passwords. After that, no password is accepted or, with `then_any`, any password."""
        self.passwords.clear()
        self.no_password = then_any

    def _add_keys(self, pattern: bytes, access: int, matches: Matches) -> None:
        """Give `access` to the keys of a pattern, compiled as `matches`. Raises RuleError if the user may use all keys
        already.
        """
        if self.keys.all(READ | WRITE):
            raise RuleError(_AFTER_ALL_KEYS)
        self.keys.add(pattern, access, matches)

    def _add_channel(self, pattern: bytes, matches: Matches) -> None:
        """Allow the channels of a pattern, compiled as `matches`. Raises RuleError if the user may use all channels
        already.
        """
        if self.every_channel:
            raise RuleError(_AFTER_ALL_CHANNELS)
        self.channels.add(pattern, pattern, matches)

    def _forget_keys(self) -> None:
        """Remove all rights to keys."""
        self.keys = KeyRules()

    def _forget_channels(self) -> None:
        """Remove all rights to channels."""
        self.channels = Patterns()

    def _all_keys(self) -> None:
        """Give READ and WRITE access to every key, instead of the rights so far."""
        self._forget_keys()
        self.keys.add(b"*", READ | WRITE, glob(b"*"))

    def _all_channels(self) -> None:
        """Allow every channel, instead of the patterns so far."""
        self._forget_channels()
        self.channels.add(b"*", b"*", glob(b"*"))

    def _allow(self, name: str, *, allowed: bool) -> None:
        """Apply the rule +name or -name to a command, a subcommand (`container|sub`), or a @category.

        Raises RuleError for an unknown name.
        """
        if name == "@all":
            self.every_command, self.rules = allowed, {}
            self.commands = {*TABLE, *ABSENT} if allowed else set()
            return
        chosen = _commands_named(name)
        if allowed:
            self.commands |= chosen
        else:
            self.commands -= chosen
        for covered in (name,) if name[:1] == "@" else chosen:
            self.rules.pop(covered, None)
        self.rules[name] = allowed

    def _reset(self) -> None:
        """Remove all rights and passwords, and disable the user."""
        self.enabled = False
        self.forget_passwords(then_any=False)
        self._forget_keys()
        self._forget_channels()
        self._allow("@all", allowed=False)

    # -- output --------------------------------------------------------------------------------------------------------

    @property
    def command_rules(self) -> str:
        """The rights to commands as ACL rules, for example `-@all +get`."""
        rules = ("+" + name if allowed else "-" + name for name, allowed in self.rules.items())
        return " ".join(["+@all" if self.every_command else "-@all", *rules])

    @property
    def key_rules(self) -> bytes:
        """The rights to keys as ACL rules, for example `~a* %R~b*`."""
        return bytes(self.keys)

    @property
    def channel_rules(self) -> bytes:
        """The rights to channels as ACL rules, for example `&news.*`."""
        return b" ".join(b"&" + channel for channel in self.channels)

    def __bytes__(self) -> bytes:
        """Return the user's line of a configuration or ACL file."""
        words = [b"user", self.name, b"on" if self.enabled else b"off"]
        words += [b"nopass"] if self.no_password else []
        words += [b"#" + hashed.encode() for hashed in self.passwords]
        words += [self.key_rules] if self.keys else []
        words += [] if self.every_channel else [b"resetchannels"]
        words += [self.channel_rules] if self.channels else []
        return b" ".join([*words, self.command_rules.encode()])


def change_of(rule: bytes) -> Change:
    """Return the function that applies an ACL rule to a user. It raises RuleError if the rule is invalid.

    This call itself raises no error. It compiles the rule's pattern.
    """
    word = rule.lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return _rule_with_argument(rule, word)
    except (RuleError, PatternTooLong) as error:
        return partial(_refuse, str(error))  # raised later, because an earlier rule may be invalid, too


def _refuse(why: str, user: User) -> None:
    """Raise RuleError with the reason `why`."""
    raise RuleError(why)


def _rule_with_argument(rule: bytes, word: bytes) -> Change:
    """Return the function that applies a rule with an argument, such as `~key*` or `>password`. `word` is the rule in
    lower case.

    Raises RuleError for an invalid rule, PatternTooLong.
    """
    sign = rule[:1]
    found = _KEY_RULE.match(rule)
    if (found or sign == b"&") and has_spaces(rule):
        raise RuleError(_SYNTAX)
    if found:
        access, matches = _ACCESS[found[1] and found[1].upper()], glob(found[2])
        return lambda user: user._add_keys(found[2], access, matches)
    if sign == b"&":
        matches = glob(rule[1:])
        return lambda user: user._add_channel(rule[1:], matches)
    if sign in (b"+", b"-"):
        return lambda user: user._allow(word[1:1024].decode("ascii", "backslashreplace"), allowed=sign == b"+")
    if sign in (b">", b"#"):
        hashed = digest(rule[1:]) if sign == b">" else _checked_hash(rule[1:])
        return lambda user: user._add_password(hashed)
    if sign in (b"<", b"!"):
        hashed = digest(rule[1:]) if sign == b"<" else _checked_hash(rule[1:])
        return lambda user: user._remove_password(hashed)
    raise RuleError(_NO_SELECTORS if sign == b"(" else _SYNTAX)


@cache
def _commands_named(name: str) -> frozenset[str]:
    """Return the names of the commands that a rule's name or @category includes, also of Redis commands that do not
    exist here. A container includes its subcommands.

    Raises RuleError for an unknown name.
    """
    if name[:1] == "@":
        if name[1:] not in CATEGORIES:
            raise RuleError(_UNKNOWN)
        here = {spec.name for spec in TABLE.values() if name[1:] in spec.categories}
        return frozenset(here | {absent for absent, categories in ABSENT.items() if name[1:] in categories})
    if name not in TABLE and name not in ABSENT:
        raise RuleError(_UNKNOWN)
    return frozenset((name, *(sub for sub in (*TABLE, *ABSENT) if sub.startswith(f"{name}|"))))


def _checked_hash(hashed: bytes) -> str:
    """Return a password's SHA-256 as text. Raises RuleError unless it has 64 lower-case hexadecimal digits."""
    found = hashed.decode("ascii", "replace")
    if not _HASH.match(found):
        raise RuleError(_BAD_HASH)
    return found


def _nothing(user: User) -> None:
    """Do nothing: the effect of rules of Redis that have no meaning here."""


_WORDS: dict[bytes, Callable[[User], None]] = {
    b"on": lambda user: user.enable(True),
    b"off": lambda user: user.enable(False),
    b"nopass": lambda user: user.forget_passwords(then_any=True),
    b"resetpass": lambda user: user.forget_passwords(then_any=False),
    b"allkeys": User._all_keys,
    b"~*": User._all_keys,
    b"resetkeys": lambda user: user._forget_keys(),
    b"allchannels": User._all_channels,
    b"&*": User._all_channels,
    b"resetchannels": lambda user: user._forget_channels(),
    b"allcommands": lambda user: user._allow("@all", allowed=True),
    b"nocommands": lambda user: user._allow("@all", allowed=False),
    b"reset": User._reset,
    b"sanitize-payload": _nothing,
    b"skip-sanitize-payload": _nothing,
    b"clearselectors": _nothing,
}
