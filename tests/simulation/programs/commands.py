"""The usual commands of a client: strings, counters, pages, blocks, batches, limits and rights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.simulation.model.model import Words
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import CHANNELS, PEERS, TENANTS, Step

REQUESTS = [b"r%d" % i for i in range(3)]  # everybody writes their pages, one by one
PLANES = [(0, 1, 8), (1, 4, 6)]  # type, dtype, columns: of blocks
LAYERS, HEADS, ROWS = 2, 2, 4


def any_value(seed: Seed) -> bytes:
    rng = seed.rng
    return rng.choice([b"%d" % rng.randrange(-5, 1000), seed.unlike(40), seed.unlike(seed.large)])


def string_write(seed: Seed) -> Words:
    rng, strings, value = seed.rng, seed.own_strings, any_value(seed)
    key = rng.choice(strings)
    options: list[bytes] = []
    if rng.random() < 0.3:
        options += [rng.choice([b"NX", b"XX"])]
    if rng.random() < 0.2:
        options += [b"GET"]
    if rng.random() < 0.4:
        options += rng.choice(
            [[b"PX", b"%d" % rng.randrange(1, 4000)], [b"EX", b"%d" % rng.randrange(1, 60)], [b"KEEPTTL"]]
        )
    return rng.choice([
        (b"SET", key, value, *options), (b"SET", key, value, *options), (b"SET", key, value),
        (b"SETEX", key, b"%d" % rng.randrange(1, 5), value), (b"PSETEX", key, b"%d" % rng.randrange(1, 900), value),
        (b"SETNX", key, value), (b"GETSET", key, value), (b"GETDEL", key),
        (b"MSET", *(w for k in rng.sample(strings, 3) for w in (k, any_value(seed)))),
        (b"MSETNX", *(w for k in rng.sample(strings, 2) for w in (k, any_value(seed)))),
        (b"GETEX", key, *rng.choice([(), (b"PX", b"500"), (b"PERSIST",)])),
    ])  # fmt: skip


def string_read(seed: Seed) -> Words:
    rng, strings = seed.rng, seed.own_strings
    key = rng.choice(strings)
    return rng.choice([
        (b"GET", key), (b"GET", key), (b"MGET", *rng.choices(strings, k=4)), (b"STRLEN", key),
        (b"GETRANGE", key, b"%d" % rng.randrange(-50, 50), b"%d" % rng.randrange(-50, 5000)),
    ])  # fmt: skip


def counter(seed: Seed) -> Words:
    rng, key = seed.rng, seed.rng.choice([*seed.own_strings[:2], b"n"])
    return rng.choice(
        [(b"INCR", key), (b"DECR", key), (b"INCRBY", key, b"%d" % rng.randrange(-9, 99)), (b"DECRBY", key, b"3")]
    )


def any_key(seed: Seed) -> bytes:
    if seed.rng.random() < 0.5:
        return seed.rng.choice(seed.own_strings)
    return b"kv:" + b":".join(any_page(seed, any_request(seed)))


def keys(seed: Seed) -> Words:
    rng = seed.rng
    name = rng.choice([b"DEL", b"UNLINK", b"EXISTS", b"TOUCH"])
    keys = [any_key(seed) for _ in range(rng.randrange(1, 4))]
    return rng.choice([(name, *keys), (b"TYPE", keys[0]), (b"GET", keys[0])])


def time_to_live(seed: Seed) -> Words:
    rng, key = seed.rng, any_key(seed)
    condition = rng.choice([(), (), (b"NX",), (b"XX",), (b"GT",), (b"LT",)])
    return rng.choice([
        (b"EXPIRE", key, b"%d" % rng.randrange(-1, 90), *condition), (b"PERSIST", key),
        (b"PEXPIRE", key, b"%d" % rng.randrange(1, 3000), *condition),
        (b"TTL", key), (b"PTTL", key), (b"PEXPIRETIME", key), (b"EXPIRETIME", key),
    ])  # fmt: skip


def any_request(seed: Seed) -> bytes:
    if seed.is_tenant and seed.rng.random() < 0.85:
        return b"q%d" % seed.peer
    return seed.rng.choice([*REQUESTS, *(b"q%d" % i for i in range(PEERS))])


def any_page(seed: Seed, req: bytes) -> Words:
    rng = seed.rng
    return (
        req,
        b"%d" % rng.randrange(LAYERS),
        b"%d" % rng.randrange(HEADS),
        b"%d" % rng.randrange(4),
        b"%d" % rng.randrange(2),
    )


def described(seed: Seed, page: Words) -> Words:
    rng = seed.rng
    kv_type = int(page[4])
    _, dtype, columns = PLANES[kv_type]
    size = ROWS * columns * 2
    if rng.random() < 0.2:
        dtype, columns = 8, rng.choice([1, 40, seed.large])
        size = ROWS * columns
    ttl = rng.choice([0, 0, 0, 1, 30])
    return *page, b"%d" % dtype, b"%d" % ROWS, b"%d" % columns, b"%d" % ttl, seed.exactly(size)


def page_set(seed: Seed) -> Words:
    return b"KVPAGESET", *described(seed, any_page(seed, seed.rng.choice([*REQUESTS, b"q%d" % seed.peer])))


def page_get(seed: Seed) -> Words:
    command = seed.rng.choice([b"KVPAGEGET", b"KVPAGEGET", b"KVPAGEEXISTS", b"KVPAGESTAT"])
    return command, *any_page(seed, any_request(seed))


def batch(seed: Seed, least: int = 1) -> list[tuple[bytes, int, int, int, int]]:
    """Whole blocks, and parts of some."""
    rng = seed.rng
    pages = rng.sample(range(8), rng.choice([1, 2, 4]))
    names = [
        (0, layer, head, page, kind)
        for page in pages
        for layer in range(LAYERS)
        for kind in (0, 1)
        for head in range(HEADS)
    ]
    if rng.random() < 0.4:
        names = rng.sample(names, max(least, len(names) * 2 // 3))
    return [(b"", *name[1:]) for name in names]


def batch_set(seed: Seed) -> Words:
    req = b"q%d" % seed.peer
    pages = [described(seed, (req, *(b"%d" % part for part in name[1:]))) for name in batch(seed)]
    return b"KVPAGEMSET", b"%d" % len(pages), *(word for page in pages for word in page)


def batch_get(seed: Seed) -> Words:
    req = any_request(seed)
    names = [(req, *(b"%d" % part for part in name[1:])) for name in batch(seed)]
    command = seed.rng.choice([b"KVPAGEMGET", b"KVPAGEMGET", b"KVPAGEMEXISTS"])
    return command, b"%d" % len(names), *(word for name in names for word in name)


def block_set(seed: Seed) -> Words:
    rng = seed.rng
    ttl, page = rng.choice([0, 0, 2, 60]), rng.randrange(8)
    planes = rng.choice([PLANES, PLANES, PLANES[:1]])
    size = sum(LAYERS * HEADS * ROWS * columns * 2 for _, _, columns in planes)
    words = [b"%d" % number for plane in planes for number in plane]
    head = [b"%d" % n for n in (page, LAYERS, HEADS, ROWS, ttl, len(planes))]
    return b"KVBLOCKSET", b"q%d" % seed.peer, *head, *words, seed.exactly(size)


def block_get(seed: Seed) -> Words:
    rng = seed.rng
    names = [(any_request(seed), b"%d" % rng.randrange(8)) for _ in range(rng.randrange(1, 5))]
    many = b"KVBLOCKMGET", b"%d" % len(names), *(word for name in names for word in name)
    return rng.choice([(b"KVBLOCKGET", *names[0]), (b"KVBLOCKEXISTS", *names[0]), many, many])


def page_other(seed: Seed) -> Words:
    rng, req = seed.rng, any_request(seed)
    pages = [b"%d" % page for page in rng.sample(range(8), rng.randrange(3))]
    return rng.choice([
        (b"KVPAGEINDEX", req), (b"KVPAGEVERIFY", req, *pages), (b"KVPAGEDEL", req, *(pages or [b"1"])),
        (b"SCARD", b"kv:%b:index" % req), (b"SMEMBERS", b"kv:%b:index" % req), (b"KVPAGEWHY", req),
    ])  # fmt: skip


def protect(seed: Seed) -> Words:
    rng, req = seed.rng, any_request(seed)
    pages = [b"%d" % page for page in rng.sample(range(8), rng.randrange(1, 3))]
    blocks = [word for page in pages for word in (req, page)]
    return rng.choice([
        (b"KVPAGEPIN", req, *pages), (b"KVPAGEUNPIN", req, *pages), (b"KVPAGEUNPIN", req),
        (b"KVPAGELEASE", req, b"%d" % rng.randrange(1, 20_000), *pages),
        (b"KVPAGEKEEP", b"a", b"2", b"%d" % rng.randrange(1, 20), *(b"kv:%b:0:0:%b:0" % (req, page) for page in pages)),
        (b"KVPAGEPREFIX", rng.choice([b"8", b"8", b"5"]), rng.choice([b"0", b"700"]), b"%d" % len(pages), *blocks),
        (b"KVPAGEPREFIX", b"8", rng.choice([b"0", b"700"]), b"%d" % len(pages), *blocks, b"LENGTHS", b"2",
         any_request(seed), pages[0], b"1", any_request(seed), pages[-1], rng.choice([b"1", b"2"])),
    ])  # fmt: skip


def everything(seed: Seed) -> Words:
    return seed.rng.choice([(b"DBSIZE",), (b"KEYS", b"*"), (b"DBSIZE",)])


def flush(seed: Seed) -> Words:
    return (b"FLUSHALL",)


def server(seed: Seed) -> Words:
    rng = seed.rng
    return rng.choice([
        (b"INFO",), (b"SAVE",), (b"PING",), (b"ECHO", b"hello"), (b"CLIENT", b"LIST"), (b"MEMORY", b"STATS"),
        (b"CLIENT", b"PAUSE", b"%d" % rng.randrange(1, 400), rng.choice([b"ALL", b"WRITE"])),
        (b"CLIENT", b"UNPAUSE"),
    ])  # fmt: skip


def channel(seed: Seed) -> Words:
    return b"PUBLISH", seed.rng.choice(CHANNELS), b"%d" % seed.drawn


def rights(seed: Seed) -> Words:
    rng, user = seed.rng, b"u%d" % seed.rng.choice(TENANTS)
    if not seed.tenants:
        return (b"ACL", b"WHOAMI")
    first = [b"~%b:*" % user, b"~kv:q%b:*" % user[1:]]
    rules = [
        [b"-get"],
        [b"+get"],
        [b"-kvpagemget"],
        [b"+kvpagemget"],
        [b"~s*"],
        [b"~kv:q1:*"],
        [b"resetkeys", *first],
    ]
    return b"ACL", b"SETUSER", user, *rng.choice(rules)


def limits(seed: Seed) -> Words:
    rng = seed.rng
    quotas = [b"", b"", b"kv:q1:* 20000", b"s* 30000 kv:r* 9000", b"kv:q3:* 6000 kv:* 300000"]
    name, values = rng.choice([
        (b"maxmemory-policy", [b"allkeys-lru", b"allkeys-prefix", b"noeviction"]),
        (b"maxmemory", [b"40000", b"200000", b"600000", b"3000000"]),
        (b"quota", quotas),
        (b"page-checksums", [b"yes", b"no"]),
        (b"tracking-table-max-keys", [b"3", b"0"]),
        (b"maxmemory-clients", [b"200kb", b"2mb", b"25%"]),
        (b"slowlog-log-slower-than", [b"0", b"10000"]),
    ])  # fmt: skip
    return b"CONFIG", b"SET", name, rng.choice(values)


def tracking(seed: Seed) -> Words:
    return seed.rng.choice([
        (b"HELLO", b"3"), (b"CLIENT", b"TRACKING", b"ON"), (b"CLIENT", b"TRACKING", b"ON"),
        (b"CLIENT", b"TRACKING", b"OFF"),
    ])  # fmt: skip


def write(seed: Seed, peer: int) -> Step:
    """Return a write."""
    seed.peer = peer
    words = seed.rng.choice([string_write, batch_set, block_set, page_set])(seed)
    return seed.send(peer, words)


def any_of(seed: Seed, peer: int) -> Words:
    """Return a command of a peer. Batches and blocks have a request of their own, so that the last writer is known."""
    seed.peer = peer
    command = seed.rng.choices([one for one, _ in KINDS], seed.weights)[0]
    return string_read(seed) if seed.is_tenant and command in _NOT_BY_TENANTS else command(seed)


KINDS: Sequence[tuple[Callable[[Seed], Words], float]] = [  # and how often
    (string_write, 4), (string_read, 4), (counter, 1), (keys, 1), (time_to_live, 2), (page_set, 3), (page_get, 3),
    (batch_set, 2), (batch_get, 3), (block_set, 2), (block_get, 3), (page_other, 2), (protect, 1), (everything, 0.3),
    (server, 0.3), (flush, 0.05), (channel, 0.5), (limits, 0.2), (tracking, 0.3), (rights, 0.2),
]  # fmt: skip
_NOT_BY_TENANTS = {server, flush, limits, tracking, rights}
