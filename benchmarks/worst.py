"""Every command of the table with its worst arguments, and the keys that make them worst.

Very many keys: absent, present, in blocks, on disk alone; very many words; values as large as may be; thousands of
connections, users, patterns and channels. A new command of the table needs its worst case here: a test checks this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import kvpage_server.commands.families  # noqa: F401  fills the table
from kvpage_server.commands.context import MOST_QUEUED
from kvpage_server.commands.specs import TABLE, WORDS_PER_STEP
from kvpage_server.core import LONGEST_PATTERN
from kvpage_server.lossless import encode_block_body
from kvpage_server.page import MAX_SINGLE_PAGES, BlockShape, DType, Plane, checksum

MANY = 100_000
_LAYERS, _HEADS = 125, 8  # layers and heads of a block with a thousand pages
_PAGES = _LAYERS * _HEADS
_MAPPED = (WORDS_PER_STEP - 4) // 2  # blocks in a KVMAP BLOCKMGET or COPY
_LONG = b"[a-z]" * (LONGEST_PATTERN // 5 - 3)  # the part of a pattern that takes longest to compile

# The cost of these does not depend on their arguments or on existing keys.
_PLAIN = """acl|cat acl|genpass acl|whoami client|caching client|getname client|getredir client|id client|info
    client|no-evict client|no-touch client|reply client|setinfo client|setname client|trackinginfo client|unblock
    cluster|info cluster|keyslot cluster|myid cluster|nodes cluster|shards cluster|slots
    command|count discard kvmap|area kvmap|attach kvmap|socket lastsave latency|doctor latency|latest module|list multi
    pubsub|numpat quit readonly readwrite
    role select slowlog|len time unwatch wait"""
PLAIN = frozenset(_PLAIN.split())
NOT_ASKED = {"shutdown": "it ends the server"}

Words = list[bytes]


class Scene(NamedTuple):
    """A command of `words`, asked when what `before` stores is there; `cold`: on disk alone.

    `crowd` are so many other connections, each of which has said `they_say`. `rest` are the seconds in which work after
    the reply is measured. `after` undoes what FLUSHALL does not.
    """

    name: str
    words: Words
    before: Sequence[Words] = ()
    cold: bool = False
    crowd: int = 0
    they_say: Sequence[Words] = ()
    rest: float = 0.0
    after: Sequence[Words] = ()

    @property
    def command(self) -> str:
        """Return the name of the command's row in the table."""
        return row_of(self.words)


def row_of(words: Words) -> str:
    """Return the name of the row in the command table for a command's words."""
    name = words[0].lower().decode()
    sub = f"{name}|{words[1].lower().decode('latin1')}" if len(words) > 1 else name
    return sub if sub in TABLE else name


def spell(words: Sequence[bytes]) -> bytes:
    """Encode a command in RESP."""
    parts = chain.from_iterable((b"$%d\r\n" % len(word), word, b"\r\n") for word in words)
    return b"*%d\r\n" % len(words) + b"".join(parts)


def scenes(many: int) -> Iterator[Scene]:
    """Yield every command with its worst arguments, `many` of them."""
    for family in (
        _keys,
        _pages,
        _blocks,
        _requests,
        _all,
        _single,
        _large,
        _rights,
        _users,
        _crowds,
        _listeners,
        _rest,
    ):
        yield from family(many)
    for name in sorted(PLAIN):
        yield Scene("as it is", _with_arguments(name))


def scene_name(scene: Scene) -> str:
    """Return the first words of a table row."""
    return f"{scene.command.replace('|', ' ').upper()} {scene.name}"


def _with_arguments(name: str) -> Words:
    """Return a command with the smallest number of arguments."""
    words = name.encode().split(b"|")
    return words + [b"1"] * (abs(TABLE[name].arity) - len(words))


# -- keys and pages ------------------------------------------------------------------------------------------------


