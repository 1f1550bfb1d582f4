"""Clients that cache their reads, in every mode of CLIENT TRACKING, and invalid tracking commands.

They are drawn in addition to a program's other steps, from a random generator of their own, in a fourth of the seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.simulation.model.model import Words
from tests.simulation.model.tracking import CHANNEL
from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import LISTENERS, MS, PEERS, Step, name_of

_SHARE = 0.03  # of steps that one of these follows
_ON, _OFF = (b"CLIENT", b"TRACKING", b"ON"), (b"CLIENT", b"TRACKING", b"OFF")
_PREFIXES = [b"", b"s", b"s1", b"u3:", b"u4:", b"kv:", b"kv:q", b"kv:q1:", b"kv:q3:", b"kv:r0:0:", b"none"]
_NOBODY = b"999999999"  # the id of no connection


def beside(seed: Seed) -> Callable[[], list[Step]]:
    """Return a function that draws some of them, and usually none, after each step."""
    rng = random.Random(f"caches {seed.number}")
    share = _SHARE if rng.random() < 0.25 else 0.0
    kinds = [_cached, _cached, _cached, _told_elsewhere, _told_elsewhere, _asked]

    def pick() -> list[Step]:
        seed.peer = rng.randrange(PEERS)
        return rng.choice(kinds)(seed)

    return seed.beside(rng, share, pick)


def _say(seed: Seed, peer: int, words: Words) -> Step:
    """Something that may name another's connection."""
    step: Step = seed.step("name", peer, words)
    return seed.soon(step, MS)


def _prefixed(seed: Seed) -> Words:
    """Return BCAST for everything, or for prefixes. Some of these overlap, which is an error."""
    some = seed.rng.sample(_PREFIXES, seed.rng.choice([0, 1, 1, 2, 3]))
    return b"BCAST", *(word for prefix in some for word in (b"PREFIX", prefix))


def _mode(seed: Seed) -> Words:
    """Options that go together, mostly."""
    rng = seed.rng
    looped = rng.choice([(), (b"NOLOOP",)])
    return *_ON, *rng.choice([(), (b"OPTIN",), (b"OPTOUT",), _prefixed(seed), _prefixed(seed)]), *looped


def _asked(seed: Seed) -> list[Step]:
    """Return a command about tracking of a client that may not track; many of these are invalid."""
    rng, other = seed.rng, name_of(seed.rng.randrange(PEERS))
    wrong: list[Words] = [
        (*_ON, b"PREFIX", b"s"), (*_ON, b"BCAST", b"OPTIN"), (*_ON, b"OPTIN", b"OPTOUT"), (*_ON, b"BCAST"), _ON,
        (*_ON, b"BCAST", b"PREFIX", b"s", b"PREFIX", b"s1"), (*_ON, b"REDIRECT", _NOBODY), (*_ON, b"NONSENSE"),
        (*_ON, b"REDIRECT", other, b"REDIRECT", other), (*_ON, b"OPTIN"), (*_ON, b"OPTOUT"), (*_ON, b"PREFIX"),
        (*_OFF, b"NONSENSE"), (b"CLIENT", b"TRACKING", b"PERHAPS"), (b"CLIENT", b"CACHING", b"PERHAPS"),
    ]  # fmt: skip
    caching = b"CLIENT", b"CACHING", rng.choice([b"YES", b"NO"])
    words = rng.choice([rng.choice(wrong), rng.choice(wrong), caching, _mode(seed), _OFF])
    shown = b"CLIENT", rng.choice([b"TRACKINGINFO", b"TRACKINGINFO", b"GETREDIR"])
    return [_say(seed, seed.peer, words), _say(seed, seed.peer, shown)]


def _some_read(seed: Seed) -> Words:
    of_pages = [commands.page_get, commands.batch_get, commands.block_get, commands.page_other]
    return seed.rng.choice([commands.string_read] * 4 + of_pages)(seed)


