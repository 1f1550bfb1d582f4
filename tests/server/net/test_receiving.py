"""Bytes are received in large pieces and hashed during receipt, and missing bytes are not waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import redis
from servers import RunningServer
from waiting import until
from wire import Wire, encode_command

from kvpage_server.page import checksum, decode_page

KIB, MIB = 1024, 1024 * 1024


def batch(sizes: list[int], seed: int = 0) -> tuple[bytes, list[bytes]]:
    """A KVPAGEMSET of pages of those sizes, and their bodies."""
    noise = random.Random(seed)
    bodies = [noise.randbytes(size) for size in sizes]
    pages = [
        [b"receiving", b"0", b"0", b"%d" % page, b"0", b"3", b"1", b"%d" % len(body), b"0", body]
        for page, body in enumerate(bodies)
    ]
    return encode_command([b"KVPAGEMSET", b"%d" % len(pages), *(word for page in pages for word in page)]), bodies


def assert_stored(client: redis.Redis, bodies: list[bytes]) -> None:
    for page, body in enumerate(bodies):
        header, stored = decode_page(client.get(b"kv:receiving:0:0:%d:0" % page))
        assert (stored, header.checksum) == (body, checksum(body)), page


@pytest.fixture
def wire(server: RunningServer) -> Iterator[Wire]:
    with Wire(server.port) as wire:
        yield wire


@pytest.mark.parametrize(
    "sizes",
    [[64 * KIB] * 40 + [10] * 3, [256 * KIB] * 9 + [5000], [16 * KIB] * 99 + [17 * KIB, 1], [MIB, MIB, 3]],
    ids=["64 KiB", "256 KiB", "16 KiB", "1 MiB"],
)
def test_a_batch_that_ends_in_smaller_pages_is_answered_at_once(
    client: redis.Redis, wire: Wire, sizes: list[int]
) -> None:
    """Although more bytes seemed to follow."""
    waited = []
    for seed in range(10):
        sent, bodies = batch(sizes, seed)
        wire.send(sent)
        start = time.perf_counter()
        assert wire.reply() == b"+OK\r\n"
        waited.append(time.perf_counter() - start)
        assert_stored(client, bodies)
    assert sorted(waited)[5] < 1


def test_the_received_part_of_a_batch_is_parsed_during_a_pause(client: redis.Redis, wire: Wire) -> None:
    sent, bodies = batch([64 * KIB] * 40)
    for start, stop in ((0, MIB), (MIB, 9 * MIB // 8), (9 * MIB // 8, 9 * MIB // 8 + 10)):
        wire.send(sent[start:stop])
        until(
            lambda taken=stop: any(int(other["qbuf"]) > taken - 70 * KIB for other in client.client_list()),
            f"taking {stop} bytes",
        )
    wire.send(sent[stop:])
    assert wire.reply() == b"+OK\r\n"
    assert_stored(client, bodies)


def test_a_slowly_received_batch_is_intact(client: redis.Redis, wire: Wire) -> None:
    sent, bodies = batch([64 * KIB] * 20 + [100 * KIB] * 5, seed=7)
    noise = random.Random(8)
    while sent:
        count = noise.choice([100, 20 * KIB, 300 * KIB])
        wire.send(sent[:count])
        sent = sent[count:]
        time.sleep(noise.choice([0, 0.001, 0.004]))
    assert wire.reply() == b"+OK\r\n"
    assert_stored(client, bodies)


def test_pages_are_hashed_only_with_checksums_enabled(client: redis.Redis, wire: Wire) -> None:
    sent, bodies = batch([64 * KIB] * 20)
    try:
        for first, then, checksums in (("yes", "no", [0] * 20), ("no", "yes", list(map(checksum, bodies)))):
            client.config_set("page-checksums", first)
            wire.send(sent[:MIB])
            until(lambda: any(int(other["qbuf"]) > MIB // 2 for other in client.client_list()), "half of it")
            client.config_set("page-checksums", then)
            wire.send(sent[MIB:])
            assert wire.reply() == b"+OK\r\n"
            stored = [client.get(b"kv:receiving:0:0:%d:0" % page) for page in range(20)]
            assert [decode_page(blob)[0].checksum for blob in stored] == checksums
    finally:
        client.config_set("page-checksums", "yes")