def _keys(many: int) -> Iterator[Scene]:
    keys = [b"key:%d" % at for at in range(many)]
    short = _strings(many)
    long = [b"MSET", *(word for key in keys for word in (key, b"v" * 2000))]
    yield Scene("new", short)
    yield Scene("new, long", long)
    yield Scene("again", short, [short])
    yield Scene("too many", [b"MSETNX", *short[1:]])
    for command in (b"DEL", b"UNLINK", b"EXISTS", b"TOUCH", b"MGET", b"WATCH"):
        words = [command, *keys]
        yield Scene("absent", words)
        yield Scene("present", words, [short])
        yield Scene("present, long", words, [long])
        yield Scene("cold", words, [long], cold=True)
    named = [b"%d" % at + b"k" * 8000 for at in range(min(many // 200, 500))]
    stored = [b"MSET", *(word for key in named for word in (key, b"v"))]
    for command in (b"DEL", b"EXISTS", b"MGET", b"WATCH"):
        yield Scene("keys of 8 KB", [command, *named], [stored])
    yield Scene("keys of 8 KB", [b"MSETNX", *stored[1:]])
    mapped = [b"KVMAP", b"MGET", *keys]
    yield Scene("present, long", mapped, [long])
    yield Scene("cold", mapped, [long], cold=True)
    yield Scene("unknown", [b"KVMAP", b"RELEASE", *(b"%d" % (at + 1) for at in range(many))])
    for command in (b"PING", b"GET", b"COMMAND", b"INFO", b"HELLO", b"AUTH", b"FLUSHALL", b"BGSAVE", b"SET"):
        yield Scene("words", [command, *keys])
    yield Scene("ten times as many words", [b"PING", *(b"%d" % at for at in range(10 * many))])


def _pages(many: int) -> Iterator[Scene]:
    names = [_page(b"r", at) for at in range(many)]
    keys = [b"kv:" + b":".join(name) for name in names]
    count, arguments = b"%d" % many, list(chain.from_iterable(names))
    others = list(chain.from_iterable(_page(b"q", at) for at in range(many)))
    stored = [b"KVPAGEMSET", count, *_with_bodies(names, b"b" * 64)]
    large = [b"KVPAGEMSET", count, *_with_bodies(names, b"b" * 4096)]
    blocks = [_block(b"r", page) for page in range(-(-many // _PAGES))]
    yield Scene("new", stored)
    yield Scene("again", stored, [stored])
    yield Scene("in blocks", stored, blocks)
    yield Scene("in cold blocks", stored, blocks, cold=True)
    for reading in (b"KVPAGEMGET", b"KVPAGEMEXISTS"):
        yield Scene("absent", [reading, count, *arguments])
        yield Scene("present", [reading, count, *arguments], [stored])
        yield Scene("in blocks", [reading, count, *arguments], blocks)
        yield Scene("absent beside blocks", [reading, count, *others], blocks)
        yield Scene("cold", [reading, count, *arguments], [large], cold=True)
        yield Scene("in cold blocks", [reading, count, *arguments], blocks, cold=True)
    for command in ([b"DEL"], [b"EXISTS"], [b"MGET"], [b"KVPAGEKEEP", b"t", b"1", b"1000"]):
        yield Scene("pages", [*command, *keys], [stored])
        yield Scene("pages in blocks", [*command, *keys], blocks)
        yield Scene("cold pages", [*command, *keys], [large], cold=True)
    layers = [[b"r", b"%d" % layer, b"0", b"0", b"0"] for layer in range(min(many, MAX_SINGLE_PAGES))]
    tall = [b"KVPAGEMSET", b"%d" % len(layers), *_with_bodies(layers, b"b" * 64)]
    index = b"kv:r:index"
    for words in (
        *([b"SMEMBERS", index], [b"SSCAN", index, b"0"], [b"KVPAGEINDEX", b"r"]),
        *([b"KVPAGEVERIFY", b"r"], [b"KVBLOCKEXISTS", b"r", b"0"]),
        *([b"KVPAGEWHY", b"r"], [b"KVPAGEDEL", b"r"]),
    ):
        yield Scene("a block of very many layers", words, [tall])
    due = [b"KVPAGEMSET", count, *_with_bodies(names, b"b" * 64, ttl=1)]
    yield Scene("that expire at once", due, rest=3.0)


def _blocks(many: int) -> Iterator[Scene]:
    count = b"%d" % many
    for kind, names in (
        ("of one request", [(b"r", b"%d" % page) for page in range(many)]),
        ("of as many requests", [(b"r%d" % page, b"0") for page in range(many)]),
    ):
        arguments = list(chain.from_iterable(names))
        pages = [[req, b"0", b"0", page, b"0"] for req, page in names]
        stored = [b"KVPAGEMSET", count, *_with_bodies(pages, b"b" * 64)]
        for before, there in (([], "absent"), ([stored], "present")):
            yield Scene(f"{there}, {kind}", [b"KVPAGEPREFIX", b"1", b"1000", count, *arguments], before)
            yield Scene(f"{there}, {kind}", [b"KVBLOCKMGET", count, *arguments], before)
            yield Scene(f"{there}, {kind}", [b"KVBLOCKMGETCODED", count, *arguments], before)
            expected = [b"SHAPE", b"1:1:1:0:1:64"]
            yield Scene(f"{there}, {kind}, of a shape", [b"KVBLOCKMGET", count, *arguments, *expected], before)
        states = chain.from_iterable((req, page, b"%d" % (at + 1)) for at, (req, page) in enumerate(names))
        lengths = [b"KVPAGEPREFIX", b"1", b"1000", count, *arguments, b"LENGTHS", count, *states]
        yield Scene(f"present with states, {kind}", lengths, [stored])
        yield Scene(f"cold, {kind}", [b"KVBLOCKMGET", count, *arguments], [stored], cold=True)
    yield Scene("TYPE set", [b"SCAN", b"0", b"TYPE", b"set", b"COUNT", b"1000000"], [stored])


def _requests(many: int) -> Iterator[Scene]:
    ids = [b"%d" % page for page in range(many)]
    pages = [[b"r", b"0", b"0", page, b"0"] for page in ids]
    stored = [b"KVPAGEMSET", b"%d" % many, *_with_bodies(pages, b"b" * 64)]
    for command in (b"KVPAGEDEL", b"KVPAGEVERIFY", b"KVPAGEPIN", b"KVPAGEUNPIN", b"KVPAGELEASE"):
        time = [b"1000"] if command == b"KVPAGELEASE" else []
        yield Scene("whole", [command, b"r", *time], [stored])
        yield Scene("by its blocks", [command, b"r", *time, *ids], [stored])
        yield Scene("absent blocks", [command, b"r", *time, *ids])
    index = b"kv:r:index"
    for words in (
        *([b"KVPAGEINDEX", b"r", b"WITHSIZES"], [b"KVPAGEWHY", b"r"], [b"SMEMBERS", index], [b"SCARD", index]),
        *([b"SISMEMBER", index, b"kv:r:0:0:0:0"], [b"SSCAN", index, b"0", b"COUNT", b"1000000"]),
        *([b"EXISTS", index], [b"TYPE", index], [b"TTL", index], [b"GET", index]),
    ):
        yield Scene("many blocks", words, [stored])


def _all(many: int) -> Iterator[Scene]:
    blocks = [_block(b"r", page) for page in range(-(-many // _PAGES))]
    for what, before in (("strings", [_strings(many)]), ("blocks", blocks)):
        for words in (
            *([b"KEYS", b"*"], [b"KEYS", b"*a*b*c*"], [b"SCAN", b"0", b"COUNT", b"1000000"], [b"RANDOMKEY"]),
            *([b"DBSIZE"], [b"INFO", b"everything"], [b"MEMORY", b"STATS"], [b"MEMORY", b"DOCTOR"]),
            *([b"SAVE"], [b"KVDECODE"], [b"CONFIG", b"RESETSTAT"], [b"FLUSHALL"], [b"FLUSHDB", b"ASYNC"]),
        ):
            yield Scene(what, words, before)
        undone = [[b"CONFIG", b"SET", b"maxmemory-policy", b"allkeys-prefix", b"quota", b"", b"maxmemory", b"0"]]
        for name, value in (
            *((b"maxmemory-policy", policy) for policy in (b"allkeys-lru", b"allkeys-s3fifo", b"volatile-ttl")),
            (b"quota", b" ".join(b"tenant-%d:* 1gb" % tenant for tenant in range(100))),
        ):
            shown = value.partition(b" ")[0].decode()
            yield Scene(
                f"{name.decode()} {shown}, {what}", [b"CONFIG", b"SET", name, value], before, rest=1.0, after=undone
            )
        for name, value in ((b"maxmemory", b"64kb"), (b"quota", b"* 64kb")):
            lowered = [*before, [b"CONFIG", b"SET", name, value]]
            shown = f"when {name.decode()} was lowered, {what}"
            yield Scene(shown, [b"SET", b"key", b"value"], lowered, after=undone)
    deleted = [_strings(many), [b"DEL", *_strings(many)[1::2]]]
    yield Scene("after as many deletions", [b"KVLOST", b"*", b"COUNT", b"1000000"], deleted)


def _single(many: int) -> Iterator[Scene]:
    """Commands for one key, one page or one block, which may be one of a thousand pages."""
    page, names = [b"r", b"0", b"0", b"0", b"0"], [b"r", b"0"]
    key = b"kv:" + b":".join(page)
    for command, *more in (
        *([b"INCR"], [b"DECR"], [b"INCRBY", b"1"], [b"DECRBY", b"1"], [b"SETNX", b"v"], [b"GETSET", b"v"], [b"GETDEL"]),
        *([b"GETEX", b"EX", b"9"], [b"SETEX", b"9", b"v"], [b"PSETEX", b"9999", b"v"], [b"STRLEN"], [b"GET"], [b"DEL"]),
        *([b"GETRANGE", b"0", b"-1"], [b"SUBSTR", b"0", b"-1"], [b"TYPE"], [b"TTL"], [b"PTTL"], [b"EXPIRETIME"]),
        *([b"PEXPIRETIME"], [b"PERSIST"], [b"EXPIRE", b"9"], [b"PEXPIRE", b"9999"], [b"EXPIREAT", b"1"]),
        *([b"PEXPIREAT", b"1"], [b"SET", b"v"], [b"MSETNX", b"v"], [b"WATCH"]),
    ):
        yield Scene("a page in a block of a thousand", [command, key, *more], [_block(b"r", 0)])
    for command in (b"OBJECT ENCODING", b"OBJECT REFCOUNT", b"OBJECT IDLETIME", b"OBJECT FREQ", b"MEMORY USAGE"):
        yield Scene("a page in a block of a thousand", [*command.split(), key], [_block(b"r", 0)])
    for command in (b"KVPAGEGET", b"KVPAGEEXISTS", b"KVPAGESTAT", b"KVPAGEWHY"):
        yield Scene("a page in a block of a thousand", [command, *page], [_block(b"r", 0)])
    yield Scene(
        "a page in a block of a thousand", [b"KVPAGESET", *page, b"8", b"1", b"1", b"0", b"b"], [_block(b"r", 0)]
    )
    whole = [[b"KVBLOCKGET", *names], [b"KVBLOCKMGETCODED", b"1", *names], [b"KVBLOCKEXISTS", *names]]
    for words in (*whole, [b"KVPAGEDEL", *names], _block(b"r", 0)):
        yield Scene("a block of a thousand pages", words, [_block(b"r", 0)])
    coded = _coded_block(b"r", 0)
    for words in (coded, [b"KVBLOCKMGETCODED", b"1", *names]):
        yield Scene("a block of 64 MB in the lossless code", words, [coded])
        yield Scene("a cold block of 64 MB in the lossless code", words, [coded], cold=True)
    named = [*chain.from_iterable((b"r", b"%d" % page) for page in range(_MAPPED))]
    for command in (b"BLOCKMGET", b"COPY 0"):
        yield Scene(
            *("as many blocks as it may name", [b"KVMAP", *command.split(), b"%d" % _MAPPED, *named]),
            before=[_block(b"r", page) for page in range(_MAPPED)],
        )
    small = [[b"r", b"%d" % at, b"0", b"0", b"0"] for at in range(8192)]
    pages = [b"KVPAGEMSET", b"8192", *_with_bodies(small, b"b" * 16)]
    yield Scene("a block of 8,192 single pages, many times", [b"KVMAP", b"COPY", b"0", b"20", *names * 20], [pages])
    widest = _block(b"r", 0, heads=64)
    reading = [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON"], [b"KVPAGEMGET", b"8000", *_names_in_widest()]]
    yield Scene("a block of 8,000 pages that somebody tracks", widest, [widest], crowd=1, they_say=reading)
    listening = [[b"CONFIG", b"SET", b"notify-keyspace-events", b"KEA"]]
    yield Scene(
        *("a block of 8,000 pages whose events somebody hears", widest, [widest, *listening]),
        crowd=1,
        they_say=[[b"PSUBSCRIBE", b"__key*"]],
        after=[[b"CONFIG", b"SET", b"notify-keyspace-events", b""]],
    )


def _large(many: int) -> Iterator[Scene]:
    value = b"v" * (512 * 1024**2 if many >= MANY else 8 * 1024**2)
    large = [b"SET", b"large", value]
    for words in (
        large,
        [b"ECHO", value],
        [b"GET", value],
        [b"PUBLISH", b"channel", value],
        [b"SETEX", b"k", b"9", value],
    ):
        yield Scene("a large value", words)
    page = [b"KVPAGESET", *_page(b"r", 0), b"8", b"1", b"1", b"0", value[:-64]]
    yield Scene("a large value", page)
    for words in (
        *(
            [b"SET", b"large", b"small"],
            [b"SET", b"large", value],
            [b"GETSET", b"large", b"small"],
            [b"GETDEL", b"large"],
        ),
        *(
            [b"GET", b"large"],
            [b"GETRANGE", b"large", b"1", b"-1"],
            [b"STRLEN", b"large"],
            [b"MGET", b"large", b"large"],
        ),
        *(
            [b"DEL", b"large"],
            [b"UNLINK", b"large"],
            [b"FLUSHALL"],
            [b"INCR", b"large"],
            [b"MEMORY", b"USAGE", b"large"],
        ),
    ):
        yield Scene("where a large value is", words, [large])
    for words in ([b"KVPAGEVERIFY", b"r"], [b"KVPAGEDEL", b"r"], [b"KVPAGEGET", *_page(b"r", 0)]):
        yield Scene("where a large page is", words, [page])
    small = many // 2
    yield Scene(
        "a large value where small ones have to go",
        [b"SET", b"large", value],
        [
            [b"CONFIG", b"SET", b"maxmemory", b"%d" % (len(value) + 1024**2)],
            _strings(small, b"v" * 2000),
            _strings(small),
        ],
        after=[[b"CONFIG", b"SET", b"maxmemory", b"0"]],
    )


# -- rights and users ----------------------------------------------------------------------------------------------


def _rights(many: int) -> Iterator[Scene]:
    most = WORDS_PER_STEP - 3
    long = [b"[%c-z]" % (97 + at % 26) + b"%d" % at + _LONG for at in range(most)]
    rules = {
        "short patterns": [b"~tenant-%d:*" % at for at in range(most)],
        "long patterns": [b"~" + pattern for pattern in long],
        "long patterns of channels": [b"&" + pattern for pattern in long],
        "passwords": [b">%d" % at for at in range(most)],
        "commands": [b"+@read", b"-@read"] * (most // 2),
    }
    gone = [[b"ACL", b"DELUSER", b"user"]]
    for name, words in rules.items():
        yield Scene(name, [b"ACL", b"SETUSER", b"user", *words], after=gone)
    on = [b"on", b"nopass", b"+@all"]
    for name in ("short patterns", "long patterns"):
        made = [
            [b"ACL", b"SETUSER", b"user", *on],
            [b"ACL", b"SETUSER", b"user", *rules[name]],
            [b"AUTH", b"user", b"x"],
        ]
        keys = [b"tenant-%d:%d" % (most - 1, at) for at in range(many)]
        back = [[b"AUTH", b"default", b""], *gone]
        for what, words in (
            ("many keys", [b"MGET", *keys]),
            ("a thousand keys", [b"MGET", *keys[:1000]]),
            ("keys of 8 KB", [b"EXISTS", *(b"%d" % at + b"k" * 8000 for at in range(min(many // 200, 500)))]),
            ("all keys", [b"KEYS", b"*"]),
        ):
            yield Scene(f"who has {name}, {what}", words, [_strings(many), *made], after=back)
    short = [[b"ACL", b"SETUSER", b"user", *on], [b"ACL", b"SETUSER", b"user", *rules["short patterns"]]]
    for words in ([b"ACL", b"DRYRUN", b"user", b"MGET", *keys[:1000]], [b"ACL", b"GETUSER", b"user"]):
        yield Scene("who has short patterns", words, short, after=gone)


def _users(many: int) -> Iterator[Scene]:
    names = [b"user-%d" % at for at in range(many // 10)]
    made = [[b"ACL", b"SETUSER", name, b"~%b:*" % name, b"+@all", b"on"] for name in names]
    gone = [[b"ACL", b"DELUSER", *names[at : at + 1000]] for at in range(0, len(names), 1000)]
    for words in (
        *([b"ACL", b"LIST"], [b"ACL", b"USERS"], [b"ACL", b"SAVE"], [b"ACL", b"LOAD"], [b"CONFIG", b"REWRITE"]),
        *([b"ACL", b"SETUSER", b"user-1", b"+get"], [b"ACL", b"DELUSER", *names[:1000]]),
    ):
        yield Scene("many users", words, made, after=gone)
    kept = [[b"CONFIG", b"SET", b"acllog-max-len", b"%d" % len(names)]]
    made = [[b"ACL", b"SETUSER", b"user", b"on", b"nopass", b"+get"], [b"AUTH", b"user", b"x"]]
    refused = [[b"GET", name] for name in names]
    back = [b"AUTH", b"default", b""]
    undone = [[b"CONFIG", b"SET", b"acllog-max-len", b"128"], [b"ACL", b"LOG", b"RESET"], [b"ACL", b"DELUSER", b"user"]]
    yield Scene("many refusals", [b"ACL", b"LOG", b"1000000"], [*kept, *made, *refused, back], after=undone)


# -- connections and channels --------------------------------------------------------------------------------------


def _crowds(many: int) -> Iterator[Scene]:
    crowd = many // 10
    ids = [b"%d" % at for at in range(1, 1000)]
    filters = list(chain.from_iterable((b"ID", number) for number in ids[: WORDS_PER_STEP // 2 - 2]))
    for words in (
        *([b"CLIENT", b"LIST"], [b"CLIENT", b"LIST", b"TYPE", b"normal"], [b"CLIENT", b"LIST", b"ID", *ids]),
        *(
            [b"CLIENT", b"KILL", b"SKIPME", b"yes"],
            [b"CLIENT", b"KILL", b"127.0.0.1:1"],
            [b"CLIENT", b"KILL", *filters],
        ),
        *(
            [b"CLIENT", b"PAUSE", b"1"],
            [b"CLIENT", b"UNPAUSE"],
            [b"INFO", b"everything"],
            [b"PING"],
            [b"CONFIG", b"RESETSTAT"],
        ),
        *([b"ACL", b"SETUSER", b"default", b"+get"], [b"CLIENT", b"TRACKING", b"ON", b"REDIRECT", b"1"]),
    ):
        yield Scene("many connections", words, crowd=crowd, rest=1.5)
    watching = [[b"WATCH", b"key"]]
    yield Scene("a key that many watch", [b"SET", b"key", b"value"], crowd=crowd, they_say=watching)
    tracking = [[b"HELLO", b"3"], [b"CLIENT", b"TRACKING", b"ON"], [b"GET", b"key"]]
    yield Scene(
        "a key that many track", [b"SET", b"key", b"value"], [[b"SET", b"key", b"v"]], crowd=crowd, they_say=tracking
    )
    yield Scene("a key that many track", [b"FLUSHALL"], [[b"SET", b"key", b"v"]], crowd=crowd, they_say=tracking)
    before = [[b"CLIENT", b"TRACKING", b"ON", b"BCAST", *_prefixes(b"p", 500)], [b"RESET"]]
    yield Scene(
        "prefixes", [b"CLIENT", b"TRACKING", b"ON", b"BCAST", *_prefixes(b"q", 500)], [[b"HELLO", b"3"], before[0]]
    )
    shown = [b"MSET", *[bytes(range(256)) * 4] * (WORDS_PER_STEP - 2)]
    for words in (shown, [b"GET", shown[1]]):
        yield Scene("shown to those who monitor", words, crowd=10, they_say=[[b"MONITOR"]])
    yield Scene("beside others", [b"MONITOR"], crowd=10, they_say=[[b"MONITOR"]])


def _listeners(many: int) -> Iterator[Scene]:
    names = [b"channel-%d" % at for at in range(many)]
    for command in (b"SUBSCRIBE", b"PSUBSCRIBE", b"UNSUBSCRIBE", b"PUNSUBSCRIBE"):
        yield Scene("many", [command, *names])
    long = [b"%d" % at + _LONG for at in range(WORDS_PER_STEP - 2)]
    yield Scene("long patterns", [b"PSUBSCRIBE", *long])
    crowd = many // 10
    yield Scene("many listen", [b"PUBLISH", b"channel", b"m"], crowd=crowd, they_say=[[b"SUBSCRIBE", b"channel"]])
    yield Scene(
        "many listen to a pattern", [b"PUBLISH", b"channel", b"m"], crowd=crowd, they_say=[[b"PSUBSCRIBE", b"chan*"]]
    )
    each = [b"PSUBSCRIBE", *(b"%d:*:%d" % (at, at) for at in range(1000))]
    for words in ([b"PUBLISH", b"channel", b"m"], [b"PUBSUB", b"NUMPAT"]):
        yield Scene("many patterns", words, crowd=max(crowd // 1000, 1), they_say=[each])
    there = [[b"SUBSCRIBE", *names[:1000]]]
    for words in ([b"PUBSUB", b"CHANNELS"], [b"PUBSUB", b"CHANNELS", b"*a*b*"], [b"PUBSUB", b"NUMSUB", *names]):
        yield Scene("many channels", words, before=[[b"PING"]], crowd=1, they_say=[[b"SUBSCRIBE", *names]])
    yield Scene("who listens to many", [b"RESET"], there)


# -- remains -----------------------------------------------------------------------------------------------------------


def _rest(many: int) -> Iterator[Scene]:
    few = min(many, MOST_QUEUED // 3)
    queued = [[b"SET", b"key:%d" % at, b"value"] for at in range(few)]
    yield Scene("as many SETs as may be queued", [b"EXEC"], [[b"MULTI"], *queued])
    scans = [_strings(many), [b"MULTI"], *[[b"KEYS", b"*a*b"]] * 10]
    yield Scene("ten KEYS of all there is", [b"EXEC"], scans)
    command = b"COMMAND"
    for words in (
        *(
            [command, b"INFO", *[b"get"] * many],
            [command, b"DOCS", *[b"config"] * (WORDS_PER_STEP - 2)],
            [command, b"DOCS"],
        ),
        *([command, b"INFO"], [command, b"LIST"], [command, b"LIST", b"FILTERBY", b"PATTERN", _LONG]),
        *([command, kind, b"MGET", *[b"k"] * (WORDS_PER_STEP - 3)] for kind in (b"GETKEYS", b"GETKEYSANDFLAGS")),
    ):
        yield Scene("all at once", words)
    patterns = [b"%d" % at + _LONG for at in range(WORDS_PER_STEP - 2)]
    yield Scene("long patterns", [b"CONFIG", b"GET", *patterns])
    yield Scene("everything", [b"CONFIG", b"GET", b"*"])
    yield Scene("a long value", [b"CONFIG", b"SET", b"notify-keyspace-events", b"\xff" * (40 * many)])
    every = [b"latency-monitor-threshold", b"0"] * ((WORDS_PER_STEP - 2) // 2)
    yield Scene("the same again and again", [b"CONFIG", b"SET", *every])
    logged = [[b"CONFIG", b"SET", b"slowlog-log-slower-than", b"0", b"slowlog-max-len", b"%d" % (many // 10)]]
    logged += [[b"MGET", *[b"k" * 128] * 31]] * (many // 10)
    undone = [[b"CONFIG", b"SET", b"slowlog-log-slower-than", b"10000", b"slowlog-max-len", b"128"]]
    for words in ([b"SLOWLOG", b"GET", b"-1"], [b"SLOWLOG", b"RESET"]):
        yield Scene("a long log", words, logged, after=undone)
    words = [b"get"] * (WORDS_PER_STEP - 2)
    for sub in (b"RESET", b"HISTOGRAM"):
        yield Scene("many", [b"LATENCY", sub, *words])
    yield Scene("an event", [b"LATENCY", b"HISTORY", b"command"])


# -- how they are spelt --------------------------------------------------------------------------------------------


def _strings(many: int, value: bytes = b"value") -> Words:
    return [
        b"MSET",
        *(word for at in range(many) for word in (b"key:%d" % at if value == b"value" else b"long:%d" % at, value)),
    ]


def _prefixes(opening: bytes, many: int) -> Iterator[bytes]:
    return chain.from_iterable((b"PREFIX", b"%b%03d" % (opening, at)) for at in range(many))


def _page(req_id: bytes, at: int) -> Words:
    block, at = divmod(at, _PAGES)
    return [req_id, b"%d" % (at // _HEADS), b"%d" % (at % _HEADS), b"%d" % block, b"0"]


def _with_bodies(names: Sequence[Words], body: bytes, ttl: int = 0) -> Iterator[bytes]:
    return (word for name in names for word in (*name, b"8", b"1", b"%d" % len(body), b"%d" % ttl, body))


def _block(req_id: bytes, page: int, heads: int = _HEADS) -> Words:
    shape = [b"%d" % number for number in (page, _LAYERS, heads, 1, 0, 1, 0, 8, 64)]
    return [b"KVBLOCKSET", req_id, *shape, b"b" * 64 * _LAYERS * heads]


def _coded_block(req_id: bytes, page: int) -> Words:
    """Return the words that store a block of 64 MB in the lossless code."""
    shape = BlockShape(16, 16, 128, (Plane(0, DType.BFLOAT16, 1024),))
    body = bytes(shape.nbytes)
    code = encode_block_body(body, shape)
    assert code is not None
    numbers = [b"%d" % number for number in (page, 16, 16, 128, 0, 1, 0, int(DType.BFLOAT16), 1024)]
    return [b"KVBLOCKSETCODED", req_id, *numbers, b"%016x" % checksum(body), bytes(code)]


def _names_in_widest() -> Iterator[bytes]:
    return (word for at in range(8000) for word in (b"r", b"%d" % (at // 64), b"%d" % (at % 64), b"0", b"0"))