def _some_write(seed: Seed) -> Words:
    others = [commands.time_to_live, commands.page_set, commands.block_set, commands.page_other]
    return seed.rng.choice([commands.string_write] * 4 + others)(seed)


def _lived(seed: Seed, reader: int) -> list[Step]:
    """Return reads, and changes of read keys, by it or by others; each at a moment of its own, or none."""
    rng, steps = seed.rng, []
    within = rng.choice([1, MS, 20 * MS])
    for _ in range(rng.randrange(3, 12)):
        seed.peer = reader
        if rng.random() < 0.4:
            steps.append(_say(seed, reader, (b"CLIENT", b"CACHING", rng.choice([b"YES", b"NO"]))))
        if rng.random() < 0.15:
            inside = [_some_read(seed), rng.choice([_some_read(seed), _some_write(seed)])]
            steps += [seed.send(reader, words) for words in ((b"MULTI",), *inside, (b"EXEC",))]
        read = [seed.send(reader, _some_read(seed)) for _ in range(rng.randrange(1, 3))]
        seed.peer = reader if rng.random() < 0.3 else rng.randrange(PEERS)
        steps += [*read, *(seed.send(seed.peer, _some_write(seed)) for _ in range(rng.randrange(1, 4)))]
    return [seed.soon(step, within) for step in steps]


def _cached(seed: Seed) -> list[Step]:
    """A client tracks for a while, and is notified on its own connection. Sometimes all its cached keys are deleted at
    once.
    """
    rng, reader = seed.rng, seed.peer
    steps = [_say(seed, reader, (b"HELLO", rng.choice([b"3", b"3", b"3", b"2"]))), _say(seed, reader, _OFF)]
    for _ in range(rng.randrange(1, 3)):
        steps += [_say(seed, reader, _mode(seed)), *_lived(seed, reader)]
        if rng.random() < 0.1:
            steps.append(seed.send(0, (b"FLUSHALL",)))
        steps.append(_say(seed, reader, (b"CLIENT", b"TRACKINGINFO")))
    steps.append(replace(seed.step("settle"), gap=MS))
    return [*steps, *([_say(seed, reader, _OFF)] if rng.random() < 0.6 else [])]


def _told_elsewhere(seed: Seed) -> list[Step]:
    """Another connection is notified: in RESP3, or on a channel. It may disconnect during a message, and return with
    another id.

    Tenants may only redirect to connections of their own.
    """
    rng, reader = seed.rng, seed.peer
    there = rng.choice(LISTENERS)
    in_resp2 = rng.random() < 0.5
    hello = (b"HELLO", b"2" if in_resp2 else b"3")
    steps = [_say(seed, reader, (b"HELLO", rng.choice([b"2", b"3"]))), _say(seed, reader, _OFF)]
    steps += [_say(seed, there, hello)]
    if in_resp2:
        steps.append(_say(seed, there, (b"SUBSCRIBE", CHANNEL)))
    other = PEERS if "notify-keyspace-events" in seed.options and rng.random() < 0.3 else there
    elsewhere = rng.choice([other, other, other, reader])
    steps.append(_say(seed, reader, (*_mode(seed), b"REDIRECT", name_of(elsewhere))))
    steps += _lived(seed, reader)
    end = rng.random()
    if end < 0.4:
        steps += [seed.soon(seed.step("reset", there), MS), *_lived(seed, reader)]
    elif end < 0.6 and in_resp2:
        steps += [_say(seed, there, (b"UNSUBSCRIBE", CHANNEL)), *_lived(seed, reader)]
    shown = b"CLIENT", rng.choice([b"TRACKINGINFO", b"GETREDIR"])
    steps += [_say(seed, reader, shown), replace(seed.step("settle"), gap=MS), _say(seed, reader, shown)]
    if in_resp2 and end >= 0.4:
        steps.append(_say(seed, there, (b"UNSUBSCRIBE", CHANNEL)))
    return [*steps, *([_say(seed, reader, _OFF)] if rng.random() < 0.6 else [])]
