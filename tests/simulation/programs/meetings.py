"""Rare coincidences of two events: a load and a new TTL, a full disk and a removal.

They are drawn in addition to a program's other steps, from a random generator of their own, in a fourth of the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.model.model import Words
from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import MS, NO_TENANTS, PEERS, Step

_SHARE = 0.012  # of steps that one of these follows
_CROWDED = 40_000  # bytes of memory that some strings have
_CROWD = [b"crowd%d" % i for i in range(24)]
_SIZE = 3_000  # bytes of each, so that most are on disk alone
_PAGES = [b"%d" % page for page in range(100, 124)]
_SHAPE = b"1", b"2", b"1", b"0", b"1", b"0", b"3"  # layers, heads, rows, ttl, planes, kv_type, dtype; all but head_dim


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws one of them, and usually none, after each step."""
    rng = random.Random(f"meetings {seed.number}")
    share = _SHARE if rng.random() < 0.25 else 0.0
    kinds = [_grown_between_scans, _another_quota]
    kinds += [_fetched_and_dated] * seed.disk
    kinds += [_dated_while_written, _removed_on_a_full_disk] * (2 * seed.disk)
    kinds += [_pinned_and_crowded_out, _replaced_at_once] * (3 if seed.maxdisk else 0)

    return seed.beside(rng, share, lambda: rng.choice(kinds)(seed))


