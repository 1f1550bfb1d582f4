"""Specifications of commands, the rows of the command table: keys of the arguments, values that must be in memory,
usage, reply.

This module contains no commands, and does not depend on clients. The decorator `registry.command` declares a command,
in a module of `families`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

from kvpage_server.commands.arguments import WRONG_TYPE, as_integer, plain, plain_all, shorten
from kvpage_server.core import Argument, Command
from kvpage_server.resp import Reply, ReplyError
from kvpage_server.store.disk.prefetch import Needed, Prefetcher
from kvpage_server.store.keyspace import Keyspace

# -- keys --------------------------------------------------------------------------------------------------------------
#
# The keys that a command's arguments name, and the access to them. ACL checks, tracking and COMMAND GETKEYS need them.
#
# `keys=` in a row has the positions of the keys, if they are fixed. The page family's keys are made from several
# arguments: `uses=` makes them, with one of the classes here. Cluster clients get the positions of the request ids,
# because a request id with braces has the same slot as all its pages.

READ, WRITE = 1, 2  # access to a key: bits


_LONGEST_PART = 512  # bytes; a request id has at most 256


class KeyPrefix(bytes):
    """A prefix that stands for every key that begins with it."""


def _part_of_name(word: Argument) -> bytes:
    """Return a request id or a number of a page's name. A word that is too long for any is cut, as commands refuse it,
    and a command may have a thousand words of megabytes.
    """
    return word if isinstance(word, bytes) else bytes(word.body[:_LONGEST_PART])


Use = tuple[bytes, int]  # a key, or a KeyPrefix; and READ, WRITE or both
Uses = Callable[[Sequence[Argument], int], Iterator[Use]]  # called with a command's arguments and its access


@dataclass(frozen=True)
class Naming:
    """A maker of the keys of a command whose arguments name pages or requests.

    Request ids are the argument at index `first` and, if `step` is not 0, every `step`-th argument after it.
    """

    first: int
    step: int = 0

    def places(self, words: int) -> tuple[int, int, int]:
        """Return the positions of the request ids among a command's words, for `Spec.keys`: first, last (-1 for the
        end), step. The command's name has `words` words.
        """
        at = self.first + words
        return (at, -1, self.step) if self.step else (at, at, 1)

    def starts(self, args: Sequence[Argument]) -> Iterable[int]:
        """Return the indexes of the request ids in `args`."""
        return range(self.first, len(args) if self.step else min(self.first + 1, len(args)), self.step or 1)


class pages(Naming):
    """The keys of pages that are named by five arguments each: req, layer, head, page, type."""

    def __call__(self, args: Sequence[Argument], access: int) -> Iterator[Use]:
        """Yield the key of each named page, with `access`. The arguments are not checked."""
        for start in self.starts(args):
            yield b"kv:%b" % b":".join(map(_part_of_name, args[start : start + 5])), access


class requests(Naming):
    """Every key of each named request, as a KeyPrefix."""

    def __call__(self, args: Sequence[Argument], access: int) -> Iterator[Use]:
        """Yield the prefix `kv:{req}:` of each named request once, with `access`."""
        for req_id in dict.fromkeys(_part_of_name(args[start]) for start in self.starts(args)):
            yield KeyPrefix(b"kv:%b:" % req_id), access


class batches(requests):
    """Every key of each request of a batch, as a KeyPrefix. The word before the first name is the number of names."""

    def starts(self, args: Sequence[Argument]) -> Iterable[int]:
        return range(self.first, end_of_batch(args, self.first, self.step), self.step)


def end_of_batch(args: Sequence[Argument], first: int, width: int) -> int:
    """Return the index behind the items of a batch, where its options begin. The items begin at index `first`, behind
    their number, and have `width` arguments each. If the number is wrong, that is the end of `args`.
    """
    count = as_integer(args[first - 1])
    return len(args) if count is None or count < 0 else min(first + count * width, len(args))


class prefixes(requests):
    """Every key of each request that KVPAGEPREFIX names, of blocks and of states, as a KeyPrefix."""

    def starts(self, args: Sequence[Argument]) -> Iterable[int]:
        blocks, states = prefix_words(args)
        return chain(range(blocks.start, blocks.stop, 2), range(states.start, states.stop, 3))


def prefix_words(args: Sequence[Argument]) -> tuple[range, range]:
    """Return the indexes of KVPAGEPREFIX's arguments for blocks, two each, and for states, three each, behind LENGTHS
    and their number. If a number is wrong, the last name may be incomplete.
    """
    count = as_integer(args[2])
    end = len(args) if count is None or count < 0 else min(3 + 2 * count, len(args))
    if end < len(args) and plain(args[end]).upper() == b"LENGTHS":
        return range(3, end), range(min(end + 2, len(args)), len(args))
    return range(3, len(args)), range(0)


def key_of_set(args: Sequence[Argument], access: int) -> Iterator[Use]:
    """Yield SET's key. With the option GET, the key is read as well as written."""
    reads = any(_part_of_name(word).upper() == b"GET" for word in args[2:])
    yield plain(args[0]), access | READ if reads else access


