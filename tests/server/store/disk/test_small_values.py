"""Small values on a disk with a limit: acknowledged values exist, and values without space are refused.

Several lie in a page of LMDB, which is seldom full and is written as a whole. So they take more than their bytes.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import redis
from servers import start_server
from test_tiered import MB, TIERED, disk_info, tiered

from kvpage_server.page import HEADER_SIZE

MAXDISK = 16 * MB  # the least
AT_ONCE = 500  # commands
Numbers = Callable[[], Iterator[int]]


def in_order() -> Iterator[int]:
    return iter(range(100_000_000))


def at_random() -> Iterator[int]:
    rng = random.Random(5)
    return iter(lambda: rng.randrange(100_000_000), -1)


def body(number: int, size: int, version: int) -> bytes:
    return b"%08d%02d" % (number, version) * (size // 10)


def set_page(number: int, size: int, version: int) -> tuple[Any, ...]:
    """Each page is the only one of its request."""
    return "KVPAGESET", f"r{number:08}", 0, 0, 0, 0, 8, 1, size, 0, body(number, size, version)


def key_of(number: int) -> str:
    return f"kv:r{number:08}:0:0:0:0"


def do_all(client: redis.Redis, commands: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The answers, of which each may be an error."""
    with client.pipeline(transaction=False) as pipe:
        for words in commands:
            pipe.execute_command(*words)
        return pipe.execute(raise_on_error=False)


def store(client: redis.Redis, numbers: list[int], size: int, version: int = 0) -> list[int]:
    """Store pages. Return the accepted ones. For others there was no room, and no other reason."""
    accepted: list[int] = []
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        answers = do_all(client, (set_page(number, size, version) for number in some))
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        assert all(isinstance(error, redis.OutOfMemoryError) and "maxdisk" in str(error) for error in errors), errors
        accepted += [number for number, answer in zip(some, answers, strict=True) if answer not in errors]
    return accepted


def fill(client: redis.Redis, numbers: Iterator[int], size: int) -> list[int]:
    """Store pages until some are refused. Returns the others."""
    stored: list[int] = []
    while True:
        some = [*islice(numbers, AT_ONCE)]
        accepted = store(client, some, size)
        stored += accepted
        if len(accepted) < AT_ONCE:
            return stored


def all_is_on_disk(client: redis.Redis) -> None:
    client.execute_command("SAVE")
    info = disk_info(client)
    assert (info["disk_failing"], info["disk_write_errors"], info["disk_waiting_bytes"]) == ("", 0, 0)


def expect(client: redis.Redis, versions: dict[int, int], size: int) -> None:
    """These versions of pages are there."""
    numbers = [*versions]
    for start in range(0, len(numbers), AT_ONCE):
        some = numbers[start : start + AT_ONCE]
        bodies = [page and page[HEADER_SIZE:] for page in client.mget(map(key_of, some))]
        assert bodies == [body(number, size, versions[number]) for number in some]


# In `make test` each value of a parameter is in some case, and in `make soak` each combination.
SIZES = {
    (100, in_order, "always"),
    (100, at_random, "everysec"),
    (1000, at_random, "always"),
    (1000, in_order, "everysec"),
}
POLICIES = {(100, "allkeys-prefix"), (600, "allkeys-lru")}


@pytest.mark.parametrize(
    ("size", "numbers", "mode"),
    [
        pytest.param(*case, marks=() if case in SIZES else pytest.mark.soak)
        for case in product((100, 600, 1000), (in_order, at_random), ("always", "everysec"))
    ],
)
def test_accepted_pages_are_durable_and_others_are_refused(
    tmp_path: Path, size: int, numbers: Numbers, mode: str
) -> None:
    options = ("--maxdisk", str(MAXDISK), "--appendfsync", mode, "--maxmemory-policy", "noeviction")
    rng, coming = random.Random(6), numbers()
    with start_server(*TIERED, *options, directory=tmp_path, killed=True) as server, server.client() as client:
        versions = dict.fromkeys(fill(client, coming, size), 0)
        assert len(versions) * (size + HEADER_SIZE) > MAXDISK / 8
        for version in range(1, 3):
            changed = store(client, rng.sample(sorted(versions), len(versions) // 3), size, version)
            versions |= dict.fromkeys(changed, version)
            gone = rng.sample(sorted(versions), len(versions) * 2 // 3)
            assert client.delete(*map(key_of, gone)) == len(gone)
            for number in gone:
                del versions[number]
            versions |= dict.fromkeys(fill(client, coming, size), 0)
        if mode == "everysec":
            all_is_on_disk(client)
        server.stop(signal.SIGKILL)
    with tiered(tmp_path, *options) as (_, client):
        assert client.dbsize() == len(versions)
        expect(client, versions, size)
        all_is_on_disk(client)


@pytest.mark.parametrize(
    ("size", "policy"),
    [
        pytest.param(*case, marks=() if case in POLICIES else pytest.mark.soak)
        for case in product((100, 600), ("allkeys-lru", "allkeys-prefix"))
    ],
)
def test_new_pages_on_a_full_disk_replace_others(tmp_path: Path, size: int, policy: str) -> None:
    options = ("--maxdisk", str(MAXDISK), "--appendfsync", "everysec", "--maxmemory-policy", policy)
    numbers = [*islice(at_random(), MAXDISK // (size + 400))]
    with tiered(tmp_path, *options) as (_, client):
        assert store(client, numbers, size) == numbers
        all_is_on_disk(client)
        assert disk_info(client)["disk_evicted"] > len(numbers) / 3
        left = client.dbsize()
        assert left * (size + HEADER_SIZE) > MAXDISK / 8
    with tiered(tmp_path, *options) as (_, client):
        assert client.dbsize() == left
        expect(client, dict.fromkeys(numbers[-left // 2 :], 0), size)


@pytest.mark.parametrize("mode", ["always", "everysec"])
def test_a_page_of_each_block_may_change_together(tmp_path: Path, mode: str) -> None:
    """96 bytes of each of the block's pages are written again with it, more than the page has."""
    size, pages = 50, 512

    def page(block: int, number: int, version: int) -> tuple[Any, ...]:
        return f"b{block}", number // 64, number % 64, 0, 0, 8, 1, size, 0, body(block, size, version)

    options = ("--maxdisk", str(MAXDISK), "--appendfsync", mode, "--maxmemory-policy", "noeviction")
    with tiered(tmp_path, *options) as (_, client):
        blocks, refused = -1, None
        while not isinstance(refused, redis.OutOfMemoryError):
            blocks += 1
            words = [word for number in range(pages) for word in page(blocks, number, 0)]
            [refused] = do_all(client, [("KVPAGEMSET", pages, *words)])
        assert blocks * pages * (size + HEADER_SIZE) > MAXDISK / 8
        for version in range(10):
            changes = [("KVPAGESET", *page(block, version, version)) for block in range(blocks)]
            assert not any(isinstance(answer, Exception) for answer in do_all(client, changes))
            all_is_on_disk(client)