def _fetched_and_dated(seed: Seed) -> list[Step]:
    """Values on disk only are requested, slowly, while another client sets their TTL."""
    rng = seed.rng
    lasts, usual = rng.randrange(300 * MS, 2_000 * MS), seed.options["maxmemory"].encode()
    steps: list[Step] = [seed.send(0, (b"CONFIG", b"SET", b"maxmemory", b"%d" % _CROWDED))]
    steps += [seed.send(rng.randrange(NO_TENANTS), (b"SET", key, seed.exactly(_SIZE))) for key in _CROWD]
    steps += [seed.step("settle"), seed.step("fault", name="", slow=150 * MS, nanoseconds=lasts)]
    for key in rng.sample(_CROWD[: len(_CROWD) // 2], 6):
        one, other = rng.sample(range(NO_TENANTS), 2)
        time = b"PEXPIRE", key, b"%d" % rng.randrange(1_000, 90_000)
        dated = rng.choice([time, time, (b"PERSIST", key), (b"SET", key, seed.exactly(30), b"KEEPTTL")])
        both = [seed.send(one, (rng.choice([b"GET", b"STRLEN"]), key)), seed.send(other, dated)]
        steps += [seed.soon(step, 5 * MS) for step in both]
    steps.append(replace(seed.step("settle"), gap=lasts))
    return [*steps, seed.send(0, (b"DEL", *_CROWD)), seed.send(0, (b"CONFIG", b"SET", b"maxmemory", usual))]


def _removed_on_a_full_disk(seed: Seed) -> list[Step]:
    """Keys are removed and written again while the disk is full and slow: removals make space."""
    rng, (*gone, other) = seed.rng, seed.rng.sample(seed.strings, 6)
    lasts, apart = rng.randrange(1_000 * MS, 5_000 * MS), rng.choice([30 * MS, 100 * MS, 400 * MS])
    steps = [seed.send(0, (b"SET", key, seed.exactly(600))) for key in (*gone, other)]
    steps += [seed.step("settle"), seed.step("fault", name="full", slow=250 * MS, nanoseconds=lasts)]
    steps.append(seed.soon(seed.send(rng.randrange(PEERS), (b"SET", other, seed.exactly(900))), MS))
    steps.append(seed.soon(seed.send(rng.randrange(PEERS), (b"DEL", *gone)), MS))
    begin = replace(seed.send(0, (b"PING",)), gap=rng.choice([MS, 200 * MS, 900 * MS, 1_200 * MS]))
    steps.append(begin)  # when it is removed, at once or after everysec's second
    for key in gone:
        steps.append(seed.soon(seed.send(rng.randrange(PEERS), (b"SET", key, seed.exactly(20))), apart))
    return [*steps, replace(seed.step("settle"), gap=lasts), seed.step(rng.choice(["stop", "kill"]))]


def _dated_while_written(seed: Seed) -> list[Step]:
    """A transaction changes the TTL of values during their commit, and then the server is killed."""
    rng, seed.peer = seed.rng, seed.rng.randrange(NO_TENANTS)
    other, steps = seed.strings[0], [seed.step("fault", name="", slow=400 * MS, nanoseconds=5_000 * MS)]
    for key in _CROWD[:8]:
        stored = [(b"SET", key, seed.exactly(_SIZE)), (b"SET", key, seed.exactly(_SIZE), b"PX", b"90000")]
        steps.append(seed.soon(seed.send(seed.peer, rng.choice(stored)), 200 * MS))
        time = rng.choice([(b"PEXPIRE", key, b"%d" % rng.randrange(20_000, 90_000)), (b"PERSIST", key)])
        changed = [(b"MULTI",), (b"SET", other, seed.exactly(20)), time, (b"EXEC",)]
        steps += [seed.soon(seed.send(seed.peer, words), 200 * MS) for words in changed]
    return [*steps, replace(seed.step("kill"), gap=rng.randrange(600 * MS))]


def _pinned_and_crowded_out(seed: Seed) -> list[Step]:
    """A page has the key of a former string, and its block is pinned, when the disk becomes full."""
    rng, seed.peer = seed.rng, seed.rng.randrange(NO_TENANTS)
    name, *page, body = commands.page_set(seed)
    key, req, number = b"kv:" + b":".join(page[:5]), page[0], page[3]
    steps = [seed.send(seed.peer, (b"SET", key, seed.exactly(_SIZE))), seed.step("settle")]
    steps += [seed.send(seed.peer, (name, *page, body)), seed.send(seed.peer, (b"KVPAGEPIN", req, number))]
    size = 2 * seed.maxdisk // len(_CROWD)
    for key in _CROWD:
        steps.append(seed.soon(seed.send(rng.randrange(NO_TENANTS), (b"SET", key, seed.exactly(size))), 20 * MS))
    ask, free = (b"KVPAGEGET", *page[:5]), (b"KVPAGEUNPIN", req, number)
    return [*steps, seed.send(seed.peer, ask), seed.send(seed.peer, free), seed.send(0, (b"DEL", *_CROWD))]


def _replaced_at_once(seed: Seed) -> list[Step]:
    """One transaction replaces most values of a small disk; or sets a TTL to a page of each block."""
    rng, seed.peer = seed.rng, seed.rng.randrange(NO_TENANTS)
    req, size = b"q%d" % seed.peer, 2 * seed.maxdisk // (3 * len(_CROWD))
    stored: list[Words] = [(b"SET", key, seed.exactly(size)) for key in _CROWD]
    changed: list[Words] = [(b"SET", key, seed.exactly(size)) for key in _CROWD]
    if rng.random() < 0.5:
        shape = *_SHAPE, b"%d" % (size // 2)
        stored = [(b"KVBLOCKSET", req, page, *shape, seed.exactly(size // 2 * 2)) for page in _PAGES]
        changed = [(b"EXPIRE", b"kv:%b:0:1:%b:0" % (req, page), b"100") for page in _PAGES]
    steps = [seed.soon(seed.send(seed.peer, words), 5 * MS) for words in stored]
    steps += [seed.step("settle"), seed.send(seed.peer, (b"MULTI",))]
    steps += [seed.send(seed.peer, words) for words in changed]
    steps += [seed.send(seed.peer, (b"EXEC",)), seed.step("settle")]
    steps.append(replace(seed.send(seed.peer, (b"SET", _CROWD[0], seed.exactly(30))), gap=2_000 * MS))
    return [*steps, seed.send(seed.peer, (b"KVPAGEDEL", req, *_PAGES)), seed.send(0, (b"DEL", *_CROWD))]


def _grown_between_scans(seed: Seed) -> list[Step]:
    """A request gets blocks, and loses some, between two scans of it."""
    rng, seed.peer = seed.rng, seed.rng.randrange(NO_TENANTS)
    index, steps = b"kv:q%d:index" % seed.peer, []
    for _ in range(rng.randrange(2, 5)):
        scan = seed.step("scan", rng.randrange(NO_TENANTS), (b"SSCAN", index), count=100, pace=MS)
        gone = b"KVPAGEDEL", b"q%d" % seed.peer, b"%d" % rng.randrange(8)
        between = rng.choice([commands.page_set(seed), commands.block_set(seed), gone])
        steps += [replace(scan, gap=2 * MS), seed.soon(seed.send(seed.peer, between), MS)]
    return steps


def _another_quota(seed: Seed) -> list[Step]:
    """A pinned or leased unit moves to another quota, or to none."""
    rng, seed.peer = seed.rng, seed.rng.choice([1, 3])
    name, req, page, *words = commands.block_set(seed)
    protect = rng.choice([(b"KVPAGEPIN", req, page), (b"KVPAGELEASE", req, b"60000", page)])
    quotas = rng.sample([b"", b"kv:q1:* 20000", b"kv:q3:* 60000 kv:* 300000", b"kv:* 500000"], 2)
    steps = [seed.send(seed.peer, (name, req, page, *words)), replace(seed.send(seed.peer, protect), gap=MS)]
    for quota in quotas:
        steps.append(replace(seed.send(0, (b"CONFIG", b"SET", b"quota", quota)), gap=MS))
        steps.append(replace(seed.step("settle"), gap=MS))
    return [*steps, seed.send(seed.peer, (b"KVPAGEUNPIN", req, page))]