def keys_at(args: Sequence[Argument], first: int, last: int, step: int, access: int) -> Iterator[Use]:
    """Yield the keys at the indexes from `first` to `last` in `args`, every `step`, with `access`.

    A negative `last` counts from the end: -1 is the last argument.
    """
    for key in plain_all(args[first : last + 1 if last >= 0 else len(args) + last + 1 : step]):
        yield key, access


# -- needs -------------------------------------------------------------------------------------------------------------
#
# Values that must be in memory for a command, if values may be on disk only: `needs=` in its row of the table.
#
# Without `needs=`, a command needs everything that its arguments name: the values of its keys, the blocks that it
# writes pages into, all blocks of its requests. So a new command may be slower than necessary, but never wrong. A
# function of needs must not read stored values: the needs of all commands of a transaction are found before the first
# one runs.


class Named(Protocol):
    """The part of a table row that functions of needs use."""

    def uses_of(self, args: Sequence[Argument]) -> Iterator[Use]:
        """Yield each key that the arguments name, and the access to it (READ, WRITE or both)."""


Needs = Callable[[Prefetcher, Named, Sequence[Argument]], Iterable[Needed]]

_LONGEST_PAGE = 10  # digits of a page id at most


def everything(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Return all values that the arguments name: the values of keys, extents that contain pages, all blocks of
    requests.
    """
    keys = [key for key, _ in spec.uses_of(args)]
    named = [key for key in keys if not isinstance(key, KeyPrefix)]
    requests = [key.split(b":")[1] for key in keys if isinstance(key, KeyPrefix)]
    blocks = ((req_id, block.page) for req_id in requests for block in lookup.index.of(req_id))
    return chain(lookup.values_of(named), lookup.extents_of(named), lookup.blocks_at(blocks))


def nothing(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Return nothing: the command needs only the index, or replaces or removes values without reading them."""
    return ()


def values(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Return the values of the keys that the arguments name."""
    return lookup.values_of([key for key, _ in spec.uses_of(args)])


def extents(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Return the extents that contain pages which the arguments name, because a write to such a page splits its
    extent.
    """
    return lookup.extents_of([key for key, _ in spec.uses_of(args)])


def as_used(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Return the values of the keys that the arguments read, and the extents that contain pages which they write."""
    uses = list(spec.uses_of(args))
    read = lookup.values_of(key for key, access in uses if access & READ)
    return chain(read, lookup.extents_of(key for key, access in uses if access & WRITE))


def extents_of_pages(first: int, step: int = 0) -> Needs:
    """Return the needs of a command that writes pages: the extents of the blocks that the pages belong to.

    A page has the words `req layer head page type`. They begin at index `first` and, with a `step` other than 0, again
    at every `step`-th argument after it.
    """

    def needs(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
        """Return the extents of the blocks in which `args` name pages."""
        stop = len(args) if step else first + 1
        reqs, pages = args[first : stop : step or 1], args[first + 3 : stop + 3 : step or 1]
        return lookup.extents_at(dict.fromkeys(_names(reqs, pages)))

    return needs


def blocks(first: int) -> Needs:
    """Return the needs of a command whose arguments from index `first` on are pairs of request id and page id: the
    values of these blocks.
    """

    def needs(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
        """Return the values of the blocks that `args` name."""
        return lookup.blocks_at(dict.fromkeys(_names(args[first::2], args[first + 1 :: 2])))

    return needs


def blocks_of_request(lookup: Prefetcher, spec: Named, args: Sequence[Argument]) -> Iterable[Needed]:
    """Return the values of the blocks that the arguments `req [page ...]` name; all blocks of the request without page
    ids.
    """
    if len(args) == 1:
        return everything(lookup, spec, args)
    return lookup.blocks_at(dict.fromkeys(_names([args[0]] * (len(args) - 1), args[1:])))


def _names(req_ids: Sequence[Argument], pages: Sequence[Argument]) -> Iterator[tuple[bytes, int]]:
    """Yield (request id, page id) of each pair. Skip a pair whose page id is no number: the command itself
    reports it.
    """
    for req_id, page in zip(map(_part_of_name, req_ids), map(_part_of_name, pages), strict=False):
        if page.isdigit() and len(page) <= _LONGEST_PAGE:
            yield req_id, int(page)


# -- spec --------------------------------------------------------------------------------------------------------------
#
# The command table. A row has all properties of a command.
#
# Arity errors, ACL checks, COMMAND and the docs are made from it. Special treatment of some commands is a field of the
# row, too: no code outside `families/` depends on the name of a command.

# Redis's categories, and the page family's; most of Redis's have no command here.
_CATEGORIES = """keyspace read write set sortedset list hash string bitmap hyperloglog geo stream pubsub admin fast slow
    blocking dangerous connection transaction scripting page"""
CATEGORIES = tuple(_CATEGORIES.split())
_FLAGS = """write readonly denyoom admin pubsub noscript blocking loading stale fast no_auth no_multi allow_busy
    no_async_loading skip_monitor skip_slowlog movablekeys may_replicate no_mandatory_keys"""
FLAGS = frozenset(_FLAGS.split())


WORDS_PER_STEP = 1024  # words of a command that runs at once; longer ones run in parts
_PART = 128  # items of a part
_SHOWN = 128  # bytes of an unknown name that an error shows


@dataclass(frozen=True, slots=True)
class Parts:
    """The division of a command of more than WORDS_PER_STEP words into commands that run one after the other.

    Each part has the `first` arguments of the command, and some of its items, which have `width` arguments each.
    `joined` says how the replies of the parts become one reply: `sum`, they are added; `array`, they are joined to one
    array with `items` elements for each argument; `apart`, each is a reply of its own; `last`, only the last one is
    sent. A command with an empty `joined` divides its work by itself and runs as a whole. Only its rights are checked
    part by part.
    """

    first: int = 0
    width: int = 1  # arguments of an item
    joined: str = ""
    items: int = 1

    def divided(self, words: Command, named: int) -> Iterator[Command]:
        """Yield the words of each part: the name, which has `named` words, the first arguments, and up to `_PART`
        items.
        """
        first, size = named + self.first, _PART * self.width
        return (words[:first] + words[start : start + size] for start in range(first, len(words), size))


class BatchParts(Parts):
    """The division of a batch with options behind its items, which belong to no part."""

    def divided(self, words: Command, named: int) -> Iterator[Command]:
        """Yield commands with some of the items each."""
        return super().divided(words[: named + end_of_batch(words[named:], self.first, self.width)], named)


class PrefixParts(Parts):
    """The division of KVPAGEPREFIX: parts with blocks, and parts with states."""

    def divided(self, words: Command, named: int) -> Iterator[Command]:
        """Yield commands with some of the blocks or states each."""
        blocks, states = prefix_words(words[named:])
        head, size = words[: named + 2], 3 * _PART
        yield from super().divided(words[: named + blocks.stop], named)
        for start in range(named + states.start, named + states.stop, size):
            yield [*head, b"0", b"LENGTHS", b"0", *words[start : start + size]]


@dataclass(frozen=True, slots=True, eq=False)
class Spec:
    """A row of the table: one command or subcommand."""

    name: str
    arity: int  # words with the name; negative: at least that many
    most: int  # the most words of a subcommand, 0 for no limit
    parts: Parts | None  # its division above WORDS_PER_STEP words; None: it is refused
    flags: frozenset[str]  # Redis's command flags
    stores: bool  # `denyoom`: it is refused when memory is full
    writes: bool  # `write`
    writes_keys: bool  # `write`, and the row has `keys=`; False if it only has `uses=`, as for pages
    writes_several: bool  # `writes_keys`, and there may be more than one key
    categories: frozenset[str]  # ACL categories
    keys: tuple[int, int, int]  # first key, last key, step; the request ids in the page family; zeros for no keys
    uses: Uses | None  # makes keys from several arguments, or an access that depends on arguments
    access: int  # READ, WRITE or both: the access to its keys
    all_keys: bool  # it reads or changes data of every key, or data that only administrators should see
    filtered: bool  # it shows and changes only data that its user may see and change
    secret: bool  # its arguments are not shown to other clients
    hashed: bool  # its long words are bodies of pages, which are hashed as they arrive
    unqueued: bool  # it runs at once in a transaction; others wait for EXEC
    runs_queued: bool  # EXEC: it runs the queued commands
    while_subscribed: bool  # a RESP2 client may call it while it listens to channels
    keeps_caching: bool  # after it, CLIENT CACHING still holds for the next command
    needs: Needs  # values that must be in memory for it, if there is a disk
    fetches: bool  # it loads values while its reply is sent; EXEC loads all values first
    preloads: bool  # it needs values, and does not load them itself
    channels: str  # the arguments that are pub/sub channels: "", "first", "all"; "patterns": all, as patterns
    group: str
    since: str
    usage: str
    summary: str
    complexity: str
    reply: str  # the shape of the reply, see `schema`; empty for a container
    tips: tuple[str, ...]  # Redis's command tips
    handler: Callable[[Any, list[Argument]], Reply]  # called with the client, a `context.Client`
    parent: str  # the container of a subcommand, empty for a command
    words: int  # number of words of its name: 2 for a subcommand

    def fits(self, count: int) -> bool:
        """Return whether the command takes `count` words, including its name."""
        return count == self.arity or 0 < -self.arity <= count

    def uses_of(self, args: Sequence[Argument]) -> Iterator[Use]:
        """Yield each key, or KeyPrefix, that the arguments name, and the access to it (READ, WRITE or both).

        `args` are the words after the name. A key may be yielded twice.
        """
        if self.uses is not None:
            return self.uses(args, self.access)
        first, last, step = self.keys
        if not first:
            return iter(())
        before = self.words  # positions count the words of the name, too
        return keys_at(args, first - before, last - before if last >= 0 else last, step, self.access)

    def channels_of(self, args: Sequence[Argument]) -> list[bytes]:
        """Return the pub/sub channels that the arguments name, or the patterns if `channels` is "patterns". Valid only
        for commands with `channels`.
        """
        return plain_all(args[:1] if self.channels == "first" else args)


TABLE: dict[str, Spec] = {}  # every command and subcommand by its lower-case name
BY_WORD: dict[Argument, Spec] = {}  # commands by the word that clients send, in lower and upper case
SUBCOMMANDS: dict[str, dict[bytes, Spec]] = {}  # by container, then by word


def subcommands(name: str) -> list[Spec]:
    """Return the rows of a container's subcommands; none for anything else."""
    return list(dict.fromkeys(SUBCOMMANDS.get(name, {}).values()))


def top_level() -> list[Spec]:
    """Return the rows of all commands, without those of subcommands."""
    return [spec for spec in TABLE.values() if not spec.parent]


def _beginning(word: Argument) -> bytes:
    """Return the first bytes of a client's word, without a copy of all its bytes."""
    return word[:_SHOWN] if isinstance(word, bytes) else bytes(word.body[:_SHOWN])


def lower_name(word: Argument) -> bytes:
    """Return the first bytes of a client's word in lower case. No name of a command is that long."""
    return _beginning(word).lower()


def named(word: Argument) -> Spec | None:
    """Return the row of the command with a client's first word, in any case; None for an unknown command."""
    return BY_WORD.get(word) or BY_WORD.get(lower_name(word))  # mixed case is rare


def spec_of(words: Sequence[Argument]) -> Spec | None:
    """Return the row for a client's words, whatever their number; None for an unknown command or subcommand.

    It is the row of a container if only its name is given.
    """
    spec = named(words[0])
    if spec is None or len(words) == 1 or spec.name not in SUBCOMMANDS:
        return spec
    return SUBCOMMANDS[spec.name].get(lower_name(words[1]))


def find(words: Sequence[Argument]) -> Spec:
    """Return the row for a client's words, which includes the row of a subcommand.

    Raises ReplyError for an unknown command or subcommand, or a wrong number of words.
    """
    spec = named(words[0])
    if spec is None:
        raise ReplyError(_unknown(words))
    if len(words) > 1 and spec.name in SUBCOMMANDS:
        spec = _find_sub(spec, words[1])
    if not spec.fits(len(words)):
        raise ReplyError(f"ERR wrong number of arguments for '{spec.name}' command")
    return spec


def too_many(spec: Spec, words: Sequence[Argument]) -> ReplyError:
    """Return Redis's error for a subcommand with more words than `Spec.most`. It is not raised here."""
    shown, container = shorten(_beginning(words[1]), _SHOWN), spec.parent.upper()
    return ReplyError(f"ERR unknown subcommand or wrong number of arguments for '{shown}'. Try {container} HELP.")


def _find_sub(spec: Spec, word: Argument) -> Spec:
    """Return the row of a container's subcommand. Raises ReplyError for an unknown one."""
    found = SUBCOMMANDS[spec.name].get(lower_name(word))
    if found is None:
        shown = shorten(_beginning(word), _SHOWN)
        raise ReplyError(f"ERR unknown subcommand '{shown}'. Try {spec.name.upper()} HELP.")
    return found


def _unknown(words: Sequence[Argument]) -> str:
    """Return the text of Redis's error for an unknown command: up to 128 bytes of its name, and its first arguments, up
    to about 128 bytes of them.
    """
    shown, room = "", _SHOWN
    for word in words[1:]:
        if room <= 0:
            break
        shown += f"'{shorten(_beginning(word), room)}' "
        room = _SHOWN - len(shown)
    return f"ERR unknown command '{shorten(_beginning(words[0]), _SHOWN)}', with args beginning with: {shown}"


# -- shape -------------------------------------------------------------------------------------------------------------
#
# The shape of a reply: in words, as in the row of the table, and as a JSON schema, as in Redis's tables.
#
# ``bulk | null`` is one of the two. ``array of bulk or null`` has items of both kinds. The words are the keys of
# `_TYPES`; most are names of RESP types. `nothing` means no reply at all.

_TYPES: dict[str, dict[str, Any]] = {
    "OK": {"const": "OK"},
    "simple": {"type": "string"},
    "bulk": {"type": "string"},
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "null": {"type": "null"},
    "map": {"type": "object"},
    "array": {"type": "array"},
    "push": {"type": "array"},
    "set": {"type": "array", "uniqueItems": True},
    "nothing": {"const": None},
}


def schema(shape: str) -> dict[str, Any]:
    """Return the JSON schema of a reply's shape, for example of ``bulk | null``. Raises KeyError for an unknown
    word.
    """
    return _one_of([_alternative(part) for part in shape.split(" | ")])


def _alternative(shape: str) -> dict[str, Any]:
    """Return the schema of one alternative of a shape, for example of ``array of bulk or null``."""
    whole, _, items = shape.partition(" of ")
    if not items:
        return _TYPES[whole]
    return _TYPES[whole] | {"items": _one_of([_TYPES[item] for item in items.split(" or ")])}


def _one_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a schema that allows each of some schemas."""
    return schemas[0] if len(schemas) == 1 else {"oneOf": schemas}


# -- usage -------------------------------------------------------------------------------------------------------------
#
# Usage strings, and their conversion into the argument trees of COMMAND DOCS, from which redis-cli makes its hints.
#
# The grammar is that of Redis's documentation. Lower-case words are values, and upper-case words are tokens. A token
# before a value names it. ``[ ]`` is optional, and ``< a | b >`` or ``[a | b]`` is one of several. ``key [key ...]``
# means that the argument before the brackets can be repeated.

_TOKEN = re.compile(r"\.\.\.|[\[\]<>|]|[^\s\[\]<>|]+")
_INTEGERS = """M N P count cursor decrement dtype end head head_dim heads increment index layer layers lease_ms
    milliseconds need numreplicas page page_size pages_per_block protover seconds start timeout ttl type"""
_KINDS = dict.fromkeys(_INTEGERS.split(), "integer") | {
    "key": "key",
    "pattern": "pattern",
    "unix-time-seconds": "unix-time",
    "unix-time-milliseconds": "unix-time",
}


def arguments(usage: str) -> list[dict[str, Any]]:
    """Return the argument tree of a usage string: a list of maps, as in the reply of COMMAND DOCS."""
    words = _TOKEN.findall(usage)
    found, rest = _sequence(words)
    assert not rest, f"unbalanced usage: {usage}"
    return found


def arity(name: str, usage: str) -> int:
    """Return the number of words of a call, including its name, negative if there can be more, as in Redis's tables."""
    least, more = _words(arguments(usage))
    count = name.count("|") + 1 + least
    return -count if more else count


def _words(found: list[dict[str, Any]]) -> tuple[int, bool]:
    """Return the least number of words of an argument tree, and whether a call may have more."""
    least, may_take_more = 0, False
    for argument in found:
        inner = argument.get("arguments", [])
        if argument["type"] == "oneof":
            choices = [_words([choice]) for choice in inner]
            count = min(choice for choice, _ in choices)
            more = any(open_ended or choice > count for choice, open_ended in choices)
        elif argument["type"] == "block":
            count, more = _words(inner)
        else:
            count, more = 1 + ("token" in argument and argument["type"] != "pure-token"), False
        flags = argument.get("flags", [])
        may_take_more |= more or bool(flags)
        least += 0 if "optional" in flags else count
    return least, may_take_more


def _sequence(words: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the argument maps up to a closing bracket or a bar, and the tokens from there on.

    `words` are tokens of a usage string.
    """
    found: list[dict[str, Any]] = []
    while words and words[0] not in ("]", ">", "|"):
        word, words = words[0], words[1:]
        if word in ("[", "<"):
            group, words = _group(words, optional=word == "[")
            if group.get("flags") == ["repeats"]:
                _mark_repeating(found, group)
            else:
                found.append(group)
        elif word == "...":
            found.append({"name": "...", "type": "string"})
        elif _is_token(word):
            found.append({"name": word.lower(), "type": "pure-token", "token": word})
            if words and not _is_token(words[0]) and words[0] not in ("[", "]", "<", ">", "|", "..."):
                found[-1] = _named_value(word, words[0])
                words = words[1:]
        else:
            found.append(_value(word))
    return found, words


def _group(words: list[str], *, optional: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the argument map of a bracketed group, and the tokens behind its closing bracket.

    `words` begin after the opening bracket. The flag "repeats" marks a group that ends in ``...``.
    """
    choices: list[list[dict[str, Any]]] = []
    while True:
        choice, words = _sequence(words)
        choices.append(choice)
        closing, words = words[0], words[1:]
        if closing != "|":
            break
    if len(choices) == 1 and choices[0] and choices[0][-1]["name"] == "...":
        return {"flags": ["repeats"], "arguments": choices[0][:-1]}, words
    parts = [_as_one(choice) for choice in choices]
    group = parts[0] if len(parts) == 1 else {"name": "choice", "type": "oneof", "arguments": parts}
    if optional:
        group = {**group, "flags": ["optional", *group.get("flags", [])]}
    return group, words


def _as_one(arguments: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one argument map for a list of them: the only one, or a block of all."""
    return arguments[0] if len(arguments) == 1 else {"name": "group", "type": "block", "arguments": arguments}


def _mark_repeating(found: list[dict[str, Any]], group: dict[str, Any]) -> None:
    """Mark arguments as repeated: the ones before the group, as in `key [key ...]`, or otherwise the group itself."""
    count = len(group["arguments"])
    names = [argument["name"] for argument in group["arguments"]]
    if [argument["name"] for argument in found[-count:]] == names:
        repeated = _as_one(found[-count:])
        del found[-count:]
        found.append({**repeated, "flags": ["multiple"]})
    else:
        found.append({**_as_one(group["arguments"]), "flags": ["optional", "multiple"]})


def _is_token(word: str) -> bool:
    """Return whether a word of a usage string is a literal token, and not the name of a value. `N` and `P` are
    names.
    """
    return word.isupper() and len(word) > 1


def _named_value(token: str, word: str) -> dict[str, Any]:
    """Return the argument map of a value that follows a token."""
    value = {**_value(word), "token": token}
    return {**value, "type": "string"} if token == "TYPE" else value  # SCAN's type is a name, a page's is a number


def _value(word: str) -> dict[str, Any]:
    """Return the argument map of a value, whose type follows from its name."""
    value = {"name": word, "type": _KINDS.get(word, "string")}
    return {**value, "key_spec_index": 0} if word == "key" else value


# -- Index keys --------------------------------------------------------------------------------------------------------
#
# `kv:{req}:index` is the read-only key with the page keys of a request. It exists while the request has a page, and is
# a set. It can't be written and has no TTL. KEYS and SCAN do not list it: it is a view of keys that they list anyway.
# SCAN with TYPE set lists only these keys, one for each request.

INDEX_READ_ONLY = "ERR an index key is read-only: it lists the pages that its request has"
INDEX_SUFFIX = b":index"
_INDEX_KEY = re.compile(rb"kv:([^\x00-\x20\x7f:]{1,256}):index\Z")
_DERIVED_KEY = re.compile(rb"kv:([^\x00-\x20\x7f:]{1,256}):(?:index)?\Z")


def request_of(key: bytes) -> bytes | None:
    """Return the request id in an index key; None for any other key."""
    found = _INDEX_KEY.match(key)
    return found[1] if found else None


def derived_from(key: bytes) -> bytes | None:
    """Return the request id in a key that changes with the request's pages; None for any other key.

    These are the index key, and `kv:{req}:`, which stands for all keys of the request.
    """
    found = _DERIVED_KEY.match(key)
    return found[1] if found else None


def lists_pages(keyspace: Keyspace, key: bytes) -> bool:
    """Return whether `key` is the index key of a request that has a page that has not expired."""
    req_id = request_of(key)
    return req_id is not None and keyspace.listing.has_pages(req_id)


def names_index(spec: Spec, words: Command) -> bool:
    """Return whether one of a command's keys is an index key. `words` are all words, and `spec.keys` has fixed
    positions.
    """
    first, last, step = spec.keys
    for key in (words[first],) if first == last else words[first : last + 1 or None : step]:
        if type(key) is bytes and key.endswith(INDEX_SUFFIX) and _INDEX_KEY.match(key):
            return True
    return False


def refuse_to_write(spec: Spec, words: Command) -> None:
    """Raise ReplyError if one of the keys of a command that writes is an index key, which is read-only."""
    if names_index(spec, words):
        raise ReplyError(INDEX_READ_ONLY)


def refuse_as_string(keyspace: Keyspace, key: bytes) -> None:
    """Raise ReplyError (WRONGTYPE) if `key` is the index key of a request that has a page: it is a set, not a
    string.
    """
    if key.endswith(INDEX_SUFFIX) and lists_pages(keyspace, key):
        raise ReplyError(WRONG_TYPE)
