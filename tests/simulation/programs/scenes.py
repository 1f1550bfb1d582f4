"""Scenes of several steps, which ordinary steps rarely make: difficult events at the same moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.simulation.programs import commands
from tests.simulation.programs.seed import Seed
from tests.simulation.programs.step import CHANNELS, LISTENERS, MS, PEERS, Step

_LONG = [b"long%d" % i for i in range(4)]
_LONG_FAULT = 25_000 * MS  # longer than anybody may be kept waiting
TTL = 3  # which of KVBLOCKSET's words after the page
_LONG_SIZE = 60_000  # bytes: some of these are more than a client may leave unread


def _restart(seed: Seed) -> Step:
    return seed.step(seed.rng.choice(["stop", "stop", "kill"]))


def _death(seed: Seed) -> list[Step]:
    """Several clients write at the same time, and the server is killed right after one reply."""
    rng = seed.rng
    writes = [
        seed.soon(commands.write(seed, peer), 100_000) for peer in rng.choices(range(PEERS), k=rng.randrange(2, 7))
    ]
    return [*writes, seed.soon(seed.step("kill", received=rng.choice([0, 0, 20_000, 200_000])), 20_000)]


def _failing_disk(seed: Seed) -> list[Step]:
    """The disk takes nothing, and slowly, or gives nothing either. The same keys are written again meanwhile.

    A restart follows, sometimes after the longest permitted wait.
    """
    rng, keys = seed.rng, seed.rng.sample(seed.strings, 2)
    lasts, slow = rng.randrange(200 * MS, 2_000 * MS), rng.choice([0, 80 * MS, 400 * MS])
    name = rng.choice(["full", "refuses"])
    more = random.Random(lasts)  # separate from `rng`, which draws later steps
    if more.random() < 0.4:
        lasts, slow = _LONG_FAULT, 0
    if more.random() < 0.4:
        name += " unreadable"
    steps: list[Step] = [seed.step("fault", name=name, slow=slow, nanoseconds=lasts)]
    within = rng.choice([10 * MS, 150 * MS])
    for _ in range(rng.randrange(5, 15)):
        write = seed.send(rng.randrange(PEERS), (b"SET", rng.choice(keys), seed.exactly(20)))
        steps.append(seed.soon(write, within))
    return [*steps, replace(seed.step("settle"), gap=lasts), _restart(seed)]


def _slow_reader(seed: Seed) -> list[Step]:
    """Somebody asks for much, and reads it later."""
    rng, (peer, other) = seed.rng, seed.rng.sample(range(3), 2)
    steps = [seed.soon(seed.send(other, (b"SET", key, seed.exactly(_LONG_SIZE))), MS) for key in _LONG]
    steps.append(replace(seed.step("stall", peer, nanoseconds=rng.randrange(100 * MS, 1_000 * MS)), gap=MS))
    steps += [seed.soon(seed.send(peer, (b"MGET", *_LONG)), 2 * MS) for _ in range(rng.randrange(5, 14))]
    return [*steps, *(seed.send(peer, (b"STRLEN", key)) for key in _LONG), seed.send(other, (b"DEL", *_LONG))]


def _last_moment(seed: Seed) -> list[Step]:
    """Keys expire, and somebody asks for each at its very last millisecond."""
    rng, steps = seed.rng, []
    for key in rng.sample(seed.strings, 2):
        size, left = rng.choice([10, 600]), b"%d" % rng.randrange(5, 300)
        steps.append(seed.send(rng.randrange(PEERS), (b"SET", key, seed.exactly(size), b"PX", left)))
        name = rng.choice([b"GET", b"GET", b"EXISTS", b"STRLEN", b"GETDEL", b"PTTL"])
        steps.append(replace(seed.step("due", rng.randrange(PEERS), (name, key)), gap=MS))
    return steps


def _pause_cut_short(seed: Seed) -> list[Step]:
    """Writers wait for the end of a long pause, and then a client ends it."""
    rng = seed.rng
    pause = seed.send(0, (b"CLIENT", b"PAUSE", b"%d" % rng.choice([900, 40_000]), b"WRITE"))
    writes = [
        seed.soon(commands.write(seed, peer), 2 * MS) for peer in rng.choices(range(1, PEERS), k=rng.randrange(1, 5))
    ]
    return [pause, *writes, replace(seed.send(0, (b"CLIENT", b"UNPAUSE")), gap=10 * MS)]


def _listeners(seed: Seed) -> list[Step]:
    """Some listen while others talk, sometimes one of them in RESP3."""
    rng, peer, channel = seed.rng, seed.rng.choice(LISTENERS), seed.rng.choice(CHANNELS)
    by_pattern = rng.random() < 0.3
    steps = [seed.send(peer, (b"PSUBSCRIBE", b"*") if by_pattern else (b"SUBSCRIBE", channel))]
    for number in range(rng.randrange(1, 8)):
        publish = (b"PUBLISH", rng.choice(CHANNELS), b"%d" % number)
        steps.append(seed.send(rng.choice([0, 3]), rng.choice([publish, publish, (b"GET", rng.choice(seed.strings))])))
    end = (b"PUNSUBSCRIBE", b"*") if by_pattern else (b"UNSUBSCRIBE", channel)
    steps.append(seed.send(peer, rng.choice([end, end, (b"RESET",), (b"PING", b"there")])))
    more = random.Random(f"listeners {seed.number} {seed.drawn}")  # separate from `rng`: most seeds stay the same
    if more.random() >= 0.4:
        return steps
    other = LISTENERS[peer == LISTENERS[0]]
    first = [seed.send(other, words) for words in ((b"HELLO", b"3"), (b"SUBSCRIBE", channel))]
    return [*first, *steps, seed.send(other, (b"UNSUBSCRIBE", channel))]


def _leased_and_crowded(seed: Seed) -> list[Step]:
    """A leased block stays while other clients fill memory."""
    rng, peer = seed.rng, seed.rng.randrange(PEERS)
    seed.peer = peer
    name, req, page, *words = commands.block_set(seed)
    words[TTL] = b"0"  # or nobody knows to the moment for how long it is protected
    steps = [seed.send(peer, (name, req, page, *words))]
    pin = (b"KVPAGEPIN", req, page)
    leased = rng.choice([
        (b"KVPAGELEASE", req, b"9000", page), pin,
        pin if page < b"4" else (b"KVPAGEPREFIX", b"8", b"9000", b"1", req, page),
    ])  # fmt: skip
    steps.append(replace(seed.send(peer, leased), gap=MS))
    others = [other for other in range(PEERS) if other != peer]
    return steps + [seed.soon(commands.write(seed, rng.choice(others)), MS) for _ in range(rng.randrange(20, 60))]


KINDS: Sequence[tuple[Callable[[Seed], list[Step]], float]] = [  # and how often
    (_death, 3), (_failing_disk, 2), (_slow_reader, 1), (_last_moment, 2), (_pause_cut_short, 1), (_listeners, 1),
    (_leased_and_crowded, 1),
]  # fmt: skip
